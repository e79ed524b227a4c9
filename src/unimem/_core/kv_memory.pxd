# The memory of a KV cache, for kv.pyx.
from libc.stdint cimport uint64_t

from unimem._core cimport native as um
from unimem._core.block cimport Block
from unimem._core.region cimport Region, Watcher
from unimem._core.tape cimport Tape

cdef class KVMemory(Watcher):
    # The native cache: C callers use the um_kv_* functions on it directly.
    cdef um.um_kv kv
    cdef readonly Tape tape
    cdef readonly Block block
    cdef readonly str name
    # None, or the most bytes that the storage may have.
    cdef readonly object budget_bytes
    # Whether memory is taken as tokens come; how often that was.
    cdef readonly bint grow
    cdef readonly Py_ssize_t n_growths
    cdef Region _region
    cdef size_t _begin, _n_lanes, _storage_bytes
    # Of each lane of a growing cache, the bytes that are committed.
    cdef size_t _low, _high
    # Bytes of a lane that were dropped since memory was last given back.
    cdef size_t _dropped
    cdef uint64_t _reserved
    # Calls that use rows without the interpreter's lock.
    cdef int _n_busy
    # Whether one of them writes.
    cdef bint _writing
    cdef bint _waiting, _postponed, _left_behind, _frozen, _closed

    cdef int _start(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except -1
    cdef size_t _row_bytes(self, um.um_kv_spec *spec) except 0
    cdef int place_fixed(self, um.um_kv_spec *spec, Tape tape, dict placement) except -1
    cdef int place_growing(self, um.um_kv_spec *spec, dict placement) except -1
    cdef int place_ring(self, um.um_kv_spec *spec, uint64_t spare_rows, dict placement) except -1
    # Each lane of a growing cache begins with n rows of a file, at these offsets.
    cdef int overlay(self, int fd, list offsets, uint64_t n) except -1
    # Raises ClosedError where there is none any more.
    cdef Region open_region(self)
    # The position where the longest layer ends.
    cdef uint64_t end_position(self)
    cdef uint64_t first_row(self)
    # Of a plain cache, the row behind the tokens and what is reserved.
    cdef uint64_t end_row(self)
    # Whether views lie over these byte ranges of any lane.
    cdef bint has_views(self, list ranges) except -1
    # A byte range of a ring's lane, which may wrap, in both of its images.
    cdef list images(self, first, end)
    # All of a lane but the rows of the last n tokens.
    cdef list ranges_but(self, uint64_t n)
    # Byte ranges of a lane that hold no tokens, of fixed storage; and those that a growing cache
    # gives back.
    cdef list dead_ranges(self)
    cdef list spare_ranges(self, bint exactly)
    # Makes n rows from `row` on usable in a plain cache, which may move its tokens, or raises.
    cdef int make_rows(self, uint64_t row, uint64_t n) except -1
    cdef int _grow_to(self, uint64_t rows) except -1
    cdef int _set_usable(self) except -1
    cdef int _commit_lanes(self, size_t first, size_t end) except -1
    cdef int _start_over(self, uint64_t rows) except -1
    cdef void _release_lanes(self, size_t first, size_t end) noexcept
    # Gives back what the tokens do not need, or waits for the views over it to go; exactly: all
    # that no token needs.
    cdef int settle(self, bint exactly=*) except -1
    cdef int _shrink(self, list ranges) except -1
    cdef int _stay_inside(self) except -1
    cdef int _check_movable(self, list ranges) except -1
    # Raises where another thread appends.
    cdef int check_not_writing(self) except -1
    # Ends a call that began with _n_busy += 1.
    cdef int end_busy(self) except -1
    cdef object _end(self)
    cdef object _lane_rows(self, layer, part, stream, uint64_t row, uint64_t n)

# Whether "k" or "v" is the latter.
cdef bint is_v(object part) except -1
