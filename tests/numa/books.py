"""The kernel's figures of nodes and pages, by other ways than unimem's; and moves of pages.

A range is the address of its first byte and its size.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NODES = Path("/sys/devices/system/node")
_MOVE_PAGES = 279  # number of the system call on x86-64
_MPOL_MF_MOVE = 2
_NOT_THERE = -2  # ENOENT: the page was never touched

_libc = ctypes.CDLL(None, use_errno=True)


def node_bytes(address: int, nbytes: int) -> dict[int, int]:
    """Return a range's resident bytes on each node, by numa_maps, for mappings that begin in it."""
    found: Counter[int] = Counter()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, _policy, *words = line.split()
        if not address <= int(start, 16) < address + nbytes:
            continue
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        page_bytes = int(pairs.get("kernelpagesize_kB", "4")) << 10
        for name, value in pairs.items():
            if name[0] == "N" and name[1:].isdigit():
                found[int(name[1:])] += int(value) * page_bytes
    return dict(sorted(found.items()))


def page_nodes(address: int, nbytes: int, step: int) -> NDArray[np.int32]:
    """Return the node of each page of a range, `step` bytes apart; -2 for an untouched page."""
    return _move_pages(address, nbytes, step, None)


def move(address: int, nbytes: int, step: int, node: int) -> None:
    """Move the pages of a range, `step` bytes apart, to a node."""
    statuses = _move_pages(address, nbytes, step, node)
    assert (statuses == node).all(), f"not all moved: {Counter(statuses.tolist())}"


def drop_page_tables(address: int, nbytes: int) -> None:
    """Remove a range of shared memory from the page tables of this process; it stays in RAM."""
    dontneed = 4
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), dontneed) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def _move_pages(address: int, nbytes: int, step: int, node: int | None) -> NDArray[np.int32]:
    addresses = np.arange(address, address + nbytes, step, dtype=np.uint64)
    targets = None if node is None else np.full(addresses.size, node, np.int32)
    statuses = np.full(addresses.size, _NOT_THERE, np.int32)
    arrays = (None if a is None else a.ctypes.data for a in (addresses, targets, statuses))
    result = _libc.syscall(
        ctypes.c_long(_MOVE_PAGES),
        ctypes.c_int(0),
        ctypes.c_ulong(addresses.size),
        *(ctypes.c_void_p(array) for array in arrays),
        ctypes.c_int(_MPOL_MF_MOVE),
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), f"move_pages: {os.strerror(ctypes.get_errno())}")
    return statuses


def numastat(node: int) -> dict[str, int]:
    """Return the pages given on a node, to threads on its CPUs ("local_node") and to others."""
    lines = (NODES / f"node{node}/numastat").read_text().splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


def meminfo(node: int) -> dict[str, int]:
    """Return the fields of a node's meminfo, in bytes; counts of pages stay counts."""
    found = {}
    for line in (NODES / f"node{node}/meminfo").read_text().splitlines():
        _, _, name, value, *unit = line.split()
        found[name.removesuffix(":")] = int(value) << (10 if unit else 0)
    return found
