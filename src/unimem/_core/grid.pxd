# Grids for Cython callers: `from unimem cimport Grid`.
from libc.stdint cimport uint32_t

from unimem._core cimport native as um
from unimem._core.tape cimport Bump

cdef class Cells:
    cdef um.um_grid grid
    cdef readonly Bump tape
    cdef readonly size_t cell_bytes
    cdef bint _begun
    cdef object __weakref__
    # Raises RuntimeError for a grid that is made already.
    cdef object begin(self)
    cdef object check_open(self)
    cdef object fail(self, um.um_error *err)
    # A cell's address, and its number in *out_id; it is not initialised. Raises GridFull or
    # ClosedError. Any number of threads may take and give at once, without the lock.
    cdef void *take_cell(self, uint32_t *out_id) except NULL nogil
    # Gives it back; raises ValueError where there is no such cell or it is free.
    cdef int give_cell(self, uint32_t cell_id) except -1 nogil

cdef class Grid(Cells):
    pass

cdef class DeviceGrid(Cells):
    # The free list.
    cdef object _links

cdef class Cell:
    cdef Cells _grid
    cdef readonly uint32_t id
    cdef Cells taken_from(self)
