# Rows and positions of KV caches, for memory.pyx and device.pyx.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.region cimport Region

cdef class KVRows:
    cdef object __weakref__
    # The native cache: C callers use the um_kv_* functions on it directly.
    # Its streams and heads are not the cache's where the rows of a head lie side by side: there it
    # has a stream of one head for each head of each stream.
    cdef um.um_kv kv
    cdef uint32_t _batch, _heads, _v_head_dim
    # Whether appends rotate heads.
    cdef readonly bint rotate
    cdef readonly str name
    # Of K, and of V; of a cache of layers, tuples: of each layer.
    cdef readonly object dtype, v_dtype
    cdef readonly str order
    cdef readonly object window
    # None, or the most bytes that the storage may have.
    cdef readonly object budget_bytes
    # Whether memory is taken as tokens come; how often that was.
    cdef readonly bint grow
    cdef Py_ssize_t _n_growths
    # The least that next_position was since an engine set this: tokens before it are the engine's.
    cdef public uint64_t _lowest_end
    cdef readonly object _dtype, _v_dtype
    # The first byte of the storage in the region that its views are windows of.
    cdef size_t _begin
    cdef size_t _n_lanes, _storage_bytes, _v_row
    # The most bytes of tokens that there were when some were last dropped.
    cdef uint64_t _most_bytes
    # Bytes of a lane that were dropped since memory was last given back.
    cdef size_t _dropped
    cdef uint64_t _reserved
    # Calls that use rows without the interpreter's lock.
    cdef int _n_busy
    # The path of the file that rows may be mapped from; None: of none.
    cdef readonly str _file
    # Whether one of them writes.
    cdef bint _writing
    cdef bint _postponed, _closed

    # Notes what the cache is to be (a KVSpec), checked.
    cdef int describe(self, um.um_kv_spec *spec, wanted) except -1
    cdef size_t check_row(self, um.um_kv_spec *spec) except 0
    # The bytes of fixed storage, and all of it but where it is.
    cdef size_t plan_fixed(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except 0
    cdef int start(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except -1
    # After a fork, in the child.
    cdef int enter_child(self) except -1

    # What the storage decides: the region whose windows are the views (raises ClosedError where
    # there is none any more), how many views and others use the memory, and its end.
    cdef Region open_region(self)
    cdef Py_ssize_t n_users(self)
    cdef object end(self)
    # Gives back what the tokens do not need, or waits for the views over it to go; exactly: all
    # that no token needs.
    cdef int settle(self, bint exactly=*) except -1
    # Makes n rows from `row` on usable in a plain cache, which may move its tokens, or raises.
    cdef int take_rows(self, uint64_t row, uint64_t n) except -1
    # Moves the tokens to row 0, of which so many will be needed.
    cdef int start_over(self, uint64_t rows) except -1

    # The block, where any of n rows from `row` on is a file's, so that it may be lost; else NULL.
    cdef um.um_block *mapped(self, uint64_t row, uint64_t n) noexcept
    # um_kv_trim, whose first tokens go to `row` on where any go.
    cdef um.um_status trim(self, uint64_t n, uint64_t keep_first, uint64_t row,
                           um.um_error *err) except *

    # The row that the first tokens go to, of a trim that keeps some; raises where views lie there.
    cdef uint64_t check_kept(self, uint64_t last, uint64_t first) except? 0

    cdef object fail(self, um.um_error *err, str doing)
    cdef int move_to(self, uint64_t row) except -1
    # Ends what moved, or was to move, tokens: raises where it failed.
    cdef object end_move(self, um.um_status status, um.um_error *err, str doing)
    cdef int make_rows(self, uint64_t row, uint64_t n) except -1
    # After a failure: whether it is worth trying again, since there is room now.
    cdef bint find_rows(self, um.um_error *err, uint64_t n) except -1
    cdef int check_movable(self, list ranges) except -1
    # Raises where the cache is closed, or another thread appends.
    cdef int begin_change(self) except -1
    # Ends a call that began with _n_busy += 1.
    cdef int end_busy(self) except -1

    # The position where the longest layer ends.
    cdef uint64_t end_position(self)
    cdef uint64_t first_row(self)
    # Of a plain cache, the row behind the tokens and what is reserved.
    cdef uint64_t end_row(self)
    # Whether views lie over these ranges of rows of any lane.
    cdef bint has_views(self, list ranges) except -1
    cdef Py_ssize_t n_windows(self, Region region, size_t first, size_t end) except -1
    cdef uint32_t heads_apart(self) noexcept
    cdef int check_whole(self, str doing) except -1
    cdef void note_end(self) noexcept
    # Bytes of the tokens that are there, and the most that there ever were.
    cdef uint64_t used_bytes(self) noexcept
    cdef uint64_t most_bytes(self) noexcept

# Raises RuntimeError unless a cache is whole: nothing is reserved, and all layers end alike.
cdef int refuse_torn(str doing, bint is_reserved, bint is_uneven) except -1
# Raises BufferError for views over a cache that is to be closed.
cdef int refuse_views(str name, Py_ssize_t n_users) except -1
# Whether "k" or "v" is the latter.
cdef bint is_v(object part) except -1
