# Blocks for Cython callers: `cimport unimem._core.block`.
from unimem._core cimport native as um
from unimem._core.region cimport Region

cdef class Block:
    cdef Region _region
    cdef readonly str name
    cdef readonly str category
    # A file in /dev/shm that other processes may attach, or None.
    cdef readonly str path
    # Part of another object, which warns for both when it is left open.
    cdef bint _is_part
    cdef dict _requested
    # What the kernel was asked for, a placing.Choice; None for memory that somebody else placed.
    cdef object _choice
    cdef object _granted
    cdef object _remove_name
    cdef object __weakref__
    cdef Region region(self)
    cdef Region _map_choice(self, object request, um.um_category category, int fd, bint strict,
                            Region source)
    cdef Region _try_map(self, object request, object choice, um.um_category category, int fd,
                         Region source, dict refused)
    cdef object explain(self, um.um_status status, const um.um_error *err, str doing)
    cdef unsigned check_threads(self, object threads) except 0
    cdef int populate(self, Region region, size_t offset, size_t nbytes, unsigned n_threads,
                      object progress, size_t before, size_t total) except -1
