# Paged caches for Cython callers: `from unimem.kv.paged cimport PagedKVCache, Sequence`.
cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem._core.block cimport Block
from unimem._core.region cimport Region

cdef class PagedKVCache:
    # The native pool: C callers use the um_paged_* functions on it directly.
    cdef um.um_paged paged
    cdef bint _begun
    cdef readonly Block block
    cdef readonly str name
    cdef readonly str dtype, v_dtype
    cdef object _dtype, _v_dtype
    # The type that K and V may be given as blocks of; float32 if they have two types.
    cdef um.um_dtype _given
    cdef object _index
    cdef Region _region
    cdef object __weakref__
    # The most blocks that sequences held when some were last returned.
    cdef uint32_t _most_in_use
    cdef object fail(self, um.um_error *err)
    # The most blocks that sequences ever held.
    cdef uint32_t most_in_use(self) noexcept
    # Raises ClosedError.
    cdef Region open_region(self)
    cdef object _view(self, Region region, uint32_t layer, bint v)

# Methods of a sequence run in the critical section of its cache.
cdef class Sequence:
    cdef um.um_paged_seq seq
    cdef readonly PagedKVCache cache
    cdef readonly Py_ssize_t n_cached
    cdef bint _closed
    # Whether a thread is writing tokens to it, with the interpreter's lock released.
    cdef bint _appending
    # The known ids of its first tokens, int32.
    cdef bytearray _ids
    # The index node of its last cached block, and the number of cached blocks.
    cdef object _node
    cdef Py_ssize_t _n_indexed
    cdef object __weakref__
    # Raise ClosedError: inside the critical section, and outside.
    cdef Region open_region(self)
    cdef Region held(self)
    # Begins a change: also raises RuntimeError while another thread writes tokens.
    cdef Region begin(self)
    cdef int check_idle(self) except -1
    # Notes the most blocks in use; before blocks are returned.
    cdef void note_use(self) noexcept
    cdef int finish(self, const um.um_paged_pending *pending, bint releases) except -1
    cdef int index_blocks(self) except -1
