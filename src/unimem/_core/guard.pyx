# cython: language_level=3, boundscheck=False, wraparound=False
"""Reading mapped files that somebody may truncate."""
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport size_of
from unimem._core.status cimport raise_file_status

# Giving the interpreter's lock up and taking it again costs more than copying less.
cdef size_t MANY_BYTES = 64 << 10


def copy(out: NDArray[Any] | bytearray | memoryview, address: int, nbytes: int, str what) -> None:
    """Copy from a mapped file, as far as it is there.

    Any number of threads may copy at once. The interpreter's lock is given up for more than a few
    pages.

    Parameters
    ----------
    out : buffer
        Writable and C-contiguous, of at least `nbytes` bytes; the first are written.
    address : int
        Of the first byte, in a mapping that the caller keeps.
    nbytes : int
        How many.
    what : str
        The path of the file, which the error names.

    Raises
    ------
    OSError
        A page cannot be had (EIO): the file has become shorter, or cannot be read. What is in `out`
        then is worth nothing.
    ValueError
        `out` is too small.
    TypeError, BufferError
        It is no such buffer.
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
