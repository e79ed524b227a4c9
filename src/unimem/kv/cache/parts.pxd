# Caches whose layers differ, for mixed.pyx.
from libc.stdint cimport uint32_t, uint64_t

from unimem.kv.cache.cache cimport KVCache
from unimem.kv.states cimport LayerStates

cdef class KVParts(KVCache):
    # The parts, those that keep all tokens first; and how many these are.
    cdef readonly tuple _parts
    cdef Py_ssize_t _n_plain
    cdef tuple _layers
    # The states, or None.
    cdef readonly LayerStates _states
    # Where the tokens end, and what is reserved, of a cache of states alone.
    cdef uint64_t _end
    # Of each layer, its part (of a state, None), its number there, and whether it has rows of its
    # own.
    cdef tuple _part_of, _index_of
    cdef bytes _owns
    # The layers that have rows, in the order in which `append_all` writes them.
    cdef list _written
    cdef uint32_t _n_layers
    cdef uint64_t _max_seq_len
    # Where the tokens begin; and the largest window, or 0.
    cdef readonly uint64_t _first
    cdef uint64_t _widest

    cdef int assemble(self, layers, list parts, max_seq_len, budget_bytes,
                      LayerStates states) except -1
    cdef KVCache part_of(self, uint32_t index)
    # `begin_change` of all of them; and whether they are open.
    cdef int begin(self) except -1
    cdef int check_open(self) except -1
    cdef int check_all_whole(self, str doing) except -1
    cdef bint is_torn(self) except -1
    cdef uint64_t end_of_all(self) noexcept
    cdef uint64_t first_of_all(self) noexcept
    cdef int set_first(self, uint64_t first, uint64_t held) except -1
    cdef int limit_ends(self) except -1
    cdef int keep(self, uint64_t n, uint64_t keep_first) except -1
    cdef int roll_back_to(self, uint64_t end) except -1
    cdef int checkpoint_if_due(self, uint64_t before) except -1
    cdef list ways_back(self)
    cdef object refuse_to_go_back(self, str doing, kind)
    # What layers, or their parts, say of themselves; 0 of a layer that keeps a state.
    cdef tuple of_each(self, str name)
    cdef tuple of_each_part(self, str name)
