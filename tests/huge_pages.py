"""Reserved huge pages for tests: borrowed from the machine, and given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE_BYTES = 2 << 20
POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def count(name: str) -> int:
    """A figure of the pool, such as free_hugepages."""
    return int((POOL / name).read_text())


@contextmanager
def reserved(n_pages: int) -> Iterator[None]:
    """Let the pool have n_pages more that are free, and as many as before at the end."""
    if not POOL.exists():
        pytest.skip("this kernel has no hugetlb pages of 2m")
    if os.geteuid() != 0:
        pytest.skip("reserving huge pages needs root")
    before, free = count("nr_hugepages"), count("free_hugepages")
    try:
        try:
            (POOL / "nr_hugepages").write_text(str(before + n_pages))
        except OSError as error:
            pytest.skip(f"huge pages cannot be reserved: {error}")
        if count("free_hugepages") < free + n_pages:
            pytest.skip(f"the machine has no {n_pages} huge pages of 2m to reserve just now")
        yield
    finally:
        (POOL / "nr_hugepages").write_text(str(before))
        assert count("nr_hugepages") == before, "reserved huge pages are still in use"


@pytest.fixture
def eight_huge_pages() -> Iterator[None]:
    """Import this into a test module to use it."""
    with reserved(8):
        yield


@pytest.fixture
def no_huge_pages() -> None:
    """Skip where somebody has reserved huge pages: they are not the tests' to take away."""
    if POOL.exists() and count("nr_hugepages"):
        pytest.skip("this machine has reserved huge pages of 2m")
