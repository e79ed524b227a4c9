"""Reserved huge pages for tests, given back at the end."""

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
    """Return a figure of the pool, such as free_hugepages."""
    return int((POOL / name).read_text())


@contextmanager
def all_held() -> Iterator[None]:
    """Take all free pages of the pool."""
    free = count("free_hugepages") - count("resv_hugepages") if POOL.exists() else 0
    if free == 0:
        yield
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB_2M
    with mmap.mmap(-1, free * PAGE_BYTES, flags=flags) as held:
        for page in range(free):
            held[page * PAGE_BYTES] = 1
        yield


# Every user may open these files. native/tests/huge_pool.h uses them, too.
LOCK, GATE = POOL / "free_hugepages", POOL / "resv_hugepages"
_lock: TextIO | None = None


def _take(kind: int) -> None:
    """Lock the pool, after any process that waits to have it alone."""
    assert _lock is not None
    fcntl.flock(_lock, fcntl.LOCK_UN)
    with GATE.open() as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(_lock, kind)


def leave_the_pool() -> None:
    """Unlock the pool for the tests that a test starts, which would wait otherwise."""
    if _lock is not None:
        fcntl.flock(_lock, fcntl.LOCK_UN)


@contextmanager
def sharing_the_pool(*, alone: bool) -> Iterator[None]:
    """Share the pool with other workers, or have it alone.

    A block with ``pages="auto"`` takes any free pages. `reserved` always has the pool alone.
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
            leave_the_pool()  # a child of the test may still have the file open
            _lock = None


@contextmanager
def reserved(n_pages: int) -> Iterator[None]:
    """Leave n_pages of the pool free, and restore its size at the end."""
    if _lock is not None:
        _take(fcntl.LOCK_EX)
    if not POOL.exists():
        pytest.skip("this kernel has no hugetlb pages of 2m")
    if os.geteuid() != 0:
        pytest.skip("reserving huge pages needs root")
    # This also gives the pages back if this process is killed.
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
    """Count the pages that this process has mapped; others may have taken reserved ones."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if "_Hugetlb:" in line) // PAGE_BYTES


@pytest.fixture
def eight_huge_pages() -> Iterator[None]:
    """Reserve eight huge pages."""
    with reserved(8):
        yield


@pytest.fixture
def no_huge_pages() -> Iterator[None]:
    """Leave no huge page free."""
    with all_held():
        yield
