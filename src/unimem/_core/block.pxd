# Blocks for Cython callers: `from unimem cimport Block`.
from unimem._core cimport native as um
from unimem._core.lock cimport Lock
from unimem._core.region cimport Region

cdef class Block:
    cdef Region _region
    # Held while the region is read or replaced.
    cdef Lock _guard
    cdef readonly str name
    cdef readonly str category
    # The file in /dev/shm of a named block, or None.
    cdef readonly str path
    # Whether it is part of another object, which warns for both if left open.
    cdef bint _is_part
    cdef dict _requested
    # The choice of `policy.decide`; None for memory placed elsewhere.
    cdef object _choice
    cdef object _granted
    cdef object _remove_name
    cdef object __weakref__
    cdef Region region(self)
    # The first byte, which never moves; raises ClosedError.
    cdef void *base(self) except NULL
    # `options` are the keyword arguments of the constructor.
    cdef int _make(self, nbytes, dict options, tuple mirror, int fd, fill) except -1
    # Commits ranges (offset, nbytes) of whole steps that are not committed yet: all, or none.
    cdef int commit_ranges(self, list ranges) except -1
    # Remembers a placement read from the kernel; None if it may have changed.
    cdef object note_granted(self, placement)
    cdef unsigned check_threads(self, object threads) except 0
    cdef int populate(self, Region region, size_t offset, size_t nbytes, unsigned n_threads,
                      object progress, size_t before, size_t total, bint write=*) except -1
