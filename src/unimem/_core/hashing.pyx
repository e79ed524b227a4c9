# cython: language_level=3, boundscheck=False, wraparound=False
"""Hashing bytes while they are copied."""
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport uint8_t

from unimem._core cimport native as um
from unimem._core.arrays cimport size_of

# Releasing the interpreter's lock costs more than copying less than this.
cdef size_t MANY_BYTES = 64 << 10


def copy_hashed(data: bytes | memoryview | NDArray[Any],
                out: bytearray | memoryview | NDArray[Any] | None = None,
                n_zeros: int = 0) -> bytes:
    """Copy `data` to `out`, if that is given, and return the hash of `data` and zeros behind it.

    The hash is XXH3 of 128 bits with seed 0, in its canonical form. Both are C-contiguous buffers
    of one size that do not overlap. The interpreter's lock is released for more than a few pages.

    Raises
    ------
    ValueError, TypeError, BufferError
        They are no such buffers, or `n_zeros` is negative.
    """
    cdef uint8_t[16] digest
    cdef Py_buffer given, target
    cdef size_t zeros = size_of(n_zeros, "n_zeros")
    cdef void *to = NULL
    PyObject_GetBuffer(data, &given, PyBUF_C_CONTIGUOUS)
    try:
        if out is not None:
            PyObject_GetBuffer(out, &target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
            to = target.buf
        try:
            if to != NULL and target.len != given.len:
                raise ValueError(f"out: expected {given.len} bytes, got {target.len}")
            if <size_t>given.len < MANY_BYTES:
                um.um_copy_hashed(to, given.buf, given.len, zeros, digest)
            else:
                with nogil:
                    um.um_copy_hashed(to, given.buf, given.len, zeros, digest)
        finally:
            if out is not None:
                PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&given)
    return digest[:16]
