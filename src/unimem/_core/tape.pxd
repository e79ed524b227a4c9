# Tapes for Cython callers: `from unimem cimport Tape`.
from libc.stdint cimport uintptr_t

from unimem._core cimport native as um
from unimem._core.lock cimport Lock
from unimem._core.region cimport Region

# The arithmetic of a tape over addresses that are never touched here.
cdef class Bump:
    cdef um.um_tape tape
    cdef object _block
    cdef bint _owns_block
    cdef bint _open
    # Overwritten by `clear` and `rewind` in debug mode, so that a stale view shows.
    cdef bint _poison
    # In a forked child, over memory that is not there: what to say.
    cdef str _left_out
    cdef readonly str name
    cdef object __weakref__
    # None, or who is told when what they lie on is taken back, and the bytes used behind it.
    cdef object _tenants

    # Uninitialised memory, valid until clear or rewind; never NULL: raises TapeFull, FrozenError,
    # ClosedError or ValueError. Any number of threads may call it at once, without the lock.
    cdef void *take_raw(self, size_t nbytes, size_t align=*) except NULL nogil
    # Of any number of bytes, whether an empty tape had room for it; raises TapeFull.
    cdef size_t check_fits(self, object nbytes) except? 0
    # Whether these bytes are taken from it.
    cpdef bint _holds(self, uintptr_t address, size_t nbytes)
    cdef object fail(self, um.um_error *err)
    cdef object check_open(self)
    cdef object poison_down_to(self, size_t floor)
    cdef object give_notice(self, size_t floor)
    # Closed: for good, and in a forked child that lacks the memory.
    cdef object close_down(self)
    cdef object lose(self)
    cdef object _release(self)

cdef class Tape(Bump):
    cdef Region _region
    # Held while that is taken or changes.
    cdef Lock _guard

    # The region, which stays mapped while the caller holds it; None where the tape is closed.
    cdef Region held(self)

    # `take_raw` as a typed memoryview of n float32.
    cdef float[::1] take_floats(self, size_t n)

cdef class DeviceTape(Bump):
    # What its arrays refer to, which keeps the memory alive.
    cdef readonly object _memory
    # Arrays that were made, by address, shape and dtype.
    cdef dict _made
