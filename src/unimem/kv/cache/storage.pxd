# The memory of a KV cache, for one_kind.pyx.
from libc.stdint cimport uint64_t

from unimem._core cimport native as um
from unimem._core.block cimport Block
from unimem._core.lock cimport Lock
from unimem.kv.cache.rows cimport KVRows
from unimem._core.region cimport Region, Watcher
from unimem._core.tape cimport Tape

# Settles a cache when a view over it has gone.
cdef class Settler(Watcher):
    cdef object cache  # a weak reference

cdef class KVStorage(KVRows):
    cdef readonly Tape tape
    cdef readonly Block block
    cdef Region _region
    # Held while `_region` is taken or changed.
    cdef Lock _guard
    # None, or a weak reference to the layered cache that holds this: its critical section counts.
    cdef object _whole
    # The rows of a growing cache that are committed in all lanes.
    cdef uint64_t _low, _high
    cdef Settler _settler
    cdef bint _waiting, _left_behind, _frozen
    # None, or caches of other layers that must have room before this ring overwrites a token.
    cdef tuple _beside

    # The region, which stays mapped while the caller holds it; None: the cache is closed.
    cdef Region held(self)
    cdef int place_fixed(self, um.um_kv_spec *spec, Tape tape, dict placement) except -1
    cdef int place_growing(self, um.um_kv_spec *spec, dict placement) except -1
    cdef int place_ring(self, um.um_kv_spec *spec, uint64_t spare_rows, dict placement) except -1
    # Maps n rows of a file at the beginning of each lane, from these offsets.
    cdef int overlay(self, int fd, str path, list offsets, uint64_t n) except -1
    # Lanes by number, in the order of the storage: where a lane begins, and the bytes of its rows.
    cdef size_t lane_offset(self, size_t lane) noexcept
    cdef size_t lane_row(self, size_t lane) noexcept
    # Ranges of rows in both images of a ring, where they may wrap.
    cdef list images(self, first, end)
    # Ranges of all rows but those of the last n tokens.
    cdef list ranges_but(self, uint64_t n)
    # Raises BufferError if a view or a call uses any of these.
    cdef int check_droppable(self, uint64_t n) except -1
    # Ranges without tokens in fixed storage and rings; and those that a growing cache gives back.
    cdef list dead_ranges(self)
    cdef list spare_ranges(self, bint exactly)
    # Makes room up to a position in `_beside`, or raises; and notes how far there is room.
    cdef int take_beside(self, uint64_t end) except -1
    cdef int limit_end(self) except -1
    cdef int _grow_to(self, uint64_t rows) except -1
    cdef int _set_usable(self) except -1
    # Rows that lie wholly in the steps of other rows, and these steps.
    cdef uint64_t whole_from(self, uint64_t row) noexcept
    cdef uint64_t whole_to(self, uint64_t row) noexcept
    cdef uint64_t first_whole(self, uint64_t row, size_t nbytes) noexcept
    cdef uint64_t end_whole(self, uint64_t row, size_t nbytes) noexcept
    cdef list steps_of(self, uint64_t first, uint64_t end, uint64_t but_first, uint64_t but_end)
    cdef int _commit_rows(self, uint64_t first, uint64_t end) except -1
    cdef int _release(self, list ranges) except -1
    cdef um.um_status discard(self, Region region, size_t lane, uint64_t first,
                              uint64_t end) noexcept
    cdef int _shrink(self, list ranges) except -1
    cdef int _stay_inside(self) except -1
    cdef int copy_rows(self, out, rows) except -1
    cdef object _lane_rows(self, layer, part, stream, uint64_t row, uint64_t n)
