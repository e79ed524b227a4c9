# DLPack's structures, which are those of
# https://github.com/dmlc/dlpack/blob/v1.3/include/dlpack/dlpack.h.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    DLPACK_MAJOR = 1
    # Of a managed tensor's flags: nobody may write to it.
    DLPACK_READ_ONLY = 1

cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t n_dims
    # The type of the elements: what kind of number, its bits, and how many are one element.
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    # In elements; NULL: those of a C-contiguous array.
    int64_t *strides
    uint64_t byte_offset

# What a capsule holds whose consumer knows no version.
cdef struct DLManagedTensor:
    DLTensor tensor
    void *context
    void (*deleter)(DLManagedTensor *) noexcept

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void *context
    void (*deleter)(DLManagedTensorVersioned *) noexcept
    uint64_t flags
    DLTensor tensor

# Functions of a type, for objects of that type: they say where the memory is without a capsule.
cdef struct DLPackExchangeAPI:
    uint32_t major
    uint32_t minor
    # Of an older major version.
    DLPackExchangeAPI *previous
    void *allocator
    void *managed_tensor_from_object
    void *managed_tensor_to_object
    # What it says holds as long as the object; -1: an exception is set. NULL: there is no such.
    int (*tensor_from_object)(void *, DLTensor *) noexcept
    # Of a device's type and number; NULL: there is no such.
    int (*current_stream)(int32_t, int32_t, void **) noexcept

# DLPack's number of a kind of numbers that NumPy has not, by ml_dtypes' name of the dtype.
cdef dict CODES
# The class of arrays whose dtype NumPy does not export.
cdef object EXPORTED
