# KV caches for Cython callers: `from unimem._core.kv cimport KVCache`.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.kv_memory cimport KVMemory

cdef class KVCache(KVMemory):
    cdef readonly str dtype
    cdef readonly object window
    # The file that it was restored from, for unimem.snapshot.
    cdef public object _snapshot
    # The least that next_position was since an engine set this: tokens before it are the engine's.
    cdef public uint64_t _lowest_end
    cdef object _dtype
    cdef dict _placement
    cdef object fail(self, um.um_error *err, str doing)
    cdef bint _find_rows(self, um.um_error *err, uint64_t n) except -1
    cdef object _view(self, uint32_t layer, bint v, uint64_t first, uint64_t n)
    cdef int _read(self, uint32_t layer, bint v, uint64_t first, uint64_t n,
                   cnp.ndarray out) except -1
    cdef void _note_end(self) noexcept
    cdef int _check_whole(self, str doing) except -1
