# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""States, which layers keep instead of tokens, and checkpoints of them.

      block  | slot 0: state | state | ... | slot 1: a checkpoint of all | slot 2 | ...
"""
import math
import os
import weakref

import numpy as np

from unimem.errors import ClosedError

cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from unimem._core.arrays cimport dtype_of, new_array, size_of, vector_over
from unimem._core.block cimport Block
from unimem._core.lock cimport hold, let_go
from unimem._core.region cimport Region, enter_holder, new_window, n_references
from unimem.kv.types cimport number_of_type, numpy_type, rounded

#: from unimem.kv.layer_specs import LayerState
#: from unimem.system.placement import PlacementOptions

cnp.import_array()

cdef enum:
    ALIGN = 64
# More address space than a process has.
cdef object MOST_BYTES = 1 << 47
cdef object MOST_CHECKPOINTS = 2**31

# A process may fork while another thread copies, which never ends in the child.
cdef object _made = weakref.WeakSet()


def _enter_child():
    cdef LayerStates states
    for states in list(_made):
        states._busy = False


os.register_at_fork(after_in_child=_enter_child)


cdef class LayerStates:
    """The states of all layers that keep one, in one block, with room for copies of all of them.

    Parameters
    ----------
    states : tuple of LayerState
        The state of each of these layers, for one stream.
    batch : int
        Streams.
    checkpoints : int
        The most copies of all states to keep.
    every : int or None
        The number of tokens after which to take one.
    name : str
        The name of the cache.
    placement : dict
        As for `Block`.

    Raises
    ------
    ValueError, TypeError
        A number out of range.
    MemoryError, PlacementError
        As `Block`.
    """
    #: states: tuple[LayerState, ...]

    def __init__(self, tuple states: tuple[LayerState, ...], batch: int, checkpoints: int,
                 every: int | None, str name,
                 dict placement: PlacementOptions | dict[str, Any]) -> None:
        cdef size_t begin = 0
        if size_of(batch, "batch", 1) >= 2**32:
            raise ValueError(f"batch: expected at most 2**32 - 1, got {batch}")
        if size_of(checkpoints, "checkpoints") >= MOST_CHECKPOINTS:
            raise ValueError(f"checkpoints: expected less than 2**31, got {checkpoints}")
        total = self.storage_bytes(states, batch, checkpoints)
        self.states, self.batch, self.name = states, batch, name
        self.n_checkpoints = checkpoints
        self.every = 0 if every is None else size_of(every, "checkpoint_every", 1)
        self._placement = placement
        self._dtypes = tuple([numpy_type(number_of_type(state.dtype)) for state in states])
        self._dims = tuple([(batch, *state.shape) for state in states])
        begins = []
        for dims, dtype in zip(self._dims, self._dtypes, strict=True):
            begins.append(begin)
            begin += rounded(math.prod(dims) * dtype.itemsize, ALIGN)
        self._begins, self.state_bytes = tuple(begins), begin
        self._held, self._free = [], list(range(self.n_checkpoints, 0, -1))
        self.block = Block(total, name=name, category="kv", **placement)
        self.block._is_part = True
        self._region = self.block.region()
        _made.add(self)
        enter_holder(self)

    @staticmethod
    def storage_bytes(states: Sequence[LayerState], batch: int, checkpoints: int) -> int:
        """Return the bytes of states, each rounded up to 64, and of their checkpoints."""
        item = {state.dtype: numpy_type(number_of_type(state.dtype)).itemsize for state in states}
        nbytes = [math.prod(state.shape) * batch * item[state.dtype] for state in states]
        total = sum([-(-n // ALIGN) * ALIGN for n in nbytes]) * (1 + checkpoints)
        if total >= MOST_BYTES:
            raise ValueError(f"KVCache: states of {sum(nbytes)} bytes and {checkpoints} "
                             "checkpoints of them are too large: expected below 2**47 bytes, which "
                             "addresses reach: take fewer checkpoints, or a smaller batch")
        return total

    # ---- the memory ----

    cdef Region held(self):
        cdef Region found
        hold(&self._guard)
        found = self._region
        let_go(&self._guard)
        return found

    cdef Region open_region(self):
        cdef Region found = self.held()
        if found is None:
            raise ClosedError(f"KVCache '{self.name}' is closed")
        return found

    cdef Region begin_change(self):
        cdef Region region = self.open_region()
        if self._busy:
            raise RuntimeError(f"KVCache '{self.name}': another thread copies its states: one "
                               "writes at a time")
        return region

    @cython.critical_section
    def _ledger_parts(self):
        cdef Region region = self.held()
        if region is None:
            return ()
        return (("kv", <uintptr_t>region.block.base, region.memory_bytes(), self.state_bytes,
                 self.state_bytes),)

    cdef object view(self, Py_ssize_t number):
        cdef Region region = self.open_region()
        cdef tuple dims = self._dims[number]
        cdef size_t begin = self._begins[number]
        cdef object dtype = self._dtypes[number]
        cdef cnp.npy_intp[32] sizes
        cdef int axis
        for axis in range(len(dims)):
            sizes[axis] = dims[axis]
        window = new_window(region, begin, math.prod(dims) * dtype.itemsize)
        return new_array(<char *>region.block.base + begin, len(dims), sizes, NULL, dtype, window,
                         True)

    @cython.critical_section
    def _slot(self, Py_ssize_t slot) -> NDArray[np.uint8]:
        """View the bytes of all states (slot 0), or of a checkpoint."""
        cdef Region region = self.open_region()
        cdef size_t begin = slot * self.state_bytes
        return vector_over(<char *>region.block.base + begin, self.state_bytes, dtype_of("uint8"),
                           new_window(region, begin, self.state_bytes), True)

    cdef int fill(self, Py_ssize_t to, Py_ssize_t source) except -1:
        # No other thread can close the cache meanwhile.
        cdef Region held = self.begin_change()
        cdef char *base = <char *>held.block.base
        cdef size_t nbytes = self.state_bytes
        self._busy = True
        with nogil:
            if source < 0:
                memset(base + to * nbytes, 0, nbytes)
            else:
                memcpy(base + to * nbytes, base + source * nbytes, nbytes)
        self._busy = False
        return 0

    # ---- checkpoints ----

    @property
    @cython.critical_section
    def positions(self) -> list[int]:
        """The positions of the checkpoints, the oldest first."""
        return [position for position, _ in self._held]

    @cython.critical_section
    def _slots(self) -> list[int]:
        """Return the slots in use: that of the states, and those of the checkpoints."""
        return [0] + [slot for _, slot in self._held]

    cdef int take(self, uint64_t position) except -1:
        cdef Py_ssize_t there = self.find(position), slot
        self.begin_change()
        if there >= 0:
            slot = self._held.pop(there)[1]
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._held.pop(0)[1]
        self.fill(slot, 0)
        self._held.append((position, slot))
        return 0

    cdef Py_ssize_t find(self, uint64_t position) noexcept:
        cdef Py_ssize_t i
        for i in range(len(self._held)):
            if self._held[i][0] == position:
                return i
        return -1

    cdef int go_back(self, uint64_t position) except -1:
        cdef Py_ssize_t there = self.find(position)
        self.fill(0, self._held[there][1])
        while len(self._held) > there + 1:
            self._free.append(self._held.pop()[1])
        return 0

    cdef int clear(self) except -1:
        self.fill(0, -1)
        while self._held:
            self._free.append(self._held.pop()[1])
        return 0

    @cython.critical_section
    def _adopt(self, positions: Sequence[int]) -> None:
        """Declare that slots 1 and on hold checkpoints of these positions, in their order."""
        n = len(positions)
        self._held = list(zip(positions, range(1, n + 1), strict=True))
        self._free = list(range(self.n_checkpoints, n, -1))

    cdef LayerStates copy(self):
        cdef LayerStates other = LayerStates(self.states, self.batch, self.n_checkpoints,
                                             self.every or None, self.name, self._placement)
        try:
            for to, slot in enumerate(self._slots()):
                np.copyto(other._slot(to), self._slot(slot))
            other._adopt(self.positions)
        except BaseException:
            other.end()
            raise
        return other

    # ---- figures and the end ----

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory that back the states and the checkpoints."""
        return self.state_bytes * (1 + self.n_checkpoints)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are in RAM, in whole pages (Pss)."""
        self.open_region()
        return self.block.verify().pss_bytes

    @property
    def closed(self) -> bool:
        """Whether it was closed, or never made."""
        return self._region is None

    def warm(self, threads: int | None = None) -> None:
        """Bring all of it into RAM, as `Block.warm` does."""
        self.open_region()
        self.block.warm(threads)

    cdef Py_ssize_t n_users(self):
        # The block and this object hold the region; other references are views.
        return 0 if self._region is None else n_references(<PyObject *>self._region) - 2

    @cython.critical_section
    def __exit__(self, *exc_info: object) -> None:
        self.end()

    cdef object end(self):
        cdef Region last
        hold(&self._guard)
        last = self._region
        self._region = None
        let_go(&self._guard)
        last = None
        if self.block is not None:
            self.block.__exit__()
