# KV caches for Cython callers: `from unimem cimport KVCache`.
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.cache.layered cimport LayeredKVCache
from unimem.kv.cache.one_kind cimport OneKindCache

cdef class KVCache:
    # The core's cache, for callers of um_kv_*. NULL if layers differ.
    cdef um.um_kv *kv
    # What does the work: one of the other two, which is None where it is not that.
    cdef readonly object _body
    cdef OneKindCache _one
    cdef LayeredKVCache _layered
    cdef bint _is_made
    cdef object __weakref__

    cdef object hold(self, body)
    # For runtimes in Cython, with the interpreter's lock or without it: one thread writes, and
    # none closes or trims the cache meanwhile.
    #
    # Appends n tokens to a layer, k and v [n, batch, heads, head_dim] of a type: float32, float16,
    # bfloat16 or, where K and V have one, the cache's. A growing cache takes the lock only to grow.
    # Raises what `append` raises; no row was appended then.
    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1 nogil
    # Row 0 of K (v: of V) of a layer and a stream, which never moves; with order="head" each head
    # of a stream is a stream here. NULL: it has none.
    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream=*) noexcept nogil
    # The row of the first of the n tokens that the layer holds and shows; they are contiguous.
    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n, uint32_t stream=*) noexcept nogil
