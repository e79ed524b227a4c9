# Caches whose layers differ, for cache.pyx.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.cache.one_kind cimport OneKindCache
from unimem.kv.states cimport LayerStates

cdef class LayeredKVCache:
    cdef object __weakref__
    # The file that it was restored from, for unimem.kv.snapshot.
    cdef public object _snapshot
    cdef readonly str name, order
    cdef readonly bint grow, rotate
    # The types of K and V of each layer, and its window or None.
    cdef readonly tuple dtype, v_dtype, window
    # What each layer keeps, and its figures; 0 for a layer that keeps a state.
    cdef readonly tuple layers, n_kv_heads, head_dim, v_head_dim, n_rows, row_bytes, v_row_bytes
    cdef readonly uint32_t n_layers
    cdef readonly uint64_t max_seq_len
    cdef readonly object budget_bytes, block, tape
    cdef readonly uint32_t batch
    cdef uint64_t _reserved
    cdef bint _closed
    # The parts, first those that keep all tokens; and the number of these.
    cdef readonly tuple _parts
    cdef Py_ssize_t _n_plain
    # The states, or None.
    cdef readonly LayerStates _states
    # Where the tokens end in a cache of states alone.
    cdef uint64_t _end
    # The part of each layer (None for a state), its number there, and whether its rows are its own.
    cdef tuple _part_of, _index_of
    cdef bytes _owns
    # The layers that have rows of their own, in the order in which `append_all` writes them.
    cdef list _written
    # Where the tokens begin, and the largest window, or 0.
    cdef readonly uint64_t _first
    cdef uint64_t _widest

    cdef int assemble(self, layers, list parts, max_seq_len, budget_bytes,
                      LayerStates states) except -1
    cdef OneKindCache part_of(self, uint32_t index)
    # Calls `begin_change` of all parts and the states; and raises ClosedError.
    cdef int begin(self) except -1
    cpdef int check_open(self) except -1
    cdef int check_whole(self, str doing) except -1
    cdef bint is_reserved(self) except -1
    cdef bint is_uneven(self) except -1
    cdef int refuse_closed(self) except -1
    cdef bint is_torn(self) except -1
    cdef uint64_t end_of_all(self) noexcept
    cdef uint64_t first_of_all(self) noexcept
    cdef uint64_t first_of_parts(self) noexcept
    cdef int set_first(self, uint64_t first, uint64_t held) except -1
    cdef int limit_ends(self) except -1
    cdef int keep(self, uint64_t n, uint64_t keep_first) except -1
    cdef uint64_t lost_before(self, uint64_t end) noexcept
    cdef int end_at(self, uint64_t end, uint64_t lost) except -1
    cdef int roll_back_to(self, uint64_t end) except -1
    cdef int checkpoint_if_due(self, uint64_t before) except -1
    cdef list ways_back(self)
    cdef object refuse_to_go_back(self, str doing, kind)
    cdef object refuse_append(self, uint32_t index)
    # Returns the part to append a layer's tokens to; ValueError if its rows are not its own.
    cdef OneKindCache part_to_append(self, uint32_t layer)
    # As those of KVCache.
    cdef int append_tokens(self, layer, k, v) except -1
    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1
    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream) noexcept
    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n, uint32_t stream) noexcept
    cdef int go_back(self, uint64_t end) except -1
    cdef Py_ssize_t n_users(self)
    cdef object end(self)
    cdef bint is_left_open(self)
