"""What it costs to verify a block: verify() against the kernel's other ways to ask.

8 GiB (less in a quick run), on transparent huge pages and on 4k pages. The peers are called through
ctypes with arrays made before, so that the kernel's work is measured; each must answer for the
whole block (files need only have contents). No peer reports all that verify() does:
``PAGEMAP_SCAN`` and ``mincore`` know neither nodes nor shares, ``move_pages`` only knows nodes.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import unimem as um
from unimem.system import limits
from unimem.system.placement import Pages
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, NotMeasured, Suite, costs, faster

SUITE = Suite("verify", "What does it cost to look at a block?", passes=3, quick_passes=3)

GIB = 1 << 30
NBYTES = 8 * GIB
# With fewer huge pages only the call itself would be measured; making 4k pages takes long.
QUICK_NBYTES = {"thp": GIB, "4k": GIB // 4}
ROOM_BYTES = 2 * GIB  # left to the machine
PAGE, HUGE = os.sysconf("SC_PAGE_SIZE"), 2 << 20
SYS_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}[os.uname().machine]
PAGEMAP_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16  # _IOWR('f', 16, struct pm_scan_arg)
IS_PRESENT, IS_HUGE = 1 << 3, 1 << 6
EVERY_PAGE, SMAPS = "move_pages, every 4k page", "smaps, read whole"

LIBC = ctypes.CDLL(None, use_errno=True)

# Called to ask; its result says, untimed, how many bytes were seen.
Ask = Callable[[], Callable[[], int]]


class ScanArguments(ctypes.Structure):
    """``struct pm_scan_arg`` of linux/fs.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in """
            size flags start end walk_end vec vec_len max_pages category_inverted category_mask
            category_anyof_mask return_mask
        """.split()
    )


def compare_ways(measure: Measure, pages: Pages, rounds: int, quick_rounds: int) -> None:
    """Compare all ways to look at a resident block.

    What the kernel has looked at stays in the caches for the next side, so the order matters: the
    sides rotate, so that ``verify()`` nearly always follows ``numa_maps`` and ``mincore``, and
    reading ``smaps`` follows ``verify()``.
    """
    least = QUICK_NBYTES[pages]
    wanted = least if measure.quick else NBYTES
    nbytes = min(wanted, limits.available_bytes() - ROOM_BYTES) // HUGE * HUGE
    if nbytes < least:
        raise NotMeasured(
            f"wants {least / GIB:.3g} GiB of memory, and {ROOM_BYTES / GIB:.0f} GiB for the "
            f"machine; there are {limits.available_bytes() / GIB:.1f} GiB"
        )
    measure.fact("GiB", nbytes / GIB)
    measure.fact("memory nodes", len(limits.nodes()))
    with (
        um.Block(nbytes, pages=pages, category="diagnostics") as block,
        open("/proc/self/pagemap", "rb", 0) as pagemap,
    ):
        block.warm()
        granted = block.verify()
        if granted.pages != pages or granted.resident_bytes != nbytes:
            raise NotMeasured(f"wants a resident block of {pages} pages, there is {granted}")
        fd = pagemap.fileno()
        peers = {
            SMAPS: read_file("smaps", nbytes),
            EVERY_PAGE: ask_move_pages(block, PAGE),
            "move_pages, one page in 2 MiB": ask_move_pages(block, HUGE),
            "PAGEMAP_SCAN": scan_pagemap(block, fd, IS_PRESENT),
            "PAGEMAP_SCAN, huge pages too": scan_pagemap(block, fd, IS_PRESENT | IS_HUGE),
            "numa_maps, read whole": read_file("numa_maps", nbytes),
        }
        walk = {"mincore": ask_mincore(block)}  # the cheapest walk of page tables
        ours = {"unimem": timed(partial(ask_unimem, block), nbytes)}
        others = (possible(measure, ways, nbytes) for ways in (peers, walk))
        measure.compare(ours, *others, rounds=rounds, quick_rounds=quick_rounds, warmup=1)


SUITE.case(
    "huge pages",
    "What does looking at a block on transparent huge pages cost?",
    unit="ms",
    targets=[faster(EVERY_PAGE, 50.0, issue=3), costs(SMAPS, 1.0, issue=3)],
)(partial(compare_ways, pages="thp", rounds=11, quick_rounds=11))

SUITE.case("4k pages", "What does looking at a block on 4k pages cost?", unit="ms")(
    partial(compare_ways, pages="4k", rounds=4, quick_rounds=4)
)


def possible(measure: Measure, ways: dict[str, Ask], nbytes: int) -> dict[str, Side]:
    """Return the ways to ask that this kernel allows, and leave out the rest."""
    sides = {}
    for name, ask in ways.items():
        try:
            ask()
        except OSError as error:
            measure.leave_out(name, f"the kernel refuses: {error.strerror}")
        else:
            sides[name] = timed(ask, nbytes)
    return sides


def timed(ask: Ask, nbytes: int) -> Side:
    """Measure the milliseconds of asking, which must report `nbytes`."""

    def run() -> float:
        start = time.perf_counter()
        seen = ask()
        elapsed = time.perf_counter() - start
        if seen() != nbytes:
            raise AssertionError(f"{seen()} bytes were seen, the block has {nbytes}")
        return elapsed * 1e3

    return run


def ask_unimem(block: um.Block) -> Callable[[], int]:
    """Call ``verify()``, and keep the object that it returns."""
    placement = block.verify()
    return lambda: sum(placement.nodes.values())


def read_file(name: str, nbytes: int) -> Ask:
    """Read a file of /proc/self to its end, without parsing it."""
    path = Path("/proc/self") / name

    def ask() -> Callable[[], int]:
        total = 0
        with path.open("rb", buffering=0) as file:
            while n := len(file.read(1 << 16)):
                total += n
        return lambda: nbytes if total > 0 else 0

    return ask


def ask_move_pages(block: um.Block, step: int) -> Ask:
    """Ask for the node of one page in every `step` bytes, without moving any."""
    pages = np.arange(block.address, block.address + block.nbytes, step, dtype=np.uint64)
    status = np.empty(len(pages), np.int32)
    # Asks where n pages of this process are: no target nodes, no flags. data_as keeps the array.
    arguments = (
        *map(ctypes.c_long, (SYS_MOVE_PAGES, 0, len(pages))),
        pages.ctypes.data_as(ctypes.c_void_p),
        None,
        status.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(0),
    )

    def ask() -> Callable[[], int]:
        checked(LIBC.syscall(*arguments))
        return lambda: int((status >= 0).sum()) * step

    return ask


def scan_pagemap(block: um.Block, fd: int, categories: int) -> Ask:
    """Walk the page tables for resident pages; refused before Linux 6.7."""
    regions = np.zeros((1 << 20, 3), np.uint64)

    def ask() -> Callable[[], int]:
        arguments = ScanArguments(
            size=ctypes.sizeof(ScanArguments),
            start=block.address,
            end=block.address + block.nbytes,
            vec=regions.ctypes.data,
            vec_len=len(regions),
            category_mask=IS_PRESENT,
            return_mask=categories,
        )
        n = checked(LIBC.ioctl(fd, ctypes.c_ulong(PAGEMAP_SCAN), ctypes.byref(arguments)))
        return lambda: int((regions[:n, 1] - regions[:n, 0]).sum())

    return ask


def ask_mincore(block: um.Block) -> Ask:
    """Ask for a byte of each 4k page."""
    pages = np.empty(block.nbytes // PAGE, np.uint8)
    arguments = (ctypes.c_void_p(block.address), ctypes.c_size_t(block.nbytes))

    def ask() -> Callable[[], int]:
        checked(LIBC.mincore(*arguments, ctypes.c_void_p(pages.ctypes.data)))
        return lambda: int((pages & 1).sum()) * PAGE

    return ask


def checked(result: int) -> int:
    """Return a call's result, or raise its error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
