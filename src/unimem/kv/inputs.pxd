# Checks of arrays that are given to KV caches, for Cython callers.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um

# Tokens to be appended.
cdef struct Given:
    um.um_dtype type
    um.um_kv_order order
    uint64_t n

# The memory of an array: the address of its first element, and the range of its bytes, which is
# empty if the array is.
cdef struct Bytes:
    uintptr_t at, low, end
    # Whether it is C-contiguous.
    bint in_order

# The core's type of a dtype whose elements go to memory of type `stored`; TypeError if the byte
# order is not native. `what` names the argument in messages, here and below.
cdef int number_of(cnp.dtype dtype, um.um_dtype stored, str what) except -1
# A NumPy array of an array of any library: over its memory if that is C-contiguous, else a copy.
cdef cnp.ndarray contiguous(object a, str what)
# Check K and V of an append to one layer, [n, heads, head_dim] for one stream or
# [batch, heads, n, head_dim]; or of one token of all layers, [n_layers, heads, head_dim].
cdef int check_tokens(Given *out, cnp.ndarray k, cnp.ndarray v, um.um_dtype stored,
                      uint32_t batch, uint32_t heads, uint32_t head_dim, uint32_t v_head_dim,
                      str doing) except -1
cdef int check_token(Given *out, cnp.ndarray k, cnp.ndarray v, um.um_dtype stored,
                     uint32_t n_layers, uint32_t heads, uint32_t head_dim, uint32_t v_head_dim,
                     str doing) except -1
# The steps of these for arrays of other libraries: check the types first; then return whether the
# shapes of K and V fit tokens of one layer, and note their order and number; raise for shapes that
# do not fit.
cdef int check_types(Given *out, cnp.dtype k, cnp.dtype v, um.um_dtype stored,
                     str doing) except -1
cdef bint fits_tokens(Given *out, int n_dims, const cnp.npy_intp *k, int v_n_dims,
                      const cnp.npy_intp *v, uint32_t batch, uint32_t heads, uint32_t head_dim,
                      uint32_t v_head_dim)
cdef object refuse_tokens(Given *out, uint32_t batch, uint32_t heads, uint32_t head_dim, str doing,
                          k_shape, v_shape, uint32_t v_head_dim)
cdef int check_token_shapes(Given *out, tuple k, tuple v, uint32_t n_layers, uint32_t heads,
                            uint32_t head_dim, uint32_t v_head_dim, str doing) except -1
# The number of elements or blocks of a head.
cdef uint32_t units(um.um_dtype type, uint32_t head_dim)
# An array's real shape, even if a subclass overrides it.
cdef tuple shape_of(cnp.ndarray a)
# The memory of an array of any library with n dimensions; strides are in bytes.
cdef void find_bytes(Bytes *out, uintptr_t at, int n, const cnp.npy_intp *sizes,
                     const cnp.npy_intp *strides, size_t item) noexcept
# The two arrays of an argument `out`, of any library, and NumPy arrays over their memory.
cdef tuple pair_of(object out)
# An array on the device of a driver; TypeError, which names the argument, for anything else.
cdef object on_device(object driver, object x, str what)
# Checks a layer's number.
cdef uint32_t layer_number(object layer, uint32_t n_layers, str what) except? 0xffffffff
# The core's type of an array `out`, [heads, n, head_dim] with the tokens of a head contiguous, that
# receives K or V of n tokens; ValueError if it does not fit.
cdef um.um_dtype out_type(object out, um.um_dtype stored, uint32_t heads, uint64_t n,
                          uint32_t head_dim) except *
