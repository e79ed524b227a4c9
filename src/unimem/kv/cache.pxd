# KV caches for Cython callers: `from unimem.kv.cache cimport KVCache`.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.memory cimport KVMemory

cdef class KVCache(KVMemory):
    # The file that it was restored from, for unimem.kv.snapshot.
    cdef public object _snapshot
    cdef dict _placement
    cdef um.um_dtype given_blocks(self) noexcept
    cdef object _view(self, uint32_t layer, bint v, uint64_t first, uint64_t n)
    # `append`, for all caches.
    cdef int append_tokens(self, layer, k, v) except -1
    cdef uint64_t next_row(self, uint32_t layer)
    cdef int _read(self, uint32_t layer, bint v, uint64_t first, uint64_t n,
                   cnp.ndarray out) except -1
