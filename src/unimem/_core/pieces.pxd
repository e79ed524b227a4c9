# A cache of pieces of files, for Cython callers: `from unimem._core.pieces cimport Holder, Pieces`.
from libc.stdint cimport int32_t

from unimem._core cimport native as um

cdef class Pieces:
    # For calls of unimem_pieces.h without the interpreter's lock. NULL once closed, and not before:
    # holders keep the object open.
    cdef um.um_pieces *pieces
    cdef readonly str name
    # The memory of the slots: a Block for each pool.
    cdef readonly tuple blocks
    cdef object _spec
    cdef int _pid
    cdef Py_ssize_t _n_holders
    cdef object __weakref__
    # Raises ClosedError, also in a forked child.
    cdef int check_open(self) except -1
    # Raises the exception of a failed call.
    cdef object fail(self, um.um_status status, const um.um_error *err)

cdef class Holder:
    # For um_pieces_ensure. NULL once closed.
    cdef um.um_pieces_holder *holder
    cdef readonly Pieces pieces
    # Calls um_pieces_ensure until no signal interrupts it, and runs Python's handlers of signals.
    cdef int ensure_ids(self, const int32_t *ids, size_t n, int32_t *slots) except -1
