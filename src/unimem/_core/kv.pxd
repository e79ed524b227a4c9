# KV caches for Cython callers: `from unimem._core.kv cimport KVCache`.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.tape cimport Tape

cdef class KVCache:
    # The native cache: C callers use the um_kv_* functions on it directly.
    cdef um.um_kv kv
    cdef readonly Tape tape
    cdef bint _owns_tape
    cdef bint _closed
    cdef size_t _storage_bytes
    cdef readonly str dtype
    cdef object _numpy_dtype
    cdef object __weakref__
    cdef object fail(self, um.um_error *err, str doing)
    cdef object check_open(self)
    cdef object _view(self, uint32_t layer, bint v, uint64_t n)
    cdef uint32_t _checked_layer(self, Py_ssize_t layer) except? 0xffffffff
