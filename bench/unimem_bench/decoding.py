"""What the suites that decode share: the prompt, the models, and the bound of memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem_bench import decoders, models, plain, states
from unimem_bench.decoders import DecoderProcess, NoPeer, SideError
from unimem_bench.decoders import Kind as DecoderKind
from unimem_bench.rounds import Side
from unimem_bench.states import heat, read_through
from unimem_bench.suite import Measure

N_CTX = 512
N_DECODE = 8  # tokens in one measurement
# Any tokens do, if all sides have the same; the first one begins a text. The long prompt fills the
# context.
LONG_PROMPT = [1, *np.random.default_rng(7).integers(3, 259, N_CTX - 1).tolist()]
PROMPT = LONG_PROMPT[:128]
# TinyLlama, and a model that is written in a second; no CPU cache holds either.
SHAPE, QUICK_SHAPE = "1.1b", "110m"
READ_BANDWIDTH = "read bandwidth"
ROOM_BYTES = 1 << 30  # for other memory, and for the machine
PEERS: tuple[DecoderKind, ...] = ("llama.cpp-mapped", "llama.cpp")
# Kinds of weights that ggml multiplies faster in another order on every x86 with AVX2.
REPACKED: frozenset[models.Kind] = frozenset({"q4_0", "q4_k_m"})
NOT_REPACKED = "no tensor of this model has another order on this CPU"


def model(measure: Measure, kind: models.Kind) -> Path:
    """Return the model of a case, and record it."""
    shape = QUICK_SHAPE if measure.quick else SHAPE
    path = models.write_model(measure.folder, shape, kind)
    measure.fact("model", path.stem)
    measure.fact("file_bytes", path.stat().st_size)
    return path


def prepared(measure: Measure, kind: models.Kind, n_copies: int) -> tuple[Path, list[int]]:
    """Return the model, in the page cache in a known state, and the CPUs that compute."""
    cpus = measure.pin(None)
    path = model(measure, kind)
    require_room(n_copies, path)
    measure.fact("share_in_huge_pages", heat(path))
    return path, cpus


def start_peer(
    measure: Measure, kind: DecoderKind, path: Path, ours: Mapping[str, Any], **options: Any
) -> DecoderProcess | None:
    """Start a decoder of llama.cpp, or leave it out if it cannot be compared with ours.

    `ours` is the `facts` of a decoder of unimem; the other arguments are those of `DecoderProcess`.
    """
    read_through(path)  # repacking drops weights from the page cache
    try:
        process = DecoderProcess(path, kind=kind, python=decoders.peer_python(), **options)
    except (NoPeer, SideError) as error:
        measure.leave_out(kind, str(error))
        return None
    different = decoders.different_builds(ours, process.facts)
    if different is None:
        return process
    process.close()
    measure.leave_out(kind, different)
    return None


def compare(
    measure: Measure,
    sides: Mapping[str, DecoderProcess],
    ours: Mapping[str, Side],
    peers: Mapping[str, Side] | None = None,
    limits: Mapping[str, Side] | None = None,
    **rounds: int,
) -> None:
    """Measure, and check that each process slept during the other processes' turns."""
    measure.compare(ours, peers, limits, pids=[side.pid for side in sides.values()], **rounds)
    for side in sides.values():
        side.require_idle()


def require_room(n_copies: int, path: Path) -> None:
    """Raise NotMeasured unless `n_copies` of a model fit into memory, with a reserve."""
    states.require_room(memory=n_copies * path.stat().st_size + ROOM_BYTES)


def reading(weights: um.Weights, cpus: Sequence[int]) -> Side:
    """Return a side that reads the weights that each token is multiplied with, and nothing else.

    Its figure is the tokens a second that this would allow: C reads the weights where they lie,
    word by word, with a pinned thread on each of `cpus`. A token reads only one row of an embedding
    that is not the output as well, so that is not counted.
    """
    tied = "output.weight" not in weights.tensors
    ranges = [
        (tensor.address, tensor.nbytes // 8 * 8)
        for name, tensor in weights.tensors.items()
        if tied or name != "token_embd.weight"
    ]
    _, first = plain.scan(ranges, cpus)

    def side() -> float:
        seconds, total = plain.scan(ranges, cpus)
        if total != first:
            raise AssertionError("the weights have changed while they were read")
        return 1 / seconds

    return side
