# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""Rows and positions of a KV cache, wherever its memory is.

      lane (K or V of a layer and a stream)
      | dropped |  token  |  token  | reserved |  free  |
                ^ first_row                    ^ end_row

The core keeps the positions (`um_kv`). A lane holds the tokens of one layer and stream; with
``order="head"`` each head of a stream is a lane. A subclass knows the memory: it makes room
(`take_rows`), moves tokens, and says whether views lie over rows.
"""
import os
import weakref

from unimem.errors import CacheFull
from unimem.kv.cache_html import kv_html
from unimem.kv.cache.spec import KVSpec
from unimem.kv.layer_specs import LayerKV
from unimem.base.arguments import flag, one_of, string
from unimem.base.text import format_bytes

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport bytes_of, size_of
from unimem.kv.inputs cimport layer_number
from unimem.kv.types cimport check_head_dim, kv_name, kv_types, number_of_type, numpy_type, rounded
from unimem._core.region cimport Region
from unimem._core.status cimport full_text, raise_file_status, raise_status

#: from unimem.kv.layer_specs import Layer
#: from unimem.kv.types import DType
#: class ModelDims(Protocol):
#:     @property
#:     def num_layers(self) -> int: ...
#:     @property
#:     def num_kv_heads(self) -> int: ...
#:     @property
#:     def head_dim(self) -> int: ...
#:     @property
#:     def max_seq_len(self) -> int: ...

cdef enum:
    LANE_ALIGN = 64


cdef int _fill_spec(um.um_kv_spec *spec, object wanted, tuple dtypes) except -1:
    """Check a KVSpec, and fill the core's."""
    cdef bint rotate = flag(wanted.rotate, "rotate")
    n_kv_heads, head_dim, max_seq_len = wanted.n_kv_heads, wanted.head_dim, wanted.max_seq_len
    window, v_head_dim = wanted.window, wanted.v_head_dim
    one_of(wanted.order, "order", ("token", "head"))
    for what in ("n_layers", "n_kv_heads", "head_dim", "max_seq_len", "batch"):
        n = getattr(wanted, what)
        if size_of(n, what, 1) >= 2**32:
            raise ValueError(f"{what}: expected at most 2**32 - 1, got {n}")
    if window is not None and size_of(window, "window", 1) > max_seq_len:
        raise ValueError(f"window: expected at most max_seq_len, {max_seq_len}, got {window}")
    v_dim = head_dim if v_head_dim is None else v_head_dim
    if size_of(v_dim, "v_head_dim") >= 2**32 - 1 and v_dim != head_dim:
        raise ValueError(f"v_head_dim: expected at most 2**32 - 2, got {v_head_dim}")
    for v, named in enumerate(dtypes):
        check_head_dim(named, v_dim if v else head_dim)
        if rotate and (v_dim if v else head_dim) % um.UM_ROTATION_LEAST:
            raise ValueError(f"rotate: expected heads of a multiple of {um.UM_ROTATION_LEAST} "
                             f"values, which are rotated at once, got {'v_' * v}head_dim="
                             f"{v_dim if v else head_dim}")
    spec.v_head_dim = 0 if v_dim == head_dim else v_dim or um.UM_KV_NO_V
    spec.rotate = rotate
    spec.n_layers, spec.n_kv_heads, spec.head_dim = wanted.n_layers, n_kv_heads, head_dim
    spec.max_seq_len, spec.batch = max_seq_len, wanted.batch
    if wanted.order == "head":
        n_lanes = <object>spec.batch * spec.n_kv_heads
        if n_lanes >= 2**32:
            raise ValueError("batch: expected at most 2**32 - 1 heads in all streams, got "
                             f"{n_lanes}")
        spec.batch, spec.n_kv_heads = n_lanes, 1
    spec.window = 0 if window is None else window
    spec.type, spec.v_type = number_of_type(dtypes[0]), number_of_type(dtypes[1])
    return 0


cdef bint is_v(object part) except -1:
    if not isinstance(part, str) or part not in ("k", "v"):
        raise ValueError(f"part: expected 'k' or 'v', got {part!r:.60}")
    return part == "v"


cdef int refuse_torn(str doing, bint is_reserved, bint is_uneven) except -1:
    if is_reserved:
        raise RuntimeError(f"KVCache.{doing}: rows are reserved: commit or roll back first")
    if is_uneven:
        raise RuntimeError(f"KVCache.{doing}: layers differ in length: roll back first")
    return 0


cdef int refuse_views(str name, Py_ssize_t n_users) except -1:
    raise BufferError(f"KVCache '{name}' has {n_users} live views: drop them first, or leave a "
                      "'with'")


cdef size_t pair_bytes(uint64_t n_rows, size_t row, size_t v_row):
    """Return the bytes of a lane of K and one of V."""
    return rounded(n_rows * row, LANE_ALIGN) + rounded(n_rows * v_row, LANE_ALIGN)


# A process may fork while another thread is in a call, which never ends in the child.
cdef object _caches = weakref.WeakSet()


def _enter_child():
    cdef KVRows cache
    for cache in list(_caches):
        cache.enter_child()


os.register_at_fork(after_in_child=_enter_child)


def for_dims(kind: type, dims: ModelDims, max_seq_len: int | None, options: dict[str, Any]) -> Any:
    """Make a cache of a class for a model."""
    try:
        sizes = dims.num_layers, dims.num_kv_heads, dims.head_dim, dims.max_seq_len
    except AttributeError:
        raise TypeError(f"dims: expected ModelDims, got {dims!r:.60}") from None
    return kind(*sizes[:3], sizes[3] if max_seq_len is None else max_seq_len, **options)


cdef class KVRows:
    """The rows and positions of a cache. Nothing here touches the memory."""
    #: dtype: DType
    #: v_dtype: DType
    #: order: Literal["token", "head"]
    #: window: int | None
    #: budget_bytes: int | None
    #: _file: str | None

    def __dealloc__(self):
        um.um_kv_free(&self.kv)

    # ---- making one ----

    cdef int describe(self, um.um_kv_spec *spec, wanted) except -1:
        if self.kv.base != NULL:
            raise RuntimeError("the KVCache is made already")
        self._closed = True
        dtypes = kv_types(wanted.dtype, wanted.k_dtype, wanted.v_dtype)
        _fill_spec(spec, wanted, dtypes)
        self._batch, self._heads = wanted.batch, wanted.n_kv_heads
        self._v_head_dim = wanted.head_dim if wanted.v_head_dim is None else wanted.v_head_dim
        self.rotate = spec.rotate
        self.order = "head" if wanted.order == "head" else "token"
        self.dtype, self.v_dtype = dtypes
        self._dtype, self._v_dtype = numpy_type(spec.type), numpy_type(spec.v_type)
        self.name = string(wanted.name, "name", "kv")
        self.window = spec.window or None
        self.budget_bytes = (None if wanted.budget_bytes is None
                             else bytes_of(wanted.budget_bytes, "budget_bytes", 1))
        return 0

    cdef size_t check_row(self, um.um_kv_spec *spec) except 0:
        cdef um.um_error err
        cdef size_t row, v_row
        if (um.um_kv_row_bytes(spec, 0, &row, &err) != um.UM_OK
                or um.um_kv_row_bytes(spec, 1, &v_row, &err) != um.UM_OK):
            raise_status(err.status, &err, "KVCache")
        n_lanes = 2 * <object>spec.n_layers * spec.batch
        most = max(row, v_row)
        if n_lanes * most >= 1 << 62:
            raise ValueError(f"KVCache: one token of {n_lanes} lanes, {most} bytes each, is more "
                             "than there can be: smaller dimensions")
        self._n_lanes = n_lanes
        self._v_row = v_row
        return row

    cdef size_t plan_fixed(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except 0:
        cdef size_t row = self.check_row(spec)
        cdef size_t v_row = self._v_row, n_pairs = self._n_lanes // 2
        cdef uint64_t n_rows = spec.max_seq_len
        if self.budget_bytes is not None:
            most = self.budget_bytes // n_pairs
            n_rows = min(n_rows, most // (row + v_row))
            while n_rows > 0 and pair_bytes(n_rows, row, v_row) > most:
                n_rows -= 1
            if n_rows == 0:
                least = n_pairs * pair_bytes(1, row, v_row)
                raise CacheFull(f"KVCache: budget_bytes={self.budget_bytes} is less than a token "
                                f"needs, {least} bytes", self.budget_bytes, 0, least)
        token = n_pairs * (<object>row + v_row)
        if n_rows * token >= 1 << 62:  # a sum of sizes overflows
            raise ValueError(f"KVCache: {n_rows} tokens of {token} bytes are more "
                             "than there can be: a smaller max_seq_len")
        storage.lane_stride = rounded(n_rows * row, LANE_ALIGN)
        storage.v_lane_stride = rounded(n_rows * v_row, LANE_ALIGN)
        storage.n_rows = storage.usable_rows = n_rows
        self._storage_bytes = n_pairs * (storage.lane_stride + storage.v_lane_stride)
        return self._storage_bytes

    cdef int start(self, um.um_kv_spec *spec, um.um_kv_storage *storage) except -1:
        cdef um.um_error err
        if um.um_kv_init(&self.kv, spec, storage, &err) != um.UM_OK:
            raise_status(err.status, &err, "KVCache")
        self._closed = False
        _caches.add(self)
        return 0

    cdef int enter_child(self) except -1:
        self._n_busy = 0
        self._postponed = self._writing = False
        return 0

    @classmethod
    def for_dims(cls, dims: ModelDims, *, max_seq_len: int | None = None, **options: Any) -> Self:
        """Make a cache for a model.

        Parameters
        ----------
        dims : ModelDims
            The model's dimensions.
        max_seq_len : int, optional
            By default ``dims.max_seq_len``.
        **options
            Arguments of the class.

        Returns
        -------
        KVCache
        """
        return for_dims(cls, dims, max_seq_len, options)

    @staticmethod
    def storage_bytes(n_layers: int, n_kv_heads: int, head_dim: int, max_seq_len: int, *,
                      batch: int = 1, dtype: npt.DTypeLike = "f16",
                      order: Literal["token", "head"] = "token",
                      k_dtype: npt.DTypeLike | None = None, v_dtype: npt.DTypeLike | None = None,
                      v_head_dim: int | None = None) -> int:
        """Return the bytes that a fixed cache of these dimensions takes.

        Returns
        -------
        int
            The sum of K and V of each layer and stream, each rounded up to 64 bytes; with
            ``order="head"`` each head is rounded.

        Raises
        ------
        ValueError
            As the class.
        """
        cdef um.um_kv_spec spec
        cdef um.um_error err
        cdef size_t nbytes
        _fill_spec(&spec, KVSpec(n_layers, n_kv_heads, head_dim, max_seq_len, batch, order=order,
                                 v_head_dim=v_head_dim), kv_types(dtype, k_dtype, v_dtype))
        if um.um_kv_storage_bytes(&spec, &nbytes, &err) != um.UM_OK:
            raise_status(err.status, &err, "KVCache")
        return nbytes

    # ---- where its memory is ----

    cdef Region open_region(self):
        raise NotImplementedError

    cdef Py_ssize_t n_users(self):
        raise NotImplementedError

    cdef object end(self):
        raise NotImplementedError

    cdef int settle(self, bint exactly=False) except -1:
        return 0

    cdef um.um_block *mapped(self, uint64_t row, uint64_t n) noexcept:
        return NULL

    cdef um.um_status trim(self, uint64_t n, uint64_t keep_first, uint64_t row,
                           um.um_error *err) except *:
        return um.um_kv_trim(&self.kv, n, keep_first, err)

    cdef int take_rows(self, uint64_t row, uint64_t n) except -1:
        cdef uint64_t first = self.first_row(), held = row - first
        if first == 0 or n > self.kv.n_rows - held:
            subject = f"KVCache '{self.name}' of budget_bytes={self.budget_bytes}"
            raise CacheFull(full_text(subject, n, "tokens", self.kv.n_rows, held), self.kv.n_rows,
                            held, n)
        return self.start_over(max(self.end_row() - first, held + n))

    cdef int start_over(self, uint64_t rows) except -1:
        self.check_movable([(0, self.end_row() - self.first_row())])
        return self.move_to(0)

    # ---- making room ----

    @cython.final
    cdef object fail(self, um.um_error *err, str doing):
        if err.status == um.UM_E_IO:
            raise_file_status(err.status, err, f"KVCache.{doing}", self._file)
        raise_status(err.status, err, f"KVCache.{doing}", CacheFull, "tokens")

    cdef int move_to(self, uint64_t row) except -1:
        cdef um.um_error err
        cdef um.um_status status
        # A device's driver releases the interpreter's lock; a move in main memory does not.
        cdef Region _held = self.open_region()  # a tape may be closed meanwhile
        self._writing = True
        status = um.um_kv_move(&self.kv, row, &err)
        self.end_move(status, &err, "move")
        self._dropped = 0
        return 0

    cdef object end_move(self, um.um_status status, um.um_error *err, str doing):
        self._writing = False
        if status != um.UM_OK:
            self.fail(err, doing)

    cdef int make_rows(self, uint64_t row, uint64_t n) except -1:
        # Meanwhile no memory is given back, and writes of other threads are refused.
        self._n_busy += 1
        self._writing = True
        try:
            self.take_rows(row, n)
        finally:
            self._writing = False
            self.end_busy()
        return 0

    @cython.final
    cdef bint find_rows(self, um.um_error *err, uint64_t n) except -1:
        if err.detail != um.UM_KV_ROWS:
            return False
        self.make_rows(err.used, n)
        self.begin_change()  # another thread may have run meanwhile
        return True

    cdef int check_movable(self, list ranges) except -1:
        # One of the busy calls is the one that asks for rows.
        if self._n_busy > 1 or self.has_views(ranges):
            raise BufferError(f"KVCache '{self.name}': views, or another thread that copies, use "
                              "rows that tokens have to move to or from: drop them first")
        return 0

    @cython.final
    cdef int begin_change(self) except -1:
        self.open_region()
        if self._writing:
            raise RuntimeError(f"KVCache '{self.name}': another thread appends to it: one writes "
                               "at a time")
        return 0

    cdef int end_busy(self) except -1:
        self._n_busy -= 1
        if self._postponed and self._n_busy == 0:
            self._postponed = False
            self.settle()
        return 0

    # ---- what is there ----

    cdef uint64_t end_position(self):
        cdef uint64_t end = 0, first = 0, n
        cdef uint32_t layer
        for layer in range(self.kv.spec.n_layers):
            n = um.um_kv_layer_len(&self.kv, layer, &first)
            end = max(end, first + n)
        return end

    cdef uint64_t first_row(self):
        return um.um_kv_row(&self.kv, um.um_kv_first_position(&self.kv))

    cdef uint64_t end_row(self):
        return um.um_kv_row(&self.kv, self.end_position()) + self._reserved

    cdef bint has_views(self, list ranges) except -1:
        cdef Region region = self.open_region()
        cdef bint found = False
        for first, end in ranges:
            if first < end:
                # A buffer covers the whole block.
                found = found or region.n_buffers > 0 or self.n_windows(region, first, end) > 0
        return found

    cdef Py_ssize_t n_windows(self, Region region, size_t first, size_t end) except -1:
        """Return how many windows lie over rows of any lane."""
        cdef size_t batch = self.kv.spec.batch, n_layers = self.kv.spec.n_layers, stream
        cdef size_t of_k = self.kv.lane_stride, of_v = self.kv.v_lane_stride
        cdef size_t row = self.kv.row_bytes, v_row = self.kv.v_row_bytes
        cdef size_t layer = batch * (of_k + of_v), begin = self._begin
        cdef Py_ssize_t n = 0
        if of_k == of_v and row == v_row:
            return region.n_windows_in_lanes(begin, of_k, self._n_lanes, first * row, end * row)
        for stream in range(batch):
            n += region.n_windows_in_lanes(begin + stream * of_k, layer, n_layers, first * row,
                                           end * row)
            if v_row:  # there may be no V
                n += region.n_windows_in_lanes(begin + batch * of_k + stream * of_v, layer,
                                               n_layers, first * v_row, end * v_row)
        return n

    cdef int check_whole(self, str doing) except -1:
        return refuse_torn(doing, self._reserved > 0,
                           self.end_position() != um.um_kv_next_position(&self.kv))

    def address(self, layer: int, part: Literal["k", "v"]) -> int:
        """Return where a layer's K or V begins, for an engine that writes rows itself.

        Parameters
        ----------
        layer : int
            The layer's number.
        part : {"k", "v"}
            The part.

        Returns
        -------
        int
            An address that never changes. Row r of the first stream begins ``r * row_bytes`` (of V,
            ``r * v_row_bytes``) behind it; with ``order="head"`` row r of its first head begins
            ``r * row_bytes / n_kv_heads`` behind it.
        """
        cdef uint32_t index = layer_number(layer, self.kv.spec.n_layers, "layer")
        cdef bint v = is_v(part)
        self.open_region()
        return <uintptr_t>um.um_kv_lane(&self.kv, index, v, 0)

    def row_of(self, position: int, layer: int = 0) -> int:
        """Return the row of the token at a position, which the cache holds or will hold.

        If a cache is no ring, an append after a trim may move its tokens to other rows. The row is
        the same in all layers of one kind.

        Raises
        ------
        ValueError
            The token was dropped, and another token may have its row.
        """
        cdef uint64_t wanted = size_of(position, "position"), oldest
        layer_number(layer, self.kv.spec.n_layers, "layer")
        self.open_region()
        oldest = um.um_kv_oldest_position(&self.kv)
        if wanted < oldest:
            raise ValueError(f"position: expected one from {oldest} on, before which tokens were "
                             f"dropped, got {position}")
        return um.um_kv_row(&self.kv, wanted)

    # ---- rows that the caller writes ----

    @cython.critical_section
    def reserve(self, n: int) -> int:
        """Reserve n rows in every layer, for the caller to write.

        Returns
        -------
        int or tuple
            The first row. The rows of a ring continue in its mirror, or modulo `n_rows`. If layers
            differ, a tuple with the first row of each; None for a layer that keeps a state. The
            tokens are visible only after `commit`.

        Raises
        ------
        CacheFull, CapacityError, BufferError
            There is no room, as for `append`, or a ring has fewer rows.
        RuntimeError
            Rows are already reserved, or layers differ in length; FrozenError as for `append`.
        """
        cdef um.um_error err
        cdef uint64_t row = 0, count = size_of(n, "n")
        self.begin_change()
        while um.um_kv_reserve(&self.kv, count, &row, &err) != um.UM_OK:
            if not self.find_rows(&err, count):
                self.fail(&err, "reserve")
        self._reserved = count
        return row

    @cython.critical_section
    def commit(self, n: int) -> None:
        """Make the first n reserved rows tokens of all layers at once, and drop the rest.

        A cache with states needs all that is reserved: its states have advanced as far.

        Raises
        ------
        RuntimeError
            Nothing is reserved.
        ValueError
            Fewer rows are reserved; with states, more.
        """
        cdef um.um_error err
        cdef uint64_t count = size_of(n, "n")
        self.begin_change()
        if um.um_kv_commit(&self.kv, count, &err) != um.UM_OK:
            if err.status == um.UM_E_INVALID:
                raise ValueError(f"KVCache.commit: expected n of at most {self._reserved}, the "
                                 f"rows that are reserved, got {n}")
            self.fail(&err, "commit")
        self._reserved = 0

    @cython.critical_section
    def rollback(self) -> None:
        """Drop reserved rows, and tokens that not all layers hold.

        If a window has overwritten tokens that it would show again, all layers drop the tokens
        before these; `spare_rows` keeps that many. States need a checkpoint at the new end.
        """
        self.begin_change()
        self._most_bytes = self.most_bytes()
        um.um_kv_rollback(&self.kv)
        self._reserved = 0
        self.note_end()
        self.settle()

    # ---- forgetting ----

    @cython.final
    cdef void note_end(self) noexcept:
        self._lowest_end = min(self._lowest_end, um.um_kv_next_position(&self.kv))

    @cython.critical_section
    def crop(self, n: int) -> None:
        """Keep the first n tokens.

        `next_position` goes back by the number of dropped tokens. A ring then shows its window
        before that position, with older tokens again. States go back to the checkpoint at that
        position, which has to exist; reserved rows and incomplete tokens are then dropped, too.

        Raises
        ------
        ValueError
            There are fewer tokens, or a ring has overwritten tokens that it would have to show, or
            a checkpoint is missing; the message says how far back the cache can go.
        RuntimeError
            Rows are reserved, or layers differ in length.
        """
        cdef um.um_error err
        cdef uint64_t count = size_of(n, "n")
        self.begin_change()
        self._most_bytes = self.most_bytes()
        if um.um_kv_crop(&self.kv, count, &err) != um.UM_OK:
            if err.detail == um.UM_KV_OVERWRITTEN:
                raise ValueError(
                    f"KVCache.crop: the last {self.seq_len - count} of {self.seq_len} tokens "
                    "cannot be dropped, since those that the window would show then were "
                    f"overwritten: expected n of at least {err.limit}, got {n}; spare_rows= keeps "
                    "more of them")
            if err.status == um.UM_E_INVALID:
                raise ValueError(f"KVCache.crop: expected n of at most {self.seq_len}, the tokens "
                                 f"that are there, got {n}")
            self.fail(&err, "crop")
        self.note_end()
        self.settle()

    @cython.critical_section
    def trim_to(self, n: int, *, keep_first: int = 0) -> bool:
        """Keep the last n tokens, and the first `keep_first`.

        No byte moves, except that the first tokens are copied to the rows before the last ones.
        Positions do not change. Pages that hold no token are given back, with the last view over
        them. If layers differ, only those that keep all tokens keep the first ones.

        Returns
        -------
        bool
            Whether tokens were dropped.

        Raises
        ------
        ValueError
            `keep_first` of a ring, or with an n below the largest window.
        RuntimeError
            Rows are reserved, or layers differ in length.
        BufferError
            Views lie over the rows that the first tokens go to. Nothing was dropped.
        OSError
            The file that rows are mapped from has become shorter. Nothing was dropped.
        """
        cdef um.um_error err
        cdef um.um_status status
        cdef uint64_t last = size_of(n, "n"), first = size_of(keep_first, "keep_first"), row = 0
        cdef uint64_t held
        self.begin_change()
        self._most_bytes = self.most_bytes()
        held = um.um_kv_seq_len(&self.kv)
        if self.window is not None and first:
            raise ValueError(f"keep_first: expected 0 for a ring, in which a token's row follows "
                             f"from its position, got {keep_first}")
        if first and last < held and first < held - last:
            row = self.check_kept(last, first)
        cdef Region _held = self.open_region()
        self._writing = True  # as in move_to
        try:
            status = self.trim(last, first, row, &err)
        except BaseException:
            self._writing = False
            raise
        self.end_move(status, &err, "trim_to")
        held -= um.um_kv_seq_len(&self.kv)
        self._dropped += held * self.kv.row_bytes
        self.settle()
        return held > 0

    cdef uint64_t check_kept(self, uint64_t last, uint64_t first) except? 0:
        cdef uint64_t row = self.end_row() - last - first
        if self.has_views([(row, row + first)]):
            raise BufferError(f"KVCache '{self.name}': views lie over the rows before the last "
                              f"{last}, where the first {first} go: drop them first")
        return row

    @cython.critical_section
    def clear(self) -> None:
        """Drop all tokens and reserved rows; the next position is 0.

        Only a growing cache gives memory back.
        """
        self.begin_change()
        self._most_bytes = self.most_bytes()
        um.um_kv_clear(&self.kv)
        self.note_end()
        self._reserved = 0
        self._dropped = 0
        self.settle()

    # ---- states of layers that keep no tokens ----

    def state(self, layer: int) -> npt.NDArray[Any]:
        """View the state that a layer keeps.

        Parameters
        ----------
        layer : int
            The number of a `LayerState`.

        Returns
        -------
        numpy.ndarray
            ``[batch, *shape]``, at an address that never changes; zeros at first and after `clear`.
            Its writer changes it in place; it is the state behind the last token.

        Raises
        ------
        ValueError
            The layer keeps tokens and no state.
        """
        raise ValueError(f"KVCache.state: layer {layer} keeps tokens and no state: layers=[...] "
                         "with a LayerState has states")

    def checkpoint(self) -> int:
        """Copy all states, for `crop` to go back to; if need be in place of the oldest copy.

        Returns
        -------
        int
            Its position, `next_position`. An older checkpoint at that position is replaced.

        Raises
        ------
        ValueError
            No layer keeps a state, or the cache was made without room for checkpoints.
        RuntimeError
            Rows are reserved, or layers differ in length.
        """
        raise ValueError("KVCache.checkpoint: no layer keeps a state: crop goes back without "
                         "checkpoints")

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Positions that `crop` can take states back to, in order: a tuple of int."""
        return ()

    # ---- restoring ----

    def _lanes(self) -> list[tuple[int, Literal["k", "v"], int]]:
        """Return all lanes in the order of the storage, as (layer, part, stream)."""
        s = self.kv.spec
        return [(layer, part, stream) for layer in range(s.n_layers) for part in "kv"
                for stream in range(s.batch)]

    def _first_kept(self) -> int:
        """Return the position before which tokens were trimmed, not those that a ring lost."""
        return self.kv.first

    def _begin_restore(self, next_position: int, n: int) -> None:
        """Clear the cache, and make room for n tokens up to a position."""
        cdef uint64_t count = n, most = self.kv.spec.window or self.kv.spec.max_seq_len
        self.clear()
        if count > most:
            raise CacheFull(f"KVCache '{self.name}': {n} tokens do not fit into {most}", most, 0, n)
        if self.kv.spec.window == 0 and (self.first_row() != 0 or self.mapped(0, count) != NULL):
            raise BufferError(f"KVCache '{self.name}': views hold memory that is to be given "
                              "back: drop them first")
        if self.kv.spec.window == 0 and count > self.kv.usable_rows:
            self.make_rows(0, count)

    def _finish_restore(self, next_position: int, n: int, trimmed: int = 0) -> None:
        """Count the tokens that were written; a ring notes before which position it was trimmed."""
        cdef um.um_error err
        if um.um_kv_adopt(&self.kv, next_position, n, &err) != um.UM_OK:
            raise_status(err.status, &err, f"KVCache '{self.name}'")
        if trimmed and self.kv.spec.window != 0:
            um.um_kv_set_first(&self.kv, trimmed, next_position - n)

    # ---- figures ----

    @property
    def seq_len(self) -> int:
        """Tokens that all layers hold; of a ring, at most its window."""
        self.open_region()
        return um.um_kv_seq_len(&self.kv)

    @property
    def next_position(self) -> int:
        """The position of the next token, which trimming does not change."""
        self.open_region()
        return um.um_kv_next_position(&self.kv)

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return self.seq_len == 0

    @cython.final
    cdef uint64_t used_bytes(self) noexcept:
        cdef uint64_t rows = 0
        cdef uint32_t layer
        for layer in range(self.kv.spec.n_layers):
            rows += um.um_kv_layer_len(&self.kv, layer, NULL)
        return rows * self.kv.spec.batch * (self.kv.row_bytes + self.kv.v_row_bytes)

    @cython.final
    cdef uint64_t most_bytes(self) noexcept:
        return max(self._most_bytes, self.used_bytes())

    @property
    def memory_usage_bytes(self) -> int:
        """Bytes of the tokens in all layers, K and V, and of states."""
        self.open_region()
        return self.used_bytes()

    @property
    def n_layers(self) -> int:
        """Layers."""
        return self.kv.spec.n_layers

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer keeps: a tuple of `LayerKV` and `LayerState`."""
        layer = LayerKV(self._heads, self.kv.spec.head_dim, self._v_head_dim, window=self.window,
                        dtype=kv_name(self.dtype, self.v_dtype))
        return (layer,) * self.kv.spec.n_layers

    @property
    def n_kv_heads(self) -> int:
        """KV heads of a layer; if layers differ, a tuple: of each, 0 for a state."""
        return self._heads

    @property
    def head_dim(self) -> int:
        """Elements of a head; if layers differ, of each."""
        return self.kv.spec.head_dim

    @property
    def v_head_dim(self) -> int:
        """Elements of a head of V, 0 without V; if layers differ, of each."""
        return self._v_head_dim

    @property
    def batch(self) -> int:
        """Streams."""
        return self._batch

    @property
    def n_growths(self) -> int:
        """How often memory was committed."""
        return self._n_growths

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit."""
        return self.kv.spec.max_seq_len

    @property
    def n_rows(self) -> int:
        """Rows of a lane; a ring counts positions modulo this number. If layers differ, of each."""
        return self.kv.n_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K in one layer and stream, all heads; if layers differ, of each."""
        return self.kv.row_bytes * self.heads_apart()

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one token's V, as `row_bytes`."""
        return self.kv.v_row_bytes * self.heads_apart()

    @cython.final
    cdef uint32_t heads_apart(self) noexcept:
        # With order="head", a row of the core has one head.
        return 1 if self.kv.spec.n_kv_heads == self._heads else self._heads

    @property
    def capacity_bytes(self) -> int:
        """Bytes of memory that back the cache; of a growing one, the committed bytes."""
        return self._storage_bytes

    # ---- the end ----

    @cython.critical_section
    def close(self) -> None:
        """Close the cache, and give back storage of its own. Closing it twice is no error.

        Raises
        ------
        BufferError
            Views still use it, and it stays open.
        """
        if not self._closed:
            n_users = self.n_users()
            if n_users > 0:
                refuse_views(self.name, n_users)
            self.end()

    def __enter__(self) -> Self:
        self.open_region()
        return self

    @cython.critical_section
    def __exit__(self, *exc_info: object) -> None:
        # Views that are still alive keep the memory; it goes with the last of them.
        self.end()

    def __reduce__(self):
        raise TypeError("a KVCache cannot be pickled: it is memory of this process. "
                        "Write it with save() and use KVCache.restore")

    def __len__(self) -> int:
        return self.seq_len

    def __repr__(self):
        if self.closed:
            return "KVCache(closed)"
        s = self.kv.spec
        batch = f", batch {self._batch}" if self._batch > 1 else ""
        batch += ", rows by head" if self.order == "head" else ""
        types = self.dtype if self.dtype == self.v_dtype else f"{self.dtype} and {self.v_dtype}"
        kind = ", growing" if self.grow else f", ring of {s.window}" if s.window else ""
        n = um.um_kv_seq_len(&self.kv)
        return (f"KVCache({n} of {s.max_seq_len} tokens, {s.n_layers} layers, "
                f"{self._heads} heads of {s.head_dim} {types}{batch}{kind}, "
                f"{format_bytes(self.capacity_bytes)})")

    _repr_html_ = kv_html
