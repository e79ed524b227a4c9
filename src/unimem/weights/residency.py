"""The pages of a model in RAM: measuring, warming, locking and dropping them."""

from __future__ import annotations

import errno
import mmap
import operator
import os
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem._core import guard
from unimem._core.block import Block
from unimem.base.arguments import check_callable, integer
from unimem.base.text import format_bytes
from unimem.system import limits
from unimem.system.placement import Lock
from unimem.weights.files import Version, identity_of, reopen
from unimem.weights.loading import Progress
from unimem.weights.tensors import Contents, ModelPart

# The flags of um_block_pages, in the order of the fields of Residency.
_FLAGS = {"resident": 1, "mapped": 2, "huge": 4, "locked": 8, "unknown": 16}
_PAGE = mmap.PAGESIZE
_SLICE = 1 << 22  # pages summed at a time
_WARM_BYTES = 64 << 20  # warmed between two calls of progress
_TICK_SECONDS = 0.05
# The page cache has pieces of up to 2 MiB, which are dropped whole or not at all.
_LARGEST_FOLIO = 2 << 20
_SMALL_RUN = 1 << 20  # a smaller run is dropped with its piece, and read again
_SAMPLES = 64  # pages of a file to look at, and one more for each gap
# Bits of an entry of pagemap: the page is mapped, and by one process only.
_ENTRY, _PRESENT, _EXCLUSIVE = struct.Struct("=Q"), 1 << 63, 1 << 56
_FEW = 8  # a file counts as mapped elsewhere from one page in eight on


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a model, a file or a tensor is in RAM. Any number of threads may use it.

    Bytes are exact: a page that two tensors share counts for each in part.

    Attributes
    ----------
    nbytes : int
        All bytes: for a tensor its data, for a file what is mapped or was loaded of it, with header
        and padding.
    resident_bytes : int
        In RAM: for a mapped file in the page cache, whichever process brought it there.
    mapped_bytes : int
        In RAM, and in the page tables of this process: accesses do not fault. If a process may not
        read its own page tables (``/proc/self/pagemap``), as after a change of its user, this is 0,
        and so are huge and locked bytes and those on nodes.
    huge_bytes : int
        Mapped here in huge pages. Before Linux 6.7 the kernel reports only hugetlb pages.
    locked_bytes : int
        Mapped here and locked by `lock`, or in hugetlb pages, which never leave RAM.
    unknown_bytes : int
        Not mapped here, and the kernel does not tell whether they are in RAM: bytes of a file that
        this process neither owns nor may write, or of one in hugetlbfs. No other figure counts
        them.
    nodes : mapping of int to int
        Mapped bytes by NUMA node; empty if the kernel does not tell, as in many containers.
    tensors : mapping of str to Residency
        Of each tensor; empty for a part of a model.
    by_file : mapping of str to Residency
        Of each file, by path; empty for a part of a model.
    """

    nbytes: int
    resident_bytes: int
    mapped_bytes: int
    huge_bytes: int
    locked_bytes: int
    unknown_bytes: int
    nodes: Mapping[int, int]
    tensors: Mapping[str, Residency] = field(default_factory=dict, repr=False)
    by_file: Mapping[str, Residency] = field(default_factory=dict, repr=False)
    _scans: Mapping[str, _Scan] = field(default_factory=dict, repr=False, compare=False)

    def ranges(self, path: str, n: int) -> list[Residency]:
        """Divide a file into ranges of equal size, for a picture of it.

        Parameters
        ----------
        path : str
            A key of `by_file`.
        n : int
            Number of ranges; at most one for each byte of the file.

        Returns
        -------
        list of Residency
            In the order of the file; they add up to `by_file` of the path.

        Raises
        ------
        KeyError
            There is no such file.
        TypeError, ValueError
            n is not an integer, or below 1.
        """
        n = operator.index(n)
        if n < 1:
            raise ValueError(f"n: expected at least 1 range, got {n}")
        scan, nbytes = self._scans[path], self.by_file[path].nbytes
        n = min(n, nbytes)
        edges = scan.file_offset + np.arange(n + 1, dtype=np.int64) * nbytes // max(n, 1)
        nodes = sorted(self.nodes)
        table = scan.sums(edges[:-1], np.diff(edges), nodes)
        return [_row(row, nodes) for row in table]

    def __str__(self) -> str:
        text = f"{format_bytes(self.resident_bytes)} of {format_bytes(self.nbytes)} in RAM"
        for name in ("mapped", "huge", "locked", "unknown"):
            nbytes = getattr(self, f"{name}_bytes")
            text += f", {format_bytes(nbytes)} {name}" if nbytes else ""
        for node, nbytes in self.nodes.items():
            text += f", {format_bytes(nbytes)} on node {node}"
        return text


def measure_residency(contents: Contents) -> Residency:
    """Look at all pages of a model once, for `Weights.residency`."""
    parts = contents._parts
    scans = {part.file.path: _Scan(part) for part in parts}
    nodes = sorted(set().union(*(scan.nodes for scan in scans.values())))
    tables, files = [], {}
    names: dict[str, int] = {}
    for part in parts:
        scan, header = scans[part.file.path], part.file.header
        indices = header.tensor_names()
        rows = [header.tensor(i)[3:] for i in indices.values()]
        where = np.array(rows, np.int64).reshape(-1, 2)
        tables.append(scan.sums(where[:, 0], where[:, 1], nodes))
        names |= {name: len(names) + i for i, name in enumerate(indices)}
        memory = part.memory
        whole = scan.sums(np.array([memory.file_offset]), np.array([memory.nbytes]), nodes)
        files[part.file.path] = whole[0]
    return _row(
        np.sum(list(files.values()), axis=0),
        nodes,
        tensors=_TensorResidencies(names, np.concatenate(tables), nodes),
        by_file={path: _row(row, nodes) for path, row in files.items()},
        _scans=scans,
    )


def map_resident(contents: Contents) -> None:
    """Map the pages of the files that are in RAM, and no others.

    The kernel reports nodes and huge pages only for pages that are mapped here.
    """
    for part in contents._parts:
        memory = part.memory
        flags, _ = memory.block._pages(memory.block_offset, memory.nbytes)
        chosen = flags & (_FLAGS["resident"] | _FLAGS["mapped"]) == _FLAGS["resident"]
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)) * _PAGE
        first = memory.block_offset // _PAGE * _PAGE
        memory.block.advise("random")  # without reading ahead
        for begin, end in (edges.reshape(-1, 2) + first).tolist():
            memory.block._warm_range(begin, min(end, memory.block.nbytes) - begin)


def warm(
    contents: Contents,
    *,
    mapped: bool,
    threads: int | None = None,
    progress: Progress | None = None,
    without: Collection[str] = (),
) -> None:
    """Bring a model into RAM and the page tables, for `Weights.warm`; as for `require_room`."""
    n_threads = limits.thread_count() if threads is None else integer(threads, "threads", 1)
    check_callable(progress)
    require_room(contents, mapped=mapped, without=without)
    ranges = _ranges(contents, without)
    total = sum(end - begin for _, begin, end in ranges)
    done, told = 0, 0.0
    pieces = [
        (part, at, min(_WARM_BYTES, end - at))
        for part, begin, end in ranges
        for at in range(begin, end, _WARM_BYTES)
    ]
    for part, offset, nbytes in pieces:
        try:
            part.memory.block._warm_range(offset, nbytes, n_threads)
        except OSError as error:
            if not mapped or error.errno is not None:
                raise
            raise OSError(errno.EIO, "The file has become shorter", part.file.path) from None
        done += nbytes
        now = time.monotonic()
        if progress is not None and done < total and now - told >= _TICK_SECONDS:
            told = now
            progress(done, total)
    if progress is not None:
        progress(total, total)


def lock(contents: Contents, blocks: Sequence[Block], how: Lock, *, mapped: bool) -> None:
    """Lock a model in RAM, or unlock it, for `Weights.lock`."""
    before: list[tuple[Block, Lock]] = []
    try:
        # First on fault, which reads nothing: a refusal comes at once, and reading can be
        # interrupted.
        for block in blocks:
            at_first: Lock = "onfault" if how is True else how
            before.append((block, block._lock(at_first, asked=how)))
        if how is True:
            warm(contents, mapped=mapped)
            for block in blocks:
                block._lock(True)
    except BaseException:
        for block, was in before:
            block._lock(was)
        raise


def evict(contents: Contents) -> int:
    """Drop a model's files from the page cache, for `Weights.evict`."""
    with ExitStack() as stack:
        fds = [stack.enter_context(reopen(part.file)) for part in contents._parts]
        before = measure_residency(contents)
        for part in contents._parts:
            try:
                part.memory.block.advise("dontneed")
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                raise ValueError(
                    f"Weights '{contents.files[0]}' are locked in RAM: lock(False) first"
                ) from None
        for fd, part in zip(fds, contents._parts, strict=True):
            write_back(fd)
            drop(fd, part.file.begin, part.file.end)
        after = measure_residency(contents)
    return sum(
        max(0, was.resident_bytes - now.resident_bytes)
        for was, now in zip(before.by_file.values(), after.by_file.values(), strict=True)
        if now.unknown_bytes == 0
    )


class _Scan:
    """The state of the pages under one file's data at one moment.

    `nodes` are those of the pages; empty if the kernel does not tell.
    """

    def __init__(self, part: ModelPart) -> None:
        memory = part.memory
        self.file_offset, self.nbytes = memory.file_offset, memory.nbytes
        where = memory.block_offset, memory.nbytes
        try:
            self._flags, node_of = memory.block._pages(*where, nodes=True)
        except OSError as error:
            # Many containers may not ask for nodes.
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                raise
            self._flags, node_of = memory.block._pages(*where)
        self._node_of = node_of
        self.nodes: set[int] = set()
        if node_of is not None:
            ids = range(node_of.max(initial=-1) + 1)
            self.nodes.update(node for node in ids if np.any(node_of == node))
        # The file offset of the first page.
        self._first = memory.file_offset - memory.block_offset % _PAGE

    def sums(
        self, offsets: NDArray[np.int64], sizes: NDArray[np.int64], nodes: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return a row for each range of the file: its size, then bytes by flag and by node."""
        low, high = self.file_offset, self.file_offset + self.nbytes
        begin = np.clip(offsets, low, high) - self._first
        end = np.clip(offsets + sizes, low, high) - self._first
        table = np.zeros((len(offsets), 1 + len(_FLAGS) + len(nodes)), np.int64)
        table[:, 0] = end - begin
        for first in range(0, len(self._flags), _SLICE):
            flags = self._flags[first : first + _SLICE]
            pages = [flags & flag != 0 for flag in _FLAGS.values()]
            if self._node_of is not None:
                node_of = self._node_of[first : first + _SLICE]
                pages += [node_of == node for node in nodes]
            where = first * _PAGE, (first + len(flags)) * _PAGE
            a, b = np.clip(begin, *where) - where[0], np.clip(end, *where) - where[0]
            for column, chosen in enumerate(pages, 1):
                table[:, column] += _bytes_below(chosen, b) - _bytes_below(chosen, a)
        return table


def _bytes_below(chosen: NDArray[np.bool_], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes of the chosen pages below each offset."""
    n_before = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(chosen, out=n_before[1:])
    page, rest = np.divmod(ends, _PAGE)
    inside = np.append(chosen, False)[page]
    below: NDArray[np.int64] = n_before[page].astype(np.int64) * _PAGE + rest * inside
    return below


def _row(row: NDArray[np.int64], nodes: Sequence[int], **whole: Any) -> Residency:
    nbytes, resident, mapped, huge, locked, unknown, *on_nodes = row.tolist()
    by_node = dict(zip(nodes, on_nodes, strict=True))
    return Residency(nbytes, resident, mapped, huge, locked, unknown, by_node, **whole)


class _TensorResidencies(Mapping[str, Residency]):
    """Residencies made on demand: a model may have 100 000 tensors."""

    def __init__(
        self, names: dict[str, int], table: NDArray[np.int64], nodes: Sequence[int]
    ) -> None:
        self._names, self._table, self._nodes = names, table, nodes

    def __getitem__(self, name: str) -> Residency:
        return _row(self._table[self._names[name]], self._nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def require_room(
    contents: Contents,
    *,
    mapped: bool,
    what: str | None = None,
    beside_bytes: int = 0,
    without: Collection[str] = (),
) -> None:
    """Raise CapacityError if warming does not fit, before anything is read.

    `mapped` says that the model lies in the page cache; `what` is as for `limits.require`;
    `beside_bytes` will be taken beside it; repacked tensors, named by `without`, are not warmed.
    """
    what = what or f"warming '{contents.files[0]}'"
    total = there = 0
    for part, begin, end in _ranges(contents, without):
        if not (mapped and part.file.in_memory):  # such files are in memory already
            total += end - begin
            there += min(part.memory.block._resident_range(begin, end - begin), end - begin)
    if total + beside_bytes <= there:
        return
    if mapped:
        limits.require_cached(total + beside_bytes, there, what)
    else:  # a part was swapped out
        limits.require(total + beside_bytes - there, what)


def _ranges(contents: Contents, without: Collection[str]) -> list[tuple[ModelPart, int, int]]:
    """List the ranges of each block to warm."""
    found = []
    for part in contents._parts:
        memory = part.memory
        runs = [(memory.block_offset, memory.block_offset + memory.nbytes)]
        if without:  # of a mapping
            shift = memory.block_offset - memory.file_offset
            runs = [(a + shift, b + shift) for a, b in runs_beside(part, contents, without)]
        found += [(part, begin, end) for begin, end in runs]
    return found


def write_back(fd: int) -> None:
    """Write dirty pages of a file to the disk: until then, they cannot be dropped."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        # Read-only file systems (squashfs, erofs, ISO 9660) refuse, and have nothing to write.
        if error.errno not in (errno.EINVAL, errno.EROFS):
            raise


class Dropper:
    """Drops used ranges of one file from the page cache. Any number of threads may use it.

    `runs` are the ranges that are still needed, sorted. The attribute `kept` has those of them that
    stay; small ones are dropped, too.
    """

    def __init__(self, fd: int, runs: Sequence[tuple[int, int]]) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self.kept = [(begin, end) for begin, end in runs if end - begin >= _SMALL_RUN]
        # Ranges to drop, sorted, without overlaps.
        self._done = [run for run in runs if run not in self.kept]

    def drop(self, begin: int, end: int) -> None:
        """Drop a range, and the pieces of the page cache that it shares with dropped ranges."""
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
    """List the ranges of a file, in whole pages, of the tensors that are not named."""
    found: list[tuple[int, int]] = []
    tensors = (contents.tensors[name] for name in part.file.header.tensor_names())
    rest = [tensor for tensor in tensors if tensor.name not in names and tensor.nbytes]
    for tensor in sorted(rest, key=lambda tensor: tensor.offset):
        begin = tensor.offset // _PAGE * _PAGE
        end = min(-(-(tensor.offset + tensor.nbytes) // _PAGE) * _PAGE, part.file.end)
        if found and begin <= found[-1][1]:
            begin, _ = found.pop()
        found.append((begin, end))
    return found


def drop(fd: int, begin: int, end: int) -> None:
    """Drop a range of a file from the page cache; mapped pages stay."""
    os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)


def drop_beside(part: ModelPart, fd: int, runs: Sequence[tuple[int, int]]) -> None:
    """Drop everything between these ranges of a file from the page cache."""
    for begin, end in _gaps(part, runs):
        drop(fd, begin, end)


def gaps_in_cache(part: ModelPart, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """List the gaps between these ranges of a mapped file that are not in the page cache.

    Pages that appear there later were read ahead, and no process needs them.
    """
    block = part.memory.block
    if block._is_cache_hidden:
        return []
    shift = part.memory.block_offset - part.memory.file_offset
    gaps = _gaps(part, runs)
    return [run for run in gaps if not block._resident_range(run[0] + shift, run[1] - run[0])]


def is_mapped_elsewhere(part: ModelPart, runs: Sequence[tuple[int, int]]) -> bool:
    """Whether other mappings, of this or another process, have pages between these ranges.

    Some pages are sampled: a process that computes with a model has most of it mapped. The answer
    is True if the kernel does not tell.
    """
    block = part.memory.block
    if block._is_cache_hidden:
        return True
    shift = part.memory.block_offset - part.memory.file_offset
    gaps = [(begin + shift, end + shift) for begin, end in _gaps(part, runs)]
    pages = [range(begin // _PAGE, end // _PAGE) for begin, end in gaps]
    step = sum(map(len, pages)) // _SAMPLES + 1
    byte = np.empty(1, np.uint8)
    n_resident = n_shared = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for page in chain.from_iterable(those[::step] for those in pages):
                if not block._resident_range(page * _PAGE, _PAGE):
                    continue
                address = block.address + page * _PAGE
                guard.copy(byte, address, 1, part.file.path)  # maps it here
                (entry,) = _ENTRY.unpack(os.pread(pagemap.fileno(), 8, address // _PAGE * 8))
                n_resident += 1
                n_shared += entry & (_PRESENT | _EXCLUSIVE) == _PRESENT
    except OSError:
        return True
    # The kernel also maps some pages around those that a process touches.
    return n_shared * _FEW > n_resident


def _gaps(part: ModelPart, runs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    at = part.file.begin
    for begin, end in (*runs, (part.file.end, part.file.end)):
        if begin > at:
            yield at, begin
        at = end


def drop_files(files: Iterable[tuple[str, Version]]) -> int:
    """Drop whole files from the page cache, except mapped pages; return the bytes that left it.

    Files with another version than the given one, or that are gone, are left alone. The bytes are
    counted as far as the kernel tells this user.
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
