# GGUF headers for Cython callers.
from unimem._core cimport native as um
from unimem.weights.header_bytes cimport HeaderBytes

cdef class GGUFHeader(HeaderBytes):
    cdef um.um_gguf _gguf
    cdef object _numbers(self, um.um_gguf_type type, um.uint64_t at, um.uint64_t n)
    cdef list _strings(self, um.uint64_t *at, um.uint64_t n)
    cdef object _array(self, um.um_gguf_type item_type, um.uint64_t *at, um.uint64_t n)
    cdef const um.um_gguf_kv *_kv(self, Py_ssize_t index) except NULL
