# Rows and positions of KV caches, for storage.pyx and device.pyx.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.region cimport Region

cdef class KVRows:
    cdef object __weakref__
    # The native cache: C callers use the um_kv_* functions on it directly.
    # With order="head" it has a stream of one head for each head of each stream.
    cdef um.um_kv kv
    cdef uint32_t _batch, _heads, _v_head_dim
    # Whether appends rotate heads.
    cdef readonly bint rotate
    cdef readonly str name
    cdef readonly str dtype, v_dtype
    cdef readonly str order
    cdef readonly object window
    # None, or the most bytes of storage.
    cdef readonly object budget_bytes
    # Whether memory is committed as tokens are appended; how often it was.
    cdef readonly bint grow
    cdef Py_ssize_t _n_growths
    # The lowest next_position since an engine set this: the tokens before it are the engine's.
    cdef public uint64_t _lowest_end
    cdef readonly object _dtype, _v_dtype
    # The first byte of the storage in the region that its views are windows of.
    cdef size_t _begin
    cdef size_t _n_lanes, _storage_bytes, _v_row
    # The most bytes of tokens when some were last dropped.
    cdef uint64_t _most_bytes
    # Bytes of a lane dropped since memory was last given back.
    cdef size_t _dropped
    cdef uint64_t _reserved
    # Calls that use rows without the interpreter's lock, and whether one of them writes.
    cdef int _n_busy
    cdef bint _writing
    # The path of the file that rows may be mapped from, or None.
    cdef readonly str _file
    cdef bint _postponed, _closed

    # Checks a KVSpec, keeps its facts and fills the core's.
    cdef int describe(self, um.um_kv_spec *spec, wanted) except -1
    cdef size_t check_row(self, um.um_kv_spec *spec) except 0
    # Fills all of a fixed storage but its address, and returns its bytes.
    cdef size_t plan_fixed(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except 0
    cdef int start(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except -1
    # After a fork, in the child.
    cdef int enter_child(self) except -1

    # For subclasses to define. The region whose windows are the views; raises ClosedError.
    cdef Region open_region(self)
    # How many views and other users the memory has.
    cdef Py_ssize_t n_users(self)
    # Closes the cache, whatever views there are.
    cdef object end(self)
    # Gives back memory that tokens do not need, or waits for the views over it; exactly: all of it.
    cdef int settle(self, bint exactly=*) except -1
    # Makes n rows from `row` on usable, which may move tokens, or raises.
    cdef int take_rows(self, uint64_t row, uint64_t n) except -1
    # Moves the tokens to row 0; that many rows will be needed.
    cdef int start_over(self, uint64_t rows) except -1

    # The block if any of n rows from `row` on is mapped from a file, and may be lost; else NULL.
    cdef um.um_block *mapped(self, uint64_t row, uint64_t n) noexcept
    # As um_kv_trim; kept first tokens are copied to `row`.
    cdef um.um_status trim(self, uint64_t n, uint64_t keep_first, uint64_t row,
                           um.um_error *err) except *

    # Returns the row that kept first tokens go to; raises BufferError if views lie there.
    cdef uint64_t check_kept(self, uint64_t last, uint64_t first) except? 0

    cdef object fail(self, um.um_error *err, str doing)
    cdef int move_to(self, uint64_t row) except -1
    # Ends a call that moves tokens; raises if it failed.
    cdef object end_move(self, um.um_status status, um.um_error *err, str doing)
    cdef int make_rows(self, uint64_t row, uint64_t n) except -1
    # After a failure, makes room if rows were missing; True: try again.
    cdef bint find_rows(self, um.um_error *err, uint64_t n) except -1
    cdef int check_movable(self, list ranges) except -1
    # Raises if the cache is closed, or another thread appends.
    cdef int begin_change(self) except -1
    # Ends a call that began with _n_busy += 1.
    cdef int end_busy(self) except -1

    # The position where the longest layer ends.
    cdef uint64_t end_position(self)
    cdef uint64_t first_row(self)
    # Without a window, the row behind the tokens and the reserved rows.
    cdef uint64_t end_row(self)
    # Whether views lie over these ranges of rows of any lane.
    cdef bint has_views(self, list ranges) except -1
    cdef Py_ssize_t n_windows(self, Region region, size_t first, size_t end) except -1
    cdef uint32_t heads_apart(self) noexcept
    cdef int check_whole(self, str doing) except -1
    cdef void note_end(self) noexcept
    # Bytes of the tokens now, and the most ever.
    cdef uint64_t used_bytes(self) noexcept
    cdef uint64_t most_bytes(self) noexcept

# Raises RuntimeError unless a cache is whole: nothing is reserved, and all layers end alike.
cdef int refuse_torn(str doing, bint is_reserved, bint is_uneven) except -1
# Raises BufferError for views over a cache that is to be closed.
cdef int refuse_views(str name, Py_ssize_t n_users) except -1
# Whether "k" or "v" is the latter.
cdef bint is_v(object part) except -1
