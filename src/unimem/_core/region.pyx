# cython: language_level=3, boundscheck=False, wraparound=False
"""Regions: each owns one mapping, and knows who uses which part of it."""
import os
import weakref

from unimem._core.status import row_name

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.ref cimport PyObject
from cpython.weakref cimport PyWeakref_NewRef
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memset

from unimem._core cimport native as um
from unimem._core.arrays cimport array_over, nbytes_of, shape_within

cdef extern from "Python.h":
    Py_ssize_t references "Py_REFCNT"(PyObject *thing)
    bint PyGC_Disable()
    bint PyGC_Enable()

cdef dict _NUMA_MODES = {"bind": um.UM_NUMA_BIND, "interleave": um.UM_NUMA_INTERLEAVE,
                         "weighted": um.UM_NUMA_WEIGHTED, "preferred": um.UM_NUMA_PREFERRED}
# What a fork leaves out of the child.
cdef object _left_out = weakref.WeakSet()
# The ledger: the newest of the regions that are mapped, and weak references, by their addresses, to
# those who know what parts of regions are for. Nothing of Python's runs while either changes; but
# weak references to a region are cleared while it is listed, when nobody may hold it any more.
cdef void *_newest = NULL
cdef dict _holders = {}
# The categories as rows of a report call them.
cdef list _ROWS = [row_name((<bytes>um.um_category_name(<um.um_category>i)).decode())
                   for i in range(um.UM_CAT_COUNT)]


def _forget_left_out():
    cdef Region region
    for region in list(_left_out):
        region.leave()
        um.um_block_forget(&region.block)


os.register_at_fork(after_in_child=_forget_left_out)


cdef object leave_out_of_child(Region region):
    _left_out.add(region)


cdef class Watcher:
    """Waits for windows to go."""

    cdef int window_ended(self) except -1:
        raise NotImplementedError


@cython.final
@cython.no_gc
cdef class Window:
    """A user of a part of a region: the base of an array, and so of all arrays made of that."""

    cdef Region region
    cdef size_t first, end
    cdef void *before
    cdef void *after

    def __dealloc__(self):
        if self.before != NULL:
            (<Window>self.before).after = self.after
        else:
            self.region.windows = self.after
        if self.after != NULL:
            (<Window>self.after).before = self.before
        self.region.n_windows -= 1
        if self.region.watchers is not None:
            self.region.tell_watchers()


cdef object new_window(Region region, size_t first, size_t nbytes):
    cdef Window window = Window.__new__(Window)
    window.region, window.first, window.end = region, first, first + nbytes
    window.after = region.windows
    if region.windows != NULL:
        (<Window>region.windows).before = <void *>window
    region.windows = <void *>window
    region.n_windows += 1
    return window


cdef class Region:
    """One mapping, unmapped with its last user."""

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.block.base, <Py_ssize_t>self.block.nbytes,
                          not self.writable, flags)
        self.n_buffers += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.n_buffers -= 1
        if self.watchers is not None:
            self.tell_watchers()

    def __dealloc__(self):
        self.leave()
        # A destructor never raises. What the kernel refuses to unmap stays in the ledger.
        cdef um.um_status _status = um.um_block_unmap(&self.block, NULL)

    cdef void enter(self) noexcept:
        global _newest
        self.older = _newest
        if _newest != NULL:
            (<Region>_newest).newer = <void *>self
        _newest = <void *>self
        self.is_entered = True

    cdef void leave(self) noexcept:
        global _newest
        if not self.is_entered:
            return
        if self.newer != NULL:
            (<Region>self.newer).older = self.older
        else:
            _newest = self.older
        if self.older != NULL:
            (<Region>self.older).newer = self.newer
        self.older = self.newer = NULL
        self.is_entered = False

    cdef str row(self):
        return _ROWS[<int>self.block.category]

    cdef size_t memory_bytes(self) noexcept:
        cdef um.um_block *b = &self.block
        return b.committed_nbytes if b.mirror_nbytes == 0 else b.committed_nbytes // 2

    cdef object array(self, size_t offset, object shape, object dtype):
        cdef size_t most = self.block.nbytes, size
        cdef tuple dims
        if shape is not None and not self.block.is_file:
            most = self.block.reserved_nbytes
        dims = shape_within(self.name, <uintptr_t>self.block.base, most, offset, shape, dtype)
        size = nbytes_of(dims, dtype.itemsize)
        if offset + size > self.block.nbytes and (
                size == 0 or not um.um_block_is_committed(&self.block, offset, size)):
            raise ValueError(
                f"{self.name}: shape {dims} of {dtype} at offset {offset} needs {size} bytes of "
                f"{most}, and not all of them are committed: commit() them")
        return array_over(<char *>self.block.base + offset, dims, dtype,
                          new_window(self, offset, size), self.writable)

    cdef list runs(self, size_t end, bint committed):
        cdef um.um_block *b = &self.block
        cdef size_t step = b.step_nbytes, at, n_steps, first
        cdef bint inside = False
        cdef list found = []
        if b.committed == NULL:
            at = b.committed_nbytes if not b.is_file else b.nbytes
            if committed:
                return [(0, min(at, end))] if min(at, end) else []
            return [(at, end - at)] if at < end else []
        n_steps = end // step
        first = 0
        for at in range(n_steps):
            if ((b.committed[at // 64] >> (at % 64) & 1) != 0) == committed:
                if not inside:
                    first, inside = at, True
            elif inside:
                found.append((first * step, (at - first) * step))
                inside = False
        if inside:
            found.append((first * step, (n_steps - first) * step))
        return found

    cdef Py_ssize_t n_windows_in(self, size_t first, size_t end):
        cdef Py_ssize_t n = 0
        cdef void *here = self.windows
        while here != NULL:
            n += (<Window>here).first < end and (<Window>here).end > first
            here = (<Window>here).after
        return n

    cdef Py_ssize_t n_windows_in_lanes(self, size_t begin, size_t stride, size_t n, size_t first,
                                       size_t end):
        cdef Py_ssize_t found = 0
        cdef void *here = self.windows
        cdef size_t window_first, window_end, lane
        while here != NULL:
            window_first, window_end = (<Window>here).first, (<Window>here).end
            lane = (window_first - begin) // stride if window_first > begin else 0
            while lane < n and begin + lane * stride + first < window_end:
                if begin + lane * stride + end > window_first:
                    found += 1
                    break
                lane += 1
            here = (<Window>here).after
        return found

    cdef object watch(self, Watcher watcher):
        # Made first: either may collect a window, which looks at the list.
        cdef list alone = [weakref.ref(watcher)]
        if self.watchers is None:
            self.watchers = alone
        else:
            self.watchers += alone

    cdef object tell_watchers(self):
        cdef list told = self.watchers
        cdef Watcher watcher
        # Who still has to wait says so again.
        self.watchers = None
        for reference in told:
            watcher = reference()
            if watcher is not None:
                watcher.window_ended()

    cdef bint is_hugetlb(self):
        return self.block.requested_pages in (um.UM_PAGES_2M, um.UM_PAGES_1G)


cdef void *alive_from(void *here) noexcept:
    while here != NULL and references(<PyObject *>here) == 0:
        here = (<Region>here).older
    return here


def regions():
    """What is mapped now, the newest first.

    Returns
    -------
    list of tuple
        Of each region the row of a report that its category is, its name, its address, the bytes of
        its memory and of its address space, what its block was requested to be, and the path of the
        file that it maps; the last two or None.
    """
    cdef list found = []
    cdef void *here = alive_from(_newest)
    cdef Region region
    cdef bint collects = PyGC_Disable()
    # Without collections no other thread runs in here: one that closes a region would take who
    # looks at it for a user.
    try:
        while here != NULL:
            region = <Region>here
            found.append((region.row(), region.name, <uintptr_t>region.block.base,
                          region.memory_bytes(), region.block.reserved_nbytes, region.requested,
                          region.file))
            here = alive_from(region.older)
        region = None
    finally:
        if collects:
            PyGC_Enable()
    return found


def _forget_holder(reference):
    _holders.pop(<uintptr_t><PyObject *>reference, None)


cdef object enter_holder(object holder):
    """Note, weakly, who tells what parts of regions are for.

    Its `_ledger_parts` does, as tuples of the fields of a `Part`, and runs nothing of Python's.
    """
    reference = PyWeakref_NewRef(holder, _forget_holder)
    _holders[<uintptr_t><PyObject *>reference] = reference


def told():
    """What those who were noted tell of their parts, the first of them first.

    Returns
    -------
    list of tuple
        The fields of a `Part` each.
    """
    cdef list found = []
    cdef bint collects = PyGC_Disable()  # as in `regions`
    try:
        for reference in list(_holders.values()):
            holder = reference()
            if holder is not None:
                found += holder._ledger_parts()
        holder = None
    finally:
        if collects:
            PyGC_Enable()
    return found


cdef int set_numa(um.um_numa *out, object policy) except -1:
    cdef unsigned n
    memset(out, 0, sizeof(um.um_numa))
    if policy is not None:
        out.mode = <um.um_numa_mode><int>_NUMA_MODES[policy.mode]
        for node in policy.nodes:
            n = node
            out.nodes[n // 64] |= (<uint64_t>1) << (n % 64)
    return 0
