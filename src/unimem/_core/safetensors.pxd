# Safetensors headers for Cython callers.
from unimem._core cimport native as um
from unimem._core.region cimport Region

cdef class SafetensorsHeader:
    cdef um.um_safetensors _safetensors
    # The private copy of the file's first bytes: somebody who truncates the file cannot end this
    # process.
    cdef Region _region
    cdef const unsigned char *_bytes
    cdef um.uint64_t _file_nbytes
    cdef int _read(self, int fd, str path) except -1
    cdef str _text(self, um.um_safetensors_text text)
    cdef bytes _utf8(self, um.um_safetensors_text text)
    cdef const um.um_safetensors_kv *_kv(self, Py_ssize_t index) except NULL
    cdef const um.um_safetensors_tensor *_tensor(self, Py_ssize_t index) except NULL
