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
    UNRANKED = -2
    # The most sizes of nodes that compute experts all at once, and in a wave: see `Waves` in
    # graph.py. Without biases of experts there are fewer.
    WHOLE_SIZES = 7
    WAVE_SIZES = 13
    AHEAD_SIZES = 6  # of the nodes that foresee experts


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
    int32_t n_waves  # in which they may be computed; 0 if only all at once
    const uintptr_t *sizes  # of the nodes that compute all at once, in tokens
    int32_t pool
    uint64_t n_fetched  # pieces of the pool, when this layer was brought last
    const uintptr_t *ahead  # the sizes of the nodes that foresee these experts


cdef struct WaveNode:
    const ExpertNode *experts
    int32_t number
    const uintptr_t *sizes  # of the nodes that compute it, in pairs


cdef void set_sizes(const uintptr_t *sizes, int n, int64_t value) noexcept nogil:
    cdef int i
    for i in range(n):
        if sizes[i] != 0:
            (<int64_t *>sizes[i])[0] = value


cdef int32_t chosen_expert(char *header, int64_t i) noexcept nogil:
    """Return the number at place i of int32 [n_tokens, n_used]."""
    cdef int64_t n_used = (<int64_t *>(header + SIZES))[0]
    cdef char *row = (<char **>(header + DATA))[0] + i // n_used * (<size_t *>(header + STRIDES))[1]
    return (<int32_t *>row)[i % n_used]


cdef bint split(const ExpertNode *node, int64_t n) noexcept nogil:
    """Divide the experts of n pairs, whose pieces are `ids`, into waves: first those in memory.

    Half of the slots are for the next wave, which is read meanwhile, unless that makes too many.
    """
    cdef Reading *reading = node.reading
    cdef Waves *waves = &reading.waves
    cdef int32_t i
    cdef int64_t k
    cdef int are_missing
    for i in range(node.n_experts):
        waves.ranks[i] = -1
    for k in range(n):
        waves.ranks[reading.ids[k] - node.first] = UNRANKED
    for are_missing in range(2):
        for i in range(node.n_experts):
            if waves.ranks[i] == UNRANKED and (
                    are_missing or um.um_pieces_slot(reading.pieces, node.first + i) >= 0):
                waves.ranks[i] = waves.n
                waves.wanted[waves.n] = node.first + i
                waves.n += 1
    waves.each = max(<int32_t>(reading.error.limit // 2),
                     (waves.n + node.n_waves - 1) // node.n_waves)
    return <uint64_t>waves.each <= reading.error.limit


cdef void begin(Reading *reading, const int32_t *ids, size_t n) noexcept nogil:
    """Begin to read n pieces; a failure shows when they are needed."""
    cdef um.um_error err
    um.um_pieces_prefetch(reading.pieces, ids, n, &err)


cdef void begin_next_layer(const ExpertNode *node, int64_t n_pairs) noexcept nogil:
    """Begin to read the experts of the next layer, if this one uses nearly all."""
    cdef int32_t i
    if node.next_first >= 0 and n_pairs >= MANY * node.n_experts:
        for i in range(node.n_experts):
            node.reading.ids[i] = node.next_first + i
        begin(node.reading, node.reading.ids, node.n_experts)


cdef void foresee_if_read(ExpertNode *node) noexcept nogil:
    """Let the next token foresee these experts only if the last one read any: it costs time."""
    cdef uint64_t n_fetched
    if node.ahead != NULL:
        n_fetched = um.um_pieces_fetched(node.reading.pieces, node.pool)
        set_sizes(node.ahead, AHEAD_SIZES, n_fetched != node.n_fetched)
        node.n_fetched = n_fetched


cdef void bring_experts(char *header, const void *given, int thread, int n_threads,
                        void *data) noexcept nogil:
    """Replace the numbers of experts, int32 [n_tokens, n_used], by their slots."""
    cdef ExpertNode *node = <ExpertNode *>data
    cdef Reading *reading = node.reading
    cdef int64_t *ne = <int64_t *>(header + SIZES)
    cdef size_t *nb = <size_t *>(header + STRIDES)
    cdef char *rows = (<char **>(header + DATA))[0]
    cdef int64_t n = ne[0] * ne[1], i
    if thread != 0 or reading.status != um.UM_OK:
        return
    for i in range(n):
        reading.ids[i] = node.first + chosen_expert(header, i)
    reading.waves.n = 0
    if not bring(reading, n):
        if reading.status == um.UM_E_FULL and node.n_waves and split(node, n):
            reading.status = um.UM_OK
            set_sizes(node.sizes, WHOLE_SIZES, 0)
        return
    if node.n_waves:
        set_sizes(node.sizes, WHOLE_SIZES, ne[1])
    for i in range(n):
        (<int32_t *>(rows + i // ne[0] * nb[1]))[i % ne[0]] = reading.slots[i]
    begin_next_layer(node, n)
    foresee_if_read(node)


cdef void bring_wave(char *header, const void *given, int thread, int n_threads,
                     void *data) noexcept nogil:
    """List the pairs of a wave, with the slots of its experts, and begin to read the next one."""
    cdef WaveNode *node = <WaveNode *>data
    cdef Reading *reading = node.experts.reading
    cdef Waves *waves = &reading.waves
    cdef int64_t *ne = <int64_t *>(header + SIZES)
    cdef int32_t first = node.number * waves.each, rank
    cdef int32_t n = min(waves.each, waves.n - first), n_pairs = 0
    cdef int64_t i
    if thread != 0 or reading.status != um.UM_OK:
        return
    if n <= 0:
        set_sizes(node.sizes, WAVE_SIZES, 0)
        return
    for i in range(n):
        reading.ids[i] = waves.wanted[first + i]
    if not bring(reading, n):
        return
    for i in range(ne[0] * ne[1]):
        rank = waves.ranks[chosen_expert(header, i)] - first
        if 0 <= rank < n:
            waves.tokens[n_pairs] = i // ne[0]
            waves.slots[n_pairs] = reading.slots[rank]
            waves.rows[n_pairs] = i
            n_pairs += 1
    set_sizes(node.sizes, WAVE_SIZES, n_pairs)
    first += n
    if first < waves.n:
        begin(reading, waves.wanted + first, min(waves.each, waves.n - first))
    else:
        begin_next_layer(node.experts, ne[0] * ne[1])


cdef void begin_experts(char *header, const void *given, int thread, int n_threads,
                        void *data) noexcept nogil:
    """Begin to read the experts in int32 [1, n], which a layer is expected to choose."""
    cdef ExpertNode *node = <ExpertNode *>data
    cdef Reading *reading = node.reading
    cdef int64_t i, n = (<int64_t *>(header + SIZES))[0]
    if thread != 0 or reading.status != um.UM_OK:
        return
    for i in range(n):
        reading.ids[i] = node.first + chosen_expert(header, i)
    begin(reading, reading.ids, n)


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
# replaces the numbers of experts, int32 [n_used, n_tokens], by their slots; the second begins to
# read experts; the third brings those of a wave; the last has a layer read before the values that
# it returns are used.
#: experts_address: int
#: ahead_address: int
#: wave_address: int
#: layer_address: int
experts_address = <uintptr_t>&bring_experts
ahead_address = <uintptr_t>&begin_experts
wave_address = <uintptr_t>&bring_wave
layer_address = <uintptr_t>&bring_layer


cdef class _Node:
    """A node, and the arrays that it points to."""
    cdef ExpertNode experts
    cdef WaveNode wave
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
    check : callable
        Raises an error if a file is not any more what it was; called after graphs that read.
    """
    #: def __init__(self, pieces: Pieces, most: int, check: Callable[[], None]) -> None: ...

    def __cinit__(self, Pieces pieces not None, Py_ssize_t most, check):
        self._check = check
        self._pieces, self._holder, self._nodes = pieces, Holder(pieces), []
        self._ids, self._slots = np.zeros(most, np.int32), np.zeros(most, np.int32)
        self.reading.pieces, self.reading.holder = pieces.pieces, self._holder.holder
        um.um_pieces_stat_read(pieces.pieces, &self._counted)
        self.reading.ids = <int32_t *>cnp.PyArray_DATA(self._ids)
        self.reading.slots = <int32_t *>cnp.PyArray_DATA(self._slots)

    def experts(self, int32_t pool, int32_t first, int32_t n,
                int32_t next_first=-1) -> tuple[int, NDArray[np.uintp]]:
        """Return the data of a node for `n` experts of a pool, whose pieces begin at `first`.

        A batch that uses nearly all of them also begins to read those of the next layer, from
        `next_first` on. The node sets the sizes whose addresses are in the returned array: to 1 if
        pieces of the pool were read since its last turn, otherwise to 0.
        """
        cdef cnp.ndarray sizes = np.zeros(AHEAD_SIZES, np.uintp)
        cdef _Node node = _Node()
        node.experts = ExpertNode(&self.reading, first, n, next_first, 0, NULL, pool, 0,
                                  <uintptr_t *>cnp.PyArray_DATA(sizes))
        node._kept = (sizes,)
        self._nodes.append(node)
        return <uintptr_t>&node.experts, sizes

    def waves(self, int32_t n_waves, int32_t first, int32_t n,
              int32_t next_first=-1) -> list[tuple[int, NDArray[np.uintp]]]:
        """Return the data and the sizes of a node as `experts`, and of those for each wave.

        The first node sets `sizes` to the number of tokens; if their experts have no room at once,
        it sets them to 0, and those of each wave to the number of its `pairs`.
        """
        cdef cnp.ndarray sizes = np.zeros(WHOLE_SIZES, np.uintp)
        cdef _Node whole = _Node(), node
        if self._pairs is None:
            self._pairs = [np.zeros(len(self._ids), kind) for kind in "iiq"]
        self._wanted = [np.zeros(max(n, len(one)), np.int32) for one in self._wanted or ((), ())]
        self._point()
        whole.experts = ExpertNode(&self.reading, first, n, next_first, n_waves,
                                   <uintptr_t *>cnp.PyArray_DATA(sizes), 0, 0, NULL)
        whole._kept, found = (sizes,), [(<uintptr_t>&whole.experts, sizes)]
        self._nodes.append(whole)
        for i in range(n_waves):
            sizes, node = np.zeros(WAVE_SIZES, np.uintp), _Node()
            node.wave = WaveNode(&whole.experts, i, <uintptr_t *>cnp.PyArray_DATA(sizes))
            node._kept = (sizes,)
            self._nodes.append(node)
            found.append((<uintptr_t>&node.wave, sizes))
        return found

    cdef void _point(self):
        """Let nodes write pairs, and what is wanted, into the arrays."""
        cdef Waves *waves = &self.reading.waves
        cdef cnp.ndarray wanted = self._wanted[0], ranks = self._wanted[1]
        cdef uintptr_t tokens, slots, rows
        tokens, slots, rows = self.pairs
        waves.tokens, waves.slots, waves.rows = (
            <int32_t *>tokens, <int32_t *>slots, <int64_t *>rows)
        waves.wanted = <int32_t *>cnp.PyArray_DATA(wanted)
        waves.ranks = <int32_t *>cnp.PyArray_DATA(ranks)

    @property
    def pairs(self) -> tuple[int, int, int]:
        """The addresses of the pairs of a wave: int32 tokens, int32 slots, and int64 rows."""
        return tuple([array.ctypes.data for array in self._pairs])

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

    cdef int check_files(self) except -1:
        cdef um.um_pieces_stat now
        um.um_pieces_stat_read(self.reading.pieces, &now)
        if now.n_reads != self._n_checked:
            self._check()
            self._n_checked = now.n_reads
        return 0

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
