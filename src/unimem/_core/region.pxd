# The owner of one mapping, for Cython callers.
from cpython.ref cimport PyObject

from unimem._core cimport native as um
from unimem._core.lock cimport Lock

# Told that a window over a region has gone. It may not raise.
cdef class Watcher:
    cdef object __weakref__
    cdef int window_ended(self) except -1

# Owns one mapping. Whoever uses the memory holds the region, so that it is unmapped with the last
# of them; the number of references to it is the number of its users. Arrays hold it through a
# window, which knows their part; everybody else counts as a user of all of it.
cdef class Region:
    cdef um.um_block block
    # Held while the block grows or shrinks, and while windows, buffers or watchers come or go.
    cdef Lock lock
    # Whether a thread is locking or unlocking pages, without the interpreter's lock.
    cdef bint is_locking
    cdef readonly bint writable
    cdef readonly str name
    # The path of the file that it is mapped from, all or a part of it; None: of none that has one.
    cdef str file
    # The first of the windows, a list linked both ways, and their number.
    cdef void *windows
    cdef Py_ssize_t n_windows
    # Buffers, such as memoryviews, which are of all of it.
    cdef Py_ssize_t n_buffers
    # Weak references to those who wait for windows to go; None while nobody does.
    cdef list watchers
    # What its block was asked to be; None: it is no block's.
    cdef dict requested
    cdef object __weakref__
    # Enters it in the list of all regions that are mapped, and takes it out. Nothing of Python's
    # runs.
    cdef int enter(self) except -1
    cdef void leave(self) noexcept
    # Raises RuntimeError while another thread locks pages.
    cdef int check_steps(self) except -1
    # um_block_release; UM_E_BUSY where an array or a buffer lies over the range, or where there are
    # references beside those of arrays and so many that are known (0: any).
    cdef um.um_status release_unused(self, size_t first, size_t nbytes, Py_ssize_t n_known,
                                     size_t *out_nbytes, um.um_error *err) noexcept
    # The row of a report that its category is, and the bytes of memory that it is made of.
    cdef str row(self)
    cdef size_t memory_bytes(self) noexcept
    # An array over a part of it, which counts as a user of that part.
    cdef object array(self, size_t offset, object shape, object dtype)
    # Offset and size of each run below `end`, in whole steps, that is committed, or is not.
    cdef list runs(self, size_t end, bint committed)
    # How many arrays lie over a part.
    cdef Py_ssize_t n_windows_in(self, size_t first, size_t end)
    # How many arrays lie over bytes [first, end) of any of n lanes, the ith of which begins at
    # byte begin + i * stride.
    cdef Py_ssize_t n_windows_in_lanes(self, size_t begin, size_t stride, size_t n, size_t first,
                                       size_t end)
    cdef object watch(self, Watcher watcher)
    cdef object tell_watchers(self)
    cdef bint is_hugetlb(self)

# How many references to a region there are. Who has one more for a moment does not count.
cdef Py_ssize_t n_references(PyObject *region) except -1

# A user of a part of a region, to be the base of an array.
cdef object new_window(Region region, size_t first, size_t nbytes)

# A fork leaves this memory out of the child: there it is forgotten.
cdef object leave_out_of_child(Region region)
# Notes, weakly, who tells what parts of regions are for: its `_ledger_parts` does, in tuples of a
# Part's fields. Nothing of Python's runs, there or here.
cdef object enter_holder(object holder)
# Fills a native policy from a policy.NumaPolicy, or None.
cdef int set_numa(um.um_numa *out, object policy) except -1
