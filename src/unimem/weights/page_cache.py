"""Dropping from the page cache what of a model is not needed there, and nothing else."""

from __future__ import annotations

import errno
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from unimem._core import guard
from unimem._core.block import Block
from unimem.weights.files import Version, identity_of
from unimem.weights.tensors import Contents, ModelPart

__all__ = [
    "Dropper",
    "drop",
    "drop_beside",
    "drop_files",
    "gaps_in_cache",
    "is_mapped_elsewhere",
    "runs_beside",
    "write_back",
]

_PAGE = 4096
# The page cache has pieces of up to 2 MiB, which are dropped whole or not at all.
_LARGEST_FOLIO = 2 << 20
_SMALL_RUN = 1 << 20  # is read again rather than left in such a piece
_SAMPLES = 64  # pages of a file that are looked at, and one of each gap
# Bits of an entry of pagemap: the page is mapped, and nowhere else.
_ENTRY, _PRESENT, _EXCLUSIVE = struct.Struct("=Q"), 1 << 63, 1 << 56
_FEW = 8  # one page of so many


def write_back(fd: int) -> None:
    """Write to the disk what of a file is in RAM alone: until then, it cannot be dropped."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        # A file system that is never written to (squashfs, erofs, ISO 9660) has nothing to write.
        if error.errno not in (errno.EINVAL, errno.EROFS):
            raise


class Dropper:
    """Drops ranges of one file as they are done with. Any number of threads may.

    Parameters
    ----------
    fd : int
        The file.
    runs : sequence of (begin, end)
        Ranges that are needed, sorted.

    Attributes
    ----------
    kept : list of (begin, end)
        Those of them that stay; small ones are dropped, too.
    """

    def __init__(self, fd: int, runs: Sequence[tuple[int, int]]) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self.kept = [(begin, end) for begin, end in runs if end - begin >= _SMALL_RUN]
        # What is done with, sorted, without overlaps.
        self._done = [run for run in runs if run not in self.kept]

    def drop(self, begin: int, end: int) -> None:
        """Drop a range, and pieces of the page cache that it shares with others that are done."""
        begin, end = begin // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
        with self._lock:
            first = bisect_left(self._done, begin, key=lambda run: run[1])
            stop = bisect_left(self._done, end + 1, lo=first, key=lambda run: run[0])
            joined = [(begin, end), *self._done[first:stop]]
            low, high = min(run[0] for run in joined), max(run[1] for run in joined)
            self._done[first:stop] = [(low, high)]
        low, high = max(low, begin - _LARGEST_FOLIO), min(high, end + _LARGEST_FOLIO)
        drop(self._fd, low, high)


def runs_beside(
    part: ModelPart, contents: Contents, names: Collection[str]
) -> list[tuple[int, int]]:
    """List the ranges of a file, in whole pages, that tensors of other names lie in."""
    found: list[tuple[int, int]] = []
    tensors = (contents.tensors[name] for name in part.file.header.tensor_names())
    rest = [tensor for tensor in tensors if tensor.name not in names and tensor.nbytes]
    for tensor in sorted(rest, key=lambda tensor: tensor.offset):
        begin = tensor.offset // _PAGE * _PAGE
        end = min(-(-(tensor.offset + tensor.nbytes) // _PAGE) * _PAGE, part.file.nbytes)
        if found and begin <= found[-1][1]:
            begin, _ = found.pop()
        found.append((begin, end))
    return found


def drop(fd: int, begin: int, end: int) -> None:
    """Drop a range of a file from the page cache; pages that are mapped stay."""
    os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)


def drop_beside(part: ModelPart, fd: int, runs: Sequence[tuple[int, int]]) -> None:
    """Drop from the page cache what is in none of these ranges of a file."""
    for begin, end in _gaps(part, runs):
        drop(fd, begin, end)


def gaps_in_cache(part: ModelPart, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """List the gaps between these ranges of a mapped file of which nothing is in the page cache.

    What comes there from now on was read ahead, and is nobody's.
    """
    block = part.memory.block
    if block._is_cache_hidden:
        return []
    gaps = _gaps(part, runs)
    return [(begin, end) for begin, end in gaps if not block._resident_range(begin, end - begin)]


def is_mapped_elsewhere(part: ModelPart, runs: Sequence[tuple[int, int]]) -> bool:
    """Tell whether others have pages of a mapped file mapped that are in none of these ranges.

    Others are other processes, and other mappings of this one. Some pages are looked at: who
    computes with a model has most of it mapped. Where the kernel does not tell: True.
    """
    block = part.memory.block
    if block._is_cache_hidden:
        return True
    pages = [range(begin // _PAGE, end // _PAGE) for begin, end in _gaps(part, runs)]
    step = sum(map(len, pages)) // _SAMPLES + 1
    byte = np.empty(1, np.uint8)
    n_resident = n_shared = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for page in chain.from_iterable(those[::step] for those in pages):
                if not block._resident_range(page * _PAGE, _PAGE):
                    continue
                address = block.address + page * _PAGE
                guard.copy(byte, address, 1, part.file.path)  # then it is mapped here
                (entry,) = _ENTRY.unpack(os.pread(pagemap.fileno(), 8, address // _PAGE * 8))
                n_resident += 1
                n_shared += entry & (_PRESENT | _EXCLUSIVE) == _PRESENT
    except OSError:
        return True
    # Around the pages that a process touches, the kernel maps some more.
    return n_shared * _FEW > n_resident


def _gaps(part: ModelPart, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    at = 0
    for begin, end in (*runs, (part.file.nbytes, part.file.nbytes)):
        if begin > at:
            yield at, begin
        at = end


def drop_files(files: Iterable[tuple[str, Version]]) -> int:
    """Drop whole files from the page cache; pages that anybody has mapped stay.

    Parameters
    ----------
    files : iterable of (str, Version)
        Their paths, and what they were: a file that was replaced, or is gone, is left alone.

    Returns
    -------
    int
        Bytes that left it, as far as the kernel tells this user.
    """
    dropped = 0
    for path, version in files:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if identity_of(os.fstat(fd))[: len(version)] == version:
                nbytes = os.fstat(fd).st_size
                before = _cached_bytes(fd, nbytes, path)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                dropped += max(0, before - _cached_bytes(fd, nbytes, path))
        finally:
            os.close(fd)
    return dropped


def _cached_bytes(fd: int, nbytes: int, path: str) -> int:
    with Block._map_fd(fd, 0, nbytes, "r", path) as block:
        return 0 if block._is_cache_hidden else block._resident_range(0, nbytes)
