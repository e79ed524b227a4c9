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
from unimem._core.arrays cimport bytes_of, dtype_of, size_of
from unimem._core.lock cimport hold, let_go
from unimem._core.mapping cimport (
    ADVICES, MOST_THREADS, PAGES, THP_BYTES, attach_file, category_of, check_unused,
    collapse_region, discard_range, grow, lend_memory, lock_all, lock_region, map_file, map_request,
    memory_bytes, overlay_range, pages_of, placement_of, release_range, repair_region,
    requested_of, require_room, resident_bytes, warm_region,
)
from unimem._core.region cimport Region, leave_out_of_child, n_references
from unimem._core.status cimport raise_status
from unimem._core.block_html import block_html
from unimem._core.status import row_name

#: from unimem.system.placement import Lock, Pages, Placement, PlacementOptions
#: Advice: TypeAlias = Literal[
#:     "willneed", "sequential", "random", "dontneed", "hugepage", "nohugepage"
#: ]
#: class Requested(TypedDict):
#:     nbytes: int
#:     pages: Pages
#:     numa: str | None
#:     lock: Lock
#:     shared: bool | str
#:     reserve: int

cdef extern from "Python.h":
    int PyObject_GetBuffer(object exporter, Py_buffer *view, int flags) except -1

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

cdef dict _ACCESS = {"r": um.UM_ACCESS_READ, "c": um.UM_ACCESS_PRIVATE, "r+": um.UM_ACCESS_SHARED}


cdef tuple _OPTIONS = tuple("pages numa lock warm shared strict reserve name category".split())
cdef dict _DEFAULTS = {"pages": "auto", "lock": False, "warm": False, "strict": False}


cdef class Block:
    """One region of memory, between two guard pages.

    Threads may use a block at the same time, but only one may grow, release or close it. A forked
    child has its own copy of private memory. It does not inherit writable shared memory: using that
    raises ClosedError there.

    Parameters
    ----------
    nbytes : int or str
        Size in bytes, or a text such as ``"512M"``. `nbytes` is rounded up to whole pages, and
        `requested` is the request.
    pages, numa, lock, warm, strict
        See `PlacementOptions`. hugetlb pages bound to nodes are touched at once, since a page that
        its node lacks later would end the process.
    shared : bool or str, default False
        True: memory behind `fileno`, which other processes can `attach`. A name: the same as a new
        file in ``/dev/shm``, which is removed when the block is closed.
    reserve : int or str, optional
        Bytes of address space into which `commit` lets the block grow.
    name : str, optional
        The name in messages.
    category : str, default "other"
        The row of reports: ``"weights"``, ``"scratch"``, ``"kv"`` (or ``"history"``),
        ``"staging"``, ``"diagnostics"``, ``"logits"``, ``"tokens"`` or ``"other"``.

    Attributes
    ----------
    path : str or None
        The file in ``/dev/shm`` of a block made with a name there.

    Raises
    ------
    ValueError
        A size of 0 or below, an unknown option.
    CapacityError
        The memory does not fit into a limit, which the message names; nothing was taken.
    MemoryError
        The system has no memory.
    FileExistsError
        Shared memory of this name exists.
    PlacementError
        With `strict`, if not everything was granted; without, there is one `PlacementWarning`.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Block(1 << 20, pages="4k") as block:
    ...     block.as_array("float32", (2, 3)).fill(1)
    ...     block.granted.pages
    '4k'
    """
    #: path: str | None
    #: def __buffer__(self, flags: int, /) -> memoryview: ...

    def __init__(self, nbytes: int | str, *, pages: Pages = "auto", numa: str | None = None,
                 lock: Lock = False, warm: bool | int = False, shared: bool | str = False,
                 strict: bool = False, reserve: int | str | None = None, name: str | None = None,
                 category: str = "other") -> None:
        if self._requested is not None:
            raise RuntimeError("the Block is made already")
        self._make(nbytes, {"pages": pages, "numa": numa, "lock": lock, "warm": warm,
                            "shared": shared, "strict": strict, "reserve": reserve, "name": name,
                            "category": category}, (), -1, None)

    cdef int _make(self, nbytes, dict options, tuple mirror, int fd, fill) except -1:
        for option in options.keys() - set(_OPTIONS):
            raise TypeError(f"unexpected argument '{option}': expected {', '.join(_OPTIONS)}")
        pages, numa, lock, warm, shared, strict, reserve, name, category = map(
            options.get, _OPTIONS)
        one_of(pages, "pages", PAGES)
        cdef um.um_category entered = category_of(category)
        cdef size_t size = bytes_of(nbytes, "nbytes", 1)
        cdef size_t kept = size if reserve is None else bytes_of(reserve, "reserve", size)
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
    def _mirrored(nbytes: int, piece_bytes: int, *, other_bytes: int = 0, run: int = 1,
                  name: str | None = None, category: str = "kv",
                  **placement: Unpack[PlacementOptions]) -> Block:
        """Make shared memory whose pieces are each mapped twice, back to back.

        `nbytes`, offsets and arrays of the block count address space, which is twice the memory:
        piece i is at ``2 * i * piece_bytes``, and once more ``piece_bytes`` behind that.

        Parameters
        ----------
        nbytes, piece_bytes : int
            Whole pieces of whole pages of the size asked for; base pages for ``pages="thp"``.
        other_bytes, run : int, optional
            Another size: `run` pieces of `piece_bytes` alternate with `run` pieces of this size.
        name, category, **placement
            As for the class; ``"auto"`` means base pages.
        """
        cdef size_t piece = size_of(piece_bytes, "piece_bytes", 1), count = size_of(run, "run", 1)
        cdef size_t size = size_of(nbytes, "nbytes", 1), other = size_of(other_bytes, "other_bytes")
        cdef size_t page = {"2m": 2 << 20, "1g": 1 << 30}.get(placement.get("pages"),
                                                              um.um_page_bytes())
        if piece % page or other % page or size % ((piece + other) * (count if other else 1)):
            raise ValueError(f"expected pieces of whole pages of {page} bytes, and whole pieces, "
                             f"got pieces of {piece} and {other}, runs of {run}, nbytes={size}")
        cdef Block block = Block.__new__(Block)
        block._make(size, _DEFAULTS | placement | {"shared": True, "name": name,
                                                   "category": category},
                    (piece, other, count), -1, None)
        return block

    @staticmethod
    def _filled(nbytes: int, fill: Callable[[Block], object], *, fd: int | None = None,
                name: str | None = None, category: str = "other",
                **placement: Unpack[PlacementOptions]) -> Block:
        """Make a block that ``fill(block)`` writes in full before it is locked and verified.

        So reading a file into it is the first touch of its pages. Errors of `fill` propagate. `fd`
        is an open, empty, writable file in shared memory to make the block of.
        """
        cdef Block block = Block.__new__(Block)
        block._make(nbytes, _DEFAULTS | placement | {"shared": fd is not None, "name": name,
                                                     "category": category},
                    (), -1 if fd is None else fd, fill)
        return block

    def _place_named(self, path, request, um.um_category category, unsigned n_threads, bint warm,
                     bint strict):
        limits.require_shm(request.nbytes, f"block '{self.name}'")
        with Descriptors() as fds:
            try:
                fd = fds.add(os.open, path, _CREATE, 0o600)
            except FileExistsError as error:
                raise FileExistsError(error.errno, "shared memory of this name exists: take "
                                      "another name, Block.attach it, or remove it", path) from None
            # Runs when the block is closed or collected, or when the process ends.
            self._remove_name = weakref.finalize(self, policy.remove_named, path, os.getpid(),
                                                 os.fstat(fd).st_ino)
            self.path = path
            self._place(request, category, fd, n_threads, warm, strict, None)

    def _place(self, request, um.um_category category, int fd, unsigned n_threads, bint warm,
               bint strict, fill):
        """Map, warm or fill, and lock memory, and compare it with the request."""
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
                # The comparison below reports a failure.
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
    def map(path: str | PathLike[str], *, offset: int = 0, nbytes: int | str | None = None,
            mode: Literal["r", "c", "r+"] = "r", name: str | None = None,
            category: str = "weights") -> Block:
        """Map a file without reading it.

        Parameters
        ----------
        path : path-like
            A regular file.
        offset : int
            The first byte, a multiple of the base page.
        nbytes : int or str, optional
            The number of bytes; by default up to the end of the file.
        mode : {"r", "c", "r+"}
            ``"r"``: shared and read-only. ``"c"``: writable, copy-on-write; the file never changes.
            ``"r+"``: writes go to the file, and a forked child does not inherit the memory.
        name : str, optional
            The name in messages; the path by default.
        category : str, default "weights"
            The row of reports, as for the class.

        Returns
        -------
        Block
            Its pages belong to the page cache. If the file is truncated, unimem raises OSError when
            it touches a lost page; any other access to one ends the process (SIGBUS).

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
            nbytes = max(size - start, 0) if nbytes is None else bytes_of(nbytes, "nbytes")
            if start + nbytes > max(size, start):
                raise ValueError(f"{file}: expected offset and nbytes of a range of its {size} "
                                 f"bytes, got {start} and {nbytes}")
            return Block._map_fd(fd, start, nbytes, mode, file, category, name)

    @staticmethod
    def _map_fd(int fd, offset: int, nbytes: int, mode: Literal["r", "c", "r+"], file: str,
                category: str = "weights", name: str | None = None) -> Block:
        cdef um.um_category entered = category_of(category)
        cdef uint64_t start = size_of(offset, "offset")
        cdef size_t size = size_of(nbytes, f"nbytes of {file} from byte {offset} on", 1)
        cdef um.um_access access = <um.um_access><int>_ACCESS[mode]
        cdef Region region = map_file(fd, start, size, access, entered, file)
        return _new_block(region, string(name, "name", file), category, mode == "r+")

    @staticmethod
    def _lent(owner: memoryview, name: str) -> Block:
        """Look at memory of the caller, in whole pages, as at a mapped file."""
        return _new_block(lend_memory(owner), name, "weights", False, False)

    @staticmethod
    def attach(fd_or_path: int | str | PathLike[str], *, writable: bool = False,
               name: str | None = None, category: str = "other") -> Block:
        """Map the shared memory of another block, here or in another process.

        Parameters
        ----------
        fd_or_path : int or path-like
            A descriptor, such as one received over a Unix socket, which may be closed afterwards;
            or a path, such as ``"/dev/shm/NAME"`` or ``"/proc/PID/fd/N"``.
        writable : bool, default False
            Whether this block may write to it.
        name, category : str
            As for the class.

        Returns
        -------
        Block
            A block over all of the memory, with the NUMA policy that its creator set.

        Raises
        ------
        OSError
            It cannot be opened, or cannot be mapped like this.
        ValueError
            It is neither memory nor a file, or it is empty.
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

    def sealed_copy(self, *, pages: Pages = "auto", name: str | None = None) -> Block:
        """Copy the memory into sealed shared memory: no process can write, grow or shrink it.

        Parameters
        ----------
        pages : {"auto", "4k", "thp", "2m", "1g"}
            As for the class.
        name : str, optional
            As for the class.

        Returns
        -------
        Block
            Read-only. Other processes `attach` its `fileno`; forked children inherit it.

        Raises
        ------
        ValueError, MemoryError, OSError
            As the class, or a mapped file became shorter.
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
    def address(self) -> int:
        """Address of the first byte; it never changes."""
        return <uintptr_t>self.base()

    @property
    def nbytes(self) -> int:
        """Usable bytes from the first byte to the first gap, in whole pages."""
        return self.region().block.nbytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of address space into which the block can grow."""
        return self.region().block.reserved_nbytes

    @property
    def committed_bytes(self) -> int:
        """Usable bytes, including those behind gaps."""
        return self.region().block.committed_nbytes

    @property
    def step_bytes(self) -> int:
        """The page size, huge or not: `commit` and `release` work in whole steps."""
        return self.region().block.step_nbytes

    @property
    def requested(self) -> Requested:
        """The request: a dict of `nbytes`, `pages`, `numa`, `lock`, `shared` and `reserve`."""
        self.region()
        return dict(self._requested)

    @property
    def granted(self) -> Placement:
        """The `Placement` that was last read from the kernel (see `verify`)."""
        self.region()
        with cython.critical_section(self):
            last = self._granted
        return self.verify() if last is None else last

    @property
    @cython.critical_section
    def closed(self) -> bool:
        """Whether the block was closed (or this forked child did not inherit it)."""
        return self._region is None or self._region.block.base == NULL

    def as_array(self, dtype: npt.DTypeLike = "uint8", shape: int | Sequence[int] | None = None,
                 offset: int = 0) -> npt.NDArray[Any]:
        """View the memory as an array, without a copy.

        Parameters
        ----------
        dtype : dtype-like
            A NumPy dtype; ``"bfloat16"`` gives the one of ml_dtypes.
        shape : int or tuple of int, optional
            By default, everything from `offset` on.
        offset : int
            In bytes.

        Returns
        -------
        numpy.ndarray
            It keeps the memory mapped, and is read-only if the block is.

        Raises
        ------
        ValueError
            The array does not fit, is not aligned for its dtype, or includes memory that is not
            committed.
        """
        return self.region().array(size_of(offset, "offset"), shape, dtype_of(dtype))

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        # The region is the exporter, so that a memoryview counts among its users.
        PyObject_GetBuffer(self.region(), buffer, flags)

    def __releasebuffer__(self, Py_buffer *buffer):
        # Never called: the region is the exporter. Without this method, np.frombuffer would release
        # the buffer at once and keep only this block, which does not keep the memory.
        pass

    def __array__(self, dtype: npt.DTypeLike | None = None,
                  copy: bool | None = None) -> npt.NDArray[Any]:
        array = self.as_array()
        if copy or (dtype is not None and np.dtype(dtype) != array.dtype):
            if copy is False:
                raise ValueError("a copy is needed for another dtype: use as_array(dtype)")
            return np.array(array, dtype=dtype)
        return array

    def __dlpack__(self, **options: Any) -> Any:
        return self.as_array().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.as_array().__dlpack_device__()

    def warm(self, threads: int | None = None,
             progress: Callable[[int, int], object] | None = None) -> None:
        """Bring all pages into RAM, so that no later access faults.

        Parameters
        ----------
        threads : int, optional
            How many threads, 1 by default. Each is pinned to its own CPU of the nodes it touches.
        progress : callable, optional
            Called as ``progress(done_bytes, total_bytes)`` after each part. An exception that it
            raises ends the warming, as Ctrl-C does; nothing is lost.

        Raises
        ------
        CapacityError
            Pages that are not in RAM yet do not fit into a limit, which the message names.
        MemoryError
            Memory ran out.
        OSError
            A mapped file became shorter.
        """
        cdef Region region = self.region()
        check_callable(progress)
        self._warm_runs(region.runs(region.block.reserved_nbytes, True), threads, progress)

    def _warm_range(self, offset: int, nbytes: int, threads: int | None = None, *,
                    write: bool = False) -> None:
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

    def _require_room(self, list runs: list[tuple[int, int]]) -> None:
        require_room(self.region(), self.name, self._choice, runs)

    cdef unsigned check_threads(self, object threads) except 0:
        # More threads than this have no parts to warm.
        return min(size_of(1 if threads is None else threads, "threads", 1), <size_t>MOST_THREADS)

    cdef int populate(self, Region region, size_t offset, size_t nbytes, unsigned n_threads,
                      object progress, size_t before, size_t total, bint write=False) except -1:
        self.note_granted(None)
        told = None if progress is None else (progress, before, total)
        return warm_region(region, self._choice, self.path, offset, nbytes, n_threads, told, write)

    def verify(self) -> Placement:
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

    def repair(self) -> Placement:
        """Move misplaced pages to where the NUMA policy wants them, and verify.

        A `PlacementWarning` reports pages that cannot be moved.

        Returns
        -------
        Placement

        Raises
        ------
        ValueError
            The block has no NUMA policy.
        OSError
            The kernel refuses to move pages, as in a container without permission.
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

    def collapse(self) -> Placement:
        """Move memory in RAM, also shared memory, into huge pages now, and verify.

        A `PlacementWarning` reports missing huge pages.

        Returns
        -------
        Placement

        Raises
        ------
        PlacementError
            The kernel cannot (before Linux 6.1), or the block was made with 4k pages.
        """
        cdef Region region = self.region()
        self.note_granted(None)
        collapse_region(region, True)
        placement = self.verify()
        text = policy.huge_page_message(self.name, placement, THP_BYTES)
        if text:
            policy.warn(text)
        return placement

    def commit(self, nbytes: int | str) -> None:
        """Make the first `nbytes` bytes of the reserved addresses usable; nothing moves.

        Parameters
        ----------
        nbytes : int or str
            Rounded up to `step_bytes`. Committed memory stays as it is; new memory is zeroed, and
            placed and locked like the block.

        Raises
        ------
        ValueError
            It is more than `reserved_bytes`, or the block maps a file.
        CapacityError, PlacementError, MemoryError
            The memory does not fit; nothing was committed.
        """
        cdef Region region = self.region()
        cdef size_t size = bytes_of(nbytes, "nbytes"), step = region.block.step_nbytes, end
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

    def release(self, offset: int = 0, nbytes: int | str | None = None) -> int:
        """Give memory back: RSS and commit charge fall, and addresses stay reserved.

        Parameters
        ----------
        offset : int
            In bytes.
        nbytes : int or str, optional
            By default up to the end. Only whole steps inside the range are given back.

        Returns
        -------
        int
            The bytes given back. They are zero if committed again.

        Raises
        ------
        BufferError
            The range is in use by arrays or others.
        ValueError
            The range is not reserved, is part of a mapped file, or is read-only.
        """
        cdef Region region = self.region()
        cdef size_t first = size_of(offset, "offset"), reserved = region.block.reserved_nbytes
        cdef size_t size = (bytes_of(nbytes, "nbytes") if nbytes is not None
                            else reserved - min(first, reserved))
        if size > reserved - min(first, reserved):
            raise ValueError(f"Block '{self.name}': expected offset and nbytes of a range of the "
                             f"{reserved} bytes that are reserved, got {first} and {size}")
        check_unused(region, first, size)
        self.note_granted(None)
        return release_range(region, first, size)

    def _discard(self, offset: int, nbytes: int) -> int:
        """Drop the pages of whole steps of a range, which stay committed and read as zeros.

        Return the bytes covered. Raise as `release`, and ValueError for locked or uncommitted
        memory.
        """
        cdef Region region = self.region()
        cdef size_t first = size_of(offset, "offset"), size = size_of(nbytes, "nbytes")
        check_unused(region, first, size)
        self.note_granted(None)
        return discard_range(region, first, size)

    def _overlay(self, offset: int, int fd, file_offset: int, nbytes: int) -> None:
        """Commit a range as a private mapping of a file, which never changes.

        Raise ValueError for a range that is not suitable or not in the file, and OSError.
        """
        cdef Region region = self.region()
        cdef size_t first = size_of(offset, "offset"), size = size_of(nbytes, "nbytes")
        cdef uint64_t start = size_of(file_offset, "file_offset")
        self.note_granted(None)
        overlay_range(region, first, fd, start, size)

    def advise(self, advice: Advice) -> None:
        """Advise the kernel how the memory will be used.

        Parameters
        ----------
        advice : {"willneed", "sequential", "random", "dontneed", "hugepage", "nohugepage"}
            ``"dontneed"`` drops pages of a mapped file, which are read again when used. It is
            refused for other memory, whose contents would be lost.

        Raises
        ------
        ValueError
            An unknown advice, or one that would lose data.
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

    def fileno(self) -> int:
        """Return the descriptor of shared memory; the block keeps owning it.

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

    def _resident_range(self, offset: int, nbytes: int) -> int:
        """Return the bytes of a range in RAM, in whole pages."""
        return resident_bytes(self.region(), offset, nbytes)

    @property
    def _is_cache_hidden(self) -> bool:
        """Whether the kernel hides which pages of the mapped file are in the page cache."""
        return bool(self.region().block.is_cache_hidden)

    def _pages(self, offset: int, nbytes: int,
               nodes: bool = False) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int16] | None]:
        """Return flags (UM_PAGE_*, uint8) and nodes (int16, or None) of base pages of a range."""
        return pages_of(self.region(), size_of(offset, "offset"), size_of(nbytes, "nbytes"), nodes)

    def _lock(self, how: Lock, *, asked: Lock | None = None) -> Lock:
        """Lock all of it (True, "onfault") or unlock it (False); return the former state.

        If this fails, the lock is unchanged, and a PlacementError names the limit and `asked`, the
        request behind `how`.
        """
        self.note_granted(None)
        return lock_all(self.region(), how, how if asked is None else asked)

    @cython.critical_section
    def close(self) -> None:
        """Give the memory back. Closing twice is no error.

        Raises
        ------
        BufferError
            Arrays, buffers or tapes still use it; it stays open.
        """
        self._check_idle()
        self._drop()

    def _check_idle(self) -> None:
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

    def __enter__(self) -> Self:
        self.region()
        return self

    @cython.critical_section
    def __exit__(self, *exc_info: object) -> None:
        # Live arrays keep the memory until the last of them goes.
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

    #: def _repr_html_(self) -> str: ...
    _repr_html_ = block_html


cdef Block _new_block(Region region, name, category, bint shared, bint entered=True):
    """Make a block over an existing mapping; `shared` if other processes see its writes."""
    cdef Block block = Block.__new__(Block)
    region.name = block.name = name
    region.writable = region.block.access != um.UM_ACCESS_READ
    if region.block.access == um.UM_ACCESS_SHARED:
        leave_out_of_child(region)
    block.category = row_name(category)
    block._region = region
    block._requested = region.requested = requested_of(
        region, shared or region.block.sharing != um.UM_SHARING_NONE)
    if entered:
        region.enter()
    return block
