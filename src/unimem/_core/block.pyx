# cython: language_level=3, boundscheck=False, wraparound=False
"""Blocks: mapped memory, with its placement read back from the kernel."""
import io
import os
import stat
import warnings
import weakref

import numpy as np

from unimem.system import limits, policy
from unimem.base.arguments import check_callable, file_path, flag, integer, one_of, string
from unimem.errors import ClosedError, PlacementError
from unimem.base.descriptors import Descriptors
from unimem.base.text import format_bytes

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from unimem._core cimport native as um
from unimem._core.arrays cimport dtype_of, size_of
from unimem._core.lock cimport hold, let_go
from unimem._core.mapping cimport (
    ADVICES, MOST_THREADS, PAGES, THP_BYTES, attach_file, category_of, check_unused,
    collapse_region, discard_range, grow, lock_all, lock_region, map_file, map_request,
    memory_bytes, overlay_range, pages_of, placement_of, release_range, repair_region,
    requested_of, require_room, resident_bytes, warm_region,
)
from unimem._core.region cimport Region, leave_out_of_child, n_references
from unimem._core.status cimport raise_status
from unimem._core.block_html import block_html
from unimem._core.status import row_name

cdef extern from "Python.h":
    int PyObject_GetBuffer(object exporter, Py_buffer *view, int flags) except -1

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

cdef dict _ACCESS = {"r": um.UM_ACCESS_READ, "c": um.UM_ACCESS_PRIVATE, "r+": um.UM_ACCESS_SHARED}


cdef class Block:
    """One region of memory, between two guard pages.

    Threads may use a block at the same time; growing, releasing and closing it is for one. After a
    fork the child has its own copy of private memory, page by page as either side writes; shared
    memory that can be written is left out of the child, where using it raises ClosedError.

    Parameters
    ----------
    nbytes : int
        Size in bytes, rounded up to whole pages in `nbytes`; the request stays in `requested`.
    pages, numa, lock, warm, strict
        See `PlacementOptions`. hugetlb pages that are bound to nodes are touched at once, since one
        that its node lacks later would end the process.
    shared : bool or str, default False
        True: memory behind `fileno`, which other processes can `attach`. A name: the same as a file
        in ``/dev/shm``, which must not exist, and which goes when the block is closed.
    reserve : int, optional
        Address space in bytes, into which `commit` lets the block grow.
    name : str, optional
        Stands in messages.
    category : str, default "other"
        The row of reports: ``"weights"``, ``"scratch"``, ``"kv"`` (or ``"history"``),
        ``"staging"``, ``"diagnostics"``, ``"logits"``, ``"tokens"`` or ``"other"``.

    Attributes
    ----------
    path : str or None
        The file in ``/dev/shm`` of a block that has a name there.

    Raises
    ------
    ValueError
        A size of 0 or below, an unknown option.
    CapacityError
        The memory does not fit into a limit, which is named; nothing was taken.
    MemoryError
        The system has no memory.
    FileExistsError
        There is shared memory of this name.
    PlacementError
        With `strict`, when not all that was asked for was granted. Without, one `PlacementWarning`.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Block(1 << 20, pages="4k") as block:
    ...     block.as_array("float32", (2, 3)).fill(1)
    ...     block.granted.pages
    '4k'
    """

    def __init__(self, nbytes, *, pages="auto", numa=None, lock=False, warm=False, shared=False,
                 strict=False, reserve=None, name=None, category="other"):
        if self._requested is not None:
            raise RuntimeError("the Block is made already")
        self._make(nbytes, pages, numa, lock, warm, shared, strict, reserve, (), name, category,
                   -1, None)

    cdef int _make(self, nbytes, pages, numa, lock, warm, shared, strict, reserve, tuple mirror,
                   name, category, int fd, fill) except -1:
        one_of(pages, "pages", PAGES)
        cdef um.um_category entered = category_of(category)
        cdef size_t size = size_of(nbytes, "nbytes", 1)
        cdef size_t kept = size if reserve is None else size_of(reserve, "reserve", size)
        policy.check_lock(lock, "lock")
        strict = flag(strict, "strict")
        if not isinstance(shared, (bool, str)):
            raise TypeError(f"shared: expected False, True or a name, got {shared!r}")
        path = policy.shared_path(shared) if isinstance(shared, str) else None
        cdef unsigned n_threads = self.check_threads(
            policy.warm_threads(False if warm is None else warm) or 1)
        request = policy.Request(nbytes=size, pages=pages, numa=policy.parse_numa(numa),
                                 lock=lock, shared=shared, reserve=kept, thp_bytes=THP_BYTES,
                                 mirror=mirror, of_file=fd >= 0)
        self.name = string(name, "name", "block")
        self.category = row_name(category)
        self._requested = {"nbytes": size, "pages": pages, "numa": numa, "lock": lock,
                           "shared": shared, "reserve": kept}
        try:
            if path is None:
                self._place(request, entered, fd, n_threads, bool(warm), strict, fill)
            else:
                self._place_named(path, request, entered, n_threads, bool(warm), strict)
        except BaseException:
            self._drop()
            raise
        return 0

    @staticmethod
    def _mirrored(nbytes, piece_bytes, *, other_bytes=0, run=1, pages="auto", numa=None,
                  lock=False, warm=False, strict=False, name=None, category="kv"):
        """Make shared memory of which each piece is mapped twice, back to back.

        What `nbytes`, offsets and arrays of the block count is its address space, twice the memory:
        the ith piece is at ``2 * i * piece_bytes``, and once more ``piece_bytes`` behind that.

        Parameters
        ----------
        nbytes, piece_bytes : int
            Whole pieces; whole pages of the size asked for; of ``pages="thp"``, base pages do.
        other_bytes, run : int, optional
            Another size: `run` pieces of `piece_bytes` and as many of this one take turns.
        pages, numa, lock, warm, strict, name, category
            As for the class; ``"auto"`` are base pages.
        """
        cdef size_t piece = size_of(piece_bytes, "piece_bytes", 1), count = size_of(run, "run", 1)
        cdef size_t size = size_of(nbytes, "nbytes", 1), other = size_of(other_bytes, "other_bytes")
        cdef size_t page = {"2m": 2 << 20, "1g": 1 << 30}.get(pages, um.um_page_bytes())
        if piece % page or other % page or size % ((piece + other) * (count if other else 1)):
            raise ValueError(f"expected pieces of whole pages of {page} bytes, and whole pieces, "
                             f"got pieces of {piece} and {other}, runs of {run}, nbytes={size}")
        cdef Block block = Block.__new__(Block)
        block._make(size, pages, numa, lock, warm, True, strict, None, (piece, other, count), name,
                    category, -1, None)
        return block

    @staticmethod
    def _filled(nbytes, fill, *, fd=None, pages="auto", numa=None, lock=False, strict=False,
                name=None, category="other"):
        """Make a block that ``fill(block)`` writes whole, before it is locked and looked at: so
        what is read into memory is the first that touches it. What `fill` raises is raised. `fd`
        is an open, empty, writable file in shared memory that the block is made of."""
        cdef Block block = Block.__new__(Block)
        block._make(nbytes, pages, numa, lock, False, fd is not None, strict, None, (), name,
                    category, -1 if fd is None else fd, fill)
        return block

    def _place_named(self, path, request, um.um_category category, unsigned n_threads, bint warm,
                     bint strict):
        limits.require_shm(request.nbytes, f"block '{self.name}'")
        with Descriptors() as fds:
            try:
                fd = fds.add(os.open, path, _CREATE, 0o600)
            except FileExistsError as error:
                raise FileExistsError(error.errno, "there is shared memory of this name: take "
                                      "another one, Block.attach it, or remove it", path) from None
            # From here on: when the block is closed, collected, or at the end of the process.
            self._remove_name = weakref.finalize(self, policy.remove_named, path, os.getpid(),
                                                 os.fstat(fd).st_ino)
            self.path = path
            self._place(request, category, fd, n_threads, warm, strict, None)

    def _place(self, request, um.um_category category, int fd, unsigned n_threads, bint warm,
               bint strict, fill):
        """Map, warm or fill, lock, and look whether it is as it was asked for."""
        self._region, self._choice = map_request(self.name, request, category, fd, strict, None)
        cdef Region region = self._region
        region.requested, region.file = self._requested, self.path
        choice, problems = self._choice, list(self._choice.shortfalls)
        if fill is not None:
            fill(self)
            warm = True
        elif warm:
            self.populate(region, 0, region.block.nbytes, n_threads, None, 0, region.block.nbytes)
        if warm:
            if request.shared and choice.pages in (("thp",) if request.mirror else ("auto", "thp")):
                # Where it cannot be done, the comparison below says so.
                collapse_region(region, False)
        if choice.lock and not region.is_hugetlb():
            self._choice = lock_region(region, choice, problems)
        if problems or warm or request.numa or request.lock or request.pages not in ("auto", "4k"):
            problems += policy.find_mismatches(request, self._choice, self.verify(),
                                               memory_bytes(region, region.block.nbytes), warm=warm)
        if problems:
            text = policy.placement_message(self.name, request.nbytes, problems, self._granted)
            if strict:
                raise PlacementError(text)
            policy.warn(text)

    @staticmethod
    def map(path, *, offset=0, nbytes=None, mode="r", name=None, category="weights"):
        """Map a file without reading it.

        Parameters
        ----------
        path : path-like
            A regular file.
        offset : int
            The first byte, a multiple of the base page.
        nbytes : int, optional
            How many bytes; all up to the end of the file by default.
        mode : {"r", "c", "r+"}
            ``"r"``: shared and read-only. ``"c"``: writable, copy-on-write; the file never changes.
            ``"r+"``: what is written is the file's, and a forked child has no part in it.
        name : str, optional
            Stands in messages; the path by default.
        category : str, default "weights"
            The row of the ledger, as for the class.

        Returns
        -------
        Block
            Its pages belong to the page cache. If the file is truncated, pages are lost: unimem
            raises OSError where it touches one, and any other access ends the process (SIGBUS).

        Raises
        ------
        OSError
            The file cannot be opened or mapped.
        ValueError
            The range is outside the file, or empty.
        """
        file = file_path(path)
        cdef size_t start = size_of(offset, "offset")
        one_of(mode, "mode", _ACCESS)
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        with Descriptors() as fds:
            fd = fds.add(os.open, file, (os.O_RDWR if mode == "r+" else os.O_RDONLY)
                         | os.O_CLOEXEC | os.O_NONBLOCK)
            size = os.fstat(fd).st_size
            nbytes = max(size - start, 0) if nbytes is None else size_of(nbytes, "nbytes")
            if start + nbytes > max(size, start):
                raise ValueError(f"{file}: expected offset and nbytes of a range of its {size} "
                                 f"bytes, got {start} and {nbytes}")
            return Block._map_fd(fd, start, nbytes, mode, file, category, name)

    @staticmethod
    def _map_fd(int fd, offset, nbytes, mode, file, category="weights", name=None):
        cdef um.um_category entered = category_of(category)
        cdef uint64_t start = size_of(offset, "offset")
        cdef size_t size = size_of(nbytes, f"nbytes of {file} from byte {offset} on", 1)
        cdef um.um_access access = <um.um_access><int>_ACCESS[mode]
        cdef Region region = map_file(fd, start, size, access, entered, file)
        return _new_block(region, string(name, "name", file), category, mode == "r+")

    @staticmethod
    def attach(fd_or_path, *, writable=False, name=None, category="other"):
        """Map the shared memory that another block has made, here or in another process.

        Parameters
        ----------
        fd_or_path : int or path-like
            A descriptor, such as one that came over a Unix socket, which may be closed afterwards;
            or a path, such as ``"/dev/shm/NAME"`` or ``"/proc/PID/fd/N"``.
        writable : bool, default False
            Whether it may be written through this block.
        name, category : str
            As for the class.

        Returns
        -------
        Block
            All of the memory. Its NUMA policy is the one that its maker has set.

        Raises
        ------
        OSError
            It cannot be opened, or not be mapped so.
        ValueError
            It is no memory or file, or empty.
        """
        cdef um.um_category entered = category_of(category)
        cdef int fd, access = os.O_RDWR if flag(writable, "writable") else os.O_RDONLY
        cdef Region region
        cdef bint is_path = isinstance(fd_or_path, (str, bytes, os.PathLike))
        with Descriptors() as fds:
            if not is_path:
                number = integer(fd_or_path, "fd_or_path")
                fd, label = number if 0 <= number < 2**31 else -1, f"descriptor {number}"
            else:
                label = file_path(fd_or_path, "fd_or_path")
                fd = fds.add(os.open, label, access | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ValueError(f"{label}: expected shared memory (Block.fileno(), or its path)")
            region = attach_file(fd, writable, entered, label)
        region.file = label if is_path else None
        cdef Block block = _new_block(region, string(name, "name", label), category, True)
        block.path = label if label.startswith(limits.SHM + "/") else None
        return block

    def sealed_copy(self, *, pages="auto", name=None):
        """Copy the memory into shared memory that nobody can write, grow or shrink any more.

        Parameters
        ----------
        pages : {"auto", "4k", "thp", "2m", "1g"}
            As for the class.
        name : str, optional
            As for the class.

        Returns
        -------
        Block
            Read-only; others `attach` its `fileno`. A forked child has it, too.

        Raises
        ------
        ValueError, MemoryError, OSError
            As the class; or a mapped file has become shorter.
        """
        cdef Region source = self.region()
        cdef Block block = Block.__new__(Block)
        one_of(pages, "pages", PAGES)
        request = policy.Request(nbytes=source.block.nbytes, pages=pages, shared=True,
                                 reserve=source.block.nbytes, thp_bytes=THP_BYTES)
        name = string(name, "name", f"sealed copy of {self.name}")
        block.name, block.category = name, self.category
        block._region, block._choice = map_request(block.name, request, source.block.category, -1,
                                                   False, source)
        cdef Region region = block._region
        block._requested = region.requested = requested_of(region, True) | {"pages": pages}
        if block._choice.pages in ("auto", "thp"):
            collapse_region(region, False)
        problems = list(block._choice.shortfalls)
        if pages != "auto":
            problems += policy.find_mismatches(request, block._choice, block.verify(),
                                               region.block.nbytes, warm=True)
        if problems:
            policy.warn(policy.placement_message(block.name, request.nbytes, problems,
                                                 block._granted))
        return block

    cdef Region region(self):
        cdef Region found
        hold(&self._guard)
        found = self._region
        let_go(&self._guard)
        if found is None or found.block.base == NULL:
            why = "is closed" if found is None else policy.LEFT_OUT
            raise ClosedError(f"Block '{self.name}' {why}")
        return found

    cdef void *base(self) except NULL:
        return self.region().block.base

    @property
    def address(self):
        """Address of the first byte; it never changes."""
        return <uintptr_t>self.base()

    @property
    def nbytes(self):
        """Usable bytes from the base on, up to the first gap: whole pages."""
        return self.region().block.nbytes

    @property
    def reserved_bytes(self):
        """Address space from the base on, into which the block can grow."""
        return self.region().block.reserved_nbytes

    @property
    def committed_bytes(self):
        """Bytes that are usable, wherever they are."""
        return self.region().block.committed_nbytes

    @property
    def step_bytes(self):
        """The page, huge or not: `commit` and `release` work in whole steps."""
        return self.region().block.step_nbytes

    @property
    def requested(self):
        """What was asked for: a dict of `nbytes`, `pages`, `numa`, `lock`, `shared`, `reserve`."""
        self.region()
        return dict(self._requested)

    @property
    def granted(self):
        """The `Placement` as it was when it was last read from the kernel (see `verify`)."""
        self.region()
        with cython.critical_section(self):
            last = self._granted
        return self.verify() if last is None else last

    @property
    @cython.critical_section
    def closed(self):
        """Whether the block was closed (or left out of this forked child)."""
        return self._region is None or self._region.block.base == NULL

    def as_array(self, dtype="uint8", shape=None, offset=0):
        """View the memory as an array, without a copy.

        Parameters
        ----------
        dtype : dtype-like
            A NumPy dtype; ``"bfloat16"`` gives the one of ml_dtypes.
        shape : int or tuple of int, optional
            All that fits from `offset` on by default.
        offset : int
            In bytes.

        Returns
        -------
        numpy.ndarray
            Which keeps the memory mapped. Read-only where the block is.

        Raises
        ------
        ValueError
            The array does not fit, is not aligned for its dtype, or reaches over memory that is not
            committed.
        """
        return self.region().array(size_of(offset, "offset"), shape, dtype_of(dtype))

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        # The region is the exporter, so that a memoryview counts among its users.
        PyObject_GetBuffer(self.region(), buffer, flags)

    def __releasebuffer__(self, Py_buffer *buffer):
        # Never called: the region is the exporter. Where an exporter has none, np.frombuffer lets
        # the buffer go at once and keeps the exporter only, which is not what keeps the memory.
        pass

    def __array__(self, dtype=None, copy=None):
        array = self.as_array()
        if copy or (dtype is not None and np.dtype(dtype) != array.dtype):
            if copy is False:
                raise ValueError("a copy is needed for another dtype: use as_array(dtype)")
            return np.array(array, dtype=dtype)
        return array

    def __dlpack__(self, **options):
        return self.as_array().__dlpack__(**options)

    def __dlpack_device__(self):
        return self.as_array().__dlpack_device__()

    def warm(self, threads=None, progress=None):
        """Bring all pages into RAM, so that no later access faults.

        Parameters
        ----------
        threads : int, optional
            How many threads, each pinned to a CPU of its own, of the nodes whose memory it touches;
            1 by default.
        progress : callable, optional
            Called as ``progress(done_bytes, total_bytes)`` after each part. What it raises ends
            the warming, as Ctrl-C does; nothing is lost by that.

        Raises
        ------
        CapacityError
            What is not in RAM yet does not fit into a limit, which is named.
        MemoryError
            There is not enough memory.
        OSError
            A mapped file has become shorter.
        """
        cdef Region region = self.region()
        check_callable(progress)
        self._warm_runs(region.runs(region.block.reserved_nbytes, True), threads, progress)

    def _warm_range(self, offset, nbytes, threads=None, *, write=False):
        self._warm_runs([(offset, nbytes)], threads, None, write)

    def _warm_runs(self, list runs, threads, progress, bint write=False):
        cdef Region region = self.region()
        cdef unsigned n_threads = self.check_threads(threads)
        cdef size_t done = 0
        total = sum([nbytes for _, nbytes in runs])
        self._require_room(runs)
        for first, nbytes in runs:
            self.populate(region, first, nbytes, n_threads, progress, done, total, write)
            done += <size_t>nbytes

    @cython.critical_section
    cdef object note_granted(self, placement):
        self._granted = placement
        return placement

    def _require_room(self, list runs):
        require_room(self.region(), self.name, self._choice, runs)

    cdef unsigned check_threads(self, object threads) except 0:
        # No block has more parts to warm.
        return min(size_of(1 if threads is None else threads, "threads", 1), <size_t>MOST_THREADS)

    cdef int populate(self, Region region, size_t offset, size_t nbytes, unsigned n_threads,
                      object progress, size_t before, size_t total, bint write=False) except -1:
        self.note_granted(None)
        return warm_region(region, self._choice, self.path, offset, nbytes, n_threads, progress,
                           before, total, write)

    def verify(self):
        """Read from the kernel where the memory is.

        Returns
        -------
        Placement

        Raises
        ------
        OSError
            ``/proc/self/smaps`` or ``numa_maps`` cannot be read.
        """
        return self.note_granted(placement_of(self.region()))

    def repair(self):
        """Move what lies elsewhere than the NUMA policy says to where it says, and verify.

        A `PlacementWarning` tells what cannot be moved.

        Returns
        -------
        Placement

        Raises
        ------
        ValueError
            The block has no NUMA policy.
        OSError
            The kernel refuses to move pages, as in a container that may not.
        """
        cdef Region region = self.region()
        if region.block.numa.mode == um.UM_NUMA_NONE:
            raise ValueError(f"Block '{self.name}' has no NUMA policy: make it with numa=")
        self.note_granted(None)
        cdef uint64_t left = repair_region(region, self.path)
        placement = self.verify()
        if left > 0:
            policy.warn(policy.misplaced_message(self.name, self._choice.numa, left, placement))
        return placement

    def collapse(self):
        """Put what is in RAM into huge pages now, shared memory included, and verify.

        Where no huge page is free, a `PlacementWarning` says so.

        Returns
        -------
        Placement

        Raises
        ------
        PlacementError
            The kernel cannot (before Linux 6.1), or the block was asked to have 4k pages.
        """
        cdef Region region = self.region()
        self.note_granted(None)
        collapse_region(region, True)
        placement = self.verify()
        text = policy.huge_page_message(self.name, placement, THP_BYTES)
        if text:
            policy.warn(text)
        return placement

    def commit(self, nbytes):
        """Make the first `nbytes` bytes usable, inside of what is reserved; nothing moves.

        Parameters
        ----------
        nbytes : int
            Rounded up to `step_bytes`. What is committed already stays as it is; what is new is
            zeroed, and placed and locked as the block is.

        Raises
        ------
        ValueError
            It is more than `reserved_bytes`, or a mapped file.
        CapacityError, PlacementError, MemoryError
            There is no room; nothing was committed then.
        """
        cdef Region region = self.region()
        cdef size_t size = size_of(nbytes, "nbytes"), step = region.block.step_nbytes, end
        if size > region.block.reserved_nbytes:
            raise ValueError(f"Block '{self.name}': nbytes: expected at most {self.reserved_bytes} "
                             f"that are reserved, got {size}: make it with a larger reserve=")
        end = (size + step - 1) // step * step
        cdef list missing = region.runs(end, False)
        if missing and not region.block.is_file:
            self.note_granted(None)
            grow(region, self._choice, self.path, [(0, end)], missing)

    cdef int commit_ranges(self, list ranges) except -1:
        self.note_granted(None)
        return grow(self.region(), self._choice, self.path, ranges, ranges)

    def release(self, offset=0, nbytes=None):
        """Give memory back; RSS and commit charge fall, and addresses stay reserved.

        Parameters
        ----------
        offset : int
            In bytes.
        nbytes : int, optional
            All up to the end by default. Only whole steps inside the range are given back.

        Returns
        -------
        int
            Bytes that were given back. Committed again they are zero.

        Raises
        ------
        BufferError
            Arrays or other users of the range are alive.
        ValueError
            The range is outside of what is reserved, or is a mapped file's or read-only.
        """
        cdef Region region = self.region()
        cdef size_t first = size_of(offset, "offset"), reserved = region.block.reserved_nbytes
        cdef size_t size = (size_of(nbytes, "nbytes") if nbytes is not None
                            else reserved - min(first, reserved))
        if size > reserved - min(first, reserved):
            raise ValueError(f"Block '{self.name}': expected offset and nbytes of a range of the "
                             f"{reserved} bytes that are reserved, got {first} and {size}")
        check_unused(region, first, size)
        self.note_granted(None)
        return release_range(region, first, size)

    def _discard(self, offset, nbytes):
        """Forget whole steps of a range: their pages go, they stay committed, and read as zeros.

        Returns the bytes of memory that were covered. Raises as `release`, and ValueError for
        memory that is locked or not committed.
        """
        cdef Region region = self.region()
        cdef size_t first = size_of(offset, "offset"), size = size_of(nbytes, "nbytes")
        check_unused(region, first, size)
        self.note_granted(None)
        return discard_range(region, first, size)

    def _overlay(self, offset, int fd, file_offset, nbytes):
        """Commit a range as a private mapping of a file, which never changes.

        Raises ValueError for a range that cannot be a file's or is not in the file, and OSError.
        """
        cdef Region region = self.region()
        cdef size_t first = size_of(offset, "offset"), size = size_of(nbytes, "nbytes")
        cdef uint64_t start = size_of(file_offset, "file_offset")
        self.note_granted(None)
        overlay_range(region, first, fd, start, size)

    def advise(self, advice):
        """Tell the kernel how the memory will be used.

        Parameters
        ----------
        advice : {"willneed", "sequential", "random", "dontneed", "hugepage", "nohugepage"}
            ``"dontneed"`` drops pages of a mapped file, which come back from it; of other memory it
            would be the contents, and is refused.

        Raises
        ------
        ValueError
            An unknown advice, or one that would lose what was written.
        OSError
            The kernel refuses.
        """
        cdef Region region = self.region()
        cdef um.um_error err
        cdef um.um_status status
        one_of(advice, "advice", ADVICES)
        cdef um.um_advice wanted = <um.um_advice><int>ADVICES[advice]
        with nogil:
            status = um.um_block_advise(&region.block, wanted, &err)
        self.note_granted(None)
        if status != um.UM_OK:
            raise_status(status, &err, f"Block '{self.name}'")

    def fileno(self):
        """Return the descriptor of shared memory, which stays the block's.

        Raises
        ------
        io.UnsupportedOperation
            The memory is not shared.
        """
        cdef int fd = self.region().block.fd
        if fd < 0:
            raise io.UnsupportedOperation(f"Block '{self.name}' has no descriptor: make it with "
                                          "shared=True")
        return fd

    def _resident_range(self, offset, nbytes):
        """How many bytes of a range are in RAM, in whole pages."""
        return resident_bytes(self.region(), offset, nbytes)

    @property
    def _is_cache_hidden(self):
        """Whether the kernel does not tell what of the mapped file is in the page cache."""
        return bool(self.region().block.is_cache_hidden)

    def _pages(self, offset, nbytes, nodes=False):
        """Flags (UM_PAGE_*) of each base page of a range, uint8, and its node, int16, or None."""
        return pages_of(self.region(), size_of(offset, "offset"), size_of(nbytes, "nbytes"), nodes)

    def _lock(self, how, *, asked=None):
        """Lock all of it (True, "onfault") or unlock it (False); returns what it was.

        Raises PlacementError, which names the limit, and what was asked for if that is not what is
        done first; the lock is as it was then."""
        self.note_granted(None)
        return lock_all(self.region(), how, how if asked is None else asked)

    @cython.critical_section
    def close(self):
        """Give the memory back. Closing twice is no error.

        Raises
        ------
        BufferError
            Arrays, buffers or tapes still use it; nothing is closed then.
        """
        self._check_idle()
        self._drop()

    def _check_idle(self):
        n_users = 0 if self._region is None else n_references(<PyObject *>self._region) - 1
        if n_users > 0:
            raise BufferError(
                f"Block '{self.name}' has {n_users} live users (arrays, buffers, tapes): "
                "drop them first, or leave a 'with'")

    def _drop(self):
        cdef Region _last  # unmapped here, where nobody else holds it
        hold(&self._guard)
        _last = self._region
        self._region = None
        let_go(&self._guard)
        self.note_granted(None)
        if self._remove_name is not None:
            self._remove_name()

    def __enter__(self):
        self.region()
        return self

    @cython.critical_section
    def __exit__(self, *exc_info):
        # Arrays that are still alive keep the memory; it goes with the last of them.
        self._drop()

    def __del__(self):
        if not self.closed and not self._is_part:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self):
        raise TypeError("a Block cannot be pickled: it is memory of this process. Make it with "
                        "shared=True, pass its fileno() or path, and use Block.attach there")

    def __repr__(self):
        state = "closed" if self.closed else f"{format_bytes(self.nbytes)}, {self.granted}"
        return f"Block('{self.name}', {state})"

    _repr_html_ = block_html


cdef Block _new_block(Region region, name, category, bint shared):
    """Make a block over an existing mapping; `shared`: other processes see what is written."""
    cdef Block block = Block.__new__(Block)
    region.name = block.name = name
    region.writable = region.block.access != um.UM_ACCESS_READ
    if region.block.access == um.UM_ACCESS_SHARED:
        leave_out_of_child(region)
    block.category = row_name(category)
    block._region = region
    block._requested = region.requested = requested_of(
        region, shared or region.block.sharing != um.UM_SHARING_NONE)
    region.enter()
    return block
