"""Reserved huge pages (hugetlb) while something is measured on them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unimem.system.limits import HugePool, huge_pools
from unimem_bench.suite import NotMeasured

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

# Adds pages, prints how many the kernel found, and removes as many when its input ends, however the
# process that wants them ends. The kernel takes no differences, so one process at a time reads the
# number and writes another. Pages that are freed after use (surplus) become reserved ones first; in
# the end, pages in use do the reverse.
_KEEPER = """
import fcntl, sys

folder, n_missing = sys.argv[1], int(sys.argv[2])

def count(name):
    with open(f"{folder}/{name}_hugepages") as file:
        return int(file.read())

def change(n):
    with open(f"{folder}/nr_hugepages") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        surplus, reserved = count("surplus"), count("nr") - count("surplus")
        with open(f"{folder}/nr_hugepages", "w") as file:
            file.write(str(max(0, reserved + n + (surplus if n > 0 else 0))))
        return count("nr") - count("surplus") - reserved

try:
    n_added = change(n_missing)
except OSError as error:
    sys.exit(print(error))
try:
    print(n_added, flush=True)
finally:
    sys.stdin.read()
    change(-n_added)
"""


@contextmanager
def reserved(nbytes: int) -> Iterator[None]:
    """Make sure that the pool of 2 MiB pages has `nbytes` free.

    Missing pages are reserved, which needs root, and given back at the end even if this process is
    killed, by another process. NotMeasured if they cannot be had; the pool is then as it was.
    """
    pool = _pool()
    n_missing = -(-max(0, nbytes - pool.available_bytes) // pool.page_bytes)
    if n_missing == 0:
        yield
        return
    remedy = pool.limit(nbytes).remedy
    wants = f"wants {n_missing} more huge pages of 2 MiB"
    command = [sys.executable, "-I", "-S", "-c", _KEEPER, str(POOL), str(n_missing)]
    # In a session of its own, so that signals to this process do not reach it.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline().strip()
        if not said.isdecimal():
            raise NotMeasured(f"{wants}, which root can reserve ({said}): {remedy}")
        if _pool().available_bytes < nbytes:
            raise NotMeasured(f"{wants}, the kernel finds room for {said}: {remedy}")
        yield


def _pool() -> HugePool:
    pool = huge_pools().get("2m")
    if pool is None:
        raise NotMeasured("wants huge pages of 2 MiB, this kernel has no pool of them")
    return pool
