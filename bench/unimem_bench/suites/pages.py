"""The same decoder on 4k pages, on transparent and on reserved huge pages, and on the mapped file.

A side is named after the pages of its weights, KV cache and scratch memory; with weights in the
mapped file, the rest has default pages. Weights are copied there, or repacked if their types are
multiplied faster so, with the rest of the file mapped. All sides live at once, each in a process of
its own, and take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import unimem as um
from unimem.system.placement import Pages
from unimem.weights.loading import EngineLoad
from unimem_bench import decoding, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.huge_pages import reserved
from unimem_bench.models import Kind
from unimem_bench.suite import Measure, NotMeasured, Suite

SUITE = Suite("pages", "Which pages should weights and KV cache lie in?", in_quick=False)

MAPPED = "mapped file"
# All are compared with the first one.
SIDES: dict[str, Pages] = {"THP": "thp", "4k": "4k", "hugetlb": "2m", MAPPED: "auto"}


def load_of(name: str, kind: Kind) -> EngineLoad:
    """Return the load mode of a side."""
    if name == MAPPED:
        return "map"
    return "repack" if kind in decoding.REPACKED else "copy"


def decode(measure: Measure, kind: Kind) -> None:
    """Make 8 tokens at a time; the limit is C that reads a copy of the weights on THP."""
    with ExitStack() as stack:
        sides, path = start(measure, stack, kind)
        for side in sides.values():
            side.prefill(decoding.PROMPT)
        weights = stack.enter_context(um.open_weights(path, load="copy", pages="thp"))
        ours = {name: partial(side.decode, decoding.N_DECODE) for name, side in sides.items()}
        limits = {decoding.READ_BANDWIDTH: decoding.reading(weights, measure.cpus)}
        decoding.compare(measure, sides, ours, limits=limits, rounds=21, quick_rounds=5)


def prefill(measure: Measure, kind: Kind) -> None:
    """Compute the prompt, each time anew."""
    with ExitStack() as stack:
        sides, _ = start(measure, stack, kind)
        measured = {name: partial(side.prefill, decoding.PROMPT) for name, side in sides.items()}
        decoding.compare(measure, sides, measured, rounds=7)


def compare_starts(measure: Measure, kind: Kind) -> None:
    """Start a process each time, with the file in the page cache; Python's start is not counted.

    The limit is reading the file's bytes once from the page cache.
    """
    path, cpus = decoding.prepared(measure, kind, len(SIDES) + 1)

    def once(name: str) -> float:
        with started(name, kind, path, cpus) as process:
            return float(process.facts["start_s"]) * 1e3

    sides = {}
    for name in SIDES:
        with left_out_without_room(measure, name):
            once(name)  # as a warm-up, and to see whether it gets its pages
            sides[name] = partial(once, name)
    states.read_through(path)
    with um.open_weights(path, load="map") as weights:
        weights.warm()
        read = decoding.reading(weights, cpus)
        limits = {decoding.READ_BANDWIDTH: lambda: 1e3 / read()}
        measure.compare(ours=sides, limits=limits, rounds=5, warmup=0)


def declare(kind: Kind, end: str, weights: str, *, in_quick: bool) -> None:
    """Declare the cases of a kind of weights."""
    SUITE.case(
        f"decode{end}",
        f"How fast are tokens made on each kind of pages{weights}?",
        unit="tokens/s",
        in_quick=in_quick,
    )(partial(decode, kind=kind))
    SUITE.case(
        f"prefill{end}",
        f"How fast is a prompt of 128 tokens computed on each kind of pages{weights}?",
        unit="tokens/s",
        in_quick=False,
    )(partial(prefill, kind=kind))
    SUITE.case(
        f"start{end}",
        f"How long does the decoder take to start on each kind of pages{weights}?",
        unit="ms",
        in_quick=False,
    )(partial(compare_starts, kind=kind))


declare("q8_0", "", "", in_quick=True)
declare("q4_k_m", "-q4_k_m", ", with repacked weights", in_quick=False)


def start(measure: Measure, stack: ExitStack, kind: Kind) -> tuple[dict[str, DecoderProcess], Path]:
    """Start all sides for which this machine has pages."""
    path, cpus = decoding.prepared(measure, kind, len(SIDES) + 1)
    sides = {}
    for name in SIDES:
        with left_out_without_room(measure, name):
            sides[name] = stack.enter_context(started(name, kind, path, cpus))
            measure.fact(name, sides[name].facts)
    return sides, path


@contextmanager
def left_out_without_room(measure: Measure, name: str) -> Iterator[None]:
    """Leave out a side for which this machine has no pages."""
    try:
        yield
    except NotMeasured as reason:
        measure.leave_out(name, str(reason))


@contextmanager
def started(name: str, kind: Kind, path: Path, cpus: list[int]) -> Iterator[DecoderProcess]:
    """Start a side, with the file in the page cache and memory ready; see `start_side`."""
    with room(name, kind, path, len(cpus)):
        states.ready(2 * path.stat().st_size, cpus)
        states.read_through(path)  # repacking drops weights from the page cache
        with start_side(name, kind, path, len(cpus)) as process:
            yield process


@contextmanager
def room(name: str, kind: Kind, path: Path, threads: int) -> Iterator[None]:
    """Provide the pages that a side needs; those of hugetlb are reserved."""
    load, pages = load_of(name, kind), SIDES[name]
    if pages == "thp" and um.doctor().thp.mode not in {"always", "madvise"}:
        raise NotMeasured("wants transparent huge pages, which are off here")
    if pages != "2m":
        yield
        return
    checks = um.plan(path, load=load, threads=threads, ctx=decoding.N_CTX, pages=pages).checks
    with reserved(max(check.needed_bytes for check in checks if "hugetlb" in check.name)):
        yield


def start_side(name: str, kind: Kind, path: Path, threads: int) -> DecoderProcess:
    """Start a side; NotMeasured if its memory is not in the pages that it is named after."""
    load, pages = load_of(name, kind), SIDES[name]
    process = DecoderProcess(path, threads=threads, ctx=decoding.N_CTX, load=load, pages=pages)
    if process.facts["load"] != load:
        process.close()
        raise NotMeasured(f"wants repacked weights: {decoding.NOT_REPACKED}")
    for part, found in process.facts["granted"].items():
        is_mapped = load == "map" or (load == "repack" and part == "weights")
        if not is_mapped and found["pages"] != pages:
            process.close()
            reasons = "; ".join(process.facts["warnings"]) or "without a warning"
            raise NotMeasured(f"wants {part} on {pages} pages, got {found['pages']}: {reasons}")
    return process
