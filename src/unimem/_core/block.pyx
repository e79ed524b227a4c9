# cython: language_level=3, boundscheck=False, wraparound=False
"""Blocks: mapped memory, with its placement read back from the kernel."""
import math
import os
import warnings

import numpy as np

from unimem.errors import ClosedError, PlacementError, PlacementWarning
from unimem.placement import Placement, format_bytes

cimport numpy as cnp
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.status cimport raise_status

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject *o) nogil
    int PyObject_GetBuffer(object exporter, Py_buffer *view, int flags) except -1

cdef extern from "numpy/arrayobject.h":
    enum:
        NPY_ITEM_REFCOUNT  # the elements are, or contain, Python objects
    object PyArray_NewFromDescr(PyTypeObject *subtype, cnp.dtype descr, int n_dims,
                                const cnp.npy_intp *dims, const cnp.npy_intp *strides, void *data,
                                int flags, PyObject *template)

cnp.import_array()

cdef object MOST = 2**63 - 1

cdef dict _PAGES = {"auto": um.UM_PAGES_AUTO, "4k": um.UM_PAGES_4K, "thp": um.UM_PAGES_THP}
cdef dict _CATEGORIES = {
    (<bytes>um.um_category_name(<um.um_category>i)).decode(): i for i in range(um.UM_CAT_COUNT)}
cdef dict _DTYPES = {}
# What dtype_of was asked last, and its answer: most callers ask for one dtype all the time.
cdef object _last_asked = object()
cdef object _last_found = None


cdef object dtype_of(object dtype):
    """A NumPy dtype; names and types are remembered, since np.dtype costs as much as a take."""
    global _last_asked, _last_found
    if dtype is _last_asked:
        return _last_found
    if isinstance(dtype, (str, type)):
        found = _DTYPES.get(dtype)
        if found is None:
            found = _DTYPES[dtype] = _new_dtype(dtype)
    else:
        found = _new_dtype(dtype)
        if found is not dtype:
            return found  # a description that may change, such as a list
    _last_asked, _last_found = dtype, found
    return found


cdef cnp.dtype _new_dtype(object dtype):
    cdef cnp.dtype found
    if isinstance(dtype, str) and dtype.lstrip("<>=|") == "f16":
        # NumPy reads it as 16 bytes, which nobody who writes it here means.
        raise ValueError("dtype 'f16' is 16 bytes wide in NumPy: write float16")
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes
        found = np.dtype(ml_dtypes.bfloat16)
    else:
        found = np.dtype(dtype)
    if found.flags & NPY_ITEM_REFCOUNT or found.itemsize == 0:
        raise ValueError(f"dtype {found} cannot lie in raw memory: expected a fixed-size number or "
                         "struct")
    return found


cdef size_t size_of(object n, str what, object least=0) except? 0:
    exact = PyNumber_Index(n)
    if not least <= exact <= MOST:
        raise ValueError(f"{what}: expected an integer from {least} to 2**63 - 1, got {n}")
    return exact


cdef tuple dims_of(object shape):
    cdef tuple dims
    cdef bint exact = type(shape) is tuple
    if exact:
        for n in <tuple>shape:
            exact = exact and type(n) is int
    if exact:
        dims = shape
    else:
        try:
            dims = tuple(shape)
        except TypeError:
            dims = (shape,)
        dims = tuple([PyNumber_Index(n) for n in dims])
    if len(dims) > MAX_DIMS:
        raise ValueError(f"shape: expected at most {MAX_DIMS} dimensions, got {len(dims)}")
    for n in dims:
        if n < 0:
            raise ValueError(f"shape: negative dimension in {dims}")
    return dims


cdef object nbytes_of(tuple dims, object itemsize):
    nbytes = itemsize
    for n in dims:
        nbytes = nbytes * n
    # NumPy refuses what would be too large without its dimensions of 0, and refuses it too late:
    # when memory has been taken.
    if nbytes == 0 and math.prod([n or 1 for n in dims], start=itemsize) > MOST:
        raise ValueError(f"shape: {dims} is too large for an array")
    return nbytes


cdef object array_over(void *address, tuple dims, object dtype, object owner, bint writable):
    cdef cnp.npy_intp sizes[MAX_DIMS]
    cdef int n_dims = 0
    for n in dims:
        sizes[n_dims] = n
        n_dims += 1
    return new_array(address, n_dims, sizes, dtype, owner, writable)


cdef object vector_over(void *address, cnp.npy_intp n, object dtype, object owner, bint writable):
    return new_array(address, 1, &n, dtype, owner, writable)


cdef inline object new_array(void *address, int n_dims, cnp.npy_intp *sizes, object dtype,
                             object owner, bint writable):
    cdef int flags = cnp.NPY_ARRAY_C_CONTIGUOUS
    if <uintptr_t>address & <uintptr_t>((<cnp.dtype>dtype).alignment - 1) == 0:
        flags |= cnp.NPY_ARRAY_ALIGNED
    if writable:
        flags |= cnp.NPY_ARRAY_WRITEABLE
    Py_INCREF(dtype)  # PyArray_NewFromDescr steals it
    array = PyArray_NewFromDescr(<PyTypeObject *>cnp.ndarray, dtype, n_dims, sizes, NULL, address,
                                 flags, NULL)
    Py_INCREF(owner)  # as PyArray_SetBaseObject does
    cnp.PyArray_SetBaseObject(array, owner)
    return array


cdef class Region:
    """One mapping, unmapped with its last user."""

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.block.base, <Py_ssize_t>self.block.nbytes,
                          not self.writable, flags)

    def __dealloc__(self):
        # A destructor never raises; the kernel refuses only what was never mapped.
        um.um_block_unmap(&self.block, NULL)

    cdef object array(self, size_t offset, object shape, object dtype):
        cdef tuple dims
        if shape is None:
            if offset > self.block.nbytes:
                raise ValueError(
                    f"{self.name}: offset {offset} is outside {self.block.nbytes} bytes")
            dims = ((self.block.nbytes - offset) // <size_t>dtype.itemsize,)
        else:
            dims = dims_of(shape)
        nbytes = nbytes_of(dims, dtype.itemsize)
        if offset + nbytes > self.block.nbytes:
            raise ValueError(
                f"{self.name}: shape {dims} of {dtype} at offset {offset} needs "
                f"{nbytes} bytes of {self.block.nbytes}")
        if (<uintptr_t>self.block.base + offset) % <size_t>dtype.alignment:
            raise ValueError(f"{self.name}: offset {offset} is not aligned for {dtype}")
        return array_over(<char *>self.block.base + offset, dims, dtype, self, self.writable)


cdef _page_names(um.um_pages pages):
    return "thp" if pages == um.UM_PAGES_THP else "4k"


cdef class Block:
    """One region of anonymous memory, between two guard pages.

    Threads may use a block at the same time; closing it is for one. After a fork the child has its
    own copy, page by page as either side writes.

    Parameters
    ----------
    nbytes : int
        Size in bytes, rounded up to whole pages in `nbytes`; the request stays in `requested`.
    pages, warm, strict
        See `PlacementOptions`.
    name : str, optional
        Stands in messages.
    category : str, default "other"
        The row of the ledger: ``"weights"``, ``"scratch"``, ``"history"``, ``"staging"``,
        ``"diagnostics"`` or ``"other"``.

    Raises
    ------
    ValueError
        A size of 0 or below, an unknown option.
    MemoryError
        The system has no memory.
    PlacementError
        With `strict`, when the pages asked for were not granted.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Block(1 << 20, pages="4k") as block:
    ...     block.as_array("float32", (2, 3)).fill(1)
    ...     block.granted.pages
    '4k'
    """

    def __init__(self, nbytes, *, pages="auto", warm=False, strict=False, name=None,
                 category="other"):
        cdef um.um_error err
        if pages not in _PAGES:
            raise ValueError(f"pages: expected one of {', '.join(_PAGES)}, got {pages!r}")
        if category not in _CATEGORIES:
            raise ValueError(
                f"category: expected one of {', '.join(_CATEGORIES)}, got {category!r}")
        cdef size_t size = size_of(nbytes, "nbytes", 1)
        cdef um.um_pages wanted = _PAGES[pages]
        cdef um.um_category entered = <um.um_category><int>_CATEGORIES[category]
        cdef um.um_status status
        cdef Region region = Region.__new__(Region)
        self.name = name or "block"
        region.name = self.name
        region.writable = True
        with nogil:
            status = um.um_block_map(&region.block, size, wanted, entered, &err)
        if status != um.UM_OK:
            raise_status(status, &err, f"Block '{self.name}' of {nbytes} bytes")
        self._region = region
        self.category = category
        try:
            if warm:
                self.warm(None if warm is True else warm)
            if pages == "thp":
                self._check_huge(bool(warm), strict)
        except BaseException:
            self._region = None
            raise

    def _check_huge(self, bint warmed, bint strict):
        placement = self.verify()
        if placement.pages == "thp" and (not warmed or placement.huge_bytes == self.nbytes):
            return
        text = (f"Block '{self.name}': asked for transparent huge pages, granted {placement}. Look "
                "/sys/kernel/mm/transparent_hugepage/enabled; 'echo madvise > "
                "/sys/kernel/mm/transparent_hugepage/enabled' as root allows them")
        if strict:
            raise PlacementError(text)
        warnings.warn(text, PlacementWarning, stacklevel=3)

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
        mode : {"r", "c"}
            ``"r"``: shared and read-only. ``"c"``: writable, copy-on-write; the file never changes.
        name : str, optional
            Stands in messages; the path by default.
        category : str, default "weights"
            The row of the ledger, as for the class.

        Returns
        -------
        Block
            Whose pages belong to the page cache. When the file is truncated by somebody, touching
            the lost pages kills the process (SIGBUS).

        Raises
        ------
        OSError
            The file cannot be opened or mapped.
        ValueError
            The range is outside the file, or empty.
        """
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if nbytes is None:
                nbytes = max(os.fstat(fd).st_size - offset, 0)
            return Block._map_fd(fd, offset, nbytes, mode, name or os.fsdecode(path), category)
        finally:
            os.close(fd)

    @staticmethod
    def _map_fd(int fd, offset, nbytes, mode, name, category="weights"):
        cdef um.um_error err
        if mode not in ("r", "c"):
            raise ValueError(f"mode: expected 'r' or 'c', got {mode!r}")
        if category not in _CATEGORIES:
            raise ValueError(
                f"category: expected one of {', '.join(_CATEGORIES)}, got {category!r}")
        cdef uint64_t start = size_of(offset, "offset")
        cdef size_t size = size_of(nbytes, f"nbytes of {name} from byte {offset} on", 1)
        cdef um.um_access access = um.UM_ACCESS_READ if mode == "r" else um.UM_ACCESS_PRIVATE
        cdef um.um_category entered = <um.um_category><int>_CATEGORIES[category]
        cdef um.um_status status
        cdef Region region = Region.__new__(Region)
        region.name = name
        region.writable = mode == "c"
        with nogil:
            status = um.um_block_map_file(&region.block, fd, start, size, access, entered, &err)
        if status != um.UM_OK:
            raise_status(status, &err, f"mapping {name}")
        cdef Block block = Block.__new__(Block)
        block.name = name
        block.category = category
        block._region = region
        return block

    cdef Region region(self):
        if self._region is None:
            raise ClosedError(f"Block '{self.name}' is closed")
        return self._region

    @property
    def address(self):
        """Address of the first byte; it never changes."""
        return <uintptr_t>self.region().block.base

    @property
    def nbytes(self):
        """Usable size in bytes: the request rounded up to whole pages."""
        return self.region().block.nbytes

    @property
    def requested(self):
        """What was asked for: a dict of `nbytes` and `pages`."""
        cdef Region region = self.region()
        names = {number: name for name, number in _PAGES.items()}
        return {"nbytes": region.block.requested_nbytes,
                "pages": names[<int>region.block.requested_pages]}

    @property
    def granted(self):
        """The `Placement` as it was when it was last read from the kernel (see `verify`)."""
        return self.verify() if self._granted is None else self._granted

    @property
    def closed(self):
        """Whether the block was closed."""
        return self._region is None

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
            The array does not fit, or is not aligned for its dtype.
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

    def warm(self, threads=None):
        """Bring all pages into RAM, so that no later access faults.

        Parameters
        ----------
        threads : int, optional
            How many threads, each pinned to a CPU of its own; 1 by default.

        Raises
        ------
        MemoryError
            There is not enough memory.
        OSError
            A mapped file has become shorter.
        """
        self._warm_range(0, self.nbytes, threads)

    def _warm_range(self, offset, nbytes, threads=None):
        cdef Region region = self.region()
        cdef um.um_error err
        cdef um.um_status status
        cdef size_t start = offset, size = nbytes
        # No block has so many parts to warm, and `unsigned` holds no more.
        cdef size_t wanted = size_of(1 if threads is None else threads, "threads", 1)
        cdef unsigned n_threads = min(wanted, 1024)
        with nogil:
            status = um.um_block_warm(&region.block, start, size, n_threads, &err)
        if status != um.UM_OK:
            raise_status(status, &err, f"warming block '{self.name}'")
        self._granted = None

    def verify(self):
        """Read from the kernel where the memory is.

        Returns
        -------
        Placement

        Raises
        ------
        OSError
            ``/proc/self/smaps`` cannot be read.
        """
        cdef Region region = self.region()
        cdef um.um_error err
        cdef um.um_placement p
        cdef um.um_status status
        with nogil:
            status = um.um_block_verify(&region.block, &p, &err)
        if status != um.UM_OK:
            raise_status(status, &err, f"verifying block '{self.name}'")
        self._granted = Placement(
            pages=_page_names(p.pages), page_bytes=p.page_bytes, resident_bytes=p.resident_bytes,
            huge_bytes=p.huge_bytes, locked_bytes=p.locked_bytes,
            swapped_bytes=p.swapped_bytes, pss_bytes=p.pss_bytes)
        return self._granted

    def _resident_range(self, offset, nbytes):
        """How many bytes of a range are in RAM, in whole pages."""
        cdef Region region = self.region()
        cdef um.um_error err
        cdef size_t start = offset, size = nbytes
        cdef uint64_t resident
        cdef um.um_status status
        with nogil:
            status = um.um_block_resident(&region.block, start, size, &resident, &err)
        if status != um.UM_OK:
            raise_status(status, &err, f"block '{self.name}'")
        return resident

    def close(self):
        """Give the memory back. Closing twice is no error.

        Raises
        ------
        BufferError
            Arrays, buffers or tapes still use it; nothing is closed then.
        """
        if self._region is None:
            return
        cdef Py_ssize_t n_users = Py_REFCNT(<PyObject *>self._region) - 1
        if n_users > 0:
            raise BufferError(
                f"Block '{self.name}' has {n_users} live users (arrays, buffers, tapes): "
                "drop them first, or leave a 'with'")
        self._region = None
        self._granted = None

    def __enter__(self):
        self.region()
        return self

    def __exit__(self, *exc_info):
        # Arrays that are still alive keep the memory; it goes with the last of them.
        self._region = None

    def __del__(self):
        if self._region is not None and not self._is_part:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self):
        raise TypeError("a Block cannot be pickled: it is memory of this process. "
                        "Save what is in it, or let the other process map the same file")

    def __repr__(self):
        if self._region is None:
            return f"Block('{self.name}', closed)"
        return f"Block('{self.name}', {format_bytes(self.nbytes)}, {self.granted})"
