"""CPU time that a block takes to warm after a rest, in huge pages, small ones, and joined ones.

    python tools/rested_block.py [--turns N]

Prints the median, least and most of N turns. A host with free page reporting has taken the memory
after 8 s. `docs/placement.md` has what it printed.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from statistics import median

import unimem as um
from unimem.system.placement import Pages

NBYTES, HUGE, REST_S = 512 << 20, 2 << 20, 8
POPULATE_WRITE, COLLAPSE = 23, 25  # uapi/asm-generic/mman-common.h


def warm(pages: Pages) -> None:
    """Warm a block of the size, by one thread."""
    with um.Block(NBYTES, pages=pages, warm=True):
        pass


def join() -> None:
    """Touch small pages, and make huge ones of them."""
    with mmap.mmap(-1, NBYTES + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.madvise(POPULATE_WRITE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, NBYTES, HUGE):
            memory.madvise(COLLAPSE, at, HUGE)


WAYS: dict[str, Callable[[], None]] = {
    "huge pages": lambda: warm("thp"),
    "4 KiB pages": lambda: warm("4k"),
    "4 KiB pages that are joined": join,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(parser.parse_args().turns):
        for way, take in WAYS.items():
            time.sleep(REST_S)
            for is_rested in (True, False):
                began = time.process_time()
                take()
                times.setdefault((way, is_rested), []).append(time.process_time() - began)
    print(f"| CPU time of {NBYTES >> 20} MiB | after {REST_S} s of rest | again at once |")
    print("|---|---|---|")
    for way in WAYS:
        found = [sorted(times[way, is_rested]) for is_rested in (True, False)]
        cells = [f"{median(x) * 1e3:.0f} ms ({x[0] * 1e3:.0f} to {x[-1] * 1e3:.0f})" for x in found]
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
