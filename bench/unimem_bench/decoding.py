"""What the suites that decode share: the prompt, the models, and the bound of memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import unimem as um
from unimem_bench import llama_build, models, plain, states
from unimem_bench.decoders import DecoderProcess, NoPeer, SideError
from unimem_bench.llama_build import Variant
from unimem_bench.llama_cpp import Flags
from unimem_bench.llama_flags import Phase, best_flags
from unimem_bench.rounds import Side
from unimem_bench.states import heat, read_through
from unimem_bench.suite import Measure, NotMeasured

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
# llama.cpp at its best, with its defaults, and with its defaults as wheels are built.
BEST, DEFAULTS, WHEEL = PEERS = "llama.cpp", "llama.cpp, defaults", "llama.cpp, as in wheels"
# Kinds of weights that ggml multiplies faster in another order on every x86 with AVX2.
REPACKED: frozenset[models.Kind] = frozenset({"q4_0", "q4_k_m"})
NOT_SEARCHED = "as 'llama.cpp': a quick run of all suites searches no better flags for it"
NOT_REPACKED = "no tensor of this model has another order on this CPU"


def model(measure: Measure, kind: models.Kind) -> Path:
    """Return the model of a case, and record it."""
    shape = QUICK_SHAPE if measure.quick else SHAPE
    path = models.write_model(measure.folder, shape, kind)
    measure.fact("model", path.stem)
    measure.fact("file_bytes", path.stat().st_size)
    return path


def prepared(
    measure: Measure, kind: models.Kind, n_copies: int, n_threads: int | None = None
) -> tuple[Path, list[int]]:
    """Return the model, in the page cache in large folios, and the CPUs that compute."""
    cpus = measure.pin(n_threads)
    path = model(measure, kind)
    require_room(n_copies, path)
    measure.fact("share_in_huge_pages", heat(path))
    return path, cpus


def llama_cpp(measure: Measure, variant: Variant = "native") -> Path:
    """Return the library of llama.cpp, built now if the case may do so; else NoPeer."""
    library = llama_build.library(variant, build=measure.builds)
    measure.fact(f"llama.cpp, {variant} build", llama_build.facts(library))
    return library


def require_llama_cpp(measure: Measure, *peers: str) -> Path:
    """Return the library of llama.cpp; NotMeasured without it, and `peers` are left out."""
    try:
        return llama_cpp(measure)
    except NoPeer as reason:
        for peer in peers:
            measure.leave_out(peer, str(reason))
        raise NotMeasured(f"wants llama.cpp: {reason}") from None


class Peer(NamedTuple):
    """A build of llama.cpp, and how it works."""

    library: Path
    flags: Flags


def peers(measure: Measure, path: Path, phase: Phase) -> dict[str, Peer]:
    """Return the peers of a case, by name; those that cannot be had are left out.

    With its best flags, which are measured if they are not known, llama.cpp is `BEST`. Where time
    is limited, they are its defaults if they are not known. A quick run does without `WHEEL`.
    """
    prompt = PROMPT if measure.quick else LONG_PROMPT
    try:
        library = llama_cpp(measure)
        of = measure.folder, path, library, prompt, measure.cpus
        best = best_flags(*of, searches=measure.builds)[phase]
    except (NoPeer, SideError) as reason:
        for name in PEERS:
            measure.leave_out(name, str(reason))
        return {}
    measure.fact("flags_tried", best.tried)
    found = {BEST: Peer(library, best.flags)}
    if best.tried:
        found[DEFAULTS] = Peer(library, Flags())
    else:
        measure.leave_out(DEFAULTS, NOT_SEARCHED)
    try:
        if measure.quick:
            raise NoPeer("a quick run does without it")
        found[WHEEL] = Peer(llama_cpp(measure, "portable"), Flags())
    except NoPeer as reason:
        measure.leave_out(WHEEL, str(reason))
    return found


def start_peer(
    measure: Measure, name: str, path: Path, peer: Peer, **options: Any
) -> DecoderProcess | None:
    """Start a decoder of llama.cpp, or leave it out if it does not start.

    The other arguments are those of `DecoderProcess`.
    """
    read_through(path)  # repacking drops weights from the page cache
    try:
        return DecoderProcess(path, kind="llama.cpp", **peer._asdict(), **options)
    except SideError as error:
        measure.leave_out(name, str(error))
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
