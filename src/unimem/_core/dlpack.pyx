# cython: language_level=3, boundscheck=False, wraparound=False
"""Exporting arrays by DLPack, including types of ml_dtypes.

NumPy exports only its own types. So an array of integers of the same width is exported, and the
type in its description is corrected.
"""
import numpy as np

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid

cdef dict CODES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}

cdef object _numpy_export = np.ndarray.__dlpack__


def export(array: npt.NDArray[Any], **options: Any) -> Any:
    """Make a capsule of an array, with the options of ``__dlpack__``, also for ml_dtypes' types.

    Raise BufferError if DLPack has no such type, or if the array is read-only and the consumer does
    not support that (``max_version`` below (1, 0)).
    """
    code = CODES.get(array.dtype.name)
    if code is None:
        return _numpy_export(array, **options)
    capsule = _numpy_export(array.view(f"u{array.itemsize}"), **options)
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        (<DLManagedTensorVersioned *>PyCapsule_GetPointer(
            capsule, "dltensor_versioned")).tensor.code = code
    else:
        (<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")).tensor.code = code
    return capsule


#: class ExportedArray(np.ndarray[Any, np.dtype[Any]]): ...
class ExportedArray(np.ndarray):
    """An array of a type of ml_dtypes that other libraries can take by DLPack."""

    __slots__ = ()

    def __dlpack__(self, **options):
        """Make a capsule, as `export`."""
        return export(self, **options)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        """Return results as NumPy's own arrays and scalars."""
        return array[()] if return_scalar else array

    def __reduce_ex__(self, protocol):
        """Pickle as NumPy's own array, which can be read without unimem."""
        return np.asarray(self).__reduce_ex__(protocol)


def exported(array: Any) -> Any:
    """Return an array, or a view that can be exported if NumPy does not export the dtype."""
    if isinstance(array, np.ndarray) and array.dtype.isbuiltin == 2:  # of ml_dtypes
        return array.view(ExportedArray)
    return array


cdef object EXPORTED = ExportedArray
