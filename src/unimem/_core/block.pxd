# Blocks for Cython callers: `from unimem cimport Block`.
from unimem._core cimport native as um
from unimem._core.lock cimport Lock
from unimem._core.region cimport Region

cdef class Block:
    cdef Region _region
    # Held while that is taken or changes.
    cdef Lock _guard
    cdef readonly str name
    cdef readonly str category
    # A file in /dev/shm that other processes may attach, or None.
    cdef readonly str path
    # Part of another object, which warns for both when it is left open.
    cdef bint _is_part
    cdef dict _requested
    # What the kernel was asked for, as `policy.decide` chose it; None for memory placed elsewhere.
    cdef object _choice
    cdef object _granted
    cdef object _remove_name
    cdef object __weakref__
    cdef Region region(self)
    # The first byte, which never moves; raises ClosedError.
    cdef void *base(self) except NULL
    # `options` are the keyword arguments of the constructor.
    cdef int _make(self, nbytes, dict options, tuple mirror, int fd, fill) except -1
    # Makes ranges usable of which nothing is, (offset, nbytes) in whole steps: all, or none.
    cdef int commit_ranges(self, list ranges) except -1
    # Notes what the kernel said; None: it may be something else now.
    cdef object note_granted(self, placement)
    cdef unsigned check_threads(self, object threads) except 0
    cdef int populate(self, Region region, size_t offset, size_t nbytes, unsigned n_threads,
                      object progress, size_t before, size_t total, bint write=*) except -1
