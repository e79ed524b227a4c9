# cython: language_level=3, boundscheck=False, wraparound=False
"""Arrays for other libraries by DLPack, of the types of ml_dtypes too.

DLPack has these types, but NumPy exports its own only. So an array of integers of the same width is
exported, whose description is then given the type that it has.
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
    """An array of a type of ml_dtypes, as which other libraries take it by DLPack."""

    __slots__ = ()

    def __dlpack__(self, **options):
        """Make a capsule, as `export`."""
        return export(self, **options)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        """What is computed of it is NumPy's own, and a scalar where NumPy makes one."""
        return array[()] if return_scalar else array

    def __reduce_ex__(self, protocol):
        """What is pickled is NumPy's own, and is read without unimem."""
        return np.asarray(self).__reduce_ex__(protocol)


def exported(array: Any) -> Any:
    """Return an array as other libraries take it: a view where NumPy does not export the dtype."""
    if isinstance(array, np.ndarray) and array.dtype.isbuiltin == 2:  # of ml_dtypes
        return array.view(ExportedArray)
    return array


cdef object EXPORTED = ExportedArray
