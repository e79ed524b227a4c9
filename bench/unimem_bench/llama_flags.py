"""llama.cpp's best flags for a model on this machine: measured once, and kept beside the models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from unimem_bench.decoders import DecoderProcess, SideError
from unimem_bench.files import made_once
from unimem_bench.llama_cpp import Flags
from unimem_bench.rounds import Side, alternate

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# The weights: repacked or as they lie in the file, mapped or read to memory of its own, and that
# memory on huge pages or not.
LAYOUTS = (
    Flags(),
    Flags(huge_pages=True),
    Flags(repack=False),
    Flags(repack=False, load_mode="none"),
    Flags(repack=False, load_mode="none", huge_pages=True),
)
UBATCHES = 128, 256  # the default is 512
ROUNDS, N_DECODE = 3, 8


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest flags of a phase, and the speed of all that were tried, in tokens/s."""

    flags: Flags
    tried: dict[str, float]  # by the flags in words


def best_flags(
    folder: Path,
    model: Path,
    library: Path,
    prompt: list[int],
    cpus: Sequence[int],
    *,
    searches: bool = True,
) -> dict[Phase, Best]:
    """Return the best flags of each phase, with a thread on each CPU.

    They are kept in `folder` for the model, the build of llama.cpp, which names the CPU, and the
    number of threads; if they are missing there, the flags are tried, which takes minutes with a
    large model, or are the defaults if nothing is searched. The model must be in the page cache.
    SideError if llama.cpp does not start.
    """
    name = f"{model.stem}-{library.parent.name}-{len(cpus)}-threads.json"

    def write(path: Path) -> None:
        found = _search(model, library, prompt, cpus)
        path.write_text(json.dumps({phase: asdict(best) for phase, best in found.items()}))

    kept = folder / "llama-flags" / name
    if not searches and not kept.exists():
        return {phase: Best(Flags(), {}) for phase in PHASES}
    made_once(kept, write)
    document: dict[Phase, dict[str, Any]] = json.loads(kept.read_text())
    return {
        phase: Best(Flags(**found["flags"]), found["tried"]) for phase, found in document.items()
    }


def _search(
    model: Path, library: Path, prompt: list[int], cpus: Sequence[int]
) -> dict[Phase, Best]:
    """Try the layouts of weights first, and then what else there is with the best of them."""
    try_all = partial(_try, model, library, prompt, cpus)
    speeds = try_all(LAYOUTS)
    first = {phase: _fastest(speeds, phase) for phase in PHASES}
    others = [replace(flags, flash=False) for flags in first.values()]
    others += [replace(first["prefill"], ubatch=n) for n in UBATCHES]
    speeds |= try_all(dict.fromkeys([*first.values(), *others]))
    return {
        phase: Best(
            _fastest(speeds, phase),
            {str(flags): round(speed, 2) for (flags, of), speed in speeds.items() if of == phase},
        )
        for phase in PHASES
    }


def _fastest(speeds: dict[tuple[Flags, str], float], phase: Phase) -> Flags:
    of_phase = {flags: speed for (flags, of), speed in speeds.items() if of == phase}
    if phase == "decode":  # a token is computed alone, whatever the batch
        of_phase = {flags: speed for flags, speed in of_phase.items() if flags.ubatch is None}
    return max(of_phase, key=of_phase.__getitem__)


def _try(
    model: Path,
    library: Path,
    prompt: list[int],
    cpus: Sequence[int],
    candidates: Iterable[Flags],
) -> dict[tuple[Flags, str], float]:
    """Measure flags alternately; those with which llama.cpp does not start are left out.

    SideError if it starts with none of them.
    """
    options: dict[str, Any] = {"threads": len(cpus), "ctx": len(prompt) + 256}
    error = SideError("no flags to try")
    with ExitStack() as stack:
        sides: dict[tuple[Flags, str], Side] = {}
        pids = []
        for flags in candidates:
            try:
                process = stack.enter_context(
                    DecoderProcess(model, kind="llama.cpp", library=library, flags=flags, **options)
                )
            except SideError as reason:
                error = reason
                continue
            pids.append(process.pid)
            sides[flags, "prefill"] = partial(process.prefill, prompt)
            sides[flags, "decode"] = partial(process.decode, N_DECODE)
        if not sides:
            raise error
        found = alternate(sides, rounds=ROUNDS, warmup=1, cpus=cpus, pids=pids)
    return {key: float(np.median(figures)) for key, figures in found.figures.items()}
