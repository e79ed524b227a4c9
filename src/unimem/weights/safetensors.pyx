# cython: language_level=3, boundscheck=False, wraparound=False
"""The header of a safetensors file: metadata and the tensor table."""
from unimem.errors import SafetensorsError

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memchr

from unimem._core cimport native as um
from unimem.weights.header_bytes cimport HeaderBytes, named, tensor_facts
from unimem._core.region cimport Region

# Headers of about 500 tensors fit into the first read. A longer one is read again from its start.
cdef enum:
    FIRST_READ_NBYTES = 1 << 16

# ggml's numbers of the types that both have, by the name in lower case.
cdef dict _GGML_TYPES = {um.um_gguf_type_of_tensor(i).name.decode(): i for i in range(256)
                         if um.um_gguf_type_of_tensor(i) != NULL}
cdef list _NAMES = [um.um_safetensors_type_name(<um.um_safetensors_type>i).decode().lower()
                    for i in range(<int>um.UM_ST_TYPE_COUNT)]


cdef class SafetensorsHeader(HeaderBytes):
    """A parsed header, with its own copy of the bytes. Immutable: any number of threads may use it.

    The arguments are those of `GGUFHeader`. A file that breaks a rule is a SafetensorsError; one
    that cannot be read, or is shorter than `file_nbytes`, an OSError.
    """
    #: def __init__(
    #:     self, source: int | memoryview, file_nbytes: int, path: str, begin: int = 0
    #: ) -> None: ...

    def __cinit__(self, source, uint64_t file_nbytes, str path, uint64_t begin=0):
        self._file_nbytes, self._begin = file_nbytes, begin
        self.read(source, path, FIRST_READ_NBYTES, SafetensorsError)

    def __dealloc__(self):
        um.um_safetensors_free(&self._safetensors)

    cdef um.um_status parse(self, size_t nbytes, um.um_error *err) noexcept nogil:
        return um.um_safetensors_parse(&self._safetensors, self._bytes, nbytes,
                                       self._file_nbytes, err)

    @property
    def nbytes(self) -> int:
        """Bytes of the header: its length, its JSON, and padding."""
        return self._safetensors.header_nbytes

    @property
    def data_offset(self) -> int:
        """The offset of the tensor data in the file."""
        return self._begin + self._safetensors.header_nbytes

    cdef bytes _utf8(self, const unsigned char *text, uint64_t nbytes):
        # Escapes are rare, and never shorter than the text that they encode.
        utf8 = PyBytes_FromStringAndSize(<const char *>text, <Py_ssize_t>nbytes)
        if memchr(text, b"\\", nbytes) == NULL:
            return utf8
        n = um.um_safetensors_write_text(text, um.um_safetensors_text(0, <uint32_t>nbytes),
                                         PyBytes_AS_STRING(utf8))
        return utf8[:n]

    cdef str text(self, const unsigned char *utf8, uint64_t nbytes):
        if memchr(utf8, b"\\", nbytes) == NULL:
            return PyUnicode_DecodeUTF8(<const char *>utf8, <Py_ssize_t>nbytes, NULL)
        return self._utf8(utf8, nbytes).decode()

    cdef named name_place(self, uint64_t i) noexcept:
        cdef uint64_t n = self._safetensors.n_kv
        cdef um.um_safetensors_text name
        name = self._safetensors.kv[i].key if i < n else self._safetensors.tensors[i - n].name
        return named(name.offset, name.nbytes)

    cdef uint64_t n_keys(self):
        return self._safetensors.n_kv

    def value(self, Py_ssize_t index) -> str:
        """Return a value of the metadata."""
        cdef Region _held = self.opened()
        cdef um.um_safetensors_text value = self._kv(index).value
        return self.text(self._bytes + value.offset, value.nbytes)

    def raw_value(self, Py_ssize_t index) -> bytes:
        """Return ``b"str\\0"`` and the value as UTF-8, which no value of another type has."""
        cdef Region _held = self.opened()
        cdef um.um_safetensors_text value = self._kv(index).value
        return b"str\0" + self._utf8(self._bytes + value.offset, value.nbytes)

    cdef const um.um_safetensors_kv *_kv(self, Py_ssize_t index) except NULL:
        if not 0 <= index < <Py_ssize_t>self._safetensors.n_kv:
            raise IndexError(f"metadata {index} of {self._safetensors.n_kv}")
        return &self._safetensors.kv[index]

    cdef uint64_t n_tensors(self):
        return self._safetensors.n_tensors

    cdef tensor_facts facts(self, uint64_t i) noexcept:
        cdef um.um_safetensors_tensor *tensor = &self._safetensors.tensors[i]
        return tensor_facts(self._safetensors.dims + tensor.first_dim, 1, tensor.n_dims,
                            tensor.offset, tensor.nbytes, tensor.type)

    cdef str type_name(self, uint32_t type):
        return _NAMES[type]

    cdef object ggml_number(self, uint32_t type):
        return _GGML_TYPES.get(_NAMES[type])
