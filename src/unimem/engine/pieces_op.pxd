# What the nodes that read weights share with the forward pass.
from libc.stdint cimport int32_t, int64_t, uint64_t

from unimem._core cimport native as um
from unimem._core.pieces cimport Holder, Pieces

cdef struct Waves:  # of the experts of the present layer that have no room at once
    int32_t n  # different experts that are wanted; 0 if they have room
    int32_t each  # of a wave
    int32_t *wanted  # their pieces, wave by wave
    int32_t *ranks  # of each expert among these; below 0 if it is not
    # The pairs of a token and an expert that a wave computes.
    int32_t *tokens
    int32_t *slots
    int64_t *rows

cdef struct Reading:
    um.um_pieces *pieces
    um.um_pieces_holder *holder
    um.um_status status  # of the first failure in the present graph
    um.um_error error
    int64_t waited_ns  # in the present graph
    int32_t *ids
    int32_t *slots
    Waves waves

cdef class PieceReader:
    cdef Reading reading
    cdef Pieces _pieces
    cdef Holder _holder
    cdef list _nodes
    cdef object _ids, _slots, _pairs, _wanted, _check
    cdef uint64_t _n_checked  # reads after which the files were looked at
    cdef um.um_pieces_stat _counted

    cdef void _point(self)
    # Raise OSError if a file was written to; it asks the kernel only if something was read.
    cdef int check_files(self) except -1
    # Around each graph.
    cdef void begin(self) noexcept nogil
    cdef void end(self) noexcept nogil
    # Add what was counted since the last call: hits, misses, bytes and ns of waiting.
    cdef void count(self, uint64_t *cells) noexcept
