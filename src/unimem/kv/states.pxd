# The states of layers that keep no tokens, for layered.pyx.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core.block cimport Block
from unimem._core.lock cimport Lock
from unimem._core.region cimport Region

cdef class LayerStates:
    cdef readonly tuple states
    cdef readonly str name
    cdef readonly Block block
    cdef readonly uint32_t batch
    # The most checkpoints, and the number of tokens after which one is taken; 0: never.
    cdef readonly uint32_t n_checkpoints
    cdef readonly uint64_t every
    cdef Region _region
    # Held while `_region` is taken or changed.
    cdef Lock _guard
    # The bytes of a slot: slot 0 of the block has the states, each other slot a checkpoint.
    cdef readonly size_t state_bytes
    # Where each state begins in a slot, its dtype, and its dimensions with all streams.
    cdef tuple _begins, _dtypes, _dims
    cdef dict _placement
    # (position, slot) of each checkpoint, the oldest first; and the free slots.
    cdef list _held, _free
    # Whether a call copies without the interpreter's lock.
    cdef bint _busy
    cdef object __weakref__

    # The region, or None if closed; open_region raises ClosedError instead.
    cdef Region held(self)
    cdef Region open_region(self)
    # As open_region; raises RuntimeError while another thread copies.
    cdef Region begin_change(self)
    cdef object view(self, Py_ssize_t number)
    # Copies a slot, or zeros it if `source` is negative.
    cdef int fill(self, Py_ssize_t to, Py_ssize_t source) except -1
    # Keeps the states as the checkpoint of a position, if need be in place of the oldest one.
    cdef int take(self, uint64_t position) except -1
    # The index of a checkpoint, or -1; `go_back` restores it, and drops those behind it.
    cdef Py_ssize_t find(self, uint64_t position) noexcept
    cdef int go_back(self, uint64_t position) except -1
    cdef int clear(self) except -1
    cdef LayerStates copy(self)
    cdef Py_ssize_t n_users(self)
    cdef object end(self)
