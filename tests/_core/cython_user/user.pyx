# cython: language_level=3, boundscheck=False, wraparound=False
"""A runtime of somebody else's, on unimem's memory: compiled against the installed package."""
from libc.stdint cimport uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.block cimport Block
from unimem._core.grid cimport Cell, Grid
from unimem.kv.cache cimport KVCache
from unimem._core.tape cimport Tape


def sum_of_squares(Tape tape, size_t n):
    """Typed memoryviews on the tape's memory, and their first addresses."""
    cdef float[::1] a = tape.take_floats(n)
    cdef double *b = <double *>tape.take_raw(n * sizeof(double), 4096)
    cdef double total = 0
    cdef size_t i
    for i in range(n):
        a[i] = i
        b[i] = a[i] * a[i]
        total += b[i]
    return total, <uintptr_t>&a[0], <uintptr_t>b


def keep_view(Tape tape):
    """A memoryview, to be held by the caller."""
    return tape.take_floats(4)


def raw(Tape tape, size_t nbytes, size_t align):
    """What the tape raises comes through."""
    return <uintptr_t>tape.take_raw(nbytes, align)


def base_of(Block block):
    """The block's address, read from the native struct."""
    return <uintptr_t>block.region().block.base


def commit(Block block, list ranges):
    """All of the ranges, or none."""
    block.commit_ranges(ranges)


def cell_of(Grid grid, Cell cell):
    """The cell's address, from the native grid."""
    return <uintptr_t>um.um_grid_cell(&grid.grid, cell.id)


def append_token(KVCache cache, const float[:, ::1] k, const float[:, ::1] v):
    """The same token in every layer, without Python in between."""
    cdef um.um_error err
    cdef um.um_status status = um.UM_OK
    cdef uint64_t row
    cdef um.um_kv *kv = &cache.kv
    cdef size_t n = kv.spec.n_kv_heads * kv.spec.head_dim
    with nogil:
        status = um.um_kv_reserve(kv, 1, &row, &err)
        for layer in range(kv.spec.n_layers):
            if status == um.UM_OK:
                status = um.um_convert(<char *>um.um_kv_lane(kv, layer, 0, 0) + row * kv.row_bytes,
                                       kv.spec.type, &k[0, 0], um.UM_F32, n, &err)
            if status == um.UM_OK:
                status = um.um_convert(<char *>um.um_kv_lane(kv, layer, 1, 0) + row * kv.row_bytes,
                                       kv.spec.type, &v[0, 0], um.UM_F32, n, &err)
        if status == um.UM_OK:
            status = um.um_kv_commit(kv, 1, &err)
    return um.um_status_name(status).decode(), um.um_kv_seq_len(kv)
