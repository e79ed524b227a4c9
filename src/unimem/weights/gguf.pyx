# cython: language_level=3, boundscheck=False, wraparound=False
"""The header of a GGUF file: metadata, decoded on access, and the tensor table."""
from struct import unpack

import numpy as np

from unimem.errors import GGUFError

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from unimem._core cimport native as um
from unimem.weights.header_bytes cimport HeaderBytes, named, tensor_facts
from unimem._core.region cimport Region

#: _Value: TypeAlias = (
#:     int | float | bool | str | NDArray[np.number[Any] | np.bool_] | list[str] | list[_Value]
#: )

# Headers without a vocabulary fit into the first read. A longer one is read again from its start.
cdef enum:
    FIRST_READ_NBYTES = 1 << 18

# The dtypes of metadata, by um_gguf_type; None for strings and arrays.
cdef list _DTYPES = [None if name is None else np.dtype(name) for name in (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool", None, None,
    "uint64", "int64", "float64")]
# Strings of one byte, since Python would make an object for each that is not UTF-8.
cdef list _BYTES = [bytes([i]).decode("utf-8", "surrogateescape") for i in range(256)]

cdef dict _TYPES = {i: um.um_gguf_type_of_tensor(i).name.decode() for i in range(256)
                    if um.um_gguf_type_of_tensor(i) != NULL}


cdef class GGUFHeader(HeaderBytes):
    """A parsed header, with its own copy of the bytes. Immutable: any number of threads may use it.

    `source` is a descriptor that is open for reading, and may be closed afterwards, or a
    memoryview of bytes; `path` is a name for messages. The file begins at byte `begin` of it, and
    the offsets here are those in it. A file that breaks a rule is a GGUFError; one that cannot be
    read, or is shorter than `file_nbytes`, an OSError.
    """
    #: def __init__(
    #:     self, source: int | memoryview, file_nbytes: int, path: str, begin: int = 0
    #: ) -> None: ...

    def __cinit__(self, source, uint64_t file_nbytes, str path, uint64_t begin=0):
        self._file_nbytes, self._begin = file_nbytes, begin
        self.read(source, path, FIRST_READ_NBYTES, GGUFError)

    def __dealloc__(self):
        um.um_gguf_free(&self._gguf)

    cdef um.um_status parse(self, size_t nbytes, um.um_error *err) noexcept nogil:
        return um.um_gguf_parse(&self._gguf, self._bytes, nbytes, self._file_nbytes, err)

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the tensor table."""
        return self._gguf.header_nbytes

    @property
    def alignment(self) -> int:
        """The alignment of tensor offsets, in bytes."""
        return self._gguf.alignment

    @property
    def table_end(self) -> int:
        """The end of the tensor table in the file."""
        return self._begin + self._gguf.header_nbytes

    @property
    def data_offset(self) -> int:
        """The offset of the tensor data in the file."""
        return self._begin + self._gguf.data_offset

    @property
    def unknown_types(self) -> dict[str, int]:
        """The number of the type of each tensor whose type ggml 0.26 does not have, by name."""
        cdef Region _held = self.opened()
        return {self.name_at(i): self._gguf.tensors[i].type for i in range(self._gguf.n_tensors)
                if um.um_gguf_type_of_tensor(self._gguf.tensors[i].type) == NULL}

    cdef uint64_t n_keys(self):
        return self._gguf.n_kv

    cdef named name_place(self, uint64_t i) noexcept:
        cdef um.um_gguf_tensor *tensor
        if i < self._gguf.n_kv:
            return named(self._gguf.kv[i].key_offset, self._gguf.kv[i].key_nbytes)
        tensor = &self._gguf.tensors[i - self._gguf.n_kv]
        return named(tensor.name_offset, tensor.name_nbytes)

    def value(self, Py_ssize_t index) -> _Value:
        """Decode a value: arrays of numbers or bools are read-only arrays, other arrays lists."""
        cdef Region _held = self.opened()
        cdef const um.um_gguf_kv *kv = self._kv(index)
        cdef uint64_t at = kv.value_offset
        if kv.type == um.UM_GGUF_STRING:
            return PyUnicode_DecodeUTF8(<const char *>self._bytes + at,
                                        <Py_ssize_t>kv.value_nbytes, "surrogateescape")
        if kv.type == um.UM_GGUF_ARRAY:
            return self._array(kv.item_type, &at, kv.n_items)
        number = PyBytes_FromStringAndSize(<const char *>self._bytes + at,
                                           <Py_ssize_t>kv.value_nbytes)
        return unpack(_DTYPES[<int>kv.type].char, number)[0]

    def raw_value(self, Py_ssize_t index) -> bytes:
        """Return a value of the metadata as bytes that identify its type and content.

        They are the number of the type (uint32); for an array also the type (uint32) and the count
        (uint64) of its items; then the value as in the file, a string without its length.
        """
        cdef Region _held = self.opened()
        cdef const um.um_gguf_kv *kv = self._kv(index)
        cdef uint32_t types[2]
        types[0], types[1] = <uint32_t>kv.type, <uint32_t>kv.item_type
        is_array = kv.type == um.UM_GGUF_ARRAY
        head = PyBytes_FromStringAndSize(<const char *>types, 8 if is_array else 4)
        if is_array:
            head += PyBytes_FromStringAndSize(<const char *>&kv.n_items, sizeof(kv.n_items))
        return head + PyBytes_FromStringAndSize(<const char *>self._bytes + kv.value_offset,
                                                <Py_ssize_t>kv.value_nbytes)

    cdef const um.um_gguf_kv *_kv(self, Py_ssize_t index) except NULL:
        if not 0 <= index < <Py_ssize_t>self._gguf.n_kv:
            raise IndexError(f"metadata {index} of {self._gguf.n_kv}")
        return &self._gguf.kv[index]

    cdef object _numbers(self, um.um_gguf_type type, uint64_t at, uint64_t n):
        # A copy, since numbers lie unaligned in a header; bytes make the array read-only.
        dtype = _DTYPES[<int>type]
        copy = PyBytes_FromStringAndSize(<const char *>self._bytes + at,
                                         <Py_ssize_t>(n * <uint64_t>dtype.itemsize))
        return np.frombuffer(copy, dtype)

    cdef list _strings(self, uint64_t *at, uint64_t n):
        cdef list strings = PyList_New(<Py_ssize_t>n)
        cdef uint64_t nbytes
        cdef Py_ssize_t i
        for i in range(<Py_ssize_t>n):
            memcpy(&nbytes, self._bytes + at[0], sizeof(nbytes))
            at[0] += sizeof(nbytes)
            if nbytes == 1:
                text = _BYTES[self._bytes[at[0]]]
            else:
                text = PyUnicode_DecodeUTF8(<const char *>self._bytes + at[0], <Py_ssize_t>nbytes,
                                            "surrogateescape")
            at[0] += nbytes
            Py_INCREF(text)  # PyList_SET_ITEM steals it
            PyList_SET_ITEM(strings, i, text)
        return strings

    cdef object _array(self, um.um_gguf_type item_type, uint64_t *at, uint64_t n):
        # Moves `at` behind the array. The parser has checked all bounds, and bounded the depth.
        cdef uint32_t inner_type
        cdef uint64_t inner_n
        if item_type == um.UM_GGUF_STRING:
            return self._strings(at, n)
        if item_type != um.UM_GGUF_ARRAY:
            numbers = self._numbers(item_type, at[0], n)
            at[0] += <uint64_t>numbers.nbytes
            return numbers
        arrays = []
        for _ in range(n):
            memcpy(&inner_type, self._bytes + at[0], sizeof(inner_type))
            memcpy(&inner_n, self._bytes + at[0] + sizeof(inner_type), sizeof(inner_n))
            at[0] += sizeof(inner_type) + sizeof(inner_n)
            arrays.append(self._array(<um.um_gguf_type>inner_type, at, inner_n))
        return arrays

    cdef uint64_t n_tensors(self):
        return self._gguf.n_tensors

    cdef tensor_facts facts(self, uint64_t i) noexcept:
        cdef um.um_gguf_tensor *tensor = &self._gguf.tensors[i]
        cdef const uint64_t *last = &tensor.ne[0] + tensor.n_dims - 1
        return tensor_facts(last, -1, tensor.n_dims, tensor.offset, tensor.nbytes, tensor.type)

    cdef str type_name(self, uint32_t type):
        return type_name(type)

    cdef object ggml_number(self, uint32_t type):
        return type


def type_name(uint32_t number) -> str:
    """Return ggml's name of a type by its number; ``type_156`` if ggml 0.26 has no such type."""
    return _TYPES.get(number) or f"type_{number}"


def tensor_type(uint32_t number) -> tuple[str, int, int]:
    """Return ggml's name of a type by its number, and the values and bytes of a block.

    ValueError says that ggml 0.26 has no such type.
    """
    cdef const um.um_gguf_tensor_type *known = um.um_gguf_type_of_tensor(number)
    if known == NULL:
        raise ValueError(f"ggml has no tensor type {number}")
    return known.name.decode(), known.block_values, known.block_bytes
