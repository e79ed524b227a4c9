# KV caches in memory that the CPU cannot touch.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem.kv.inputs cimport Bytes, Given
from unimem.kv.cache.rows cimport KVRows
from unimem._core.region cimport Region
from unimem._core.tape cimport DeviceTape

cdef class KVDevice(KVRows):
    cdef um.um_kv_spec _spec
    cdef um.um_kv_storage _storage
    # The user's tape, or one of the cache's own.
    cdef DeviceTape _tape
    cdef bint _owns_tape
    # A region without memory: its windows are the views, at offsets in the storage.
    cdef Region _views
    cdef readonly object _driver
    cdef int _device
    # The stream on which rows move: that of an append that makes room, or None: the current one.
    cdef object _stream
    # While tokens move: the memory, which thus stays; the error to raise at the end; and whether
    # bytes have moved.
    cdef object _moving, _held_back
    cdef bint _has_moved
    # Whether a move ended half way, because the device failed.
    cdef bint _is_torn
    # The type of arrays that the driver takes as they are.
    cdef object _array_type

    cdef object as_array(self, object x, str what)
    cdef object number_of_stream(self, object stream)
    # Checks k and v, and returns their shape.
    cdef tuple check_given(self, Given *out, object k, object v, str doing)
    # Finds the memory of tokens, which has to be on this device and outside this cache.
    cdef int find_apart(self, Bytes *out, object a, tuple shape, str doing) except -1
    cdef int find_rows_on(self, object stream, um.um_error *err, uint64_t n) except -1
    cdef int move_bytes(self, uintptr_t to, uintptr_t from_, size_t nbytes) except -1
    cdef int move_piece(self, uintptr_t to, uintptr_t from_, size_t nbytes) except -1
