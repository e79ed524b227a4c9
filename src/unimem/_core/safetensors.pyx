# cython: language_level=3, boundscheck=False, wraparound=False
"""The header of a safetensors file: metadata and the tensor table."""
import hashlib

from unimem.errors import CapacityError, SafetensorsError

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint64_t
from libc.string cimport memchr, memset

from unimem._core cimport native as um
from unimem._core.region cimport Region
from unimem._core.status cimport raise_file_status, raise_status

# Headers of some 500 tensors fit into the first read. A longer one is read anew, from its start.
cdef enum:
    FIRST_READ_NBYTES = 1 << 16

# ggml's number of the types that it has too; its names are the same in lower case.
cdef dict _GGML_TYPES = {"f32": 0, "f16": 1, "i8": 24, "i16": 25, "i32": 26, "i64": 27, "f64": 28,
                         "bf16": 30}
cdef list _NAMES = [um.um_safetensors_type_name(<um.um_safetensors_type>i).decode().lower()
                    for i in range(<int>um.UM_ST_TYPE_COUNT)]


cdef class SafetensorsHeader:
    """A parsed header, with its own copy of the bytes. Immutable: any number of threads may use it.

    Parameters
    ----------
    fd : int
        The file, open for reading; it is not needed afterwards.
    file_nbytes : int
        Its size.
    path : str
        Stands in messages.

    Raises
    ------
    SafetensorsError
        The file breaks a rule of the format.
    OSError
        It cannot be read, or is shorter than `file_nbytes`.
    MemoryError
        The system has no memory.
    """

    def __cinit__(self, int fd, uint64_t file_nbytes, str path):
        self._file_nbytes = file_nbytes
        try:
            self._read(fd, path)
        except SafetensorsError as error:
            raise SafetensorsError(error.rule, error.offset, path) from None

    def __dealloc__(self):
        um.um_safetensors_free(&self._safetensors)

    cdef int _read(self, int fd, str path) except -1:
        cdef um.um_error err
        cdef um.um_status status = um.UM_OK
        cdef uint64_t nbytes = min(self._file_nbytes, <uint64_t>FIRST_READ_NBYTES)
        cdef um.um_block_options options
        memset(&options, 0, sizeof(options))
        while True:
            if nbytes > 0:
                self._region = Region.__new__(Region)
                self._region.name = path
                with nogil:
                    status = um.um_block_map(&self._region.block, nbytes, &options, &err)
                if status != um.UM_OK:
                    raise_status(status, &err, path)
                self._bytes = <const unsigned char *>self._region.block.base
                with nogil:
                    status = um.um_file_read(fd, 0, self._region.block.base, nbytes, &err)
                if status != um.UM_OK:
                    raise_file_status(status, &err, "reading the header", path)
            with nogil:
                status = um.um_safetensors_parse(&self._safetensors, self._bytes, nbytes,
                                                 self._file_nbytes, &err)
            if status == um.UM_OK:
                return 0
            if status != um.UM_E_FULL:
                raise_status(status, &err, path, CapacityError, "bytes", SafetensorsError)
            nbytes = err.asked

    @property
    def nbytes(self):
        """Bytes of the header: its length, its JSON, and what pads it."""
        return self._safetensors.header_nbytes

    @property
    def data_offset(self):
        """The byte of the file where tensor data begins."""
        return self._safetensors.header_nbytes

    cdef bytes _utf8(self, um.um_safetensors_text text):
        # Escapes are rare, and never shorter than what they stand for.
        utf8 = PyBytes_FromStringAndSize(<const char *>self._bytes + text.offset, text.nbytes)
        if memchr(self._bytes + text.offset, b"\\", text.nbytes) == NULL:
            return utf8
        n = um.um_safetensors_write_text(self._bytes, text, PyBytes_AS_STRING(utf8))
        return utf8[:n]

    cdef str _text(self, um.um_safetensors_text text):
        if memchr(self._bytes + text.offset, b"\\", text.nbytes) == NULL:
            return PyUnicode_DecodeUTF8(<const char *>self._bytes + text.offset, text.nbytes, NULL)
        return self._utf8(text).decode()

    def keys(self):
        """The keys of the metadata, each with its index, in the order of the file."""
        cdef uint64_t i
        keys = {}
        for i in range(self._safetensors.n_kv):
            keys[self._text(self._safetensors.kv[i].key)] = i
        return keys

    def value(self, Py_ssize_t index):
        """One value of the metadata.

        Returns
        -------
        str
        """
        return self._text(self._kv(index).value)

    def raw_value(self, Py_ssize_t index):
        """One value of the metadata as bytes that no value of another type or content has.

        Returns
        -------
        bytes
            ``b"str\\0"``, and the value as UTF-8.
        """
        return b"str\0" + self._utf8(self._kv(index).value)

    cdef const um.um_safetensors_kv *_kv(self, Py_ssize_t index) except NULL:
        if not 0 <= index < <Py_ssize_t>self._safetensors.n_kv:
            raise IndexError(f"metadata {index} of {self._safetensors.n_kv}")
        return &self._safetensors.kv[index]

    def tensor_names(self):
        """The names of the tensors, each with its index, in the order of the header."""
        cdef uint64_t i
        names = {}
        for i in range(self._safetensors.n_tensors):
            names[self._text(self._safetensors.tensors[i].name)] = i
        return names

    cdef const um.um_safetensors_tensor *_tensor(self, Py_ssize_t index) except NULL:
        if not 0 <= index < <Py_ssize_t>self._safetensors.n_tensors:
            raise IndexError(f"tensor {index} of {self._safetensors.n_tensors}")
        return &self._safetensors.tensors[index]

    def tensor(self, Py_ssize_t index):
        """One row of the tensor table.

        Returns
        -------
        ne : tuple of int
            Dimensions in ggml's order: the contiguous one first.
        type : str
            The dtype's name in lower case, such as ``"bf16"`` or ``"f8_e4m3"``.
        ggml_type : int or None
            ggml's number of the type, where ggml has it.
        offset, nbytes : int
            Of the data, in the file: at any byte, also where the dtype would be aligned.
        """
        cdef const um.um_safetensors_tensor *tensor = self._tensor(index)
        cdef const uint64_t *dims = self._safetensors.dims + tensor.first_dim
        cdef Py_ssize_t n_dims = tensor.n_dims
        ne = tuple([dims[n_dims - 1 - i] for i in range(n_dims)])
        name = _NAMES[<int>tensor.type]
        return ne, name, _GGML_TYPES.get(name), tensor.offset, tensor.nbytes

    def bytes_by_type(self):
        """The bytes of all tensors of a type, by the type's name."""
        cdef um.um_safetensors_tensor *tensor
        cdef uint64_t i
        totals = {}
        for i in range(self._safetensors.n_tensors):
            tensor = &self._safetensors.tensors[i]
            name = _NAMES[<int>tensor.type]
            totals[name] = totals.get(name, 0) + tensor.nbytes
        return totals

    def fingerprint(self):
        """A hash of the header and the size of the file, in hexadecimal."""
        digest = hashlib.blake2b(memoryview(self._region)[:self._safetensors.header_nbytes],
                                 digest_size=16)
        digest.update(int(self._file_nbytes).to_bytes(8, "little"))
        return digest.hexdigest()
