"""Threads over the chunks of a snapshot, which write, read and check its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem.base.threads import starting_threads, wait_until
from unimem.errors import SnapshotError
from unimem.kv.snapshot.format_rows import DAMAGED, Chunk, Section
from unimem.kv.snapshot.source import RemoteSnapshot, SnapshotBytes

# One thread hashes while others write; more keep no disk busier.
_THREADS = 4

_T = TypeVar("_T")


def again(source: SnapshotBytes, work: Callable[[], _T]) -> _T:
    """Do the work of reading and checking; repeat it once if a server's bytes are damaged."""
    try:
        return work()
    except SnapshotError:
        if not isinstance(source, RemoteSnapshot):
            raise
    return work()


def read_rows(
    rows: Sequence[NDArray[np.uint8] | None],
    section: Section,
    source: SnapshotBytes,
    *,
    verify: bool,
) -> None:
    """Read lanes into memory; None skips a lane."""

    def read(chunk: Chunk, buffer: NDArray[np.uint8]) -> None:
        lane = rows[chunk.lane]
        if lane is None:
            return
        data = lane[chunk.begin : chunk.begin + chunk.nbytes]
        source.read(data, chunk.offset)
        if verify:
            padding = buffer[: chunk.padding]
            source.read(padding, chunk.offset + chunk.nbytes)
            _check_chunk(section, chunk, data, padding)

    for_each_chunk(section, lambda *given: again(source, lambda: read(*given)))


def check_data(section: Section, source: SnapshotBytes) -> None:
    """Read all data of a section and compare its checksums."""

    def check(chunk: Chunk, buffer: NDArray[np.uint8]) -> None:
        data = buffer[: chunk.nbytes + chunk.padding]
        source.read(data, chunk.offset)
        _check_chunk(section, chunk, data)

    for_each_chunk(section, lambda *given: again(source, lambda: check(*given)))


def _check_chunk(section: Section, chunk: Chunk, *pieces: NDArray[np.uint8]) -> None:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    if digest.intdigest() != section.checksums[chunk.number]:
        rule = f"the data's checksum does not match in {section.name_of(chunk.lane)}"
        raise SnapshotError(f"{rule}; {DAMAGED}", chunk.offset, section.path)


def staging(nbytes: int) -> Block:
    """Take page-aligned memory for data on its way."""
    return Block(nbytes, pages="4k", name="snapshot", category="staging")


def for_each_chunk(section: Section, work: Callable[[Chunk, NDArray[np.uint8]], object]) -> None:
    """Do the work for every chunk in threads, each with page-aligned memory for a chunk.

    If chunks fail, the error of the first of them in the file is raised, and no further work
    begins. When this returns or raises, no work is under way, however often it was interrupted:
    the caller may close the file and reuse the memory.
    """
    n_threads = min(_THREADS, len(section.checksums))
    if n_threads == 0:
        return
    nbytes = min(section.chunk_bytes, section._longest_lane)
    buffers: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()

    stopped, failed = False, len(section.checksums)

    def one(chunk: Chunk) -> None:
        nonlocal failed
        buffer = buffers.get()
        try:
            # Read while the buffer is held: a thread without a buffer begins no work after the
            # stop. Chunks before a failed one are still done, since the first error is raised. If
            # several fail, any of their numbers will do, so no lock is needed.
            if not stopped and chunk.number < failed:
                work(chunk, buffer)
        except BaseException:
            failed = chunk.number
            raise
        finally:
            buffers.put(buffer)

    def is_idle() -> bool:
        return buffers.qsize() == n_threads

    with staging(n_threads * nbytes) as block, ThreadPoolExecutor(n_threads) as pool:
        for i in range(n_threads):
            buffers.put(block.as_array("uint8", nbytes, i * nbytes))
        try:
            with starting_threads():
                for _ in pool.map(one, section.chunks()):
                    pass
        finally:
            stopped = True
            try:
                wait_until(is_idle)
            finally:
                wait_until(is_idle)  # an interrupt may have come before its first line
