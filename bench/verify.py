"""What it costs to look at a block: verify() against the kernel's other ways to ask.

8 GB on transparent huge pages, then on 4k pages. Beside verify() stand reading all of
``/proc/self/smaps``, ``/proc/self/numa_maps``, ``move_pages`` for every 4k page and for one page in
2 MB, ``PAGEMAP_SCAN`` with and without telling huge pages apart, and ``mincore``. They are called
through ctypes with arrays made before, so that what is measured is the kernel's work; that they
answer for all of the block is checked.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from bench.harness import Bench, pin, ratios
from unimem.placement import Pages

NBYTES = 8 << 30
ROOM_BYTES = 2 << 30  # what is left to the machine
PAGE, HUGE = os.sysconf("SC_PAGE_SIZE"), 2 << 20
SYS_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}[os.uname().machine]
PAGEMAP_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16  # _IOWR('f', 16, struct pm_scan_arg)
IS_PRESENT, IS_HUGE = 1 << 3, 1 << 6

LIBC = ctypes.CDLL(None, use_errno=True)


class ScanArguments(ctypes.Structure):
    """``struct pm_scan_arg`` of linux/fs.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "size",
            "flags",
            "start",
            "end",
            "walk_end",
            "vec",
            "vec_len",
            "max_pages",
            "category_inverted",
            "category_mask",
            "category_anyof_mask",
            "return_mask",
        )
    )


def checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def timed(run: Callable[[], Any], nbytes: int) -> Callable[[], float]:
    """Milliseconds of a `run` that returns a function, which says how many bytes were seen."""

    def measure() -> float:
        start = time.perf_counter()
        seen = run()
        elapsed = time.perf_counter() - start
        if seen() != nbytes:
            raise AssertionError(f"{seen()} bytes were seen, the block has {nbytes}")
        return elapsed * 1e3

    return measure


def ask_unimem(block: um.Block) -> Callable[[], Any]:
    def run() -> Callable[[], int]:
        placement = block.verify()
        return lambda: sum(placement.nodes.values())

    return run


def read_file(path: str, nbytes: int) -> Callable[[], Any]:
    """Read a file of /proc without looking into it."""

    def run() -> Callable[[], int]:
        fd = os.open(path, os.O_RDONLY)
        total = 0
        while n := len(os.read(fd, 1 << 16)):
            total += n
        os.close(fd)
        return lambda: nbytes if total > 0 else 0

    return run


def ask_move_pages(block: um.Block, step: int) -> Callable[[], Any]:
    pages = np.arange(block.address, block.address + block.nbytes, step, dtype=np.uint64)
    status = np.empty(len(pages), np.int32)
    # Where n pages of this process are: no nodes to go to, no flags. data_as keeps the array.
    arguments = (
        *map(ctypes.c_long, (SYS_MOVE_PAGES, 0, len(pages))),
        pages.ctypes.data_as(ctypes.c_void_p),
        None,
        status.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(0),
    )

    def run() -> Callable[[], int]:
        checked(LIBC.syscall(*arguments))
        return lambda: int((status >= 0).sum()) * step

    return run


def scan_pagemap(block: um.Block, fd: int, categories: int) -> Callable[[], Any]:
    regions = np.zeros((1 << 20, 3), np.uint64)

    def run() -> Callable[[], int]:
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

    return run


def ask_mincore(block: um.Block) -> Callable[[], Any]:
    pages = np.empty(block.nbytes // PAGE, np.uint8)
    arguments = (ctypes.c_void_p(block.address), ctypes.c_size_t(block.nbytes))

    def run() -> Callable[[], int]:
        checked(LIBC.mincore(*arguments, ctypes.c_void_p(pages.ctypes.data)))
        return lambda: int((pages & 1).sum()) * PAGE

    return run


@contextmanager
def warmed(nbytes: int, pages: Pages) -> Iterator[um.Block]:
    with um.Block(nbytes, pages=pages, category="diagnostics") as block:
        block.warm()
        granted = block.verify()
        if granted.pages != pages or granted.resident_bytes != nbytes:
            raise AssertionError(f"asked for {pages}, got {granted}")
        yield block


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no line 'MemAvailable'")


def main() -> int:
    bench = Bench("verify", __doc__)
    bench.parser.add_argument("--nbytes", type=int, default=NBYTES, help="of the block")
    asked = bench.parse().nbytes
    nbytes = min(asked, available_bytes() - ROOM_BYTES) // HUGE * HUGE
    if nbytes < asked:
        print(f"{asked} bytes do not fit on this machine: the block has {nbytes}")
    pin(1)
    nodes = Path("/sys/devices/system/node/has_memory").read_text().strip()
    bench.facts = {"nbytes": nbytes, "memory_nodes": nodes}
    every_page, one_in_2mb = "move_pages, every 4k page", "move_pages, one page in 2 MB"
    kinds: tuple[tuple[Pages, int], ...] = (("thp", 31), ("4k", 11))
    for pages, rounds in kinds:
        with warmed(nbytes, pages) as block, open("/proc/self/pagemap", "rb", 0) as pagemap:
            fd = pagemap.fileno()
            # Each side follows the same one in every round. What the kernel looks at is in caches
            # after numa_maps as it is after verify(), and is not after move_pages.
            sides = {
                "numa_maps, read whole": read_file("/proc/self/numa_maps", nbytes),
                "verify()": ask_unimem(block),
                "smaps, read whole": read_file("/proc/self/smaps", nbytes),
                every_page: ask_move_pages(block, PAGE),
                one_in_2mb: ask_move_pages(block, HUGE),
                "PAGEMAP_SCAN": scan_pagemap(block, fd, IS_PRESENT),
                "PAGEMAP_SCAN, huge": scan_pagemap(block, fd, IS_PRESENT | IS_HUGE),
                "mincore": ask_mincore(block),
            }
            title = f"looking at {nbytes / (1 << 30):.3g} GiB, {pages}"
            samples = bench.compare(
                title,
                {name: timed(run, nbytes) for name, run in sides.items()},
                unit="ms",
                rounds=rounds,
                warmup=2,
            )
        if pages == "thp":
            ours = samples["verify()"]
            quotients = ratios(samples[every_page], ours)
            bench.at_least(title, f"{every_page} / verify()", quotients, 50.0)
            quotients = ratios(ours, samples["smaps, read whole"])
            bench.at_most(title, "verify() / smaps, read whole", quotients, 1.0)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
