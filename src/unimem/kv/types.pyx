# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The one table of the types that KV memory stores: names, numbers, blocks and NumPy's dtypes.

The core has names, sizes and ggml's numbers (`um_dtype_describe`); a type's number is its index
here, in the core and in files. From q8_0 on a type is one of ggml's blocks: 32 values of
a head with one scale.
"""
import typing

import numpy as np

from unimem._core cimport native as um
from unimem._core.arrays cimport dtype_of

#: DType: TypeAlias = Literal["f32", "f16", "bf16",
#:                            "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
#: KV_TYPES: tuple[DType, ...]
#: GGML_TYPES: dict[str, int]

cdef list _NIBBLES = [("qs", "u1", (BLOCK_VALUES // 2,))]
cdef list _FIFTH_BITS = [("qh", "u1", (BLOCK_VALUES // 8,)), *_NIBBLES]
cdef list _SCALE = [("d", "<f2")], _SCALE_AND_LEAST = [("d", "<f2"), ("m", "<f2")]
# NumPy's name of a float, or the fields of a block, in the order of um_dtype.
cdef list _NUMPY = [
    "float32", "float16", "bfloat16",
    _SCALE + [("qs", "i1", (BLOCK_VALUES,))],
    _SCALE + _NIBBLES,
    _SCALE_AND_LEAST + _NIBBLES,
    _SCALE + _FIFTH_BITS,
    _SCALE_AND_LEAST + _FIFTH_BITS,
    _SCALE + _NIBBLES,
]


cdef tuple _described(int number):
    """Return the name of a type, and ggml's number of it."""
    cdef const um.um_dtype_info *info = um.um_dtype_describe(<um.um_dtype>number)
    return info.name.decode(), info.ggml_type


cdef list _TYPES = [_described(i) for i in range(um.UM_DTYPE_COUNT)]

#: The names, in the order of their numbers.
KV_TYPES = tuple([name for name, _ in _TYPES])
DType = typing.Literal[KV_TYPES]
#: ggml's number of each.
GGML_TYPES = dict(_TYPES)

cdef dict _NUMBERS = {name: number for number, name in enumerate(KV_TYPES)}
# Types by NumPy's names, which are those of dtypes.
cdef dict _FLOATS = dict(zip(_NUMPY[:um.UM_Q8_0], KV_TYPES))
cdef list _BLOCKS = [np.dtype(fields) for fields in _NUMPY[um.UM_Q8_0:]]


#: def kv_type(dtype: object, what: str = "dtype") -> str: ...
cpdef str kv_type(object dtype, str what="dtype"):
    """Return the name of a KV type, such as ``"f16"`` or ``"q8_0"``.

    Parameters
    ----------
    dtype : str or dtype-like
        Such a name, or a dtype as `as_dtype` takes it.
    what : str
        The argument, for messages.

    Raises
    ------
    ValueError
        The dtype is no KV type.
    """
    if isinstance(dtype, str) and dtype in _NUMBERS:
        return dtype
    try:
        return _FLOATS[dtype_of(dtype).name]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{what}: expected one of {', '.join(_NUMBERS)}, or a dtype that is one "
                         f"of these, got {dtype!r:.60}") from None


#: def kv_pair(dtype: object, what: str = "kv_dtype") -> tuple[DType, DType]: ...
cpdef tuple kv_pair(object dtype, str what="kv_dtype"):
    """Return the types of K and V that one name gives: ``"q8_0,q4_0"``, or one type of both.

    Raises
    ------
    ValueError
        As `kv_type`.
    """
    parts = dtype.split(",") if isinstance(dtype, str) else [dtype]
    if len(parts) != 2:
        parts = [dtype, dtype]
    return kv_type(parts[0], what), kv_type(parts[1], what)


#: def kv_name(k_dtype: str, v_dtype: str) -> str: ...
cpdef str kv_name(str k_dtype, str v_dtype):
    """Return the name of a pair of types, as `kv_pair` takes it."""
    return k_dtype if k_dtype == v_dtype else f"{k_dtype},{v_dtype}"


cdef tuple kv_types(object dtype, object k_dtype, object v_dtype):
    of_k, of_v = kv_pair(dtype, "dtype")
    return (of_k if k_dtype is None else kv_type(k_dtype, "k_dtype"),
            of_v if v_dtype is None else kv_type(v_dtype, "v_dtype"))


#: def block_values(name: str) -> int: ...
cpdef int block_values(str name) except -1:
    """Return the values in a block of a type; 1 for the floats."""
    return um.um_dtype_block_values(number_of_type(name))


#: def block_bytes(name: str) -> int: ...
cpdef int block_bytes(str name) except -1:
    """Return the bytes of a block of a type, or of a float."""
    return um.um_dtype_block_bytes(number_of_type(name))


def row_bytes_of(n_kv_heads: int, head_dim: int, str dtype) -> int:
    """Return the bytes of one token's K or V in one layer."""
    return n_kv_heads * head_dim // block_values(dtype) * block_bytes(dtype)


def round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `n`."""
    return -(-n // step) * step


cdef size_t rounded(size_t n, size_t unit) noexcept nogil:
    return (n + unit - 1) // unit * unit


cdef um.um_dtype number_of_type(str name) except *:
    return <um.um_dtype><int>_NUMBERS[name]


cdef object numpy_type(um.um_dtype number):
    return _BLOCKS[number - um.UM_Q8_0] if number >= um.UM_Q8_0 else dtype_of(_NUMPY[number])


cdef int check_head_dim(str name, object head_dim) except -1:
    if head_dim % block_values(name):
        raise ValueError(f"head_dim: expected a multiple of {BLOCK_VALUES} for {name}, got "
                         f"{head_dim}")
    return 0
