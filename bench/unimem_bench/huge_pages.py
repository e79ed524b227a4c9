"""Reserved huge pages (hugetlb) for as long as something is measured on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unimem.system.limits import HugePool, huge_pools
from unimem_bench.suite import NotMeasured

__all__ = ["reserved"]

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


@contextmanager
def reserved(nbytes: int) -> Iterator[None]:
    """Let the pool of 2 MiB pages have so much that is free.

    What it lacks is reserved, which takes root, and given back at the end, whatever happens; only a
    process that is killed leaves it there.

    Parameters
    ----------
    nbytes : int
        That will be taken.

    Raises
    ------
    NotMeasured
        If they cannot be had; the pool is then as it was.
    """
    pool = _pool()
    n_missing = -(-max(0, nbytes - pool.available_bytes) // pool.page_bytes)
    if n_missing == 0:
        yield
        return
    remedy = pool.limit(nbytes).remedy
    wants = f"wants {n_missing} more huge pages of 2 MiB"
    before = _n_reserved()
    try:
        # Those that would go become reserved ones first, and are in use.
        _reserve(pool.total + n_missing)
    except OSError as error:
        raise NotMeasured(f"{wants}, which root can reserve ({error}): {remedy}") from error
    n_added = _n_reserved() - before
    try:
        if _pool().available_bytes < nbytes:
            raise NotMeasured(f"{wants}, the kernel finds room for {n_added}: {remedy}")
        yield
    finally:
        # Others may have changed it meanwhile. Pages that are in use go when they are free.
        _reserve(_n_reserved() - n_added)


def _pool() -> HugePool:
    pool = huge_pools().get("2m")
    if pool is None:
        raise NotMeasured("wants huge pages of 2 MiB, this kernel has no pool of them")
    return pool


def _n_reserved() -> int:
    """Count the pages that stay: ``nr_hugepages`` also has those that go when they are free."""
    total, surplus = (
        int((POOL / name).read_text()) for name in ("nr_hugepages", "surplus_hugepages")
    )
    return total - surplus


def _reserve(n: int) -> None:
    (POOL / "nr_hugepages").write_text(str(max(0, n)))
