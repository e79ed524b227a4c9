# cython: language_level=3, boundscheck=False, wraparound=False
"""Pieces of files that are read into slots when they are needed: weights larger than RAM."""
import errno
import os

import numpy as np

from unimem.base.arguments import one_of, string
from unimem.errors import CapacityError, ClosedError

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport int32_t, int64_t, uint32_t, uintptr_t
from posix.unistd cimport getpid

from unimem._core cimport native as um
from unimem._core.arrays cimport dtype_of, size_of
from unimem._core.block cimport Block
from unimem._core.mapping cimport discard_range
from unimem._core.status cimport raise_status

#: from typing import Literal, TypedDict, Unpack
#: from unimem.system.placement import PlacementOptions
#: Policy: TypeAlias = Literal["frequent", "recent", "cycle"]
#: Io: TypeAlias = Literal["auto", "ring", "threads"]
#: class Stat(TypedDict):
#:     hits: int
#:     misses: int
#:     prefetched: int
#:     prefetch_hits: int
#:     evicted: int
#:     failed: int
#:     n_reads: int
#:     read_bytes: int
#:     waited_ns: int
#:     resident: int
#:     resident_bytes: int

cnp.import_array()

cdef dict _POLICIES = {"frequent": um.UM_PIECES_FREQUENT, "recent": um.UM_PIECES_RECENT,
                       "cycle": um.UM_PIECES_CYCLE}
cdef dict _IO = {"auto": um.UM_PIECES_IO_AUTO, "ring": um.UM_PIECES_IO_RING,
                 "threads": um.UM_PIECES_IO_THREADS}

cdef enum:
    ALIGN = 4096


@cython.no_gc
cdef class _Spec:
    """The arrays of a um_pieces_spec, and where each part of a piece is."""

    cdef um.um_pieces_spec spec
    cdef um.um_pieces_pool *pools
    cdef uint32_t *pool_of
    cdef uint32_t *group_of
    cdef um.um_pieces_range *ranges
    cdef int *fds
    cdef list paths

    def __cinit__(self, files, pools, pieces, groups=None):
        cdef list given = [(pool, list(ranges)) for pool, ranges in pieces]
        cdef list sizes = [list(parts) for parts in pools]
        cdef size_t n_ranges = sum([len(ranges) for _, ranges in given]), at = 0
        cdef Py_ssize_t i, part
        cdef um.um_error err
        self.paths = [path for _, path in files]
        self.fds = <int *>_array(len(self.paths), sizeof(int))
        self.pools = <um.um_pieces_pool *>_array(len(sizes), sizeof(um.um_pieces_pool))
        self.pool_of = <uint32_t *>_array(len(given), sizeof(uint32_t))
        self.group_of = <uint32_t *>_array(len(given), sizeof(uint32_t))
        self.ranges = <um.um_pieces_range *>_array(n_ranges, sizeof(um.um_pieces_range))
        for i, (fd, _) in enumerate(files):
            self.fds[i] = fd
        for i, parts in enumerate(sizes):
            if not 1 <= len(parts) <= um.UM_PIECES_MAX_PARTS:
                raise ValueError(f"pools: expected 1 to {um.UM_PIECES_MAX_PARTS} parts in pool "
                                 f"{i}, got {len(parts)}")
            self.pools[i].n_parts = len(parts)
            for part in range(len(parts)):
                self.pools[i].part_nbytes[part] = size_of(parts[part], f"part {part} of pool {i}",
                                                          1)
        for i, (pool, ranges) in enumerate(given):
            if not 0 <= pool < len(sizes) or len(ranges) != len(sizes[pool]):
                raise ValueError(f"pieces: expected the number of one of {len(sizes)} pools, and a "
                                 f"range for each of its parts, got pool {pool} and {len(ranges)} "
                                 f"ranges in piece {i}")
            self.pool_of[i] = pool
            for file, offset in ranges:
                if not 0 <= file < len(self.paths):
                    raise ValueError(f"pieces: expected the number of one of {len(self.paths)} "
                                     f"files, got {file} in piece {i}")
                self.ranges[at].file = file
                self.ranges[at].offset = size_of(offset, f"offset in piece {i}")
                at += 1
        self.spec.fds, self.spec.n_files = self.fds, len(self.paths)
        self.spec.pools, self.spec.n_pools = self.pools, len(sizes)
        self.spec.pool_of, self.spec.n_pieces = self.pool_of, len(given)
        self.spec.ranges = self.ranges
        if groups is not None:
            if len(groups) != len(given) or not all([0 <= group < len(given) for group in groups]):
                raise ValueError(f"groups: expected a number from 0 to {len(given) - 1} for each "
                                 f"of {len(given)} pieces, got {len(groups)}: {groups!r:.60}")
            for i, group in enumerate(groups):
                self.group_of[i] = group
            self.spec.group_of, self.spec.n_groups = self.group_of, max(groups, default=0) + 1
        if um.um_pieces_layout(&self.spec, &err) != um.UM_OK:
            raise_status(err.status, &err, "pieces")

    def __dealloc__(self):
        PyMem_Free(self.fds)
        PyMem_Free(self.pools)
        PyMem_Free(self.pool_of)
        PyMem_Free(self.group_of)
        PyMem_Free(self.ranges)

    cdef um.um_pieces_pool *pool(self, number) except NULL:
        cdef Py_ssize_t i = number
        if not 0 <= i < <Py_ssize_t>self.spec.n_pools:
            raise ValueError(f"pool: expected 0 to {self.spec.n_pools - 1}, got {i}")
        return &self.pools[i]


cdef void *_array(size_t n, size_t size) except NULL:
    cdef void *made = PyMem_Calloc(max(n, <size_t>1), size)
    if made == NULL:
        raise MemoryError()
    return made


def strides(pools: Sequence[Sequence[int]],
            pieces: Iterable[tuple[int, Sequence[tuple[int, int]]]]) -> list[int]:
    """Return the bytes of a slot of each pool, before any memory is taken.

    Parameters are those of `Pieces`.
    """
    cdef _Spec spec
    given = [(pool, list(ranges)) for pool, ranges in pieces]
    n_files = 1 + max([file for _, ranges in given for file, _ in ranges], default=-1)
    spec = _Spec([(-1, "")] * n_files, pools, given)
    return [spec.pools[i].stride for i in range(spec.spec.n_pools)]


cdef class Pieces:
    """A cache of pieces of files, in pools of equal slots.

    A piece is read and evicted whole, such as an expert of a layer. It consists of parts, such as
    its gate, up and down matrices; each is a range of a file. A pool has a slot for each piece that
    is in memory at the same time. Part p of the piece in slot s is at ``address(pool) + s *
    stride(pool) + part_offset(pool, p)``.

    Any number of threads may use it at once, each with a `holder` of its own. In a forked child it
    raises ClosedError.

    Parameters
    ----------
    files : sequence of tuple
        ``(fd, path)``: open files, which may be closed afterwards, and their names for errors.
    pools : sequence of sequence of int
        The sizes in bytes of the parts of the pieces of each pool, up to 8.
    pieces : iterable of tuple
        ``(pool, [(file, offset), ...])``: the pool of each piece, and for each of its parts the
        number of the file and the offset there in bytes.
    slots : sequence of int
        The slots of each pool, at least 1. `resize` may add some, up to one for each piece.
    policy : {"frequent", "recent", "cycle"}
        Which piece is evicted: the one used least, where older uses count less, and those of its
        group's last call more; the one not used for the longest time; or the one used last, for
        pieces that are used in a circle, as the layers of a dense model.
    groups : sequence of int, optional
        The group of each piece, numbered from 0: a call asks for pieces of one group, such as the
        experts of a layer, and groups have their turns in order. By default all are one group.
    io : {"auto", "ring", "threads"}
        Whether an io_uring reads or threads do; "auto" takes threads where io_uring is refused.
    name : str
        The name in messages.
    **placement
        See `PlacementOptions`.

    Attributes
    ----------
    name : str
    blocks : tuple of Block
        The memory of the slots of each pool, of category "weights".

    Raises
    ------
    ValueError
        A number or a size is wrong.
    OSError
        A file cannot be opened again, or the kernel refuses what reads need.
    CapacityError, MemoryError, PlacementError
        As `Block`.
    """

    def __init__(self, files: Sequence[tuple[int, str]], pools: Sequence[Sequence[int]],
                 pieces: Iterable[tuple[int, Sequence[tuple[int, int]]]], *,
                 slots: Sequence[int], policy: Policy = "frequent",
                 groups: Sequence[int] | None = None, io: Io = "auto", name: str = "pieces",
                 **placement: Unpack[PlacementOptions]) -> None:
        cdef _Spec spec
        cdef um.um_error err
        cdef um.um_status status
        cdef um.um_pieces_pool *pool
        cdef Py_ssize_t i
        if self.pieces != NULL:
            raise RuntimeError("the Pieces are made already")
        self.name = string(name, "name", "pieces")
        self._pid = getpid()
        one_of(policy, "policy", tuple(_POLICIES))
        one_of(io, "io", tuple(_IO))
        self._spec = spec = _Spec(files, pools, pieces, groups)
        spec.spec.policy = <um.um_pieces_policy><int>_POLICIES[policy]
        spec.spec.io = <um.um_pieces_io><int>_IO[io]
        if len(slots) != <Py_ssize_t>spec.spec.n_pools:
            raise ValueError(f"slots: expected a number for each of {spec.spec.n_pools} pools, got "
                             f"{len(slots)}")
        for i in range(spec.spec.n_pieces):
            spec.pools[spec.pool_of[i]].max_slots += 1
        made = []
        try:
            for i in range(spec.spec.n_pools):
                pool = &spec.pools[i]
                pool.n_slots = size_of(slots[i], f"slots of pool {i}", 1)
                pool.max_slots = max(pool.max_slots, pool.n_slots)
                block = Block(pool.n_slots * pool.stride, reserve=pool.max_slots * pool.stride,
                              name=f"{self.name}:slots", category="weights", **placement)
                made.append(block)
                pool.base = (<Block>block).base()
            with nogil:
                status = um.um_pieces_create(&self.pieces, &spec.spec, &err)
            if status != um.UM_OK:
                raise_status(status, &err, self.name)
        except BaseException:
            for block in made:
                block.close()
            raise
        self.blocks = tuple(made)

    def holder(self) -> Holder:
        """Make a holder, which keeps the pieces of its last `Holder.ensure` from eviction."""
        return Holder(self)

    @cython.critical_section
    def prefetch(self, ids: npt.ArrayLike, first: int = 0, n: int | None = None,
                 name: str | None = None) -> None:
        """Begin to read the pieces that are missing, in this order, without waiting.

        A piece for which there is no slot is left out. An error of a read is not raised here:
        `Holder.ensure` tries again. Parameters are those of `Holder.ensure`.

        Raises
        ------
        TypeError, ValueError
            They are not integers, or there is no such piece.
        OSError
            The kernel refuses to begin reads.
        """
        cdef cnp.ndarray numbers = _numbers(self, ids, first, n, name)
        cdef const int32_t *at = <const int32_t *>cnp.PyArray_DATA(numbers)
        cdef size_t n_ids = cnp.PyArray_SIZE(numbers)
        cdef um.um_error err
        cdef um.um_status status
        self.check_open()
        if n_ids > 0:
            self._n_users += 1
            with nogil:
                status = um.um_pieces_prefetch(self.pieces, at, n_ids, &err)
            self._n_users -= 1
            if status != um.UM_OK:
                self.fail(status, &err)

    @cython.critical_section
    def resize(self, pool: int, n_slots: int) -> None:
        """Change the number of slots of a pool, and its memory.

        Slots from `n_slots` on lose their pieces. Arrays over them stay readable, with any
        contents, and their memory goes back to the system all the same.

        Raises
        ------
        BufferError
            A holder keeps a piece in a slot that would go; nothing changed.
        ValueError
            `n_slots` is 0 or above `max_slots`.
        CapacityError, MemoryError, PlacementError
            There is no memory to grow into; nothing changed.
        """
        cdef um.um_error err
        cdef um.um_status status
        cdef uint32_t number, n
        self.check_open()
        cdef um.um_pieces_pool *known = (<_Spec>self._spec).pool(pool)
        if size_of(n_slots, "n_slots", 1) > known.max_slots:
            raise ValueError(f"n_slots: expected at most {known.max_slots}, got {n_slots}")
        number, n = pool, n_slots
        cdef Block block = self.blocks[number]
        if n > known.n_slots:
            block.commit(n * known.stride)
        self._n_users += 1
        with nogil:
            status = um.um_pieces_resize(self.pieces, number, n, &err)
        self._n_users -= 1
        if status != um.UM_OK:
            self.fail(status, &err)
        cdef bint shrinks = n < known.n_slots
        known.n_slots = n
        if shrinks:
            try:
                block.release(n * known.stride)
            except BufferError:
                discard_range(block.region(), n * known.stride,
                              block.region().block.nbytes - n * known.stride)

    @cython.critical_section
    def slot(self, piece: int) -> int | None:
        """Return the slot of a piece in its pool; None if it is not in memory."""
        self.check_open()
        found = um.um_pieces_slot(self.pieces, piece)
        return None if found < 0 else found

    def array(self, pool: int, part: int, dtype: npt.DTypeLike,
              shape: Sequence[int]) -> npt.NDArray[Any]:
        """View a part of all slots as an array.

        Parameters
        ----------
        pool, part : int
            Their numbers.
        dtype : dtype-like
            A NumPy dtype.
        shape : sequence of int
            The part's shape in one slot.

        Returns
        -------
        numpy.ndarray
            Of shape ``(n_slots, *shape)``, read-only; the stride of its first axis is
            ``stride(pool)``. Only slots that a holder keeps have contents that stay.

        Raises
        ------
        ValueError
            The shape has other bytes than the part.
        """
        self.check_open()
        cdef um.um_pieces_pool *known = (<_Spec>self._spec).pool(pool)
        cdef Block block = self.blocks[pool]
        descr = dtype_of(dtype)
        cdef list steps = []
        nbytes, wanted = descr.itemsize, known.part_nbytes[_part_of(known, part)]
        for extent in reversed(shape):
            steps.insert(0, nbytes)
            nbytes *= extent
        if nbytes != wanted:
            raise ValueError(f"shape: expected {wanted} bytes of part {part} of pool {pool}, got "
                             f"{nbytes}: {tuple(shape)} of {descr}")
        whole = block.as_array("uint8", (known.n_slots * known.stride,))
        found = np.ndarray((known.n_slots, *shape), descr, whole, known.part_offset[part],
                           (known.stride, *steps))
        found.flags.writeable = False
        return found

    def address(self, pool: int) -> int:
        """Return where the first slot of a pool begins."""
        return <uintptr_t>(<_Spec>self._spec).pool(pool).base

    def stride(self, pool: int) -> int:
        """Return the bytes from one slot of a pool to the next."""
        return (<_Spec>self._spec).pool(pool).stride

    def part_offset(self, pool: int, part: int) -> int:
        """Return where a part begins in a slot."""
        cdef um.um_pieces_pool *known = (<_Spec>self._spec).pool(pool)
        return known.part_offset[_part_of(known, part)]

    def n_slots(self, pool: int) -> int:
        """Return the number of slots of a pool."""
        return (<_Spec>self._spec).pool(pool).n_slots

    def max_slots(self, pool: int) -> int:
        """Return how many slots a pool may have."""
        return (<_Spec>self._spec).pool(pool).max_slots

    @cython.critical_section
    def n_fetched(self, pool: int) -> int:
        """Return how many pieces of a pool had their reading begun."""
        self.check_open()
        (<_Spec>self._spec).pool(pool)
        return um.um_pieces_fetched(self.pieces, pool)

    @property
    def n_pieces(self) -> int:
        """The number of pieces."""
        return (<_Spec>self._spec).spec.n_pieces

    @property
    @cython.critical_section
    def io(self) -> Literal["ring", "threads"]:
        """Whether an io_uring reads or threads do."""
        self.check_open()
        return "ring" if um.um_pieces_has_ring(self.pieces) else "threads"

    @cython.critical_section
    def is_direct(self, file: int) -> bool:
        """Whether a file is read past the page cache."""
        self.check_open()
        if not 0 <= file < <Py_ssize_t>(<_Spec>self._spec).spec.n_files:
            raise ValueError(f"file: expected the number of a file, got {file}")
        return um.um_pieces_is_direct(self.pieces, file)

    @property
    @cython.critical_section
    def n_reads(self) -> int:
        """The number of reads that have ended, as in `stat`."""
        cdef um.um_pieces_stat now
        self.check_open()
        um.um_pieces_stat_read(self.pieces, &now)
        return now.n_reads

    @cython.critical_section
    def stat(self) -> Stat:
        """Return totals since the creation; see ``um_pieces_stat`` in unimem_pieces.h.

        In a forked child all are 0.
        """
        cdef um.um_pieces_stat now
        if self.pieces == NULL:
            self.check_open()
        um.um_pieces_stat_read(self.pieces, &now)
        return dict(now)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.pieces == NULL

    @cython.critical_section
    def close(self) -> None:
        """Wait for reads, and give the memory back.

        Raises
        ------
        BufferError
            A holder is open, or a call of another thread runs.
        """
        if self.pieces == NULL:
            return
        if self._n_users > 0:
            raise BufferError(f"Pieces '{self.name}' have {self._n_users} open holders or calls "
                              "that run: close the holders first")
        _destroy(self)
        for block in self.blocks:
            block.__exit__()  # arrays keep the memory until the last of them goes

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __dealloc__(self):
        _destroy(self)

    def __reduce__(self):
        raise TypeError("Pieces cannot be pickled: they are memory of this process")

    cdef int check_open(self) except -1:
        if self.pieces == NULL:
            raise ClosedError(f"Pieces '{self.name}' are closed")
        if getpid() != self._pid:
            raise ClosedError(f"Pieces '{self.name}': a forked child has none of the reads that "
                              "are under way: open the files again there")
        return 0

    cdef object fail(self, um.um_status status, const um.um_error *err):
        subject = f"Pieces '{self.name}'"
        if status == um.UM_E_IO:
            path = (<_Spec>self._spec).paths[err.used]
            why = os.strerror(err.os_errno) if err.os_errno else "the file has become shorter"
            raise OSError(err.os_errno or errno.EIO, f"{subject}: {err.asked} bytes at offset "
                          f"{err.offset} cannot be read: {why}", path)
        if status == um.UM_E_STATE:
            raise ClosedError(f"{subject}: {err.what.decode()}")
        if status == um.UM_E_BUSY:
            raise BufferError(f"{subject}: {err.what.decode()}: try again when they let pieces go, "
                              "or give a larger budget")
        raise_status(status, err, subject, CapacityError, "slots")


cdef void _destroy(Pieces pieces) noexcept:
    cdef um.um_pieces *gone = pieces.pieces
    pieces.pieces = NULL
    with nogil:
        um.um_pieces_destroy(gone)


cdef Py_ssize_t _part_of(const um.um_pieces_pool *pool, part) except -1:
    cdef Py_ssize_t number = part
    if not 0 <= number < <Py_ssize_t>pool.n_parts:
        raise ValueError(f"part: expected 0 to {pool.n_parts - 1}, got {number}")
    return number


cdef cnp.ndarray _numbers(Pieces pieces, ids, first, n, name):
    """Return the numbers of pieces as a new array of int32; for the others, see Holder.ensure."""
    cdef int32_t begin = first
    cdef Py_ssize_t most = (<_Spec>pieces._spec).spec.n_pieces - begin if n is None else n
    cdef cnp.ndarray given = cnp.PyArray_FROM_O(ids)
    cdef Py_ssize_t n_ids = cnp.PyArray_SIZE(given), i
    if n_ids > 0 and not cnp.PyArray_ISINTEGER(given):
        raise TypeError(f"ids: expected integers, numbers of pieces of '{name or pieces.name}', "
                        f"got {given.dtype}: {ids!r:.60}")
    cdef cnp.ndarray wide = cnp.PyArray_FROM_OTF(
        given, cnp.NPY_INT64, cnp.NPY_ARRAY_CARRAY_RO | cnp.NPY_ARRAY_FORCECAST)
    cdef cnp.ndarray found = cnp.PyArray_EMPTY(
        cnp.PyArray_NDIM(given), cnp.PyArray_DIMS(given), cnp.NPY_INT32, 0)
    cdef const int64_t *asked = <const int64_t *>cnp.PyArray_DATA(wide)
    cdef int32_t *numbers = <int32_t *>cnp.PyArray_DATA(found)
    for i in range(n_ids):
        if not 0 <= asked[i] < most:
            low = int(given.min())
            raise ValueError(
                f"ids: expected numbers of the {most} pieces of '{name or pieces.name}', from 0 to "
                f"{most - 1}, got {low if low < 0 else int(given.max())}")
        numbers[i] = begin + <int32_t>asked[i]
    return found


cdef class Holder:
    """Keeps the pieces of its last `ensure` in memory. One thread uses it at a time."""

    def __init__(self, Pieces pieces not None) -> None:
        cdef um.um_error err
        if self.holder != NULL:
            raise RuntimeError("the Holder is made already")
        with cython.critical_section(pieces):
            pieces.check_open()
            if um.um_pieces_holder_create(&self.holder, pieces.pieces, &err) != um.UM_OK:
                pieces.fail(err.status, &err)
            self.pieces = pieces
            pieces._n_users += 1

    def ensure(self, ids: npt.ArrayLike, first: int = 0, n: int | None = None,
               name: str | None = None) -> npt.NDArray[np.int32]:
        """Make pieces present, and keep them until the next call, `release` or `close`.

        Parameters
        ----------
        ids : array-like of int
            Numbers of pieces; they may repeat.
        first, n : int, optional
            `ids` count from piece `first` on, and are below `n`; by default all pieces.
        name : str, optional
            The name of these pieces in messages.

        Returns
        -------
        numpy.ndarray
            The slot of each piece in its pool: int32, of the shape of `ids`.

        Raises
        ------
        TypeError, ValueError
            They are not integers, or there is no such piece.
        CapacityError
            There are more different pieces of a pool than it has slots; nothing changed.
        BufferError
            Other holders keep too many slots.
        OSError
            A file cannot be read, or became shorter. The holder keeps nothing, and the next call
            tries again.
        """
        cdef cnp.ndarray slots = _numbers(self.pieces, ids, first, n, name)
        cdef int32_t *at = <int32_t *>cnp.PyArray_DATA(slots)
        if cnp.PyArray_SIZE(slots) == 0:
            self.release()
        else:
            self.ensure_ids(at, cnp.PyArray_SIZE(slots), at)
        return slots

    cdef int ensure_ids(self, const int32_t *ids, size_t n, int32_t *slots) except -1:
        cdef um.um_error err
        cdef um.um_status status
        with cython.critical_section(self):
            self._check()
            self._is_used = True
        cdef um.um_pieces *pieces = self.pieces.pieces
        try:
            while True:
                with nogil:
                    status = um.um_pieces_ensure(pieces, self.holder, ids, n, slots, &err)
                if status == um.UM_OK:
                    return 0
                if err.detail != um.UM_PIECES_INTERRUPTED:
                    self.pieces.fail(status, &err)
                PyErr_CheckSignals()
        finally:
            self._is_used = False

    @cython.critical_section
    def release(self) -> None:
        """Let all pieces go; they stay in memory until others replace them."""
        self._check()
        um.um_pieces_release(self.pieces.pieces, self.holder)

    def _check(self):
        if self.holder == NULL:
            raise ClosedError("the Holder is closed")
        if self._is_used:
            raise BufferError("another thread is in a call of this Holder: make one for each "
                              "thread")
        self.pieces.check_open()

    @cython.critical_section
    def close(self) -> None:
        """Let all pieces go, and end the holder. BufferError: another thread uses it."""
        if self.holder != NULL and self._is_used:
            self._check()
        _end(self)

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __dealloc__(self):
        _end(self)


cdef void _end(Holder holder) noexcept:
    cdef um.um_pieces_holder *gone = holder.holder
    holder.holder = NULL
    if gone != NULL:
        um.um_pieces_holder_destroy(gone)
        with cython.critical_section(holder.pieces):
            holder.pieces._n_users -= 1
