# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""Checks of the arguments of KV caches: arrays of tokens, layers and outputs.

`contiguous` makes a NumPy array of an array of any library. `check_tokens` and `check_token`
compare type and shape with the cache's, and fill a `Given` for the core.
"""
import numpy as np

cimport numpy as cnp
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport uint32_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport index_of
from unimem._core.foreign cimport array_of, target_of
from unimem.kv.types cimport BLOCK_VALUES, numpy_type

cnp.import_array()

# NumPy's number for bfloat16 of ml_dtypes, found with the first such array.
cdef int _bf16_number = -1


cdef int number_of(cnp.dtype dtype, um.um_dtype stored, str what) except -1:
    global _bf16_number
    cdef int number = dtype.type_num
    if not cnp.PyArray_ISNBO(dtype.byteorder):
        raise TypeError(f"{what}: expected float32, float16 or bfloat16 in this machine's byte "
                        f"order, got {dtype}")
    if number == cnp.NPY_FLOAT32:
        return um.UM_F32
    if number == cnp.NPY_FLOAT16:
        return um.UM_F16
    if _bf16_number < 0 and dtype.name == "bfloat16":
        _bf16_number = number
    if number == _bf16_number:
        return um.UM_BF16
    if stored >= um.UM_Q8_0 and dtype == numpy_type(stored):
        return stored
    raise TypeError(f"{what}: expected float32, float16 or bfloat16, got {dtype}")


cdef cnp.ndarray contiguous(object a, str what):
    cdef cnp.ndarray given = array_of(a, what)
    if cnp.PyArray_ISCARRAY_RO(given):
        return given
    if not given.dtype.isnative:
        given = given.astype(given.dtype.newbyteorder("="))
    return np.require(given, requirements="CA")


cdef uint32_t units(um.um_dtype type, uint32_t head_dim):
    return head_dim // BLOCK_VALUES if type >= um.UM_Q8_0 else head_dim


cdef tuple shape_of(cnp.ndarray a):
    return tuple([a.shape[axis] for axis in range(a.ndim)])


cdef int check_types(Given *out, cnp.dtype k, cnp.dtype v, um.um_dtype stored,
                     str doing) except -1:
    cdef int number = number_of(k, stored, "k")
    if number_of(v, stored, "v") != number:
        raise TypeError(f"{doing}: expected k and v of one dtype, got {k} and {v}")
    out.type = <um.um_dtype>number
    return 0


cdef bint fits_tokens(Given *out, int n_dims, const cnp.npy_intp *k, int v_n_dims,
                      const cnp.npy_intp *v, uint32_t batch, uint32_t heads, uint32_t head_dim,
                      uint32_t v_head_dim):
    cdef cnp.npy_intp dim = units(out.type, head_dim), v_dim = units(out.type, v_head_dim)
    cdef bint fits
    if n_dims == 3 and batch == 1:
        out.order = um.UM_KV_TOKEN_MAJOR
        out.n = k[0]
        fits = k[1] == heads and k[2] == dim
    else:
        out.order = um.UM_KV_HEAD_MAJOR
        fits = n_dims == 4 and k[0] == batch and k[1] == heads and k[3] == dim
        out.n = k[2] if fits else 0
    # All dimensions of K and V are alike, but for the size of a head.
    return (fits and v_n_dims == n_dims and cnp.PyArray_CompareLists(k, v, n_dims - 1)
            and v[n_dims - 1] == v_dim)


cdef object refuse_tokens(Given *out, uint32_t batch, uint32_t heads, uint32_t head_dim, str doing,
                          k_shape, v_shape, uint32_t v_head_dim):
    dim, v_dim = units(out.type, head_dim), units(out.type, v_head_dim)
    short = f"[n, {heads}, {dim}] or " if batch == 1 else ""
    shape = f"{short}[{batch}, {heads}, n, {dim}]"
    if v_dim == dim:
        one = "; one token has n = 1, as k[None]" if k_shape == (heads, dim) else ""
        raise ValueError(f"{doing}: expected k and v of one shape, {shape}, got {k_shape} and "
                         f"{v_shape}{one}")
    raise ValueError(f"{doing}: expected k of shape {shape}, and v of the same with {v_dim} for "
                     f"{dim}, got {k_shape} and {v_shape}")


cdef int check_tokens(Given *out, cnp.ndarray k, cnp.ndarray v, um.um_dtype stored,
                      uint32_t batch, uint32_t heads, uint32_t head_dim, uint32_t v_head_dim,
                      str doing) except -1:
    check_types(out, k.descr, v.descr, stored, doing)
    if not fits_tokens(out, cnp.PyArray_NDIM(k), cnp.PyArray_DIMS(k), cnp.PyArray_NDIM(v),
                       cnp.PyArray_DIMS(v), batch, heads, head_dim, v_head_dim):
        refuse_tokens(out, batch, heads, head_dim, doing, shape_of(k), shape_of(v), v_head_dim)
    return 0


cdef int check_token_shapes(Given *out, tuple k, tuple v, uint32_t n_layers, uint32_t heads,
                            uint32_t head_dim, uint32_t v_head_dim, str doing) except -1:
    expected = (n_layers, heads, units(out.type, head_dim))
    of_v = (n_layers, heads, units(out.type, v_head_dim))
    if k != expected or v != of_v:
        apart = "" if of_v == expected else f", and v of {of_v}"
        raise ValueError(f"{doing}: expected k and v of shape {expected}{apart}, got {k} and {v}: "
                         "one token of all layers; append takes more tokens, of one layer")
    return 0


cdef int check_token(Given *out, cnp.ndarray k, cnp.ndarray v, um.um_dtype stored,
                     uint32_t n_layers, uint32_t heads, uint32_t head_dim, uint32_t v_head_dim,
                     str doing) except -1:
    check_types(out, k.descr, v.descr, stored, doing)
    return check_token_shapes(out, shape_of(k), shape_of(v), n_layers, heads, head_dim, v_head_dim,
                              doing)


cdef void find_bytes(Bytes *out, uintptr_t at, int n, const cnp.npy_intp *sizes,
                     const cnp.npy_intp *strides, size_t item) noexcept:
    cdef Py_ssize_t axis, size, stride, step = item
    out.at = out.low = at
    out.end = at + item
    out.in_order = True
    for axis in range(n - 1, -1, -1):
        size, stride = sizes[axis], strides[axis]
        if size == 0:
            out.low = out.end = at
            break
        if size > 1 and stride != step:
            out.in_order = False
        if stride < 0:
            out.low -= <uintptr_t>((size - 1) * -stride)
        else:
            out.end += <uintptr_t>((size - 1) * stride)
        step *= size


cdef tuple pair_of(object out):
    try:
        pair = tuple(out)
    except TypeError:
        raise TypeError(f"out: expected two arrays, got {out!r:.60}") from None
    if len(pair) != 2:
        raise ValueError(f"out: expected two arrays, got {len(pair)}")
    return pair, tuple([target_of(target, "out") for target in pair])


cdef object on_device(object driver, object x, str what):
    try:
        return driver.to_array(x)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None


cdef uint32_t layer_number(object layer, uint32_t n_layers, str what) except? 0xffffffff:
    cdef int overflow
    cdef long exact
    if PyLong_CheckExact(layer):
        exact = PyLong_AsLongAndOverflow(layer, &overflow)  # -1: too large
        if 0 <= exact < n_layers:
            return <uint32_t>exact
    number = index_of(layer, what)
    if not 0 <= number < n_layers:
        raise ValueError(f"{what}: expected a layer from 0 to {n_layers - 1}, got {layer}")
    return <uint32_t>number


cdef um.um_dtype out_type(object out, um.um_dtype stored, uint32_t heads, uint64_t n,
                          uint32_t head_dim) except *:
    cdef cnp.ndarray a = out
    cdef um.um_dtype number = <um.um_dtype>number_of(a.descr, stored, "out")
    # A subclass may override the attributes of the array.
    cdef cnp.npy_intp *sizes = cnp.PyArray_DIMS(a)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(a)
    cdef cnp.npy_intp item = cnp.PyArray_ITEMSIZE(a), dim = units(number, head_dim)
    if (cnp.PyArray_NDIM(a) != 3 or sizes[0] != heads or sizes[1] != <cnp.npy_intp>n
            or sizes[2] != dim or not cnp.PyArray_ISBEHAVED(a)
            or (n > 0 and dim > 1 and strides[2] != item)
            or (n > 1 and strides[1] != dim * item)
            or (heads > 1 and strides[0] < <cnp.npy_intp>n * dim * item)):
        raise ValueError(
            f"out: expected two writable arrays of shape {(heads, n, dim)} in which the tokens of "
            f"a head are contiguous, got shape {shape_of(a)}"
            f"{'' if cnp.PyArray_ISWRITEABLE(a) else ', read-only'}")
    return number
