"""How fast new memory becomes resident: warming a block, beside C that touches the same memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import unimem as um
from unimem.system.placement import Pages
from unimem_bench import huge_pages, plain
from unimem_bench.rounds import Side, thread_counts
from unimem_bench.states import HUGE_PAGE, ready
from unimem_bench.suite import Measure, NotMeasured, Suite, faster

SUITE = Suite(
    "first-touch", "How fast is new memory brought in, on which pages?", passes=3, quick_passes=2
)

NBYTES, QUICK_NBYTES = 1 << 30, 128 << 20
MEMSET = "C memset of memory that is there"
STEPS = {"4k": 4096, "thp": HUGE_PAGE, "2m": HUGE_PAGE}


def gigabytes_a_second(nbytes: int, run: Callable[[], object]) -> float:
    """Time one call that touches `nbytes`."""
    start = time.perf_counter()
    run()
    return nbytes / (time.perf_counter() - start) / 1e9


def warm(nbytes: int, pages: Pages, cpus: Sequence[int]) -> float:
    """Warm a new block; GB/s."""
    ready(nbytes, cpus)
    with um.Block(nbytes, pages=pages, category="diagnostics") as block:
        speed = gigabytes_a_second(nbytes, partial(block.warm, len(cpus)))
        granted = block.verify()
    if granted.pages != pages or granted.resident_bytes != nbytes:
        raise NotMeasured(f"wants {nbytes} bytes on {pages} pages, was granted {granted}")
    return speed


def touch(nbytes: int, pages: plain.Pages, cpus: Sequence[int]) -> float:
    """Touch every page of a new mapping in C; GB/s."""
    ready(nbytes, cpus)
    try:
        return nbytes / plain.touch(nbytes, STEPS[pages], pages, cpus) / 1e9
    except OSError as error:  # reserved pages may be taken meanwhile
        raise NotMeasured(f"wants {nbytes} bytes on {pages} pages: {error}") from error


def zeros(nbytes: int, cpus: Sequence[int]) -> float:
    """Touch every page of ``np.zeros``, which requests huge pages itself; GB/s."""
    ready(nbytes, cpus)

    array = np.zeros(nbytes, np.uint8)  # like a block, made and given back untimed

    def run() -> None:
        array[:: STEPS["4k"]] = 1

    return gigabytes_a_second(nbytes, run)


def memset(array: np.ndarray[tuple[int], np.dtype[np.uint8]], cpus: Sequence[int]) -> float:
    """Clear resident memory, as the kernel must clear new memory; GB/s."""
    seconds = plain.fill_by_threads(array.ctypes.data, array.nbytes, 0, cpus)
    return array.nbytes / seconds / 1e9


def size(measure: Measure) -> int:
    """Return the bytes to touch."""
    nbytes = QUICK_NBYTES if measure.quick else NBYTES
    measure.fact("nbytes", nbytes)
    return nbytes


TARGETS = (faster("C, a byte a huge page", 0.95, issue=3), faster("unimem, 4k pages", 6.0, issue=3))


def on_huge_pages(n_threads: int, measure: Measure) -> None:
    """Compare huge pages with C's, with NumPy's, and with 4k pages."""
    cpus, nbytes = measure.pin(n_threads), size(measure)
    there = np.ones(nbytes, np.uint8)
    peers: dict[str, Side] = {
        "C, a byte a huge page": partial(touch, nbytes, "thp", cpus),
        "C, a byte a 4k page": partial(touch, nbytes, "4k", cpus),
    }
    if n_threads == 1:
        peers["np.zeros, touched"] = partial(zeros, nbytes, cpus)
    ours = {
        "unimem": partial(warm, nbytes, "thp", cpus),
        "unimem, 4k pages": partial(warm, nbytes, "4k", cpus),
    }
    limits = {MEMSET: partial(memset, there, cpus)}
    measure.compare(ours, peers, limits, rounds=4, quick_rounds=4)


for n, word, does in ((1, "one thread", "does"), (2, "two threads", "do")):
    SUITE.case(
        word.replace(" ", "-"),
        f"How fast {does} {word} bring in a block on transparent huge pages?",
        unit="GB/s",
        targets=TARGETS,
    )(partial(on_huge_pages, n))


@SUITE.case(
    "reserved", "How fast does one thread bring in reserved huge pages (hugetlb)?", unit="GB/s"
)
def reserved(measure: Measure) -> None:
    """Compare a block on hugetlb pages with C that touches such pages."""
    nbytes = size(measure)
    there = np.ones(nbytes, np.uint8)
    with huge_pages.reserved(nbytes):
        ours = {"unimem": partial(warm, nbytes, "2m", measure.cpus)}
        peers = {"C, a byte a huge page": partial(touch, nbytes, "2m", measure.cpus)}
        limits = {MEMSET: partial(memset, there, measure.cpus)}
        measure.compare(ours, peers, limits, rounds=4, quick_rounds=4)


@SUITE.case(
    "threads",
    "How does bringing in a block on transparent huge pages scale with threads?",
    unit="GB/s",
    x="threads",
)
def threads(measure: Measure) -> None:
    """Warm with 1, 2, 4 and so on up to all CPUs."""
    cpus, nbytes = measure.pin(None), size(measure)
    counts = thread_counts(len(cpus))
    there = np.ones(nbytes, np.uint8)
    ours: dict[float, Side] = {n: partial(warm, nbytes, "thp", cpus[:n]) for n in counts}
    peers: dict[float, Side] = {n: partial(touch, nbytes, "thp", cpus[:n]) for n in counts}
    limits: dict[float, Side] = {n: partial(memset, there, cpus[:n]) for n in counts}
    sides = {"unimem": ours}, {"C, a byte a huge page": peers}, {MEMSET: limits}
    measure.scale(*sides, rounds=4, quick_rounds=4)
