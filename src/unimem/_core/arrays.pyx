# cython: language_level=3, boundscheck=False, wraparound=False
"""Arrays over memory: dtypes, shapes, and ndarrays made with the C API."""
import math

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport uintptr_t

from unimem._core.dlpack cimport EXPORTED
from unimem.base.text import parse_bytes

cdef extern from "numpy/arrayobject.h":
    enum:
        NPY_ITEM_REFCOUNT  # the elements are, or contain, Python objects
    enum:
        NPY_USERDEF  # from this number on types are others', such as ml_dtypes'
    object PyArray_NewFromDescr(PyTypeObject *subtype, cnp.dtype descr, int n_dims,
                                const cnp.npy_intp *dims, const cnp.npy_intp *strides, void *data,
                                int flags, PyObject *template)

cnp.import_array()

cdef object MOST = 2**63 - 1

# Short names of types, as in kernels and model files. NumPy's own f16 is a type of 16 bytes, which
# no caller means.
cdef dict _SHORT = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}
cdef dict _DTYPES = {}
# The last question to dtype_of and its answer: most callers ask for one dtype all the time. A
# critical section of `_memo` guards both.
cdef object _memo = object()
cdef object _last_asked = object()
cdef object _last_found = None


cdef object dtype_of(object dtype):
    """Return the dtype that a user names. Names and types are remembered: np.dtype is slow."""
    global _last_asked, _last_found
    with cython.critical_section(_memo):
        if dtype is _last_asked:
            return _last_found
    if isinstance(dtype, (str, type)):
        found = _DTYPES.get(dtype)
        if found is None:
            found = _DTYPES[dtype] = _new_dtype(dtype)
    else:
        found = _new_dtype(dtype)
        if found is not dtype:
            return found  # a description that may change, such as a list
    with cython.critical_section(_memo):
        _last_asked, _last_found = dtype, found
    return found


cdef cnp.dtype _new_dtype(object dtype):
    cdef cnp.dtype found
    named = dtype
    if type(dtype).__module__ == "torch":
        named = str(dtype).removeprefix("torch.")
    if isinstance(named, str):
        named = _SHORT.get(named, named)
        if named.lstrip("<>=|") == "f16":
            raise ValueError("dtype: expected 'float16', or 'longdouble' for what NumPy calls f16, "
                             f"got {dtype!r}")
    # NumPy takes None for float64, and reads names in bytes as its own.
    found = None if dtype is None or isinstance(dtype, bytes) else _numpy_dtype(named)
    if found is None:
        raise TypeError("dtype: expected a dtype of NumPy, torch or ml_dtypes, or its name, as in "
                        f"'float16' or 'f16', got {dtype!r:.60}")
    if found.flags & NPY_ITEM_REFCOUNT or found.itemsize == 0:
        raise ValueError(f"dtype {found} cannot lie in raw memory: expected a fixed-size number or "
                         "struct")
    return found


cdef object _numpy_dtype(object named):
    """Return a dtype of NumPy or, by its name, of ml_dtypes, or None."""
    try:
        return np.dtype(named)
    except Exception:  # of many kinds, for descriptions of structs
        if not isinstance(named, str):
            return None
    import ml_dtypes  # which most callers never need
    kind = getattr(ml_dtypes, named, None)
    return np.dtype(kind) if isinstance(kind, type) else None


def as_dtype(dtype: object, among: Collection[str] | None = None,
             what: str = "dtype") -> np.dtype[Any]:
    """Return the NumPy dtype that a user names, in the one vocabulary that all calls share.

    It is a dtype of NumPy, ml_dtypes or torch, or a name: NumPy's, or ``"f16"``, ``"f32"``,
    ``"f64"`` and ``"bf16"``. `among` are NumPy's names of accepted dtypes. ValueError and TypeError
    name the argument as `what`.
    """
    if among is None:
        return dtype_of(dtype)
    return dtype_among(dtype, among, what)


cdef object dtype_among(object dtype, object among, str what):
    try:
        found = dtype_of(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found.name not in among:
        raise ValueError(f"{what}: expected one of {', '.join(among)}, got {dtype!r:.60}")
    return found


cdef object index_of(object n, str what):
    if type(n) is int:
        return n
    if type(n) is not bool:  # no caller means a number
        try:
            return PyNumber_Index(n)
        except TypeError:
            pass
    raise TypeError(f"{what}: expected an integer, got {n!r:.60}")


cdef size_t size_of(object n, str what, object least=0) except? 0:
    exact = index_of(n, what)
    if not least <= exact <= MOST:
        raise ValueError(f"{what}: expected an integer from {least} to 2**63 - 1, got {n}")
    return exact


cdef size_t bytes_of(object n, str what, object least=0) except? 0:
    if isinstance(n, str):
        try:
            n = parse_bytes(n)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    return size_of(n, what, least)


def checked_nbytes(n: SupportsIndex | str, str what, object least: int = 0) -> int:
    """Return a size in bytes, which a text such as ``"512M"`` may give.

    `what` names it in the ValueError of one that is not from `least` to 2**63 - 1.
    """
    return bytes_of(n, what, least)


cdef tuple dims_of(object shape):
    cdef tuple dims
    cdef bint exact = type(shape) is tuple
    if exact:
        for n in <tuple>shape:
            exact = exact and type(n) is int
    if exact:
        dims = shape
    else:
        try:
            dims = (shape,) if isinstance(shape, (str, bytes, bytearray)) else tuple(shape)
        except TypeError:
            dims = (shape,)
        dims = tuple([index_of(n, "shape") for n in dims])
    if len(dims) > MAX_DIMS:
        raise ValueError(f"shape: expected at most {MAX_DIMS} dimensions, got {len(dims)}")
    for n in dims:
        if n < 0:
            raise ValueError(f"shape: expected dimensions of 0 or more, got {dims}")
    return dims


cdef object nbytes_of(tuple dims, object itemsize):
    nbytes = itemsize
    for n in dims:
        nbytes = nbytes * n
    # NumPy also refuses arrays that would be too large without their dimensions of 0, but only
    # after memory was taken.
    if nbytes == 0 and math.prod([n or 1 for n in dims], start=itemsize) > MOST:
        raise ValueError(f"shape: {dims} is too large for an array, even with an empty dimension: "
                         "expected below 2**63 bytes without it")
    return nbytes


cdef tuple shape_within(str name, size_t base, size_t nbytes, size_t offset, object shape,
                        object dtype):
    cdef tuple dims
    if shape is None:
        if offset > nbytes:
            raise ValueError(f"{name}: offset {offset} is outside {nbytes} bytes")
        dims = ((nbytes - offset) // <size_t>dtype.itemsize,)
    else:
        dims = dims_of(shape)
    needed = nbytes_of(dims, dtype.itemsize)
    if offset + needed > nbytes:
        raise ValueError(f"{name}: shape {dims} of {dtype} at offset {offset} needs {needed} bytes "
                         f"of {nbytes}")
    if (base + offset) % <size_t>dtype.alignment:
        raise ValueError(f"{name}: offset {offset} is not aligned for {dtype}")
    return dims


def array_within(name: str, base: int, nbytes: int, offset: int,
                 shape: int | tuple[int, ...] | None,
                 dtype: DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Check an array over `nbytes` of GPU memory at `base`, as `Block.as_array` does.

    Return its shape and dtype. Raise ValueError if it does not fit or is not aligned.
    """
    descr = dtype_of(dtype)
    return shape_within(name, base, nbytes, size_of(offset, "offset"), shape, descr), descr


cdef object array_over(void *address, tuple dims, object dtype, object owner, bint writable):
    cdef cnp.npy_intp sizes[MAX_DIMS]
    cdef int n_dims = 0
    for n in dims:
        sizes[n_dims] = n
        n_dims += 1
    return new_array(address, n_dims, sizes, NULL, dtype, owner, writable)


cdef object vector_over(void *address, cnp.npy_intp n, object dtype, object owner, bint writable):
    return new_array(address, 1, &n, NULL, dtype, owner, writable)


cdef object new_array(void *address, int n_dims, const cnp.npy_intp *sizes,
                      const cnp.npy_intp *strides, object dtype, object owner, bint writable):
    cdef object kind = cnp.ndarray
    if (<cnp.dtype>dtype).type_num >= NPY_USERDEF:
        kind = EXPORTED  # NumPy does not export this type to other libraries
    return _array_of(kind, address, n_dims, sizes, strides, dtype, owner, writable)


cdef object plain_array(void *address, int n_dims, const cnp.npy_intp *sizes,
                        const cnp.npy_intp *strides, object dtype, object owner, bint writable):
    return _array_of(cnp.ndarray, address, n_dims, sizes, strides, dtype, owner, writable)


cdef inline object _array_of(object kind, void *address, int n_dims, const cnp.npy_intp *sizes,
                             const cnp.npy_intp *strides, object dtype, object owner,
                             bint writable):
    # With strides, NumPy finds out itself whether the array is contiguous.
    cdef int flags = cnp.NPY_ARRAY_C_CONTIGUOUS if strides == NULL else 0
    if <uintptr_t>address & <uintptr_t>((<cnp.dtype>dtype).alignment - 1) == 0:
        flags |= cnp.NPY_ARRAY_ALIGNED
    if writable:
        flags |= cnp.NPY_ARRAY_WRITEABLE
    Py_INCREF(dtype)  # PyArray_NewFromDescr steals it
    array = PyArray_NewFromDescr(<PyTypeObject *>kind, dtype, n_dims, sizes, strides, address,
                                 flags, NULL)
    Py_INCREF(owner)  # as PyArray_SetBaseObject does
    cnp.PyArray_SetBaseObject(array, owner)
    return array
