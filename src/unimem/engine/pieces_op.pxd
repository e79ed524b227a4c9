# What the nodes that read weights share with the forward pass.
from libc.stdint cimport int32_t, int64_t

from unimem._core cimport native as um
from unimem._core.pieces cimport Holder, Pieces

cdef struct Reading:
    um.um_pieces *pieces
    um.um_pieces_holder *holder
    um.um_status status  # of the first failure in the present graph
    um.um_error error
    int64_t waited_ns  # in the present graph
    int32_t *ids
    int32_t *slots

cdef class PieceReader:
    cdef Reading reading
    cdef Pieces _pieces
    cdef Holder _holder
    cdef list _nodes
    cdef object _ids, _slots

    # Around each graph.
    cdef void begin(self) noexcept nogil
    cdef void end(self) noexcept nogil
