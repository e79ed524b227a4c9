"""Speeds beside the newest llama.cpp, for types of weights and numbers of threads, as one table.

``python tools/peer_table.py q4_k_m q8_0 --threads 1 2`` takes about 4 minutes a type on a quiet
machine; the suite ``decode`` takes hours, since it searches the peer's flags anew. Here every
candidate of the peer's flags is a side of the same rounds, and the fastest one is its best.
``--behind 8192 --kv-dtype q8_0`` makes tokens behind as many invented ones, the same for all sides.
``--prompt 8192`` computes a longer prompt instead, twice.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np

from unimem_bench import decoding, llama_build, models
from unimem_bench.decoders import DecoderProcess
from unimem_bench.llama_cpp import Flags
from unimem_bench.rounds import Side, alternate, pin
from unimem_bench.states import heat

CANDIDATES = (
    Flags(),
    Flags(huge_pages=True),
    Flags(repack=False, load_mode="none", huge_pages=True),
)
OURS = "unimem"
PHASES = {"prefill 512": 4, "decode": 12}  # rounds of each


def measure(path: Path, n_threads: int, given: argparse.Namespace) -> list[str]:
    """Measure a model, and return a row for each phase that `given` asks for."""
    behind, kv_dtype = given.behind, given.kv_dtype
    if behind:
        phases = {"decode": PHASES["decode"]}
    elif given.prompt:
        phases = {f"prefill {given.prompt}": 2}
    else:
        phases = PHASES
    prompt = np.resize(decoding.LONG_PROMPT, given.prompt or len(decoding.LONG_PROMPT)).tolist()
    cpus = pin(n_threads)
    heat(path)
    with ExitStack() as stack:
        ctx = 1024 + behind + given.prompt
        start = partial(DecoderProcess, path, threads=n_threads, ctx=ctx, kv_dtype=kv_dtype)
        library = llama_build.library()
        processes = {OURS: stack.enter_context(start())}
        for flags in CANDIDATES:
            process = start(kind="llama.cpp", library=library, flags=flags)
            processes[str(flags)] = stack.enter_context(process)
        pids = [process.pid for process in processes.values()]
        if behind:
            folder = stack.enter_context(TemporaryDirectory())
            for process in processes.values():
                process.fill(behind, Path(folder, "rows"))
        rows = []
        for phase, rounds in phases.items():
            sides: dict[str, Side] = {
                name: partial(process.decode, decoding.N_DECODE)
                if phase == "decode"
                else partial(process.prefill, prompt)
                for name, process in processes.items()
            }
            found = alternate(
                sides, rounds=rounds, warmup=not given.prompt, cpus=cpus, pids=pids
            ).figures
            load = str(processes[OURS].facts["load"])
            what = f"{phase} behind {behind}" if behind else phase
            what += f", {kv_dtype}" if behind or given.prompt else ""
            rows.append(_row(path, n_threads, what, load, found))
    return rows


def _row(path: Path, n_threads: int, phase: str, load: str, found: dict[str, list[float]]) -> str:
    speeds = {name: float(np.median(figures)) for name, figures in found.items()}
    best = max((name for name in found if name != OURS), key=speeds.__getitem__)
    cells = [path.stem, str(n_threads), phase, f"{load}: {speeds[OURS]:.1f}"]
    for name in (best, str(Flags())):
        ratios = np.divide(found[OURS], found[name])
        low, high = np.quantile(ratios, [0.25, 0.75])
        label = f"{name}: " if name == best else ""
        cells += [f"{label}{speeds[name]:.1f}", f"{np.median(ratios):.2f}x ({low:.2f}-{high:.2f})"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the models, if they are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=get_args(models.Kind))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", default=decoding.SHAPE, choices=models.SHAPES)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"), help="for the models")
    parser.add_argument("--behind", type=int, default=0, help="tokens before those of decode")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a longer prompt")
    parser.add_argument("--kv-dtype", default="f16", help="of all caches")
    parser.add_argument("--only-write", action="store_true", help="the models, and measure nothing")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    paths = [models.write_model(given.dir, given.shape, kind) for kind in given.kinds]
    if given.only_write:
        return
    heads = ["model", "threads", "phase", "unimem", "llama.cpp, best", "ratio (quartiles)"]
    heads += ["its defaults", "ratio (quartiles)"]
    print("\n".join((f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")), file=sys.stdout)
    for path in paths:
        for n_threads in given.threads:
            rows = measure(path, n_threads, given)
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
