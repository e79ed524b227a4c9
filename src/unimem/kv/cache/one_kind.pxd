# KV caches whose layers are alike, for cache.pyx, layered.pyx and the engine.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.cache.storage cimport KVStorage

cdef class OneKindCache(KVStorage):
    # The file that it was restored from, for unimem.kv.snapshot.
    cdef public object _snapshot
    # The KVSpec that it was made of.
    cdef object _spec
    # As those of KVCache.
    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1 nogil
    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream=*) noexcept nogil
    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n, uint32_t stream=*) noexcept nogil
    cdef um.um_dtype given_blocks(self) noexcept
    cdef object _view(self, uint32_t layer, bint v, uint64_t first, uint64_t n)
    cdef bint append_few(self, layer, k, v) noexcept
    cdef int append_tokens(self, layer, k, v) except -1
    cdef uint64_t next_row(self, uint32_t layer)
    cdef int _read(self, uint32_t layer, bint v, uint64_t first, uint64_t n,
                   cnp.ndarray out) except -1
    cdef bint is_left_open(self)
