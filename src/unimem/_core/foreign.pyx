# cython: language_level=3, boundscheck=False, wraparound=False
"""Viewing arrays of other libraries as NumPy's, without a copy."""
import numpy as np

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int64_t

from unimem._core.arrays cimport MAX_DIMS, dtype_of, plain_array
from unimem._core.dlpack cimport (
    CODES, DLPACK_MAJOR, DLPACK_READ_ONLY, DLManagedTensor, DLManagedTensorVersioned,
    DLPackExchangeAPI, DLTensor,
)

#: AnyArray: TypeAlias = npt.NDArray[Any] | SupportsDLPack | Buffer
#: class SupportsDLPack(Protocol):
#:     def __dlpack__(self, *, stream: None = None) -> Any: ...
#:     def __dlpack_device__(self) -> tuple[Any, Any]: ...

cnp.import_array()

# DLDeviceType of memory that the CPU reads.
cdef tuple _HOST = (1, 3, 11, 13)  # CPU, CUDA host, ROCm host, CUDA managed

cdef enum:
    _COMPLEX = 5  # of DLDataTypeCode

# NumPy's names of DLDataTypeCode; those of ml_dtypes follow from the code alone.
cdef dict _NAMES = {0: "int", 1: "uint", 2: "float", 5: "complex"}
cdef dict _OF_ML_DTYPES = {code: name for name, code in CODES.items()}

# The last question and its answer: most callers have one kind of arrays of one dtype. A critical
# section of `_memo` guards them.
cdef object _memo = object()
cdef object _last_kind = None
cdef DLPackExchangeAPI *_last_api = NULL
cdef bint _last_is_lazy = False
cdef int64_t _last_type = -1
cdef object _last_dtype = None
# An array without elements may have no address.
cdef char _nowhere[64]


cdef DLPackExchangeAPI *_functions_of(object kind, bint *out_is_lazy) except? NULL:
    """Return the functions that describe objects of a type without a capsule, or NULL.

    The type may negate or conjugate its objects lazily if `out_is_lazy` is set.
    """
    global _last_kind, _last_api, _last_is_lazy
    cdef DLPackExchangeAPI *api = NULL
    with cython.critical_section(_memo):
        if kind is _last_kind:
            out_is_lazy[0] = _last_is_lazy
            return _last_api
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        api = <DLPackExchangeAPI *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api != NULL and (api.major != DLPACK_MAJOR or api.tensor_from_object == NULL):
        api = api.previous
    out_is_lazy[0] = hasattr(kind, "is_neg")
    with cython.critical_section(_memo):
        _last_api = api
        _last_is_lazy = out_is_lazy[0]
        _last_kind = kind
    return api


cdef object dtype_of_tensor(const DLTensor *tensor, str what):
    global _last_type, _last_dtype
    cdef int64_t asked = <int64_t>tensor.lanes << 16 | tensor.code << 8 | tensor.bits
    with cython.critical_section(_memo):
        if asked == _last_type:
            return _last_dtype
    if tensor.code == 6 and tensor.bits == 8:
        name = "bool"
    elif tensor.code in _OF_ML_DTYPES:
        name = _OF_ML_DTYPES[tensor.code]
    else:
        name = f"{_NAMES.get(tensor.code, 'type')}{tensor.bits}"
    try:
        found = dtype_of(name)
    except (TypeError, ValueError):
        found = None
    if found is None or tensor.lanes != 1 or found.itemsize * 8 != tensor.bits:
        raise TypeError(f"{what}: expected a dtype that NumPy or ml_dtypes has, got DLPack's code "
                        f"{tensor.code} of {tensor.bits} bits and {tensor.lanes} lanes")
    with cython.critical_section(_memo):
        _last_dtype = found
        _last_type = asked
    return found


cdef cnp.ndarray _array_over(const DLTensor *tensor, object owner, bint writable, str what):
    cdef cnp.npy_intp sizes[MAX_DIMS]
    cdef cnp.npy_intp steps[MAX_DIMS]
    cdef cnp.npy_intp *strides = NULL
    cdef int axis, n = tensor.n_dims
    cdef cnp.npy_intp item, step
    cdef char *data = <char *>tensor.data
    if tensor.device_type != 1 and tensor.device_type not in _HOST:
        raise TypeError(f"{what}: expected an array in main memory, got one on a device of "
                        f"DLPack's type {tensor.device_type}: give a copy, as .cpu() makes it")
    if not 0 <= n <= MAX_DIMS:
        raise TypeError(f"{what}: expected at most {MAX_DIMS} dimensions, got {n}")
    dtype = dtype_of_tensor(tensor, what)
    item = step = (<cnp.dtype>dtype).itemsize
    for axis in range(n - 1, -1, -1):
        sizes[axis] = tensor.shape[axis]
        steps[axis] = step if tensor.strides == NULL else tensor.strides[axis] * item
        if sizes[axis] != 1 and steps[axis] != step:
            strides = steps  # not those of a C-contiguous array
        step *= sizes[axis]
    if data == NULL:
        if step != 0:  # as of tensors that torch only traces
            raise TypeError(f"{what}: expected an array in main memory, got one without memory")
        data = _nowhere
    else:
        data += tensor.byte_offset
    return plain_array(data, n, sizes, strides, dtype, owner, writable)


cdef class _Capsule:
    """The content of a capsule; its deleter runs when the last array over it goes."""
    cdef DLManagedTensor *plain
    cdef DLManagedTensorVersioned *versioned

    def __dealloc__(self):
        if self.plain != NULL and self.plain.deleter != NULL:
            self.plain.deleter(self.plain)
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)


cdef cnp.ndarray _open_capsule(object capsule, str what):
    cdef _Capsule held = _Capsule()
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        held.versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(
            capsule, "dltensor_versioned")
        PyCapsule_SetName(capsule, "used_dltensor_versioned")
        if held.versioned.major != DLPACK_MAJOR:
            raise TypeError(f"{what}: expected DLPack {DLPACK_MAJOR}, got {held.versioned.major}")
        return _array_over(&held.versioned.tensor, held,
                           not held.versioned.flags & DLPACK_READ_ONLY, what)
    if not PyCapsule_IsValid(capsule, "dltensor"):
        raise TypeError(f"{what}: expected a capsule of DLPack from __dlpack__, got "
                        f"{capsule!r:.60}")
    held.plain = <DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")
    PyCapsule_SetName(capsule, "used_dltensor")
    # It has no flags that would say whether it may be written.
    return _array_over(&held.plain.tensor, held, False, what)


cdef object _ask(object x, str what):
    """Return the capsule of an object."""
    if _is_lazy(x):
        raise TypeError(f"{what}: expected an array whose memory has its values, got a "
                        f"{type(x).__name__} that is negated or conjugated lazily: give "
                        ".resolve_conj().resolve_neg()")
    try:
        device = int(x.__dlpack_device__()[0])
        if device in _HOST:
            try:
                return x.__dlpack__(max_version=(DLPACK_MAJOR, 0))
            except TypeError:  # older than versions
                return x.__dlpack__()
    except Exception as error:
        raise _unreadable(x, what, error) from None
    raise TypeError(f"{what}: expected an array in main memory, got a {type(x).__name__} on a "
                    f"device of DLPack's type {device}: give a copy, as .cpu() makes it")


cdef int _failed() except -1:
    return -1


cdef int _refuse_unreadable(object x, str what) except -1:
    """Raise TypeError instead of the exception that is set."""
    try:
        _failed()
    except Exception as error:
        raise _unreadable(x, what, error) from None
    return 0


cdef object _unreadable(object x, str what, error):
    said = str(error).partition("\n")[0]
    return TypeError(f"{what}: expected an array whose memory can be read, got a "
                     f"{type(x).__name__} that says: {said:.200}")


cdef bint _is_lazy(object x) except -1:
    """Return whether torch has negated or conjugated a tensor by a bit, which DLPack lacks."""
    is_neg = getattr(x, "is_neg", None)
    return is_neg is not None and (is_neg() or x.is_conj())


cdef cnp.ndarray array_of(object x, str what):
    return <cnp.ndarray>x if cnp.PyArray_Check(x) else foreign_array(x, what)


cdef cnp.ndarray foreign_array(object x, str what):
    cdef DLTensor tensor
    owner = described(&tensor, NULL, x, what)
    return target_of(x, what) if owner is None else _array_over(&tensor, owner, False, what)


cdef object described(DLTensor *out, void **stream, object x, str what):
    cdef bint is_lazy = False
    cdef DLPackExchangeAPI *api = _functions_of(type(x), &is_lazy)
    if api == NULL:
        return None
    if is_lazy and x.is_neg():
        x = x.resolve_neg()
    # No try: it would cost every call as much as finding the dtype.
    if api.tensor_from_object(<void *>x, out) < 0:
        _refuse_unreadable(x, what)
    if is_lazy and out.code == _COMPLEX and x.is_conj():
        return described(out, stream, x.resolve_conj(), what)
    if stream != NULL and api.current_stream != NULL:
        if api.current_stream(out.device_type, out.device_id, stream) < 0:
            _refuse_unreadable(x, what)
    return x


cdef cnp.ndarray target_of(object x, str what):
    if cnp.PyArray_Check(x):
        return <cnp.ndarray>x
    if hasattr(type(x), "__dlpack__") and hasattr(type(x), "__dlpack_device__"):
        return _open_capsule(_ask(x, what), what)
    # Bytes have a buffer, but are no numbers.
    if PyObject_CheckBuffer(x) and not isinstance(x, (bytes, bytearray)):
        try:
            return np.asarray(memoryview(x))
        except (BufferError, NotImplementedError, ValueError) as error:
            raise _unreadable(x, what, error) from None
    raise TypeError(f"{what}: expected a NumPy array, or another that has __dlpack__ or a buffer, "
                    f"got {type(x).__name__}")
