# cython: language_level=3, boundscheck=False, wraparound=False
"""Regions: each owns one mapping and counts the users of its parts."""
import os
import weakref

from unimem._core.status import row_name

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.ref cimport PyObject
from cpython.weakref cimport PyWeakref_NewRef
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from unimem._core cimport native as um
from unimem._core.arrays cimport array_over, nbytes_of, shape_within
from unimem._core.lock cimport Lock, hold, let_go

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject *thing) nogil
    bint PyGC_Disable()
    bint PyGC_Enable()

cdef dict _NUMA_MODES = {"bind": um.UM_NUMA_BIND, "interleave": um.UM_NUMA_INTERLEAVE,
                         "weighted": um.UM_NUMA_WEIGHTED, "preferred": um.UM_NUMA_PREFERRED}
# Regions that forked children do not inherit.
cdef object _left_out = weakref.WeakSet()
# The ledger: weak references, by address, to the mapped regions, oldest first, and to holders that
# name parts of regions. No Python code runs while either changes. A listed region whose weak
# reference is cleared is about to go.
cdef dict _entered = {}
cdef dict _holders = {}
# Held while references are counted, and by `regions`, which adds some for a moment.
cdef object _counting = object()
# The names of the categories in reports.
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
    """An object that waits for windows to go."""

    cdef int window_ended(self) except -1:
        raise NotImplementedError


@cython.final
@cython.no_gc
cdef class Window:
    """A user of a part of a region: the base of an array and of all arrays derived from it."""

    cdef Region region
    cdef size_t first, end
    cdef void *before
    cdef void *after

    def __dealloc__(self):
        cdef Region region = self.region
        cdef bint is_awaited
        if region is None:
            return
        hold(&region.lock)
        if self.before != NULL:
            (<Window>self.before).after = self.after
        else:
            region.windows = self.after
        if self.after != NULL:
            (<Window>self.after).before = self.before
        region.n_windows -= 1
        is_awaited = region.watchers is not None
        let_go(&region.lock)
        if is_awaited:
            region.tell_watchers()


cdef void _add(Region region, Window window, size_t first, size_t nbytes) noexcept:
    """Link a window; the caller holds the region's lock."""
    window.region, window.first, window.end = region, first, first + nbytes
    window.after = region.windows
    if region.windows != NULL:
        (<Window>region.windows).before = <void *>window
    region.windows = <void *>window
    region.n_windows += 1


cdef object new_window(Region region, size_t first, size_t nbytes):
    cdef Window window = Window.__new__(Window)
    hold(&region.lock)
    _add(region, window, first, nbytes)
    let_go(&region.lock)
    return window


cdef struct Kept:
    um.um_block block
    Kept *after

# Mappings that the kernel refused to unmap, as at the limit of mappings. They stay in the ledger.
# The next destructor of a region tries again, since destructors cannot raise.
cdef Kept *_kept = NULL
cdef Lock _kept_lock


cdef void keep_mapped(um.um_block *block) noexcept:
    global _kept
    cdef Kept *kept = <Kept *>malloc(sizeof(Kept))
    if kept != NULL:
        kept.block = block[0]
        hold(&_kept_lock)
        kept.after, _kept = _kept, kept
        let_go(&_kept_lock)


cdef void unmap_kept() noexcept:
    global _kept
    cdef Kept *kept
    hold(&_kept_lock)
    while _kept != NULL and um.um_block_unmap(&_kept.block, NULL) == um.UM_OK:
        kept, _kept = _kept, _kept.after
        free(kept)
    let_go(&_kept_lock)


cdef Py_ssize_t _count_in(void *here, size_t first, size_t end) noexcept:
    """Count windows over a part, from `here` on; the caller holds the region's lock."""
    cdef Py_ssize_t n = 0
    while here != NULL:
        n += (<Window>here).first < end and (<Window>here).end > first
        here = (<Window>here).after
    return n


cdef class Region:
    """One mapping, unmapped with its last reference."""

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        # Counted first, so that nothing is given back from here on.
        hold(&self.lock)
        self.n_buffers += 1
        let_go(&self.lock)
        try:
            PyBuffer_FillInfo(buffer, self, self.block.base, <Py_ssize_t>self.block.nbytes,
                              not self.writable, flags)
        except BaseException:
            hold(&self.lock)
            self.n_buffers -= 1
            let_go(&self.lock)
            raise

    def __releasebuffer__(self, Py_buffer *buffer):
        hold(&self.lock)
        self.n_buffers -= 1
        let_go(&self.lock)
        if self.watchers is not None:
            self.tell_watchers()

    def __dealloc__(self):
        self.leave()
        unmap_kept()
        if um.um_block_unmap(&self.block, NULL) != um.UM_OK:
            keep_mapped(&self.block)

    cdef int enter(self) except -1:
        _entered[<uintptr_t><PyObject *>self] = PyWeakref_NewRef(self, None)
        return 0

    cdef void leave(self) noexcept:
        _entered.pop(<uintptr_t><PyObject *>self, None)

    cdef int check_steps(self) except -1:
        if self.is_locking:
            raise RuntimeError(f"Block '{self.name}': another thread locks or unlocks its pages: "
                               "one changes it at a time")
        return 0

    cdef um.um_status release_unused(self, size_t first, size_t nbytes, Py_ssize_t n_known,
                                     size_t *out_nbytes, um.um_error *err) noexcept:
        cdef um.um_status status = um.UM_E_BUSY
        cdef size_t step = self.block.step_nbytes
        cdef size_t begin = (first + step - 1) // step * step, end = (first + nbytes) // step * step
        cdef bint is_used
        hold(&self.lock)
        is_used = self.n_buffers > 0 or _count_in(self.windows, begin, end) > 0 or (
            n_known > 0 and Py_REFCNT(<PyObject *>self) - self.n_windows > n_known)
        if begin >= end or not is_used:
            status = um.um_block_release(&self.block, first, nbytes, out_nbytes, err)
        let_go(&self.lock)
        return status

    cdef str row(self):
        return _ROWS[<int>self.block.category]

    cdef size_t memory_bytes(self) noexcept:
        cdef um.um_block *b = &self.block
        return b.committed_nbytes if b.mirror_nbytes == 0 else b.committed_nbytes // 2

    cdef object array(self, size_t offset, object shape, object dtype):
        cdef size_t most = self.block.nbytes, size
        cdef tuple dims
        cdef bint is_there
        cdef Window window = Window.__new__(Window)
        if shape is not None and not self.block.is_file:
            most = self.block.reserved_nbytes
        dims = shape_within(self.name, <uintptr_t>self.block.base, most, offset, shape, dtype)
        size = nbytes_of(dims, dtype.itemsize)
        hold(&self.lock)
        is_there = offset + size <= self.block.nbytes or (
            size > 0 and um.um_block_is_committed(&self.block, offset, size) != 0)
        if is_there:
            _add(self, window, offset, size)
        let_go(&self.lock)
        if not is_there:
            raise ValueError(
                f"{self.name}: shape {dims} of {dtype} at offset {offset} needs {size} bytes of "
                f"{most}, and not all of them are committed: commit() them")
        return array_over(<char *>self.block.base + offset, dims, dtype, window, self.writable)

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
        cdef Py_ssize_t n
        hold(&self.lock)
        n = _count_in(self.windows, first, end)
        let_go(&self.lock)
        return n

    cdef Py_ssize_t n_windows_in_lanes(self, size_t begin, size_t stride, size_t n, size_t first,
                                       size_t end):
        cdef Py_ssize_t found = 0
        cdef void *here
        cdef size_t window_first, window_end, lane
        hold(&self.lock)
        here = self.windows
        while here != NULL:
            window_first, window_end = (<Window>here).first, (<Window>here).end
            lane = (window_first - begin) // stride if window_first > begin else 0
            while lane < n and begin + lane * stride + first < window_end:
                if begin + lane * stride + end > window_first:
                    found += 1
                    break
                lane += 1
            here = (<Window>here).after
        let_go(&self.lock)
        return found

    cdef object watch(self, Watcher watcher):
        # Made before the lock is held: it may collect a window, which looks at the list.
        cdef list alone = [weakref.ref(watcher)]
        hold(&self.lock)
        if self.watchers is None:
            self.watchers = alone
        else:
            self.watchers += alone
        let_go(&self.lock)

    cdef object tell_watchers(self):
        cdef list told
        cdef Watcher watcher
        # Watchers that still have to wait register again.
        hold(&self.lock)
        told = self.watchers
        self.watchers = None
        let_go(&self.lock)
        if told is None:
            return
        for reference in told:
            watcher = reference()
            if watcher is not None:
                watcher.window_ended()

    cdef bint is_hugetlb(self):
        return self.block.requested_pages in (um.UM_PAGES_2M, um.UM_PAGES_1G)


cdef Py_ssize_t n_references(PyObject *region) except -1:
    with cython.critical_section(_counting):
        return Py_REFCNT(region)


def regions() -> list[tuple[str, str, int, int, int, dict[str, Any] | None, str | None]]:
    """Return all mapped regions, newest first.

    Returns
    -------
    list of tuple
        The row of a report for its category, name, address, bytes of memory and of address space,
        its block's request or None, and the path of the file that it maps or None.
    """
    cdef list found = []
    cdef Region region
    cdef bint collects = PyGC_Disable()
    # Without garbage collection, and in this section, no other code runs: a thread that closes a
    # region would take the references here for users.
    try:
        with cython.critical_section(_counting):
            for reference in reversed(list(_entered.values())):
                region = reference()
                if region is not None:
                    found.append((region.row(), region.name, <uintptr_t>region.block.base,
                                  region.memory_bytes(), region.block.reserved_nbytes,
                                  region.requested, region.file))
            region = None
    finally:
        if collects:
            PyGC_Enable()
    return found


def _forget_holder(reference):
    _holders.pop(<uintptr_t><PyObject *>reference, None)


cdef object enter_holder(object holder):
    """Note, by a weak reference, an object that names parts of regions.

    Its `_ledger_parts` returns them, as tuples of the fields of a `Part`, and runs no Python code.
    """
    reference = PyWeakref_NewRef(holder, _forget_holder)
    _holders[<uintptr_t><PyObject *>reference] = reference


def holder_parts() -> list[tuple[str, int, int, int, int]]:
    """Return the fields of each `Part` that holders name, in the order they were entered."""
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
