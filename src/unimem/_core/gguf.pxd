# GGUF headers for Cython callers.
from unimem._core cimport native as um
from unimem._core.region cimport Region

cdef class Header:
    cdef um.um_gguf _gguf
    # The private copy of the file's first bytes. Nothing is read from the mapping of the file, so
    # that somebody who truncates it cannot end this process.
    cdef Region _region
    cdef const unsigned char *_bytes
    cdef um.uint64_t _file_nbytes
    cdef int _read(self, int fd, str path) except -1
    cdef object _numbers(self, um.um_gguf_type type, um.uint64_t at, um.uint64_t n)
    cdef list _strings(self, um.uint64_t *at, um.uint64_t n)
    cdef object _array(self, um.um_gguf_type item_type, um.uint64_t *at, um.uint64_t n)
    cdef const um.um_gguf_kv *_kv(self, Py_ssize_t index) except NULL
    cdef const um.um_gguf_tensor *_tensor(self, Py_ssize_t index) except NULL
