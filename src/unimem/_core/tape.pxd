# Tapes for Cython callers: `from unimem cimport Tape`.
from libc.stdint cimport uintptr_t

from unimem._core cimport native as um
from unimem._core.lock cimport Lock
from unimem._core.region cimport Region

# The arithmetic of a tape over addresses, which it never touches.
cdef class Bump:
    cdef um.um_tape tape
    cdef object _block
    cdef bint _owns_block
    cdef bint _open
    # Whether `clear` and `rewind` overwrite memory, so that stale views show (debug mode).
    cdef bint _poison
    # The message for a forked child that did not inherit the memory.
    cdef str _left_out
    cdef readonly str name
    cdef object __weakref__
    # None, or objects to notify once the tape is taken back below a number of bytes.
    cdef object _tenants

    # Uninitialised memory, valid until clear or rewind; never NULL: raises TapeFull, FrozenError,
    # ClosedError or ValueError. Any number of threads may call it at once, without the lock.
    cdef void *take_raw(self, size_t nbytes, size_t align=*) except NULL nogil
    # Returns a size, or raises TapeFull if even an empty tape has no room for it.
    cdef size_t check_fits(self, object nbytes) except? 0
    # Whether these bytes are taken.
    cpdef bint _holds(self, uintptr_t address, size_t nbytes)
    cdef object fail(self, um.um_error *err)
    cdef object check_open(self)
    cdef object poison_down_to(self, size_t floor)
    cdef object give_notice(self, size_t floor)
    # Closes it for good, and in a forked child that lacks the memory.
    cdef object close_down(self)
    cdef object lose(self)
    cdef object _release(self)

cdef class Tape(Bump):
    cdef Region _region
    # Held while the region is read or replaced.
    cdef Lock _guard

    # The region, which stays mapped while the caller holds it; None if the tape is closed.
    cdef Region held(self)

    # `take_raw` as a typed memoryview of n float32.
    cdef float[::1] take_floats(self, size_t n)

cdef class DeviceTape(Bump):
    # The owner of the memory, which its arrays reference.
    cdef readonly object _memory
    # Arrays already made, by address, shape and dtype.
    cdef dict _made
