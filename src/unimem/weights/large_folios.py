"""Mapped model files in large folios of the page cache, which the kernel maps as huge pages.

A file that was written piece by piece lies in the cache in small folios: each 4 KiB page has an
entry of its own in the page tables, which decoding waits for (docs/weights.md). If it is read anew
through a mapping that asks for huge pages, the cache has it in folios of 2 MiB, for all processes
that map it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from unimem.weights.files import reopen
from unimem.weights.residency import drop, measure_residency
from unimem.weights.tensors import Contents

_LEAST_BYTES = 64 << 20  # a smaller model gains less than reading it costs
_ENOUGH = 0.5  # of a model in huge pages
_PIECE_BYTES = 64 << 20
# Bytes a second. A disk that is slower costs the start more than a conversation gains.
_LEAST_RATE = 5e8


def ask_for_huge_pages(contents: Contents) -> None:
    """Let files that are not in the page cache yet arrive there in large folios.

    Files in memory are left alone, as is a kernel without huge pages.
    """
    for part in contents._parts:
        if not part.file.in_memory:
            with suppress(OSError):
                part.memory.block.advise("hugepage")


def read_anew(contents: Contents) -> int:
    """Read what lies in small folios anew, in large ones; return the bytes that were read.

    It ends early if the disk is slow, if the file system has no large folios, or if pages cannot be
    dropped since another process maps them. The model's pages must be in RAM; afterwards some may
    not be in this process's page tables.

    Parameters
    ----------
    contents : Contents
        Mapped weights, which are warm, after `ask_for_huge_pages`.
    """
    found = measure_residency(contents)
    if contents.nbytes < _LEAST_BYTES or found.huge_bytes >= _ENOUGH * found.mapped_bytes:
        return 0
    done = 0
    with ExitStack() as stack:
        for part in contents._parts:
            memory = part.memory
            if part.file.in_memory or memory.nbytes < _PIECE_BYTES:
                continue
            fd = stack.enter_context(reopen(part.file))
            try:
                memory.block.advise("dontneed")
            except (OSError, ValueError):  # locked in RAM
                return done
            for begin in range(0, memory.nbytes, _PIECE_BYTES):
                nbytes = min(_PIECE_BYTES, memory.nbytes - begin)
                drop(fd, memory.file_offset + begin, memory.file_offset + begin + nbytes)
                started = time.monotonic()
                memory.block._warm_range(memory.block_offset + begin, nbytes)
                done += nbytes
                if nbytes < _LEAST_RATE * (time.monotonic() - started):
                    return done
    return done
