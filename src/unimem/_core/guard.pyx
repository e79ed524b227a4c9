# cython: language_level=3, boundscheck=False, wraparound=False
"""Reading mapped files that another process may truncate."""
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport size_of
from unimem._core.status cimport raise_file_status

# Releasing the interpreter's lock costs more than copying less than this.
cdef size_t MANY_BYTES = 64 << 10


def copy(out: NDArray[Any] | bytearray | memoryview, address: int, nbytes: int, str what) -> None:
    """Copy `nbytes` bytes at an address in a mapped file; `what` is its path in errors.

    `out` is a writable, C-contiguous buffer. Any number of threads may copy at once; the
    interpreter's lock is released for more than a few pages.

    Raises
    ------
    OSError
        A page cannot be read (EIO), as when the file became shorter. `out` is then undefined.
    ValueError, TypeError, BufferError
        `out` is too small, or no such buffer.
    """
    cdef um.um_error err
    cdef um.um_status status
    cdef uintptr_t first = size_of(address, "address", 1)
    cdef size_t size = size_of(nbytes, "nbytes")
    cdef Py_buffer view
    PyObject_GetBuffer(out, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    try:
        if size > <size_t>view.len:
            raise ValueError(f"out: expected at least {size} bytes, got {view.len}")
        if size < MANY_BYTES:
            status = um.um_guard_copy(view.buf, <const void *>first, size, &err)
        else:
            with nogil:
                status = um.um_guard_copy(view.buf, <const void *>first, size, &err)
    finally:
        PyBuffer_Release(&view)
    if status != um.UM_OK:
        raise_file_status(status, &err, f"copying {size} bytes", what)
