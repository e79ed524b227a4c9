"""Arrays of other libraries, as seen by unimem, over arrays of NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from unimem._core.dlpack import ExportedArray, export

Array = NDArray[Any]

# DLPack's numbers of NumPy's kinds; others here are bfloat16.
CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
BFLOAT = 4
CUDA = 2  # DLPack's number


class Versioned:
    """Has ``__dlpack__`` of DLPack 1."""

    def __init__(self, array: Array, device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return export(self.array, **options)


class Unversioned(Versioned):
    """Has ``__dlpack__`` of before versions."""

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return export(self.array)


class Refusing(Versioned):
    """Has a ``__dlpack__`` that returns None."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("lent already\nto somebody")


class Wrong(Versioned):
    """Has a ``__dlpack__`` that returns no capsule."""

    def __dlpack__(self, **options: Any) -> Any:
        return "capsule"


class _Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("n_dims", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class Described(NamedTuple):
    """The contents of a DLPack 1 capsule."""

    major: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    code: int
    bits: int
    read_only: bool


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = ctypes.py_object, ctypes.c_char_p


def described(capsule: Any) -> Described:
    """Read a capsule without opening it."""
    found = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
    sizes, steps = (
        tuple((ctypes.c_int64 * found.tensor.n_dims).from_address(at))
        for at in (found.tensor.shape, found.tensor.strides)
    )
    tensor = found.tensor
    address = tensor.data + tensor.byte_offset
    read_only = bool(found.flags & 1)
    return Described(found.major, address, sizes, steps, tensor.code, tensor.bits, read_only)


class _Functions(ctypes.Structure):
    """`DLPackExchangeAPI`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("managed_tensor_from_object", ctypes.c_void_p),
        ("managed_tensor_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


def _describe(thing: Any, out: Any) -> int:
    out[0] = thing.tensor
    return 0


def _current_stream(_device_type: int, _device: int, out: Any) -> int:
    out[0] = 77
    return 0


_streams_kind = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)
_stream_of = _streams_kind(_current_stream)
_kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Tensor))
_tensor_from_object = _kind(_describe)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
# Capsules point to these.
_NAME = ctypes.create_string_buffer(b"dlpack_exchange_api")
_functions = _Functions(
    **{"major": 1, "minor": 3},
    tensor_from_object=ctypes.cast(_tensor_from_object, ctypes.c_void_p),
    current_stream=ctypes.cast(_stream_of, ctypes.c_void_p),
)
_newer = _Functions(major=2, previous=ctypes.addressof(_functions))
_newest_only = _Functions(major=2)


def _capsule(functions: _Functions) -> Any:
    return _new_capsule(ctypes.addressof(functions), ctypes.addressof(_NAME), None)


class Exchanged:
    """Has the functions of DLPack's C exchange API, and nothing else."""

    __dlpack_c_exchange_api__ = _capsule(_functions)

    def __init__(self, array: Array, **fields: int) -> None:
        self.array = array
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.steps = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        described = {
            **{"data": array.ctypes.data, "device_type": 1, "n_dims": array.ndim, "lanes": 1},
            **{"code": CODES.get(array.dtype.kind, BFLOAT), "bits": array.itemsize * 8},
            **{"shape": ctypes.addressof(self.shape), "strides": ctypes.addressof(self.steps)},
        }
        self.tensor = _Tensor(**described | fields)


class NewerExchanged(Exchanged):
    """Has functions of DLPack 2, and behind them those of 1."""

    __dlpack_c_exchange_api__ = _capsule(_newer)


class NewestExchanged(Versioned):
    """Has functions of DLPack 2 only, and ``__dlpack__``."""

    __dlpack_c_exchange_api__ = _capsule(_newest_only)


KINDS: dict[str, Callable[[Array], Any]] = {
    "DLPack": Versioned,
    "DLPack before versions": Unversioned,
    "exchange API": Exchanged,
    "exchange API of later versions": NewerExchanged,
    "exchange API of later versions only": NewestExchanged,
    "an array of ours": lambda array: array.view(ExportedArray),
    "a buffer": lambda array: array.data if array.dtype.isbuiltin == 1 else array,
}
