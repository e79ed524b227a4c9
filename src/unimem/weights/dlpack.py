"""Arrays for other libraries by DLPack, of the types of ml_dtypes too.

DLPack has these types, but NumPy exports its own only. So an array of integers of the same width is
exported, whose description is then given the type that it has.
The layout is that of https://github.com/dmlc/dlpack/blob/v1.1/include/dlpack/dlpack.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numpy.typing import NDArray

__all__ = ["export"]

# DLDataTypeCode.
_CODES = {
    "bfloat16": 4,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}


class _DLTensor(ctypes.Structure):
    """`DLTensor`, with its `DLDevice` and `DLDataType`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def export(array: NDArray[Any], **options: Any) -> Any:
    """Make a capsule of an array, as its ``__dlpack__`` does, of ml_dtypes' types too.

    Parameters
    ----------
    array : numpy.ndarray
        The capsule, and its consumer, keep it alive.
    **options
        Of the protocol: ``stream``, ``max_version``, ``dl_device``, ``copy``.

    Returns
    -------
    PyCapsule

    Raises
    ------
    BufferError
        The array is read-only, and the consumer does not say that it knows such (``max_version`` of
        at least (1, 0)); or DLPack has no such type.
    """
    code = _CODES.get(array.dtype.name)
    if code is None:
        return array.__dlpack__(**options)
    capsule = array.view(f"u{array.itemsize}").__dlpack__(**options)
    if _is_valid(capsule, b"dltensor_versioned"):
        _Versioned.from_address(_pointer(capsule, b"dltensor_versioned")).tensor.code = code
    else:
        _Managed.from_address(_pointer(capsule, b"dltensor")).tensor.code = code
    return capsule
