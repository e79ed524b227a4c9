# The states of the layers of a cache that keep no tokens, for mixed.pyx.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core.block cimport Block
from unimem._core.lock cimport Lock
from unimem._core.region cimport Region

cdef class LayerStates:
    cdef readonly tuple states
    cdef readonly str name
    cdef readonly Block block
    cdef readonly uint32_t batch
    # How many checkpoints there is room for, and after how many tokens one is taken; 0: never.
    cdef readonly uint32_t n_checkpoints
    cdef readonly uint64_t every
    cdef Region _region
    # Held while that is taken or changes.
    cdef Lock _guard
    # The bytes of all states: slot 0 of the block has the states, each other one a checkpoint.
    cdef readonly size_t state_bytes
    # Of each state, where it begins in a slot, and its dtype and dimensions, of all streams.
    cdef tuple _begins, _dtypes, _dims
    cdef dict _placement
    # (position, slot) of each checkpoint, the oldest first; and the slots without one.
    cdef list _held, _free
    # Whether a call copies without the interpreter's lock.
    cdef bint _busy
    cdef object __weakref__

    # The region, or None where it is closed; and the same, which raises ClosedError then.
    cdef Region held(self)
    cdef Region open_region(self)
    # open_region, and raises where another thread copies.
    cdef Region begin_change(self)
    cdef object view(self, Py_ssize_t number)
    # Copies a slot, or zeros it where there is none to copy.
    cdef int fill(self, Py_ssize_t to, Py_ssize_t source) except -1
    # Keeps the states as the checkpoint of a position; the oldest one makes room.
    cdef int take(self, uint64_t position) except -1
    # Whether there is a checkpoint, whose states `go_back` restores. Those behind it go.
    cdef Py_ssize_t find(self, uint64_t position) noexcept
    cdef int go_back(self, uint64_t position) except -1
    cdef int clear(self) except -1
    cdef LayerStates copy(self)
    cdef Py_ssize_t n_users(self)
    cdef object end(self)
