# Scratchpads for Cython callers: `from unimem.kv.scratchpad cimport Scratchpad`.
cimport numpy as cnp
from libc.stdint cimport int32_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.region cimport Region
from unimem._core.tape cimport Bump

# Rows of one width that are appended, and cropped at the end; a subclass knows the memory.
cdef class _Rows:
    cdef readonly Bump tape
    cdef readonly str name
    cdef readonly Py_ssize_t capacity
    cdef readonly Py_ssize_t dim
    cdef readonly object dtype
    cdef Py_ssize_t n_tokens
    # The most tokens when some were last cropped.
    cdef Py_ssize_t most_tokens
    cdef size_t row_bytes
    # A type of the core, or F64.
    cdef int type
    cdef bint _begun
    cdef bint _owns_tape
    # Set last: a pad that was not made completely is closed.
    cdef bint _open
    # Whether a thread writes rows, with the interpreter's lock released.
    cdef bint _appending
    cdef object __weakref__
    # Checks the arguments that all constructors have, and returns the bytes of all rows; `what` is
    # their name of max_tokens.
    cdef size_t prepare(self, object max_tokens, str what, object dim, object dtype,
                        str name) except 0
    cdef object check_open(self)
    cdef object check_idle(self)
    cdef object check_shape(self, object shape, bint batch)
    # Raises unless n tokens of the type of the array `rows` can be appended now.
    cdef int check_tokens(self, int given, object rows, Py_ssize_t n) except -1
    cdef object fail(self, um.um_error *err)
    # Gives back blocks that the tokens do not need.
    cdef um.um_status give_back(self, um.um_error *err)

# Rows in main memory.
cdef class _HostRows(_Rows):
    # Raises ClosedError when the tape is closed.
    cdef Region region(self)
    # The address and bytes of all rows, and the bytes that n tokens use.
    cdef uintptr_t address(self) noexcept
    cdef size_t nbytes(self) noexcept
    cdef size_t bytes_of(self, Py_ssize_t n) noexcept
    cdef object append_rows(self, cnp.ndarray rows, Py_ssize_t n)
    # Writes n rows behind the last one; there is room.
    cdef um.um_status write(self, const char *rows, int given, Py_ssize_t n, um.um_error *err)

cdef class Scratchpad(_HostRows):
    # The first row; the other rows follow without a gap.
    cdef char *base

# Rows in memory of a device, whose addresses are never touched here.
cdef class DeviceScratchpad(_Rows):
    cdef object _driver
    cdef object _kernels
    # The first row; the other rows follow without a gap.
    cdef uintptr_t base
    cdef object append_rows(self, object rows, Py_ssize_t n, object stream)
    # Queues the copy of n rows, or their conversion, to an address.
    cdef object queue(self, uintptr_t out, object rows, int given, Py_ssize_t n, object stream)

cdef class PagedScratchpad(_HostRows):
    cdef um.um_grid grid
    cdef readonly Py_ssize_t block_tokens
    # The grid cell of each block in use; the table lies on the tape, too.
    cdef int32_t *table
    cdef Py_ssize_t n_in_use
    cdef Py_ssize_t blocks_for(self, Py_ssize_t n)
    # The address of a token.
    cdef char *row(self, Py_ssize_t i) noexcept nogil
    cdef um.um_status take_blocks(self, Py_ssize_t n, um.um_error *err)
    cdef um.um_status copy_in(self, const char *rows, int given, Py_ssize_t n,
                              um.um_error *err) noexcept nogil
    # Copies the first n tokens.
    cdef void copy_out(self, char *out, Py_ssize_t n) noexcept nogil
