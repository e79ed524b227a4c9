# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The KV cache as users see it: its arguments, its docstrings, and the body that does the work.

      KVCache --+--> OneKindCache      all layers are alike: rows, and storage that they lie in
                `--> LayeredKVCache    layers differ: a OneKindCache for each kind, and states

Neither body knows this class. Private members that other rooms need are those of the body.
"""
import warnings

from unimem.kv.cache.held import call, figure
from unimem.kv.cache.rows import for_dims
from unimem.kv.cache.spec import KVSpec, signature, spec_of
from unimem.kv.cache_html import kv_html

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.cache.layered cimport LayeredKVCache
from unimem.kv.cache.one_kind cimport OneKindCache
from unimem.kv.cache.rows cimport KVRows

#: from unimem._core.block import Block
#: from unimem._core.foreign import AnyArray
#: from unimem._core.tape import Tape
#: from unimem.kv.cache.rows import ModelDims
#: from unimem.kv.layer_specs import Layer
#: from unimem.kv.types import DType
#: from unimem.system.placement import Pages, Placement, PlacementOptions
#: _ArrayT = TypeVar("_ArrayT", bound=AnyArray)


def _made(spec):
    """Return the body that a KVSpec or a LayersSpec asks for."""
    return OneKindCache(spec) if isinstance(spec, KVSpec) else LayeredKVCache(spec)


class _Restored:
    """The class that `snapshot.restore` calls: it makes bodies."""

    def __new__(cls, **fields):
        return _made(spec_of((), fields))

    _mapped = staticmethod(OneKindCache.mapped_from)
    _of_layers = staticmethod(LayeredKVCache.of_parts)


cdef class KVCache:
    """K and V of all layers of one stream (optionally a batch).

    The storage holds K and V of each layer, each ``[batch, rows, n_kv_heads, head_dim]``, or with
    ``order="head"`` ``[batch, n_kv_heads, rows, head_dim]``. Appending copies, or converts, into
    the next row, and no address ever changes. A token counts once every layer holds it. Its
    position is its place in the conversation, whatever is dropped before it. There are three kinds:

    fixed
        All memory is taken at once. Trimming moves no byte: the tokens begin at a later row. When
        the last row is used, they move to the first.
    growing (``grow=True``)
        Address space is reserved. Memory is committed in steps as tokens are appended, and given
        back as they are dropped, except for a little that is kept for the next tokens.
    ring (``window=n``)
        The last n tokens. The token at position p is in row ``p % n_rows``. The rows are mapped
        twice, back to back, so the window is one array wherever it begins, and nothing moves.

    One thread writes; other threads may read views of tokens that are present. A view stays valid
    until its rows are overwritten; memory under a view is not given back. A forked child has its
    own copy, except of a ring, which it does not have. A page faults with its first token, unless
    ``warm=True``, `warm` or `Layout.freeze` has touched it; growing touches what it commits.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim : int
        The model's dimensions, if all layers are alike.
    layers : sequence of LayerKV and LayerState, optional
        What each layer keeps, instead of these dimensions. `max_seq_len` is then a keyword, and
        `window` and `tape` are not accepted. See docs/kv.md.
    max_seq_len : int
        Tokens that fit. A ring holds its window, and its positions have no limit.
    batch : int, default 1
        Streams that grow together.
    dtype : {"f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}
        The stored type. For the first three, dtypes of NumPy, ml_dtypes and torch, and NumPy's
        names, are accepted. The other types are ggml's: blocks of 32 values of a head with one
        scale and eight, five or four bits a value, quantized as ggml's reference does. A pair such
        as ``"q8_0,q4_0"`` names the types of K and V.
    k_dtype, v_dtype : str, optional
        The types of K and V, if they differ from `dtype`.
    v_head_dim : int, optional
        Elements of a head of V, if that differs from `head_dim`; 0: no V.
    order : {"token", "head"}
        What is contiguous: the heads of a token, as matrix products write and ggml reads them; or
        the tokens of a head, as attention over a whole conversation reads them. Arguments and
        results are the same except for strides.
    window : int, optional
        Makes a ring of this many tokens.
    spare_rows : int, default 0
        Rows of a ring beyond its window; their number is rounded up to whole pages. `crop` can undo
        up to this many tokens; reserving more evicts tokens that are still in the window.
    budget_bytes : int or str, optional
        The limit of `capacity_bytes`; CacheFull is raised at it. It limits the rows of a fixed
        cache.
    grow : bool, default False
        Makes a growing cache.
    rotate : bool, default False
        Whether appends rotate heads of floats (`rotate_heads`), so that outliers cost quantized
        types less. The reader rotates its queries, and rotates the output of attention back.
    checkpoints, checkpoint_every : int, optional
        For `layers` with states: the most copies of all states to keep (`checkpoint`), and the
        number of tokens after which `commit` and `append_all` take one.
    tape : Tape, optional
        Where the storage of a fixed cache is taken, such as ``layout.history``; otherwise it has a
        block of its own.
    name : str, optional
        Its name in messages.
    **placement
        See `PlacementOptions`; only without `tape`.

    Attributes
    ----------
    tape, block : Tape or None, Block or None
        What the storage lies on.
    dtype, v_dtype : str
        The types of K and V, such as ``"f16"``.
    order : str
        ``"token"`` or ``"head"``.
    window, budget_bytes : int or None
        As given.
    grow, rotate : bool
        Whether memory is committed as tokens come, and whether appends rotate heads.
    n_growths : int
        How often that was.

    Raises
    ------
    ValueError
        A dimension below 1, an unknown dtype, sizes whose product is too large, or options that
        exclude each other.
    TapeFull
        `tape` has no room.
    CacheFull
        `budget_bytes` is too small for one token, or for the ring.
    MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import numpy as np
    >>> import unimem as um
    >>> with um.KVCache(2, 4, 8, 16) as kv:
    ...     for layer in range(2):
    ...         kv.append(layer, np.ones((3, 4, 8), "float32"), np.ones((3, 4, 8), "float32"))
    ...     k, v = kv.layer(0)
    ...     kv.seq_len, k.shape, k.dtype.name
    (3, (1, 4, 3, 8), 'float16')
    """
    #: @overload
    #: def __new__(cls, *, layers: Sequence[Layer], max_seq_len: int, batch: int = 1,
    #:             dtype: npt.DTypeLike = "f16", order: Literal["token", "head"] = "token",
    #:             spare_rows: int = 0, budget_bytes: int | str | None = None, grow: bool = False,
    #:             rotate: bool = False, checkpoints: int = 0, checkpoint_every: int | None = None,
    #:             name: str | None = None, **placement: Unpack[PlacementOptions]) -> Self: ...
    #: @overload
    #: def __new__(cls, n_layers: int, n_kv_heads: int, head_dim: int, max_seq_len: int, *,
    #:             batch: int = 1, dtype: npt.DTypeLike = "f16",
    #:             k_dtype: npt.DTypeLike | None = None, v_dtype: npt.DTypeLike | None = None,
    #:             v_head_dim: int | None = None, order: Literal["token", "head"] = "token",
    #:             window: int | None = None, spare_rows: int = 0,
    #:             budget_bytes: int | str | None = None, grow: bool = False,
    #:             rotate: bool = False, tape: Tape | None = None, name: str | None = None,
    #:             **placement: Unpack[PlacementOptions]) -> Self: ...

    __signature__ = signature()

    def __cinit__(self):
        self.hold(OneKindCache.__new__(OneKindCache))

    def __init__(self, *dims, **options):
        if self._is_made:
            raise RuntimeError("the KVCache is made already")
        body = _made(spec_of(dims, options))
        if self._is_made:  # by what converted the arguments
            body.__exit__()
            raise RuntimeError("the KVCache is made already")
        self.hold(body)
        self._is_made = True

    cdef object hold(self, body):
        self._body = body
        self._one = body if isinstance(body, OneKindCache) else None
        self._layered = body if isinstance(body, LayeredKVCache) else None
        self.kv = NULL if self._one is None else &self._one.kv

    @classmethod
    def for_dims(cls, dims: ModelDims, *, max_seq_len: int | None = None, **options: Any) -> Self:
        """Make a cache for a model.

        Parameters
        ----------
        dims : ModelDims
            The model's dimensions.
        max_seq_len : int, optional
            ``dims.max_seq_len`` by default.
        **options
            As for the class.

        Returns
        -------
        KVCache
        """
        return for_dims(cls, dims, max_seq_len, options)

    #: @overload
    #: @staticmethod
    #: def storage_bytes(n_layers: int, n_kv_heads: int, head_dim: int, max_seq_len: int, *,
    #:                   batch: int = 1, dtype: npt.DTypeLike = "f16",
    #:                   order: Literal["token", "head"] = "token",
    #:                   k_dtype: npt.DTypeLike | None = None, v_dtype: npt.DTypeLike | None = None,
    #:                   v_head_dim: int | None = None) -> int: ...
    #: @overload
    #: @staticmethod
    #: def storage_bytes(*, layers: Sequence[Layer], max_seq_len: int, batch: int = 1,
    #:                   dtype: npt.DTypeLike = "f16", order: Literal["token", "head"] = "token",
    #:                   spare_rows: int = 0, checkpoints: int = 0,
    #:                   pages: Pages = "auto") -> int: ...
    @staticmethod
    def storage_bytes(*dims, layers=None, **options):
        """Return the bytes that a cache of fixed memory takes.

        Parameters
        ----------
        *dims : int
            `n_layers`, `n_kv_heads`, `head_dim` and `max_seq_len`, also by name.
        layers : sequence of LayerKV, optional
            Instead of the first three; rings are then counted as well.
        **options
            `batch`, `dtype` and `order`; with `layers` also `spare_rows`, `checkpoints`, `pages`.

        Returns
        -------
        int
            The sum of K and V of each layer and stream, each rounded up to 64 bytes; with
            ``order="head"`` each head is rounded. Rings have whole pages.

        Raises
        ------
        ValueError, TypeError
            As the class.
        """
        return (OneKindCache.storage_bytes(*dims, **options) if layers is None else
                LayeredKVCache.storage_bytes(layers, *dims, **options))

    # ---- appending ----

    def append(self, layer: int, k: AnyArray, v: AnyArray) -> None:
        """Append tokens to one layer.

        Parameters
        ----------
        layer : int
            The layer's number.
        k, v : array
            Arrays in main memory, of NumPy, torch or any library with ``__dlpack__`` or a buffer.
            Both have one shape, ``[n, n_kv_heads, head_dim]`` (batch 1) or
            ``[batch, n_kv_heads, n, head_dim]``, and one dtype, float32, float16 or bfloat16. They
            are converted to the cache's dtype, rounding to nearest even; arrays that are not
            C-contiguous are copied first. If K and V have one quantized type, its blocks are
            accepted, too, as `layer` shows them.

        Raises
        ------
        CacheFull
            There is no room for all n tokens, or `budget_bytes` would be exceeded.
        CapacityError, MemoryError, PlacementError
            A growing cache cannot get more memory.
        ValueError, TypeError
            A wrong layer, shape or dtype.
        RuntimeError
            Rows are reserved; FrozenError if memory would have to be committed.
        BufferError
            After trimming, tokens have to move to the first rows, and views lie over those.
        OSError
            The rows are mapped from a file (`restore`), which has become shorter.

        Notes
        -----
        When it raises, no row was appended.
        """
        if self._one is not None:
            with cython.critical_section(self._one):
                self._one.append_tokens(layer, k, v)
        else:
            with cython.critical_section(self._layered):
                self._layered.append_tokens(layer, k, v)

    def append_all(self, k: AnyArray, v: AnyArray) -> None:
        """Append one token to all layers (batch 1).

        Parameters
        ----------
        k, v : array
            ``[n_layers, n_kv_heads, head_dim]``, float32, float16 or bfloat16; otherwise as for
            `append`. If layers differ, a sequence of arrays ``[n_kv_heads, head_dim]``, one of each
            layer that has rows of its own.

        Raises
        ------
        CacheFull, CapacityError, ValueError, TypeError, RuntimeError, BufferError, OSError
            As `append`; RuntimeError also when layers differ in length.
        """
        self._body.append_all(k, v)

    # ---- for runtimes in Cython ----

    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1 nogil:
        if self._one is not None:
            return self._one.append_rows(layer, k, v, type, n)
        with gil:
            return self._layered.append_rows(layer, k, v, type, n)

    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream=0) noexcept nogil:
        if self._one is not None:
            return self._one.lane(layer, v, stream)
        with gil:
            return self._layered.lane(layer, v, stream)

    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n,
                    uint32_t stream=0) noexcept nogil:
        if self._one is not None:
            return self._one.rows(layer, v, out_n, stream)
        with gil:
            return self._layered.rows(layer, v, out_n, stream)

    address = call(KVRows.address)
    row_of = call(KVRows.row_of)
    reserve = call(KVRows.reserve)
    commit = call(KVRows.commit)
    rollback = call(KVRows.rollback)

    # ---- reading ----

    #: @overload
    #: def layer(self, i: int, dtype: npt.DTypeLike | None = None,
    #:           out: None = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
    #: @overload
    #: def layer(self, i: int, dtype: npt.DTypeLike,
    #:           out: tuple[_ArrayT, _ArrayT]) -> tuple[_ArrayT, _ArrayT]: ...
    def layer(self, i, dtype=None, out=None):
        """View the tokens that one layer holds.

        Parameters
        ----------
        i : int
            The layer's number.
        dtype : dtype-like, optional
            The dtype to return converted copies in, instead of views.
        out : tuple of array, optional
            Two arrays of any library that receive the copies, of their shape and of `dtype`.

        Returns
        -------
        k, v : numpy.ndarray
            ``[batch, n_kv_heads, n, head_dim]`` with the n tokens that this layer holds now, or of
            a ring, its window. Views do not grow, and stay valid until their rows are overwritten.
            Views of a quantized cache are ``[batch, n_kv_heads, n, head_dim / 32]`` blocks with
            ggml's fields: ``"q8_0"`` has ``d`` (float16) and ``qs`` (32 int8), and value ``i`` is
            ``d * qs[i]``. docs/kv.md has the other types.

        Raises
        ------
        ValueError
            A wrong layer, or an `out` of another shape or dtype.
        OSError
            Copies were asked for, and the file that the rows are mapped from has become shorter.
        """
        return self._body.layer(i, dtype, out)

    # ---- forgetting ----

    crop = call(KVRows.crop)
    trim_to = call(KVRows.trim_to)
    clear = call(KVRows.clear)
    give_back = call(OneKindCache.give_back)

    def enforce_memory_limit(self, max_bytes: int | str) -> bool:
        """Keep as many of the last tokens as fit, and give back the memory of all other tokens.

        Parameters
        ----------
        max_bytes : int or str
            The limit of `memory_usage_bytes` afterwards.

        Returns
        -------
        bool
            Whether tokens were dropped.

        Raises
        ------
        BufferError
            Views lie over memory that would be given back, or another thread copies. Nothing was
            dropped.
        RuntimeError
            Rows are reserved, or layers differ in length.

        Notes
        -----
        Nothing is done if tokens and memory are within the limit. Memory is given back in whole
        pages; a fixed cache or a ring keeps memory that is locked or in hugetlb pages. Pages that
        the system refuses to take are given back by a later call.
        """
        return self._body.enforce_memory_limit(max_bytes)

    # ---- states ----

    state = call(KVRows.state)
    checkpoint = call(KVRows.checkpoint)
    checkpoints = figure(OneKindCache.checkpoints)

    # ---- copies and snapshots ----

    def copy(self) -> Self:
        """Return a cache of the same kind with the same tokens, in memory of its own.

        Raises
        ------
        RuntimeError
            Rows are reserved, or layers differ in length.
        CapacityError, MemoryError, PlacementError
            There is no room for it.
        OSError
            The file that the rows are mapped from has become shorter.
        """
        return _around(KVCache, self._body.copy())

    def save(self, path: str | PathLike[str], *,
             tokens: Sequence[int] | npt.NDArray[Any] | None = None,
             model: str | None = None) -> None:
        """Write the tokens to a file, for `restore`.

        The file is replaced at once: whenever the process or the machine stops, the old or the new
        file is there, whole. docs/snapshots.md describes the format.

        Parameters
        ----------
        path : path-like
            The file, or the URL of an object, such as ``s3://bucket/key``: see docs/remote.md.
        tokens : sequence of int, optional
            The ids of all tokens up to `next_position`.
        model : str, optional
            The model that the cache belongs to, such as ``weights.content_hash()``.

        Raises
        ------
        RuntimeError
            Rows are reserved, or layers differ in length.
        ValueError
            `tokens` are not `next_position` many.
        OSError
            The path cannot be written, or is a folder or device; or the file that the rows are
            mapped from has become shorter. The file at the path is unchanged.
        """
        from unimem.kv import snapshot

        self._body.check_saveable()
        write = snapshot.save if self._layered is None else snapshot.save_layers
        write(self._body, path, tokens, model)

    @classmethod
    def restore(cls, path: str | PathLike[str], *, mode: Literal["map", "copy"] = "map",
                tokens: Sequence[int] | npt.NDArray[Any] | None = None, model: str | None = None,
                verify: bool | None = None, **placement: Unpack[PlacementOptions]) -> Self:
        """Make a cache from a file that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file, or its URL.
        mode : {"map", "copy"}
            ``"map"``: the file is mapped, copy-on-write, and ready at once; the cache grows on
            demand, on base pages. ``"copy"``: the file is read, in parallel. A ring and a URL are
            always read.
        tokens : sequence of int, optional
            The tokens to compute, which must begin with those of the file.
        model : str, optional
            The model that the file must have been saved with.
        verify : bool, optional
            Whether to compare the checksums of the data; by default only if it is read. See also
            the method `verify`.
        **placement
            See `PlacementOptions`; only with ``"copy"``.

        Returns
        -------
        KVCache

        Raises
        ------
        SnapshotError
            The file is no snapshot, is damaged, or belongs to another model or other tokens.
        ValueError, TypeError
            An unknown mode or option, placement with ``"map"``, or invalid `tokens`.
        OSError
            The file cannot be read.
        CapacityError, MemoryError, PlacementError
            There is no room.
        """
        from unimem.kv import snapshot

        return _around(cls, snapshot.restore(_Restored, path, mode, tokens, model, verify,
                                             placement))

    def verify(self) -> None:
        """Compare the data of the file that the cache was restored from with its checksums.

        Raises
        ------
        SnapshotError
            The file was changed or truncated.
        ValueError
            The cache was not restored with ``mode="map"``.
        OSError
            The file cannot be read.
        """
        from unimem.kv import snapshot

        self._body.check_open()
        snapshot.verify(self._body)

    # ---- figures ----

    tape = figure(OneKindCache.tape, "The tape that the storage lies on, or None.")
    block = figure(OneKindCache.block, "The block of its own that the storage lies on, or None.")
    name = figure(OneKindCache.name, "Its name in messages.")
    dtype = figure(OneKindCache.dtype, "The type of K; if layers differ, of each.")
    v_dtype = figure(OneKindCache.v_dtype, "The type of V; if layers differ, of each.")
    order = figure(OneKindCache.order, 'What is contiguous: ``"token"`` or ``"head"``.')
    window = figure(OneKindCache.window, "Tokens of a ring, or None; if layers differ, of each.")
    budget_bytes = figure(OneKindCache.budget_bytes, "The most bytes of storage, or None.")
    grow = figure(OneKindCache.grow, "Whether memory is committed as tokens come.")
    rotate = figure(OneKindCache.rotate, "Whether appends rotate heads.")
    seq_len = figure(OneKindCache.seq_len)
    next_position = figure(OneKindCache.next_position)
    memory_usage_bytes = figure(OneKindCache.memory_usage_bytes)
    layers = figure(OneKindCache.layers)
    n_layers = figure(OneKindCache.n_layers)
    n_kv_heads = figure(OneKindCache.n_kv_heads)
    head_dim = figure(OneKindCache.head_dim)
    v_head_dim = figure(OneKindCache.v_head_dim)
    batch = figure(OneKindCache.batch)
    n_growths = figure(OneKindCache.n_growths)
    max_seq_len = figure(OneKindCache.max_seq_len)
    n_rows = figure(OneKindCache.n_rows)
    row_bytes = figure(OneKindCache.row_bytes)
    v_row_bytes = figure(OneKindCache.v_row_bytes)
    capacity_bytes = figure(OneKindCache.capacity_bytes)
    resident_bytes = figure(OneKindCache.resident_bytes)
    granted = figure(OneKindCache.granted)
    closed = figure(OneKindCache.closed)
    _pieces = figure(OneKindCache._pieces)

    @property
    def is_empty(self) -> bool:
        """Whether there is no token."""
        return self.seq_len == 0

    # ---- the end ----

    warm = call(OneKindCache.warm)
    close = call(KVRows.close)
    _freeze = call(OneKindCache._freeze)

    def __enter__(self) -> Self:
        self._body.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # The last live view, if there is one, keeps the memory.
        self._body.__exit__()

    def __reduce__(self):
        raise TypeError("a KVCache cannot be pickled: it is memory of this process. "
                        "Write it with save() and use KVCache.restore")

    def __len__(self) -> int:
        return self._body.seq_len

    def __repr__(self):
        return repr(self._body)

    _repr_html_ = kv_html

    def __del__(self):
        if self._one.is_left_open() if self._one is not None else self._layered.is_left_open():
            warnings.warn(f"unclosed '{self.name}': {self!r}", ResourceWarning, stacklevel=1,
                          source=self)


cdef KVCache _around(type cls, body):
    """Return a cache that holds a body."""
    cdef KVCache cache = cls.__new__(cls)
    cache.hold(body)
    cache._is_made = True
    return cache
