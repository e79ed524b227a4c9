# KV caches in memory that the CPU cannot touch.
cimport numpy as cnp
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem.kv.inputs cimport Bytes, Given
from unimem.kv.row_kernels cimport RowKernels
from unimem.kv.cache.rows cimport KVRows
from unimem._core.region cimport Region
from unimem._core.tape cimport DeviceTape

# Tokens on the device, of any library: what keeps their memory, where it is, and its figures.
cdef class DeviceTokens:
    cdef object owner
    cdef cnp.dtype dtype
    cdef Bytes bytes
    cdef int n_dims
    # At most five dimensions; strides are in bytes.
    cdef cnp.npy_intp[5] sizes
    cdef cnp.npy_intp[5] steps
    # The strides of these axes; -1 is none.
    cdef void find_along(self, const int *axes, int64_t[5] out) noexcept

# Where tokens go: their number, the first layer and the number of layers, the row of the first, and
# the address of an int32 that is that row, or 0.
cdef struct Span:
    uint64_t n
    uint32_t layer, n_layers
    uint64_t row
    uintptr_t row_address

# The driver's own call that queues a copy: to, from, bytes, stream.
ctypedef int (*Copy)(uintptr_t, uintptr_t, size_t, uintptr_t) noexcept nogil

cdef class KVDevice(KVRows):
    cdef um.um_kv_spec _spec
    cdef um.um_kv_storage _storage
    # The user's tape, or one of the cache's own.
    cdef DeviceTape _tape
    cdef bint _owns_tape
    # A region without memory: its windows are the views, at offsets in the storage.
    cdef Region _views
    # Tensors of all rows of K and V, by layer, where views are slices of these.
    cdef readonly dict _whole
    cdef readonly object _driver
    # The kernels for its rows, and those that copy q8_0 blocks, or None.
    cdef public RowKernels _kernels, _blocks
    # Its number, and DLPack's of its kind.
    cdef int _device, _device_type
    # The stream on which rows move: that of an append that makes room, or None: the current one.
    cdef object _stream
    # While tokens move: the memory, which thus stays; the error to raise at the end; and whether
    # bytes have moved.
    cdef object _moving, _held_back
    cdef bint _has_moved
    # Whether a move ended half way, because the device failed.
    cdef bint _is_torn
    # The type of arrays that the driver takes as they are.
    cdef object _array_type

    # Finds k and v, and the number of the stream: by default the current one of torch, if both are
    # its tensors, else of CuPy.
    cdef tuple find_pair(self, object k, object v, object stream)
    # Tokens of a library that has DLPack's C functions, such as torch; None: it has not, or they
    # are not on this device.
    cdef DeviceTokens exchanged(self, object x, void **queue, str what)
    cdef DeviceTokens find(self, object x, str what)
    cdef object number_of_stream(self, object stream)
    cdef int check_given(self, Given *out, DeviceTokens k, DeviceTokens v, str doing) except -1
    # Raises for tokens in this cache.
    cdef int check_apart(self, DeviceTokens given, str doing) except -1
    # NULL: the driver's method does it.
    cdef Copy _copy
    # Where a row of K or V of a layer's first stream begins.
    cdef uintptr_t row_address(self, uint32_t layer, bint v, uint64_t row) noexcept
    # Queues a copy.
    cdef int copy_rows(self, uintptr_t to, uintptr_t from_, size_t nbytes, object stream) except -1
    # Queues a kernel.
    cdef int write(self, DeviceTokens k, DeviceTokens v, um.um_dtype given, const int *axes,
                   const Span *span, uintptr_t stream) except -1
    cdef int find_rows_on(self, object stream, um.um_error *err, uint64_t n) except -1
    cdef int move_bytes(self, uintptr_t to, uintptr_t from_, size_t nbytes) except -1
    cdef int move_piece(self, uintptr_t to, uintptr_t from_, size_t nbytes) except -1
