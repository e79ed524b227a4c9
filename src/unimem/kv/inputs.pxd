# Checks of arrays that are given to KV caches, for Cython callers.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um

# Tokens to be appended.
cdef struct Given:
    um.um_dtype type
    um.um_kv_order order
    uint64_t n

# The memory of an array: where its first element is, and its bytes from the lowest to the highest
# address, which are none where it is empty.
cdef struct Bytes:
    uintptr_t at, low, end
    # Whether it is C-contiguous.
    bint in_order

# The native type of elements of a dtype, which are to go to memory of type `stored`. Of the other
# byte order there is none. `what` is the argument that has it, for messages, here and below.
cdef int number_of(cnp.dtype dtype, um.um_dtype stored, str what) except -1
# An array of any library as NumPy's, over the same memory where that is in order, else a copy.
cdef cnp.ndarray contiguous(object a, str what)
# Checks K and V of an append to one layer, [n, heads, head_dim] for one stream or
# [batch, heads, n, head_dim]; and of one token of all layers, [n_layers, heads, head_dim].
cdef int check_tokens(Given *out, cnp.ndarray k, cnp.ndarray v, um.um_dtype stored,
                      uint32_t batch, uint32_t heads, uint32_t head_dim, uint32_t v_head_dim,
                      str doing) except -1
cdef int check_token(Given *out, cnp.ndarray k, cnp.ndarray v, um.um_dtype stored,
                     uint32_t n_layers, uint32_t heads, uint32_t head_dim, uint32_t v_head_dim,
                     str doing) except -1
# The steps of these for arrays of other libraries: types; whether a shape is that of tokens of one
# layer, and which order and number it says (types come first); and what is raised where k's is
# not, or v's differs.
cdef int check_types(Given *out, cnp.dtype k, cnp.dtype v, um.um_dtype stored,
                     str doing) except -1
cdef bint fits_tokens(Given *out, int n_dims, const cnp.npy_intp *sizes, uint32_t batch,
                      uint32_t heads, uint32_t head_dim)
cdef object refuse_tokens(Given *out, uint32_t batch, uint32_t heads, uint32_t head_dim, str doing,
                          k_shape, v_shape, object v_head_dim=*)
cdef int check_token_shapes(Given *out, tuple k, tuple v, uint32_t n_layers, uint32_t heads,
                            uint32_t head_dim, uint32_t v_head_dim, str doing) except -1
# What a head of a type has so many of: elements, or blocks.
cdef uint32_t units(um.um_dtype type, uint32_t head_dim)
# An array's real shape, whatever a subclass says.
cdef tuple shape_of(cnp.ndarray a)
# The memory of an array of any library; strides are in bytes.
cdef int find_bytes(Bytes *out, uintptr_t at, tuple shape, tuple strides, size_t item) except -1
# The two arrays of an argument `out`, of any library, and the two over their memory as NumPy's.
cdef tuple pair_of(object out)
# An array on the device of a driver; TypeError, which names the argument, for what is none.
cdef object on_device(object driver, object x, str what)
# A layer's number, of those from 0 on.
cdef uint32_t layer_number(object layer, uint32_t n_layers, str what) except? 0xffffffff
# The native type of an array `out` that n tokens' K or V are to be copied to, [heads, n, head_dim],
# the tokens of a head contiguous; ValueError where it is another.
cdef um.um_dtype out_type(object out, um.um_dtype stored, uint32_t heads, uint64_t n,
                          uint32_t head_dim) except *
