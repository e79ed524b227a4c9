"""Reserved huge pages for tests: borrowed from the machine, and given back."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import pytest

PAGE_BYTES = 2 << 20
_MAP_HUGETLB_2M = 0x40000 | 21 << 26  # of the kernel's mman.h
POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def count(name: str) -> int:
    """A figure of the pool, such as free_hugepages."""
    return int((POOL / name).read_text())


@contextmanager
def all_held() -> Iterator[None]:
    """Let no page of the pool be free: what the machine has is held meanwhile."""
    free = count("free_hugepages") - count("resv_hugepages") if POOL.exists() else 0
    if free == 0:
        yield
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB_2M
    with mmap.mmap(-1, free * PAGE_BYTES, flags=flags) as held:
        for page in range(free):
            held[page * PAGE_BYTES] = 1
        yield


# Everybody may open these two, whoever runs the tests. native/tests/huge_pool.h has them, too.
LOCK, GATE = POOL / "free_hugepages", POOL / "resv_hugepages"
_lock: TextIO | None = None


def _take(kind: int) -> None:
    """Take the pool, behind whoever waits to have it alone: else many who share it go first."""
    assert _lock is not None
    fcntl.flock(_lock, fcntl.LOCK_UN)
    with GATE.open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(_lock, kind)


def leave_the_pool() -> None:
    """Let others have it: tests that a test starts would wait for it to end."""
    if _lock is not None:
        fcntl.flock(_lock, fcntl.LOCK_UN)


@contextmanager
def sharing_the_pool(*, alone: bool) -> Iterator[None]:
    """Share the pool with other workers, or have it alone.

    A block with ``pages="auto"`` takes pages from it, whoever has reserved them. `reserved` has it
    alone in any case.
    """
    global _lock  # noqa: PLW0603 - one for each worker
    if not LOCK.exists():
        yield
        return
    with LOCK.open() as _lock:
        _take(fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            leave_the_pool()  # closing does not, where a child of the test has the file open too
            _lock = None


@contextmanager
def reserved(n_pages: int) -> Iterator[None]:
    """Let the pool have n_pages that are free, and as many pages as before at the end."""
    if _lock is not None:
        _take(fcntl.LOCK_EX)
    if not POOL.exists():
        pytest.skip("this kernel has no hugetlb pages of 2m")
    if os.geteuid() != 0:
        pytest.skip("reserving huge pages needs root")
    # Gives them back also where this process is killed.
    from unimem_bench import huge_pages
    from unimem_bench.suite import NotMeasured

    before = count("nr_hugepages")
    with ExitStack() as stack:
        stack.enter_context(all_held())
        try:
            stack.enter_context(huge_pages.reserved(n_pages * PAGE_BYTES))
        except NotMeasured as reason:
            pytest.skip(f"huge pages cannot be reserved: {reason}")
        yield
    left = count("nr_hugepages")
    assert left == before or _n_mapped() == 0, f"{left} huge pages, where {before} were before"


def _n_mapped() -> int:
    """Count what this process has of them: others may take, and keep, what it reserved."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if "_Hugetlb:" in line) // PAGE_BYTES


@pytest.fixture
def eight_huge_pages() -> Iterator[None]:
    """Import this into a test module to use it."""
    with reserved(8):
        yield


@pytest.fixture
def no_huge_pages() -> Iterator[None]:
    """Import this into a test module whose tests reckon with an empty pool."""
    with all_held():
        yield
