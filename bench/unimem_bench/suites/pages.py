"""The same decoder on 4k pages, on transparent and on reserved huge pages, and on the mapped file.

Weights, KV cache and scratch memory lie in the pages that a side is named after; where weights are
read from the mapped file, the rest is as it is by default. All sides live at once, each in a
process of its own, and take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import unimem as um
from unimem.system.placement import Pages
from unimem.weights.loading import Load
from unimem_bench import decoding, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.huge_pages import reserved
from unimem_bench.models import Kind
from unimem_bench.suite import Measure, NotMeasured, Suite

SUITE = Suite("pages", "Which pages should weights and KV cache lie in?")

KIND: Kind = "q8_0"
# The first one is what the others are compared with.
SIDES: dict[str, tuple[Load, Pages]] = {
    "THP": ("copy", "thp"),
    "4k": ("copy", "4k"),
    "hugetlb": ("copy", "2m"),
    "mapped file": ("map", "auto"),
}


@SUITE.case("decode", "How fast are tokens made on each kind of pages?", unit="tokens/s")
def decode(measure: Measure) -> None:
    """Make 8 tokens at a time; the limit is C that reads a copy of the weights on THP."""
    with ExitStack() as stack:
        sides, path = start(measure, stack)
        for side in sides.values():
            side.prefill(decoding.PROMPT)
        weights = stack.enter_context(um.open_weights(path, load="copy", pages="thp"))
        ours = {name: partial(side.decode, decoding.N_DECODE) for name, side in sides.items()}
        limits = {decoding.READ_BANDWIDTH: decoding.reading(weights, measure.cpus)}
        decoding.compare(measure, sides, ours, limits=limits, rounds=21, quick_rounds=5)


@SUITE.case(
    "prefill",
    "How fast is a prompt of 128 tokens computed on each kind of pages?",
    unit="tokens/s",
    in_quick=False,
)
def prefill(measure: Measure) -> None:
    """Compute the prompt, each time anew."""
    with ExitStack() as stack:
        sides, _ = start(measure, stack)
        measured = {name: partial(side.prefill, decoding.PROMPT) for name, side in sides.items()}
        decoding.compare(measure, sides, measured, rounds=7)


@SUITE.case(
    "start",
    "How long does the decoder take to start on each kind of pages?",
    unit="ms",
    in_quick=False,
)
def compare_starts(measure: Measure) -> None:
    """Start a process a time, with the file in the page cache; Python's start is not counted.

    The limit is reading the file's bytes once, where the page cache has them.
    """
    path, cpus = decoding.prepared(measure, KIND, len(SIDES) + 1)

    def once(name: str) -> float:
        states.ready(2 * path.stat().st_size, cpus)
        with room(name, path, len(cpus)), start_side(name, path, len(cpus)) as process:
            return float(process.facts["start_s"]) * 1e3

    sides = {}
    for name in SIDES:
        with left_out_without_room(measure, name):
            once(name)  # as a warm-up, and to see whether its pages can be had
            sides[name] = partial(once, name)
    with um.open_weights(path, load="map") as weights:
        weights.warm()
        read = decoding.reading(weights, cpus)
        limits = {decoding.READ_BANDWIDTH: lambda: 1e3 / read()}
        measure.compare(ours=sides, limits=limits, rounds=5, warmup=0)


def start(measure: Measure, stack: ExitStack) -> tuple[dict[str, DecoderProcess], Path]:
    """Start all sides that this machine has pages for."""
    path, cpus = decoding.prepared(measure, KIND, len(SIDES) + 1)
    sides = {}
    for name in SIDES:
        with left_out_without_room(measure, name):
            stack.enter_context(room(name, path, len(cpus)))
            states.ready(2 * path.stat().st_size, cpus)
            sides[name] = stack.enter_context(start_side(name, path, len(cpus)))
            measure.fact(name, sides[name].facts)
    return sides, path


@contextmanager
def left_out_without_room(measure: Measure, name: str) -> Iterator[None]:
    """Leave out a side that this machine has no pages for."""
    try:
        yield
    except NotMeasured as reason:
        measure.leave_out(name, str(reason))


@contextmanager
def room(name: str, path: Path, threads: int) -> Iterator[None]:
    """Have the pages that a side wants; those of hugetlb are reserved."""
    load, pages = SIDES[name]
    if pages == "thp" and um.doctor().thp.mode not in {"always", "madvise"}:
        raise NotMeasured("wants transparent huge pages, which are off here")
    if pages != "2m":
        yield
        return
    checks = um.plan(path, load=load, threads=threads, ctx=decoding.N_CTX, pages=pages).checks
    with reserved(max(check.needed_bytes for check in checks if "hugetlb" in check.name)):
        yield


def start_side(name: str, path: Path, threads: int) -> DecoderProcess:
    """Start a side, and check that its memory lies in the pages that it is named after."""
    load, pages = SIDES[name]
    process = DecoderProcess(path, threads=threads, ctx=decoding.N_CTX, load=load, pages=pages)
    for part, found in process.facts["granted"].items():
        if load == "copy" and found["pages"] != pages:
            process.close()
            reasons = "; ".join(process.facts["warnings"]) or "without a warning"
            raise NotMeasured(f"wants {part} on {pages} pages, got {found['pages']}: {reasons}")
    return process
