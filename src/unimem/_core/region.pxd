# The owner of one mapping, for Cython callers.
from cpython.ref cimport PyObject

from unimem._core cimport native as um
from unimem._core.lock cimport Lock

# Called when a window over a region has gone. It may not raise.
cdef class Watcher:
    cdef object __weakref__
    cdef int window_ended(self) except -1

# Owns one mapping. Every user of the memory references the region, which unmaps it with the last
# reference: references are users. Arrays reference it through a window, which knows their part; all
# other references count as users of the whole.
cdef class Region:
    cdef um.um_block block
    # Held while the block grows or shrinks, and while windows, buffers or watchers come or go.
    cdef Lock lock
    # Whether a thread is locking or unlocking pages, without the interpreter's lock.
    cdef bint is_locking
    cdef readonly bint writable
    cdef readonly str name
    # The path of the file that it maps, if any.
    cdef str file
    # The owner of the memory, if that is not mapped here; kept, and nothing is unmapped.
    cdef object owner
    # The head of a doubly linked list of windows, and its length.
    cdef void *windows
    cdef Py_ssize_t n_windows
    # Buffers over the whole, such as memoryviews.
    cdef Py_ssize_t n_buffers
    # Weak references to objects that wait for windows to go, or None.
    cdef list watchers
    # The request of its block, if it has one.
    cdef dict requested
    cdef object __weakref__
    # Adds it to the list of mapped regions, and removes it. Neither runs Python code.
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    # Raises RuntimeError while another thread locks pages.
    cdef int check_steps(self) except -1
    # um_block_release; UM_E_BUSY if an array or a buffer lies over the range, or if there are more
    # than `n_known` references beside those of arrays (0: any number).
    cdef um.um_status release_unused(self, size_t first, size_t nbytes, Py_ssize_t n_known,
                                     size_t *out_nbytes, um.um_error *err) noexcept
    # The row of a report for its category, and its bytes of memory.
    cdef str row(self)
    cdef size_t memory_bytes(self) noexcept
    # An array over a part, which counts as a user of that part.
    cdef object array(self, size_t offset, object shape, object dtype)
    # Offset and size of each run of whole steps below `end` that is committed, or is not.
    cdef list runs(self, size_t end, bint committed)
    # How many arrays lie over a part.
    cdef Py_ssize_t n_windows_in(self, size_t first, size_t end)
    # How many arrays lie over bytes [first, end) of any of n lanes; lane i begins at byte
    # begin + i * stride.
    cdef Py_ssize_t n_windows_in_lanes(self, size_t begin, size_t stride, size_t n, size_t first,
                                       size_t end)
    cdef object watch(self, Watcher watcher)
    cdef object tell_watchers(self)
    cdef bint is_hugetlb(self)

# How many references a region has, without those that `regions` takes for a moment.
cdef Py_ssize_t n_references(PyObject *region) except -1

# A user of a part of a region: the base of an array.
cdef object new_window(Region region, size_t first, size_t nbytes)

# Forgets a region in forked children, which do not inherit its memory.
cdef object leave_out_of_child(Region region)
# Enters, by a weak reference, an object whose `_ledger_parts` names parts of regions, as tuples of
# the fields of a Part. Neither runs Python code.
cdef object enter_holder(object holder)
# Fills a native policy from a policy.NumaPolicy, or None.
cdef int set_numa(um.um_numa *out, object policy) except -1
