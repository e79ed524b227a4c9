"""What of a model is in RAM, page by page; bringing it there, keeping it there, and dropping it."""

from __future__ import annotations

import errno
import mmap
import operator
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem.base.arguments import check_callable, integer
from unimem.base.text import format_bytes
from unimem.system import limits
from unimem.system.placement import Lock
from unimem.weights.files import reopen
from unimem.weights.loading import Progress
from unimem.weights.page_cache import runs_beside, write_back
from unimem.weights.tensors import Contents, ModelPart

__all__ = ["Residency", "evict", "lock", "map_resident", "measure_residency", "warm"]

# Of um_block_pages, in the order of the fields of Residency.
_FLAGS = {"resident": 1, "mapped": 2, "huge": 4, "locked": 8, "unknown": 16}
_PAGE = mmap.PAGESIZE
_SLICE = 1 << 22  # pages whose sums are held at a time
_WARM_BYTES = 64 << 20  # between two looks at the clock
_TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a model, a file or a tensor is in RAM. Any number of threads may use it.

    Bytes are exact: of a page that two tensors share, each has its part.

    Attributes
    ----------
    nbytes : int
        All bytes: of a tensor its data, of a file what of it is mapped or was loaded, header and
        padding included.
    resident_bytes : int
        In RAM: of a mapped file in the page cache, whichever process brought it there.
    mapped_bytes : int
        In RAM, and in the page tables of this process: touching them costs no fault. A process
        that may not look at its own, as after a change of its user (``/proc/self/pagemap``), is
        told of none; nor of what is in huge pages, locked, or on which nodes.
    huge_bytes : int
        Mapped here in huge pages. Before Linux 6.7 the kernel tells only of hugetlb pages.
    locked_bytes : int
        Mapped here and locked by `lock`, or in hugetlb pages, which never leave RAM.
    unknown_bytes : int
        Not mapped here, and the kernel does not tell whether they are in RAM: of a file that this
        process neither owns nor may write, or one in hugetlbfs. They are in no other figure.
    nodes : mapping of int to int
        Mapped bytes by NUMA node; empty where the kernel tells no nodes, as in many containers.
    tensors : mapping of str to Residency
        Of each tensor; of a part of a model, empty.
    by_file : mapping of str to Residency
        Of each file, by path; of a part of a model, empty.
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
        """Tell of a file in ranges of equal size, for a picture of it.

        Parameters
        ----------
        path : str
            A key of `by_file`.
        n : int
            How many ranges; of a file of fewer bytes, as many as it has bytes.

        Returns
        -------
        list of Residency
            In the order of the file; their sum is `by_file` of the path.

        Raises
        ------
        KeyError
            There is no such file.
        TypeError, ValueError
            n is no integer, or below 1.
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
    """Look at all pages of a model once: see `Weights.residency`."""
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
    """Map what of the files is in RAM, and nothing else.

    Only of pages that are mapped here the kernel tells their nodes, and whether they are huge.
    """
    for part in contents._parts:
        memory = part.memory
        flags, _ = memory.block._pages(memory.block_offset, memory.nbytes)
        chosen = flags & (_FLAGS["resident"] | _FLAGS["mapped"]) == _FLAGS["resident"]
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False)) * _PAGE
        first = memory.block_offset // _PAGE * _PAGE
        memory.block.advise("random")  # so that no page is read because its neighbour is touched
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
    """Bring a model into RAM and into the page tables: see `Weights.warm`, and `require_room`."""
    n_threads = limits.thread_count() if threads is None else integer(threads, "threads", 1)
    check_callable(progress)
    require_room(contents, mapped=mapped, without=without)
    ranges = _ranges(contents, without)
    total = sum(end - begin for _, begin, end in ranges)
    done, told = 0, 0.0
    for part, offset, nbytes in _pieces(ranges):
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
    """Keep a model in RAM, or no longer: see `Weights.lock`."""
    before: list[tuple[Block, Lock]] = []
    try:
        # First on fault, which reads nothing: what is refused is refused at once, and reading can
        # be interrupted.
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
    """Drop a model's files from the page cache: see `Weights.evict`.

    Pages that are mapped elsewhere stay, by other processes or other contents of this one.
    """
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
        for fd in fds:
            write_back(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        after = measure_residency(contents)
    return sum(
        max(0, was.resident_bytes - now.resident_bytes)
        for was, now in zip(before.by_file.values(), after.by_file.values(), strict=True)
        if now.unknown_bytes == 0
    )


# ---- one file -----------------------------------------------------------------------------------


class _Scan:
    """The pages under one file's data, as they were when they were looked at.

    Attributes
    ----------
    file_offset, nbytes : int
        What of the file was looked at.
    nodes : set of int
        The nodes that pages are on; empty where the kernel does not tell.
    """

    def __init__(self, part: ModelPart) -> None:
        memory = part.memory
        self.file_offset, self.nbytes = memory.file_offset, memory.nbytes
        where = memory.block_offset, memory.nbytes
        try:
            self._flags, node_of = memory.block._pages(*where, nodes=True)
        except OSError as error:
            # Containers often may not ask for nodes.
            if error.errno not in (errno.EPERM, errno.ENOSYS):
                raise
            self._flags, node_of = memory.block._pages(*where)
        self._node_of = node_of
        self.nodes: set[int] = set()
        if node_of is not None:
            ids = range(node_of.max(initial=-1) + 1)
            self.nodes.update(node for node in ids if np.any(node_of == node))
        # The offset in the file of the first page's first byte.
        self._first = memory.file_offset - memory.block_offset % _PAGE

    def sums(
        self, offsets: NDArray[np.int64], sizes: NDArray[np.int64], nodes: Sequence[int]
    ) -> NDArray[np.int64]:
        """Sum bytes of ranges of the file: a row a range, of its size, each flag and each node."""
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
    """Bytes of the chosen pages below each place."""
    n_before = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(chosen, out=n_before[1:])
    page, rest = np.divmod(ends, _PAGE)
    inside = np.append(chosen, False)[page]
    below: NDArray[np.int64] = n_before[page].astype(np.int64) * _PAGE + rest * inside
    return below


def _row(row: NDArray[np.int64], nodes: Sequence[int], **whole: Any) -> Residency:
    nbytes, resident, mapped, huge, locked, unknown, *on_nodes = row.tolist()
    return Residency(
        nbytes,
        resident,
        mapped,
        huge,
        locked,
        unknown,
        dict(zip(nodes, on_nodes, strict=True)),
        **whole,
    )


class _TensorResidencies(Mapping[str, Residency]):
    """Residencies that are made when they are asked for: a model may have 100 000 tensors."""

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


# ---- warming ------------------------------------------------------------------------------------


def require_room(
    contents: Contents,
    *,
    mapped: bool,
    what: str | None = None,
    beside_bytes: int = 0,
    without: Collection[str] = (),
) -> None:
    """Refuse to bring in what does not fit, before anything is read.

    Parameters
    ----------
    contents : Contents
        The model.
    mapped : bool
        Whether it lies in the page cache, and not in memory of its own.
    what : str, optional
        As for `limits.require`; by default the warming of its first file.
    beside_bytes : int
        Memory that will be taken beside it.
    without : collection of str
        Names of tensors of a mapped model that are not brought in: they were repacked.
    """
    what = what or f"warming '{contents.files[0]}'"
    total = there = 0
    for part, begin, end in _ranges(contents, without):
        if not (mapped and part.file.in_memory):  # such files take none of what is free
            total += end - begin
            there += min(part.memory.block._resident_range(begin, end - begin), end - begin)
    if total + beside_bytes <= there:
        return
    if mapped:
        limits.require_cached(total + beside_bytes, there, what)
    else:  # something was swapped out
        limits.require(total + beside_bytes - there, what)


def _ranges(contents: Contents, without: Collection[str]) -> list[tuple[ModelPart, int, int]]:
    """List what of each block is to be in RAM."""
    found = []
    for part in contents._parts:
        memory = part.memory
        runs = [(memory.block_offset, memory.block_offset + memory.nbytes)]
        if without:  # a file that is mapped lies in a block as it is
            runs = runs_beside(part, contents, without)
        found += [(part, begin, end) for begin, end in runs]
    return found


def _pieces(ranges: Iterable[tuple[ModelPart, int, int]]) -> Iterator[tuple[ModelPart, int, int]]:
    for part, begin, end in ranges:
        for offset in range(begin, end, _WARM_BYTES):
            yield part, offset, min(_WARM_BYTES, end - offset)
