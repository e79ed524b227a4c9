# cython: language_level=3, boundscheck=False, wraparound=False
"""A runtime of somebody else's, on unimem's memory: compiled against the installed package."""
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem cimport Block, Grid, KVCache, Tape
from unimem cimport native as um
from unimem._core.grid cimport Cell


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
    """The block's address."""
    return <uintptr_t>block.base()


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
    cdef um.um_kv *kv = cache.kv
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


def fill_cells(Grid grid, n, give):
    """Take n cells without the lock, and give back the cells of some numbers."""
    cdef list found = []
    cdef uint32_t cell_id
    cdef void *address
    for _ in range(n):
        with nogil:
            address = grid.take_cell(&cell_id)
        found.append((cell_id, <uintptr_t>address))
    for cell_id in give:
        with nogil:
            grid.give_cell(cell_id)
    return found


def take_unlocked(Tape tape, size_t nbytes):
    """An address, taken without the lock."""
    cdef void *address
    with nogil:
        address = tape.take_raw(nbytes)
    return <uintptr_t>address


def append_unlocked(KVCache cache, uint32_t layer, const float[:, :, ::1] k,
                    const float[:, :, ::1] v):
    """Tokens [n, heads, head_dim] for one layer, one after the other."""
    cdef Py_ssize_t i
    with nogil:
        for i in range(k.shape[0]):
            cache.append_rows(layer, &k[i, 0, 0], &v[i, 0, 0], um.UM_F32, 1)


def append_together(KVCache cache, uint32_t layer, const float[:, :, ::1] k,
                    const float[:, :, ::1] v):
    """The same tokens in one call, with the lock."""
    cache.append_rows(layer, &k[0, 0, 0], &v[0, 0, 0], um.UM_F32, k.shape[0])


def where(KVCache cache, uint32_t layer, bint v, uint32_t stream=0):
    """Row 0 of a layer, its first token's row, and how many tokens it shows."""
    cdef uint64_t n = 0
    cdef void *lane
    cdef void *rows
    with nogil:
        lane = cache.lane(layer, v, stream)
        rows = cache.rows(layer, v, &n, stream)
    return <uintptr_t>lane, <uintptr_t>rows, n
