# Grids for Cython callers: `from unimem._core.grid cimport Grid`.
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

cdef class Grid(Cells):
    pass

cdef class DeviceGrid(Cells):
    # The free list.
    cdef object _links

cdef class Cell:
    cdef Cells _grid
    cdef readonly uint32_t id
    cdef Cells taken_from(self)
