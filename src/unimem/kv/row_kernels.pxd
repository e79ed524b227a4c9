# The kernels of ``rows.cu`` for one type of rows, for Cython callers.
from libc.stdint cimport int64_t, uintptr_t

# The driver's own call that launches a kernel, cuLaunchKernel: the function, the sizes of the grid
# and of a block, shared memory, the stream, where each argument is, and nothing.
ctypedef int (*Launch)(uintptr_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, uintptr_t, void **, void **) noexcept nogil

# The arguments of a kernel that appends, as ``rows.cu`` has them.
cdef struct Side:
    uintptr_t given, out
    int64_t heads, dim
    # The bytes from one layer, stream, head, token and value to the next.
    int64_t[5] strides
    int64_t layer_stride, lane_stride, row_bytes

cdef struct Append:
    Side[2] sides  # K and V
    int64_t layers, streams, n, row, n_rows
    uintptr_t row_address

cdef class RowKernels:
    cdef dict _append, _read
    cdef unsigned _block_x, _block_y
    # NULL: the kernels' own calls launch.
    cdef Launch _launch
    cdef int queue_append(self, str given, Append *a, uintptr_t stream) except -1
    cdef int queue(self, tuple kernel, unsigned[3] grid, unsigned[2] block, void *arguments,
                   size_t nbytes, uintptr_t stream) except -1
