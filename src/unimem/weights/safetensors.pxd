# Safetensors headers for Cython callers.
from unimem._core cimport native as um
from unimem.weights.header_bytes cimport HeaderBytes

cdef class SafetensorsHeader(HeaderBytes):
    cdef um.um_safetensors _safetensors
    cdef bytes _utf8(self, const unsigned char *text, um.uint64_t nbytes)
    cdef const um.um_safetensors_kv *_kv(self, Py_ssize_t index) except NULL
