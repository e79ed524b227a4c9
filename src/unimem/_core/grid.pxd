# Grids for Cython callers: `from unimem._core.grid cimport Grid`.
from libc.stdint cimport uint32_t

from unimem._core cimport native as um
from unimem._core.tape cimport Tape

cdef class Grid:
    cdef um.um_grid grid
    cdef readonly Tape tape
    cdef readonly size_t cell_bytes
    cdef object __weakref__
    cdef object fail(self, um.um_error *err)

cdef class Cell:
    cdef Grid _grid
    cdef readonly uint32_t id
    cdef Grid taken_from(self)
