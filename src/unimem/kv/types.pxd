# The table of KV types, for Cython callers.
from unimem._core cimport native as um

cdef enum:
    BLOCK_VALUES = 32  # of each type from UM_Q8_0 on

cpdef str kv_type(object dtype, str what=*)
cpdef tuple kv_pair(object dtype, str what=*)
cpdef str kv_name(str k_dtype, str v_dtype)
# The types of K and of V that a cache was asked for: `dtype`, unless one of them is named.
cdef tuple kv_types(object dtype, object k_dtype, object v_dtype)
cpdef int block_values(str name) except -1
cpdef int block_bytes(str name) except -1
# Raises ValueError for heads that are not whole blocks.
cdef int check_head_dim(str name, object head_dim) except -1
# The core's number of a type; and the NumPy dtype of its elements or blocks.
cdef um.um_dtype number_of_type(str name) except *
cdef object numpy_type(um.um_dtype number)
# `round_up` of sizes.
cdef size_t rounded(size_t n, size_t unit) noexcept nogil
