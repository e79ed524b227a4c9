"""The data of a snapshot: its chunks are written, read and checked in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem.base.threads import starting_threads, wait_until
from unimem.errors import SnapshotError
from unimem.kv.snapshot.format_rows import DAMAGED, Chunk, Snapshot
from unimem.kv.snapshot.format_states import StatesSnapshot
from unimem.kv.snapshot.source import RemoteSnapshot, SnapshotBytes

__all__ = ["Section", "again", "check_data", "for_each_chunk", "read_rows", "staging"]

# One thread hashes while others write; more keep no disk busier.
_THREADS = 4

#: What has data in a file: a cache whose layers are alike, or states.
Section: TypeAlias = Snapshot | StatesSnapshot
_T = TypeVar("_T")


def again(source: SnapshotBytes, work: Callable[[], _T]) -> _T:
    """Do what reads and checks; where a server's bytes are damaged, once more."""
    try:
        return work()
    except SnapshotError:
        if not isinstance(source, RemoteSnapshot):
            raise
    return work()


def read_rows(
    rows: Sequence[NDArray[np.uint8] | None],
    snapshot: Section,
    source: SnapshotBytes,
    *,
    verify: bool,
) -> None:
    """Read lanes into memory; None of one that is not wanted."""

    def read(chunk: Chunk, buffer: NDArray[np.uint8]) -> None:
        lane = rows[chunk.lane]
        if lane is None:
            return
        data = lane[chunk.begin : chunk.begin + chunk.nbytes]
        source.read(data, chunk.offset)
        if verify:
            padding = buffer[: chunk.padding]
            source.read(padding, chunk.offset + chunk.nbytes)
            _check_chunk(snapshot, chunk, data, padding)

    for_each_chunk(snapshot, lambda *given: again(source, lambda: read(*given)))


def check_data(snapshot: Section, source: SnapshotBytes) -> None:
    """Read all data of a section, and compare its checksums."""

    def check(chunk: Chunk, buffer: NDArray[np.uint8]) -> None:
        data = buffer[: chunk.nbytes + chunk.padding]
        source.read(data, chunk.offset)
        _check_chunk(snapshot, chunk, data)

    for_each_chunk(snapshot, lambda *given: again(source, lambda: check(*given)))


def _check_chunk(snapshot: Section, chunk: Chunk, *pieces: NDArray[np.uint8]) -> None:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    if digest.intdigest() != snapshot.checksums[chunk.number]:
        rule = f"the data's checksum does not match in {snapshot.name_of(chunk.lane)}"
        raise SnapshotError(f"{rule}; {DAMAGED}", chunk.offset, snapshot.path)


def staging(nbytes: int) -> Block:
    """Take page-aligned memory that data goes through."""
    return Block(nbytes, pages="4k", name="snapshot", category="staging")


def for_each_chunk(snapshot: Section, work: Callable[[Chunk, NDArray[np.uint8]], object]) -> None:
    """Do the work for every chunk, in threads, each with page-aligned memory for a chunk.

    The error of the first chunk that has one is raised, and what has not begun then is left. No
    work is under way any more when this returns or raises, however often it is interrupted: the
    caller closes the file, and gives the memory to others.
    """
    n_threads = min(_THREADS, len(snapshot.checksums))
    if n_threads == 0:
        return
    longest = max(snapshot.lane_stride, snapshot.v_lane_stride)
    nbytes = min(snapshot.chunk_bytes, longest)
    buffers: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()

    stopped, failed = False, len(snapshot.checksums)

    def one(chunk: Chunk) -> None:
        nonlocal failed
        buffer = buffers.get()
        try:
            # Read while the buffer is held: a thread without one begins no work after the stop.
            # Chunks before one that failed are done: the error of the first is raised. Of several
            # that failed any number will do here, so it needs no lock.
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
                for _ in pool.map(one, snapshot.chunks()):
                    pass
        finally:
            stopped = True
            try:
                wait_until(is_idle)
            finally:
                wait_until(is_idle)  # an interrupt may have come before its first line
