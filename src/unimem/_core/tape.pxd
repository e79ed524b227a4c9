# Tapes for Cython callers: `from unimem._core.tape cimport Tape`.
from unimem._core cimport native as um
from unimem._core.block cimport Block
from unimem._core.region cimport Region

cdef class Tape:
    cdef um.um_tape tape
    cdef Region _region
    cdef Block _block
    cdef bint _owns_block
    # Overwritten by `clear` and `rewind` in debug mode, so that a stale view shows.
    cdef bint _poison
    # In a forked child, over memory that was left out of it.
    cdef bint _left_out
    cdef readonly str name
    cdef object __weakref__

    # Uninitialised memory, valid until clear or rewind; never NULL: raises TapeFull, FrozenError,
    # ClosedError or ValueError.
    cdef void *take_raw(self, size_t nbytes, size_t align=*) except NULL
    # The same as a typed memoryview of n float32.
    cdef float[::1] take_floats(self, size_t n)
    cdef object fail(self, um.um_error *err)
    cdef object check_open(self)
    cdef object poison_down_to(self, size_t floor)
    cdef object _release(self)
