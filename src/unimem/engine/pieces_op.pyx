# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The nodes of a graph that bring streamed weights into memory before ggml multiplies them.

One thread of ggml's team calls the core, which reads everything that is missing at once. The other
threads wait at the end of the node, as after any node. After a failed read the graph ends there:
see `is_over` in forward.pyx.
"""
import numpy as np

from unimem.backends import ggml

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.pieces cimport Holder, Pieces
from unimem.engine.clock cimport now_ns

cnp.import_array()

# Offsets in a ggml_tensor.
cdef size_t SIZES = ggml.NE_OFFSET
cdef size_t STRIDES = ggml.NB_OFFSET
cdef size_t DATA = ggml.DATA_OFFSET

cdef enum:
    # A batch that uses each expert of a layer this many times on average uses nearly all of them.
    MANY = 4


cdef bint bring(Reading *reading, size_t n) noexcept nogil:
    """Bring the n pieces in `ids` into memory, and write their slots."""
    cdef int64_t start = now_ns()
    cdef um.um_status status = um.um_pieces_ensure(
        reading.pieces, reading.holder, reading.ids, n, reading.slots, &reading.error)
    reading.waited_ns += now_ns() - start
    if status != um.UM_OK:
        reading.status = status
    return status == um.UM_OK


cdef struct ExpertNode:
    Reading *reading
    int32_t first  # the piece of the layer's first expert; the others follow
    int32_t n_experts
    int32_t next_first  # that of the next layer, or -1


cdef void bring_experts(char *header, const void *given, int thread, int n_threads,
                        void *data) noexcept nogil:
    """Replace the numbers of experts, int32 [n_tokens, n_used], by their slots."""
    cdef ExpertNode *node = <ExpertNode *>data
    cdef Reading *reading = node.reading
    cdef int64_t *ne = <int64_t *>(header + SIZES)
    cdef size_t *nb = <size_t *>(header + STRIDES)
    cdef char *rows = (<char **>(header + DATA))[0]
    cdef int64_t n = ne[0] * ne[1], i
    cdef um.um_error err
    if thread != 0 or reading.status != um.UM_OK:
        return
    for i in range(n):
        reading.ids[i] = node.first + (<int32_t *>(rows + i // ne[0] * nb[1]))[i % ne[0]]
    if not bring(reading, n):
        return
    for i in range(n):
        (<int32_t *>(rows + i // ne[0] * nb[1]))[i % ne[0]] = reading.slots[i]
    if node.next_first >= 0 and n >= MANY * node.n_experts:
        for i in range(node.n_experts):
            reading.ids[i] = node.next_first + i
        # A failure shows when they are needed.
        um.um_pieces_prefetch(reading.pieces, reading.ids, node.n_experts, &err)


cdef struct LayerNode:
    Reading *reading
    int32_t piece
    char *pool
    size_t stride  # from one slot of the pool to the next
    size_t n_tensors
    const uintptr_t *headers  # of its tensors
    const size_t *offsets  # of their data in a slot
    size_t n_ahead
    const int32_t *ahead  # the pieces that are used next


cdef void bring_layer(char *header, const void *given, int thread, int n_threads,
                      void *data) noexcept nogil:
    """Point the tensors of a layer at the slot that holds it, and begin to read the next ones."""
    cdef LayerNode *node = <LayerNode *>data
    cdef Reading *reading = node.reading
    cdef um.um_error err
    cdef char *slot
    cdef size_t i
    if thread != 0 or reading.status != um.UM_OK:
        return
    reading.ids[0] = node.piece
    if not bring(reading, 1):
        return
    slot = node.pool + reading.slots[0] * node.stride
    for i in range(node.n_tensors):
        (<char **>(node.headers[i] + DATA))[0] = slot + node.offsets[i]
    if node.n_ahead:
        um.um_pieces_prefetch(reading.pieces, node.ahead, node.n_ahead, &err)


# The functions for ``ggml_map_custom1``; their `userdata` are from a `PieceReader`. The first
# replaces the numbers of experts, int32 [n_used, n_tokens], by their slots; the second has a layer
# read before the values that it returns are used.
#: experts_address: int
#: layer_address: int
experts_address = <uintptr_t>&bring_experts
layer_address = <uintptr_t>&bring_layer


cdef class _Node:
    """A node, and the arrays that it points to."""
    cdef ExpertNode experts
    cdef LayerNode layer
    cdef tuple _kept


cdef class PieceReader:
    """Reads the streamed weights that the graphs of one decoder use. For one graph at a time.

    Parameters
    ----------
    pieces : Pieces
        The cache of the weights. It outlives the reader's graphs.
    most : int
        The most pieces that a node asks for.
    """
    #: def __init__(self, pieces: Pieces, most: int) -> None: ...

    def __cinit__(self, Pieces pieces not None, Py_ssize_t most):
        self._pieces, self._holder, self._nodes = pieces, Holder(pieces), []
        self._ids, self._slots = np.zeros(most, np.int32), np.zeros(most, np.int32)
        self.reading.pieces, self.reading.holder = pieces.pieces, self._holder.holder
        um.um_pieces_stat_read(pieces.pieces, &self._counted)
        self.reading.ids = <int32_t *>cnp.PyArray_DATA(self._ids)
        self.reading.slots = <int32_t *>cnp.PyArray_DATA(self._slots)

    def experts(self, int32_t first, int32_t n, int32_t next_first=-1) -> int:
        """Return the data of a node for `n` experts, whose pieces are numbered from `first` on.

        A batch that uses nearly all of them also begins to read those of the next layer, from
        `next_first` on.
        """
        cdef _Node node = _Node()
        node.experts = ExpertNode(&self.reading, first, n, next_first)
        self._nodes.append(node)
        return <uintptr_t>&node.experts

    def layer(self, int32_t piece, pool: tuple[int, int], offsets: Mapping[int, int],
              ahead: Sequence[int]) -> int:
        """Return the data of a node for a layer, which is one piece.

        Parameters
        ----------
        piece : int
            Its number.
        pool : tuple of int
            The address of its pool, and the bytes from slot to slot.
        offsets : mapping of int to int
            Where in a slot the data of each tensor is, by the address of the tensor's header.
        ahead : sequence of int
            The pieces that are used next.
        """
        cdef _Node node = _Node()
        cdef cnp.ndarray headers = np.array(list(offsets), np.uintp)
        cdef cnp.ndarray places = np.array(list(offsets.values()), np.uintp)
        cdef cnp.ndarray later = np.array(ahead, np.int32)
        cdef uintptr_t base = pool[0]
        node._kept = headers, places, later
        node.layer = LayerNode(
            &self.reading, piece, <char *>base, pool[1], len(headers),
            <uintptr_t *>cnp.PyArray_DATA(headers), <size_t *>cnp.PyArray_DATA(places),
            len(later), <int32_t *>cnp.PyArray_DATA(later))
        self._nodes.append(node)
        return <uintptr_t>&node.layer

    def close(self) -> None:
        """Let the pieces go; graphs may not be computed any more."""
        self._holder.close()

    def was_interrupted(self) -> bool:
        """Return True if a signal ended a read; raise for any other failure of the last graph.

        Raises
        ------
        OSError
            A file cannot be read, or has become shorter: its path, and the place in the message.
        CapacityError, BufferError
            The weights of one token do not fit into their budget, or other decoders hold too many.
        """
        if self.reading.error.detail == um.UM_PIECES_INTERRUPTED:
            return True
        self._pieces.fail(self.reading.status, &self.reading.error)
        return False

    cdef void begin(self) noexcept nogil:
        self.reading.status = um.UM_OK
        self.reading.waited_ns = 0

    cdef void count(self, uint64_t *cells) noexcept:
        cdef um.um_pieces_stat now
        um.um_pieces_stat_read(self.reading.pieces, &now)
        cells[0] += now.hits - self._counted.hits
        cells[1] += now.misses - self._counted.misses
        cells[2] += now.read_bytes - self._counted.read_bytes
        cells[3] += now.waited_ns - self._counted.waited_ns
        self._counted = now

    cdef void end(self) noexcept nogil:
        um.um_pieces_release(self.reading.pieces, self.reading.holder)
