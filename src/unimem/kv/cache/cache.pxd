# KV caches for Cython callers: `from unimem cimport KVCache`.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.cache.storage cimport KVMemory

cdef class KVCache(KVMemory):
    # The file that it was restored from, for unimem.kv.snapshot.
    cdef public object _snapshot
    cdef dict _placement
    # For runtimes in Cython, with the interpreter's lock or without it: one thread writes, and
    # nobody closes or trims the cache meanwhile.
    #
    # Appends n tokens to a layer, k and v [n, batch, heads, head_dim] of a type: float32, float16,
    # bfloat16 or, where K and V have one, the cache's. A growing cache takes the lock only to grow.
    # Raises what `append` raises; no row was appended then.
    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1 nogil
    # Row 0 of K (v: of V) of a layer and a stream, which never moves; with order="head" each head
    # of a stream is one. NULL: there is none.
    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream=*) noexcept nogil
    # The row of the first of the n tokens that the layer holds and shows; they are contiguous.
    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n, uint32_t stream=*) noexcept nogil
    cdef um.um_dtype given_blocks(self) noexcept
    cdef object _view(self, uint32_t layer, bint v, uint64_t first, uint64_t n)
    # `append`, for all caches.
    cdef int append_tokens(self, layer, k, v) except -1
    cdef uint64_t next_row(self, uint32_t layer)
    cdef int _read(self, uint32_t layer, bint v, uint64_t first, uint64_t n,
                   cnp.ndarray out) except -1
