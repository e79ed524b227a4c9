# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Forward passes over the two graphs of a decoder, in one call each.

Everything that a token needs beside ggml (mask, inputs, rows of the KV cache, ids) is written here
with the interpreter's lock released.
"""
import numpy as np

from unimem.engine.sampling import Sampling, check_finite, sample
from unimem.errors import CacheFull, ClosedError
from unimem.backends import ggml

cimport numpy as cnp
from cpython.buffer cimport Py_buffer
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from unimem._core cimport native as um
from unimem.engine.pieces_op cimport PieceReader, Reading
from unimem.engine.clock cimport now_ns
from unimem.engine.thread_count cimport ThreadCount
from unimem.base.turns cimport Turn
from unimem.kv.cache.cache cimport KVCache
from unimem.kv.cache.one_kind cimport OneKindCache

#: from unimem.accounting.published import Tally
#: from unimem.engine.graph import Arrays, Graph
#: from unimem.engine.history import History
#: from unimem.weights.loading import Lifetime

cdef extern from "<stdbool.h>":
    ctypedef bint c_bool "bool"

cdef extern from "numpy/ndarrayobject.h":
    ctypedef struct PyArray_ArrFuncs:
        int (*argmax)(void *data, cnp.npy_intp n, cnp.npy_intp *at, void *array) noexcept nogil
    PyArray_ArrFuncs *PyDataType_GetArrFuncs(cnp.dtype dtype)

cdef extern from "Python.h":
    Py_buffer *PyMemoryView_GET_BUFFER(object view)

cnp.import_array()

cdef enum:
    KV_BUCKET = 256  # attention reads a multiple of this many rows, so its length seldom changes
    MOST_PARTS = 2  # of a cache: layers that keep all tokens, and layers that keep a window
    NO_ROW = -2  # has no next row
    SUCCESS = 0  # ggml_status
    ABORTED = 1

# ggml counts positions in 32 bits.
cdef int64_t MOST_POSITIONS = 2**31 - 1
cdef uint16_t HIDDEN = 0xFC00  # minus infinity, as float16
cdef uint16_t SHOWN = 0


cdef struct Team:  # backends/ggml.py
    c_bool is_kept, is_made, is_lost


ctypedef c_bool (*IsOver)(void *data) noexcept nogil
ctypedef int (*Compute)(void *graph, void *plan, int n_threads, IsOver is_over,
                        void *data) noexcept nogil  # `compute_address` of backends/ggml.py


cdef struct Mask:  # unimem.engine.graph.Mask
    uint16_t *values  # [n_tokens, n_kv]
    size_t *strides  # nb[1] to nb[3] of its header
    uintptr_t *lengths  # addresses of the int64 that are the number of rows that attention reads
    Py_ssize_t n_lengths
    int64_t n_kv


cdef struct Graph:
    void *graph
    void *plan
    int64_t n_tokens
    Mask masks[MOST_PARTS]


cdef struct Part:  # the cache of one kind of layers
    um.um_kv *kv
    int64_t window  # how many tokens a token sees, itself included
    int64_t *rows  # input of both graphs
    uint64_t row, held  # the row of the next token, and the number of tokens before it
    int64_t shown_first, shown_last  # rows that the mask of the decode graph shows


cdef struct Watch:  # on a graph that is being computed
    int64_t deadline  # in ns, without waiting for weights; 0 for none
    const Reading *reading  # NULL if all weights are in memory


cdef c_bool is_over(void *data) noexcept nogil:
    cdef Watch *watch = <Watch *>data
    cdef int64_t waited = 0
    if watch.reading != NULL:
        if watch.reading.status != um.UM_OK:
            return True
        waited = watch.reading.waited_ns
    return watch.deadline != 0 and now_ns() - waited > watch.deadline


cdef void attend(Mask *mask, int64_t n_tokens, int64_t n_kv) noexcept nogil:
    """Make attention read the first n_kv rows of a part."""
    cdef Py_ssize_t i
    if n_kv == mask.n_kv:
        return
    for i in range(mask.n_lengths):
        (<int64_t *>mask.lengths[i])[0] = n_kv
    mask.strides[0] = 2 * n_kv
    mask.strides[1] = mask.strides[2] = 2 * n_kv * n_tokens
    mask.n_kv = n_kv


cdef void fill(uint16_t *mask, int64_t begin, int64_t end, uint16_t value) noexcept nogil:
    cdef int64_t i
    for i in range(begin, end):
        mask[i] = value


cdef void show(uint16_t *mask, int64_t n_kv, int64_t first, int64_t last) noexcept nogil:
    """Show a token the rows [first, last]; rows below 0 count from the end of a ring."""
    fill(mask, 0, n_kv, HIDDEN)
    if first < 0:
        fill(mask, n_kv + first, n_kv, SHOWN)
    fill(mask, max(first, 0), last + 1, SHOWN)


cdef int64_t first_row(const Part *part, int64_t held, int64_t row) noexcept nogil:
    """Return the first row that the token in `row` sees; below 0, from the end of the ring."""
    return row - min(held, part.window - 1)


cdef int64_t n_kv_of(const Part *part, int64_t first, int64_t end) noexcept nogil:
    """Return how many rows attention must read to cover [first, end)."""
    cdef int64_t n_rows = part.kv.n_rows
    if first < 0:
        return n_rows
    return min(n_rows, (end + KV_BUCKET - 1) // KV_BUCKET * KV_BUCKET)


cdef class ForwardPass:
    """Computes tokens at the end of a KV cache, writes their rows, and chooses the next token.

    One thread at a time, in the decoder's turn. `decode` and `prefill` are the graphs of one token
    and of a batch, `inputs` the arrays that they read and write, `logits` float32 [vocab] their
    output, and `ids` int32 [ctx] the ids of tokens by position.
    """
    #: tally: Tally
    #: compute_address: int
    #: n_talks: int
    #: lifetime: Lifetime | None
    #: bring_back: Callable[[], object] | None
    #: @property
    #: def n_ids(self) -> int: ...
    #: @property
    #: def logits_end(self) -> int: ...
    #: @property
    #: def compute_ns(self) -> int: ...
    #: @property
    #: def computed_ns(self) -> int: ...
    cdef public uintptr_t compute_address  # ggml's function
    cdef public object lifetime  # of weights that a tape may take back, or None
    cdef public object bring_back  # called before tokens are used; None unless they are put aside
    cdef public object tally  # of unimem.accounting.published, which counts tokens
    cdef readonly ThreadCount threads
    cdef readonly uint64_t n_ids  # positions whose ids were noted; see `n_known`
    cdef public uint64_t n_talks  # conversations that have ended
    cdef readonly uint64_t logits_end  # the position after the token of the logits; 0 without
    cdef readonly int64_t compute_ns  # time within ggml's compute call so far
    cdef readonly int64_t computed_ns  # when that ended last, of the monotonic clock
    cdef KVCache _kv
    cdef tuple _caches
    cdef int _n_parts
    cdef Part _parts[MOST_PARTS]
    cdef Turn _turn
    cdef object _prefill_graph, _options, _rng, _seed
    cdef tuple _asked  # the arguments that `_options` were made from, or None
    cdef bint _is_greedy
    cdef cnp.ndarray _logits, _ids
    cdef Graph _decode, _prefill
    cdef int64_t _batch, _ctx
    # The inputs of both graphs.
    cdef int32_t *_tokens
    cdef int32_t *_positions
    cdef int32_t *_last
    cdef Team *_team
    cdef PieceReader _reader  # of streamed weights, or None
    cdef Reading *_reading
    cdef int64_t _n_reserved  # rows for the tokens that are being computed; -1: none are computed
    cdef int (*_argmax)(void *, cnp.npy_intp, cnp.npy_intp *, void *) noexcept nogil
    cdef bint _is_closed

    def __init__(self, decode: Graph, prefill: Graph, history: History, inputs: Arrays,
                 cnp.ndarray logits not None: NDArray[Any], cnp.ndarray ids not None: NDArray[Any],
                 *, ThreadCount threads not None, Turn turn not None,
                 PieceReader reader: PieceReader | None = None) -> None:
        cdef OneKindCache cache
        cdef int i
        self._prefill_graph = prefill
        self._kv, self._caches, self._n_parts = history.kv, history.parts, len(history.parts)
        assert self._n_parts <= MOST_PARTS
        self.windows = history.windows
        for i in range(self._n_parts):
            cache = self._caches[i]
            self._parts[i].kv = &cache.kv
            self._parts[i].rows = <int64_t *><uintptr_t>inputs.rows[i]
            self._parts[i].shown_last = NO_ROW
        self._logits, self._ids = logits, ids
        self._ctx, self._batch = ids.shape[0], prefill.batch
        self.threads, self._turn, self._reader = threads, turn, reader
        self._n_reserved = -1
        self._reading = NULL if reader is None else &reader.reading
        self._tokens = <int32_t *><uintptr_t>inputs.tokens
        self._positions = <int32_t *><uintptr_t>inputs.positions
        self._last = <int32_t *><uintptr_t>inputs.last
        self._team = <Team *><uintptr_t>ggml.team_address
        self.compute_address = ggml.compute_address
        self._argmax = PyDataType_GetArrFuncs(logits.dtype).argmax
        self._take_options(Sampling())
        self._asked = Sampling.temperature, Sampling.top_k, Sampling.top_p, Sampling.seed
        self._load(&self._decode, decode)
        self._load(&self._prefill, prefill)

    cdef int _load(self, Graph *g, graph) except -1:
        cdef cnp.ndarray lengths
        cdef Mask *mask
        cdef int i
        g.graph = <void *><uintptr_t>graph.address
        g.plan = <void *><uintptr_t>graph.plan_address
        g.n_tokens = graph.n_tokens
        for i in range(self._n_parts):
            of_part, mask = graph.masks[i], &g.masks[i]
            lengths = of_part.lengths  # which the graph keeps
            mask.values = <uint16_t *><uintptr_t>of_part.address
            mask.strides = <size_t *><uintptr_t>of_part.strides_address
            mask.lengths = <uintptr_t *>cnp.PyArray_DATA(lengths)
            mask.n_lengths = lengths.shape[0]
            mask.n_kv = of_part.n_kv
        return 0

    def close(self) -> None:
        """Refuse every further computation, as the memory is about to go."""
        self._is_closed = True

    @property
    def ids(self) -> NDArray[Any]:
        """int32 [n_ids]: the ids of the computed tokens, by position."""
        return self._ids[:self.n_ids]

    # ---- the parts of the cache ----

    @property
    def windows(self) -> Sequence[int]:
        """For each part, how many tokens a token sees, itself included."""
        return tuple([self._parts[i].window for i in range(self._n_parts)])

    @windows.setter
    def windows(self, windows: Sequence[int]) -> None:
        for i, window in zip(range(self._n_parts), windows, strict=True):
            self._parts[i].window = window

    cdef int _begin_change(self) except -1:
        for cache in self._caches:
            (<OneKindCache>cache).begin_change()
        return 0

    cdef uint64_t _position(self) noexcept:
        """Return the position of the next token."""
        return um.um_kv_next_position(self._parts[0].kv)

    cdef uint64_t _lowest_end(self) noexcept:
        """Return an upper bound of where the tokens computed here end."""
        cdef uint64_t end = <uint64_t>-1
        for cache in self._caches:
            end = min(end, (<OneKindCache>cache)._lowest_end)
        return end

    cdef int _reserve(self, uint64_t n) except -1:
        """Reserve rows in every part, and note their place and how many tokens precede them."""
        cdef uint64_t end = self._position()
        cdef um.um_error err
        cdef Part *part
        cdef int i, done = 0
        for i in range(self._n_parts):
            part = &self._parts[i]
            part.held = um.um_kv_seq_len(part.kv)
            if (um.um_kv_next_position(part.kv) != end
                    or um.um_kv_reserve(part.kv, n, &part.row, &err) != um.UM_OK):
                break
            done += 1
        if done == self._n_parts:
            for cache in self._caches:
                (<OneKindCache>cache)._reserved = n
            return 0
        for i in range(done):
            um.um_kv_rollback(self._parts[i].kv)
        self._kv.reserve(n)  # makes room, or says why it cannot
        for i in range(self._n_parts):
            part = &self._parts[i]
            part.held, part.row = um.um_kv_seq_len(part.kv), um.um_kv_row(part.kv, end)
        return 0

    cdef int _commit(self, uint64_t n) except -1:
        cdef um.um_error err
        cdef int i
        for i in range(self._n_parts):
            if um.um_kv_commit(self._parts[i].kv, n, &err) == um.UM_OK:
                (<OneKindCache>self._caches[i])._reserved = 0
            else:
                self._caches[i].commit(n)  # says why
        return 0

    # ---- computing ----

    def require_idle(self) -> None:
        """Raise RuntimeError in a signal handler that came while tokens are computed."""
        if self._n_reserved >= 0:
            raise RuntimeError("a signal handler cannot change the conversation while tokens are "
                               "computed: do so after that call")

    cdef int _begin(self, int64_t n_reserved) except -1:
        """Begin to compute tokens, for which so many rows will be reserved."""
        self.require_idle()
        self._check()  # may compute a conversation that was put aside
        self._n_reserved = n_reserved
        return 0

    def require_room(self, int64_t n) -> None:
        """Raise `CacheFull` unless n more tokens fit."""
        self._check()
        self._require_room(n)

    cdef int _require_room(self, int64_t n) except -1:
        # A ring always has room: the context limits it.
        cdef um.um_kv *kv = self._parts[0].kv
        cdef int64_t position = self._position()
        cdef int64_t used = position if kv.spec.window else um.um_kv_seq_len(kv)
        if n > self._ctx - used or n > MOST_POSITIONS - position:
            raise CacheFull(
                f"no room for {n} more token{'s' * (n > 1)}: {used} of {self._ctx} are used, "
                f"{self._ctx - used} left; reset() begins a new conversation",
                self._ctx, used, n)
        return 0

    def next_token(self, temperature: float, top_k: int, top_p: float, seed: int | None) -> int:
        """Choose a token by the logits and compute it, as `Decoder.generate_next_token`."""
        cdef tuple asked
        cdef int64_t token
        self._turn.enter()
        try:
            self._check()
            asked = self._asked
            if (asked is None or asked[0] is not temperature or asked[1] is not top_k
                    or asked[2] is not top_p or asked[3] is not seed):
                self._take_options(Sampling(temperature, top_k, top_p, seed))
                self._asked = temperature, top_k, top_p, seed
            self._require_room(1)
            token = self._choose()
            self._step(token)
            self._tell(1)
        finally:
            self._turn.leave()
        return token

    def advance(self, uint64_t talk, int64_t token, options: Sampling, stop: frozenset[int]) -> int:
        """Compute a token unless it is below 0, and choose the next one; -1 if that is in `stop`.

        The same seed continues a sequence of choices until `forget`. Once `n_talks` is no longer
        `talk`, this raises RuntimeError; otherwise it raises as `step` and `sample`.
        """
        cdef bint is_end
        self._turn.enter()
        try:
            if talk != self.n_talks:
                raise RuntimeError("a new conversation has begun; this one cannot go on")
            if token >= 0:
                self._step(token)
            if options is not self._options:
                self._take_options(options)
            token = self._choose()
            is_end = token in stop
            self._tell(not is_end)
        finally:
            self._turn.leave()
        return -1 if is_end else token

    cdef int _take_options(self, options) except -1:
        """Choose by these options from now on."""
        self._asked, self._options, self._is_greedy = None, options, options.temperature == 0
        return 0

    def step(self, int32_t token) -> None:
        """Compute one token; if it raises, the token does not count.

        No memory is taken, and nothing moves.

        Raises
        ------
        CacheFull, BufferError
            As `KVCache.reserve`.
        ClosedError
            It is closed, or this is a forked child, which has none of ggml's threads.
        OSError
            Streamed weights cannot be read, and the next token may succeed, or their file was
            written to.
        RuntimeError
            ggml reports a failure.
        """
        self._turn.enter()
        try:
            self._step(token)
            self._tell(0)
        finally:
            self._turn.leave()

    cdef int64_t _choose(self) except -1:
        cdef uint64_t end
        cdef cnp.npy_intp best
        cdef float *logits
        self._check()
        end = self._position()
        if (self.logits_end != end or self._lowest_end() != end
                or um.um_kv_seq_len(self._parts[0].kv) == 0):
            raise RuntimeError("there are no logits to choose by: prefill tokens first")
        if self._is_greedy:
            logits = <float *>cnp.PyArray_DATA(self._logits)
            # As ndarray.argmax, which also finds the first NaN.
            self._argmax(logits, self._logits.shape[0], &best, <void *>self._logits)
            if not isfinite(logits[best]):
                check_finite(self._logits, best)
            return best
        if self._rng is None or self._options.seed != self._seed:
            self._seed = self._options.seed
            self._rng = np.random.default_rng(self._seed)
        return sample(self._logits, self._options, self._rng)

    def step_again(self, int32_t token) -> None:
        """Compute the last token of the cache again, and rewrite its rows."""
        cdef uint64_t end
        cdef Part *part
        cdef int i
        self._turn.enter()
        try:
            self._begin(0)
            self._begin_change()
            end = self._position()
            for i in range(self._n_parts):
                part = &self._parts[i]
                part.held = um.um_kv_seq_len(part.kv) - 1
                part.row = um.um_kv_row(part.kv, end - 1)
            self.logits_end = 0
            self._compute_token(token, end - 1)
            self.logits_end = end
            self._tell(0)
        finally:
            self._n_reserved = -1
            self._turn.leave()

    cdef int _step(self, int32_t token) except -1:
        cdef uint64_t position
        self._begin(1)
        try:
            self._begin_change()
            position = self._position()
            self._reserve(1)
            self.logits_end = 0
            try:
                self._compute_token(token, position)
                self.note_tokens(position, &token, 1)
                self.logits_end = position + 1
                self._commit(1)
            except BaseException:
                self._kv.rollback()
                raise
        finally:
            self._n_reserved = -1
        return 0

    cdef int _compute_token(self, int32_t token, int64_t position) except -1:
        """Compute the token at a position, in the rows that `_reserve` noted."""
        cdef bint again = True
        cdef int i, status
        while again:
            with nogil:
                for i in range(self._n_parts):
                    self._show_token(&self._parts[i], &self._decode.masks[i])
                    self._parts[i].rows[0] = self._parts[i].row
                self._tokens[0] = token
                self._positions[0] = position
                self._last[0] = 0
                status = self._run_token()
            again = self._end(status, 1)
        return 0

    cdef int _tell(self, uint64_t n_generated) except -1:
        """Count as `Tally.count`, `Tally.hold` and `Tally.stream`."""
        cells = self.tally._cells  # an end or a fork changes which they are
        cdef uint64_t *cell = <uint64_t *>PyMemoryView_GET_BUFFER(cells).buf
        cdef OneKindCache kv
        cdef int i
        cell[1] += n_generated
        cell[2] = cell[3] = 0
        for i in range(self._n_parts):
            kv = <OneKindCache>self._caches[i]
            cell[2] += kv.used_bytes()
            cell[3] = max(cell[3], um.um_kv_seq_len(&kv.kv))
        if self._reader is not None:
            self._reader.count(cell + 4)
        return 0

    def prefill(self, tokens: NDArray[Any]) -> None:
        """Compute checked tokens in batches, with logits for the last one.

        A ring takes at most a batch. It raises as `step`; then none of the tokens counts.
        """
        cdef cnp.ndarray ids = np.ascontiguousarray(tokens, np.int32)
        cdef const int32_t *given = <const int32_t *>cnp.PyArray_DATA(ids)
        cdef int64_t position, i = 0, batch, most = self._batch, n = ids.shape[0], spent
        cdef int part, status
        self._begin(n)
        try:
            position = self._position()
            self._reserve(n)
            self.logits_end = 0
            try:
                while i < n:
                    batch = min(most, n - i)
                    if batch != self._prefill.n_tokens:
                        self._prefill.n_tokens = 0  # until it is complete
                        self._prefill_graph.resize(batch)
                        self._load(&self._prefill, self._prefill_graph)
                    with nogil:
                        for part in range(self._n_parts):
                            self._show_batch(part, i, batch)
                        self._write_batch(given + i, batch, position + i)
                        status = self._run(&self._prefill, self.threads.most, 0, &spent)
                    if not self._end(status, batch):
                        i += batch
                    elif self._reading.status == um.UM_E_FULL:
                        most = batch // 2
                self.note_tokens(position, given, n)
                self.logits_end = position + n
                self._commit(n)
            except BaseException:
                self._kv.rollback()
                raise
        finally:
            self._n_reserved = -1

    cdef int _check(self) except -1:
        if self._is_closed:
            raise ClosedError("the Decoder is closed")
        if self.lifetime is not None and self.lifetime._ended:
            self.lifetime.check()  # says how
        if self._team.is_lost:
            ggml.require_threads(self.threads.most)
        if self.bring_back is not None:
            self.bring_back()
        return 0

    cdef bint _end(self, int status, int64_t n_tokens) except -1:
        """Handle signals and failures; return whether a graph has to be computed once more.

        It has to if a signal ended a read, or if the weights of `n_tokens` tokens do not fit into
        their budget and those of fewer tokens may.
        """
        # The interpreter has not run meanwhile. A signal handler may close the decoder.
        PyErr_CheckSignals()
        if status == SUCCESS and self._reader is not None:
            self._reader.check_files()  # runs Python, and so handlers as well
        self._check()
        self._begin_change()
        for cache in self._caches:
            if (<OneKindCache>cache)._reserved != <uint64_t>self._n_reserved:
                raise RuntimeError("the rows of tokens that are being computed were dropped, by "
                                   "clear or rollback in a signal handler: none of them counts")
        if status == SUCCESS:
            return False
        if self._reading != NULL and self._reading.status != um.UM_OK:
            return ((self._reading.status == um.UM_E_FULL and n_tokens > 1)
                    or self._reader.was_interrupted())
        raise RuntimeError(f"ggml could not compute the graph (status {status})")

    cdef int _run_token(self) noexcept nogil:
        cdef int64_t limit = self.threads.limit(), spent
        cdef int status = self._run(&self._decode, self.threads.next_count(), limit, &spent)
        if status == ABORTED and limit and not self._has_failed():
            self.threads.note_token(spent, True)
            status = self._run(&self._decode, self.threads.next_count(), 0, &spent)
        if not self._has_failed():
            self.threads.note_token(spent, False)
        return status

    cdef bint _has_failed(self) noexcept nogil:
        return self._reading != NULL and self._reading.status != um.UM_OK

    cdef int _run(self, Graph *g, int n_threads, int64_t limit, int64_t *spent) noexcept nogil:
        """Compute a graph in at most `limit` ns (0: any); neither they nor `spent` has reads."""
        cdef int64_t start = now_ns(), ns
        cdef IsOver ends = NULL
        cdef Watch watch
        cdef int status
        watch.deadline, watch.reading = (start + limit if limit else 0), self._reading
        if n_threads > 1:
            self._team.is_made = self._team.is_kept
        if self._reading != NULL:
            self._reader.begin()
        if limit or self._reading != NULL:
            ends = is_over
        status = (<Compute>self.compute_address)(g.graph, g.plan, n_threads, ends, &watch)
        if self._reading != NULL:
            self._reader.end()
        self.computed_ns = now_ns()
        ns = self.computed_ns - start
        self.compute_ns += ns
        spent[0] = ns if self._reading == NULL else ns - self._reading.waited_ns
        return status

    # ---- what is computed ----

    cdef void _write_batch(self, const int32_t *tokens, int64_t n, int64_t position) noexcept nogil:
        cdef int64_t i
        memcpy(self._tokens, tokens, 4 * n)
        for i in range(n):
            self._positions[i] = position + i
        self._last[0] = n - 1

    cdef void _show_batch(self, int i, int64_t done, int64_t n) noexcept nogil:
        """Write the mask and the rows of the next n tokens of a part.

        The first `done` reserved tokens are computed already.
        """
        cdef Part *part = &self._parts[i]
        cdef Mask *mask = &self._prefill.masks[i]
        cdef int64_t row = part.row + done, held = part.held + done, at
        attend(mask, self._prefill.n_tokens, n_kv_of(part, first_row(part, held, row), row + n))
        for i in range(n):
            at = (row + i) % <int64_t>part.kv.n_rows
            part.rows[i] = at
            show(mask.values + i * mask.n_kv, mask.n_kv, first_row(part, held + i, at), at)

    cdef void _show_token(self, Part *part, Mask *mask) noexcept nogil:
        """Show the next token the tokens before it, as far as the window goes."""
        cdef int64_t row = part.row
        cdef int64_t first = first_row(part, part.held, row), before = part.shown_first
        cdef int64_t n_kv = n_kv_of(part, first, row + 1)
        if n_kv != mask.n_kv or row != part.shown_last + 1 or not before <= first <= before + 1:
            attend(mask, 1, n_kv)
            show(mask.values, n_kv, first, row)
        else:
            if first != before:
                mask.values[before if before >= 0 else n_kv + before] = HIDDEN
            mask.values[row] = SHOWN
        part.shown_first, part.shown_last = first, row

    # ---- ids ----

    def forget(self) -> None:
        """Begin a new conversation."""
        self.n_ids = 0
        self.logits_end = 0
        self.n_talks += 1
        self._rng = None

    @property
    def n_known(self) -> int:
        """How many first positions hold tokens that were computed here, with known ids."""
        return min(self.n_ids, self._lowest_end())

    def note_ids(self, int64_t position, tokens: NDArray[Any]) -> None:
        """Note the ids of tokens from `position` on, unless earlier ids are unknown."""
        cdef cnp.ndarray ids = np.ascontiguousarray(tokens, np.int32)
        self.note_tokens(position, <int32_t *>cnp.PyArray_DATA(ids), ids.shape[0])

    cdef int note_tokens(self, int64_t position, const int32_t *tokens, int64_t n) except -1:
        cdef int64_t end = position + n
        # Other writers append to the cache.
        self.n_ids = min(self.n_ids, self._lowest_end())
        if position <= self.n_ids:
            if end > self._ids.shape[0]:
                # Positions exceed the context only after a trim.
                self._ids = np.concatenate([self._ids, np.zeros(end, np.int32)])
            memcpy(<int32_t *>cnp.PyArray_DATA(self._ids) + position, tokens, 4 * n)
            self.n_ids = end
        for cache in self._caches:
            # Before they are committed; a rollback lowers it.
            (<OneKindCache>cache)._lowest_end = end
        return 0
