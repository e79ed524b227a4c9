# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The KV cache as users see it: its arguments, its documents, and the cache that it holds.

A `KVCache` holds a body, which does the work: a `OneKindCache` where all layers are alike, and a
`LayeredKVCache`, made of such caches, where they differ. Neither knows this class.
"""
import warnings

from unimem.kv.cache.held import call, figure
from unimem.kv.cache.rows import for_dims
from unimem.kv.cache.spec import SIGNATURE, KVSpec, spec_of
from unimem.kv.cache_html import kv_html

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from unimem._core cimport native as um
from unimem.kv.cache.layered cimport LayeredKVCache
from unimem.kv.cache.one_kind cimport OneKindCache
from unimem.kv.cache.rows cimport KVRows


def _made(spec):
    """Return the body that a KVSpec or a LayersSpec asks for."""
    return OneKindCache(spec) if isinstance(spec, KVSpec) else LayeredKVCache(spec)


class _Restored:
    """What `snapshot.restore` makes: bodies."""

    def __new__(cls, **fields):
        return _made(spec_of((), fields))

    _mapped = staticmethod(OneKindCache.mapped_from)
    _of_layers = staticmethod(LayeredKVCache.of_parts)


cdef class KVCache:
    """K and V of all layers of one stream (optionally a batch).

    For each layer the storage holds K and V, each ``[batch, rows, n_kv_heads, head_dim]``, or with
    ``order="head"`` ``[batch, n_kv_heads, rows, head_dim]``. Appending is a copy, or a conversion,
    into the next row, and no address ever changes. A token counts once every layer holds it. Its
    position is that in the conversation, whatever is dropped before it. There are three kinds:

    fixed
        All memory is taken at once. Trimming moves no byte: the tokens begin at a later row. When
        the last row is used they move to the first.
    growing (``grow=True``)
        Address space is reserved, and memory is committed in steps as tokens come, and given back
        when they go, but for a little that is kept for what comes next.
    ring (``window=n``)
        The last n tokens. The token of position p is in row ``p % n_rows``, and since the rows are
        mapped twice, back to back, the window is one array wherever it begins. Nothing is ever
        moved.

    One thread writes; others may read views of tokens that are there. A view stays valid while its
    rows are not written anew; memory under a view is not given back. After a fork the child has
    its own copy, but for a ring, which is left out of it. A page faults when its first token comes,
    unless ``warm=True``, `warm` or `Layout.freeze` has touched it; growing touches what it commits.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim : int
        The model's dimensions, where all layers are alike.
    layers : sequence of LayerKV and LayerState, optional
        Instead of these: what each layer keeps. Then `max_seq_len` is named, too, and `window` and
        `tape` are not accepted. See docs/kv.md.
    max_seq_len : int
        Tokens that fit. A ring holds its window, and positions go on without end.
    batch : int, default 1
        Streams that grow together.
    dtype : {"f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}
        What is stored; dtypes of NumPy, ml_dtypes and torch, and NumPy's names, are accepted for
        the first three. The others are ggml's: blocks of 32 values of a head with one scale, of
        eight, five or four bits a value. They are quantized as ggml's reference does it. Two, as
        ``"q8_0,q4_0"``, are those of K and of V.
    k_dtype, v_dtype : str, optional
        What is stored of K, and of V, where that is not `dtype`.
    v_head_dim : int, optional
        Elements of a head of V, where that is not `head_dim`; 0: no V.
    order : {"token", "head"}
        What lies side by side: the heads of a token, as matrix products write them and ggml reads
        them; or the tokens of a head, as attention over a whole conversation reads them. All that
        is given and shown is the same but for strides.
    window : int, optional
        Makes a ring of the last so many tokens.
    spare_rows : int, default 0
        Of a ring: rows beyond the window, which is rounded up to whole pages anyway. So far can
        `crop` go back, and so many tokens and one more can be reserved before any is lost that
        the first of them attends to.
    budget_bytes : int, optional
        What `capacity_bytes` never exceeds: CacheFull is raised before. Of a fixed cache it limits
        the rows.
    grow : bool, default False
        Makes a growing cache.
    rotate : bool, default False
        Whether appends rotate the heads of floats (`rotate_heads`), whose outliers cost quantized
        types less then. Whoever reads rotates queries, and rotates back what is made of V.
    checkpoints, checkpoint_every : int, optional
        With `layers` that keep a state: copies of all states that are kept at most (`checkpoint`),
        and after how many tokens `commit` and `append_all` take one.
    tape : Tape, optional
        Where the storage of a fixed cache is taken, such as ``layout.history``; otherwise it has a
        block of its own.
    name : str, optional
        Stands in messages.
    **placement
        See `PlacementOptions`; only without `tape`.

    Attributes
    ----------
    tape, block : Tape or None, Block or None
        What the storage lies on.
    dtype, v_dtype : str
        What is stored of K, and of V, such as ``"f16"``.
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
        A dimension below 1, an unknown dtype, sizes whose product does not fit; options that do
        not go together.
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

    __signature__ = SIGNATURE

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
    def for_dims(cls, dims, *, max_seq_len=None, **options):
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

    @staticmethod
    def storage_bytes(*dims, layers=None, **options):
        """Return the bytes that a cache takes whose memory is fixed.

        Parameters
        ----------
        *dims : int
            `n_layers`, `n_kv_heads`, `head_dim` and `max_seq_len`, also by their names.
        layers : sequence of LayerKV, optional
            Instead of the first three: then rings are counted as well.
        **options
            `batch`, `dtype` and `order`; with `layers` also `spare_rows`, `checkpoints`, `pages`.

        Returns
        -------
        int
            For each layer and stream K and V, each rounded up to 64 bytes; with ``order="head"``
            each head of these. Rings have whole pages.

        Raises
        ------
        ValueError, TypeError
            As the class.
        """
        return (OneKindCache.storage_bytes(*dims, **options) if layers is None else
                LayeredKVCache.storage_bytes(layers, *dims, **options))

    # ---- appending ----

    def append(self, layer, k, v):
        """Append tokens to one layer.

        Parameters
        ----------
        layer : int
            Which.
        k, v : array
            Of NumPy, or of torch or whoever else has ``__dlpack__`` or a buffer; in main memory. Of
            one shape and dtype, float32, float16 or bfloat16: ``[n, n_kv_heads, head_dim]``
            (batch 1), or ``[batch, n_kv_heads, n, head_dim]``. Converted to the cache's dtype,
            rounding to nearest even; arrays that are not C-contiguous are copied first. A
            quantized cache takes blocks, too, as `layer` shows them, where K and V have one type.

        Raises
        ------
        CacheFull
            There is no room for all n, or `budget_bytes` would be passed.
        CapacityError, MemoryError, PlacementError
            A growing cache cannot have more memory.
        ValueError, TypeError
            A wrong layer, shape or dtype.
        RuntimeError
            Rows are reserved; FrozenError when memory would have to be committed.
        BufferError
            Tokens were trimmed, the rest has to move to the first rows, and views lie over these.
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

    def append_all(self, k, v):
        """Append one token to all layers (batch 1).

        Parameters
        ----------
        k, v : array
            ``[n_layers, n_kv_heads, head_dim]``, float32, float16 or bfloat16; otherwise as for
            `append`.

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

    def layer(self, i, dtype=None, out=None):
        """View the tokens that one layer holds.

        Parameters
        ----------
        i : int
            Which layer.
        dtype : dtype-like, optional
            Converted copies in this dtype instead of views.
        out : tuple of array, optional
            Where the converted copies go: two arrays, of any library, of the copies' shape and of
            `dtype`.

        Returns
        -------
        k, v : numpy.ndarray
            ``[batch, n_kv_heads, n, head_dim]`` with the n tokens that this layer holds now (of a
            ring: its window). Views do not grow, and stay valid until their rows are written anew.
            Those of a quantized cache are ``[batch, n_kv_heads, n, head_dim / 32]`` blocks, whose
            fields are ggml's: those of ``"q8_0"`` are ``d`` (float16) and ``qs`` (32 int8), and
            value ``i`` is ``d * qs[i]``. docs/kv.md has the others.

        Raises
        ------
        ValueError
            A wrong layer, or an `out` of another shape or dtype.
        OSError
            Of copies: the rows are mapped from a file, which has become shorter.
        """
        return self._body.layer(i, dtype, out)

    # ---- forgetting ----

    crop = call(KVRows.crop)
    trim_to = call(KVRows.trim_to)
    clear = call(KVRows.clear)
    give_back = call(OneKindCache.give_back)

    def enforce_memory_limit(self, max_bytes):
        """Keep as many of the last tokens as fit, and give the memory of all others back.

        Parameters
        ----------
        max_bytes : int
            What `memory_usage_bytes` is at most afterwards.

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
        Where tokens and memory are within the limit already, nothing is done. Memory is given back
        in whole pages; that of a fixed cache or a ring stays where it is locked, or of hugetlb
        pages. Pages that the system refuses to take now go with a later call.
        """
        return self._body.enforce_memory_limit(max_bytes)

    # ---- states ----

    state = call(KVRows.state)
    checkpoint = call(KVRows.checkpoint)
    checkpoints = figure(OneKindCache.checkpoints)

    # ---- copies and snapshots ----

    def copy(self):
        """Return a cache of the same kind with the same tokens, in memory of its own.

        Raises
        ------
        RuntimeError
            Rows are reserved, or layers differ in length.
        CapacityError, MemoryError, PlacementError
            There is no room for it.
        OSError
            The rows are mapped from a file, which has become shorter.
        """
        return _around(KVCache, self._body.copy())

    def save(self, path, *, tokens=None, model=None):
        """Write the tokens to a file, for `restore`.

        The file is replaced at once: whenever the process or the machine stops, it is the old one
        or the new one, whole. Its format is described in docs/snapshots.md.

        Parameters
        ----------
        path : path-like
            The file, or the URL of an object, such as ``s3://bucket/key``: see docs/remote.md.
        tokens : sequence of int, optional
            The ids of all tokens up to `next_position`.
        model : str, optional
            What the cache belongs to, such as ``weights.fingerprint``.

        Raises
        ------
        RuntimeError
            Rows are reserved, or layers differ in length.
        ValueError
            Another number of `tokens`.
        OSError
            It cannot be written, or is a folder or device; or the rows are mapped from a file that
            has become shorter. The file is as it was.
        """
        from unimem.kv import snapshot

        self._body.check_saveable()
        write = snapshot.save if self._layered is None else snapshot.save_layers
        write(self._body, path, tokens, model)

    @classmethod
    def restore(cls, path, *, mode="map", tokens=None, model=None, verify=None, **placement):
        """Make a cache of what `save` wrote.

        Parameters
        ----------
        path : path-like
            The file, or its URL.
        mode : {"map", "copy"}
            ``"map"``: the file is mapped, copy-on-write, and ready at once; the cache grows on
            demand, on base pages. ``"copy"``: it is read, in parallel. A ring, and what a URL
            names, is always read.
        tokens : sequence of int, optional
            The tokens to be computed: those of the file must be the first of them.
        model : str, optional
            What the file must have been saved with.
        verify : bool, optional
            Whether the checksums of the data are compared; by default only when it is read. See
            also the method `verify`.
        **placement
            See `PlacementOptions`; only with ``"copy"``.

        Returns
        -------
        KVCache

        Raises
        ------
        SnapshotError
            The file is no snapshot, is damaged, or is one of another model or of other tokens.
        ValueError, TypeError
            An unknown mode or option, placement with ``"map"``, `tokens` that are no ids.
        OSError
            It cannot be read.
        CapacityError, MemoryError, PlacementError
            There is no room.
        """
        from unimem.kv import snapshot

        return _around(cls, snapshot.restore(_Restored, path, mode, tokens, model, verify,
                                             placement))

    def verify(self):
        """Compare the data of the file that the cache was restored from with its checksums.

        Raises
        ------
        SnapshotError
            It was changed, or truncated.
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
    name = figure(OneKindCache.name, "What messages call it.")
    dtype = figure(OneKindCache.dtype, 'What is stored of K, such as ``"f16"``; with `layers`, of each layer.')
    v_dtype = figure(OneKindCache.v_dtype, "What is stored of V.")
    order = figure(OneKindCache.order, 'What lies side by side: ``"token"`` or ``"head"``.')
    window = figure(OneKindCache.window, "Tokens of a ring, or None; with `layers`, of each layer.")
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
    def is_empty(self):
        """Whether there is no token."""
        return self.seq_len == 0

    # ---- the end ----

    warm = call(OneKindCache.warm)
    close = call(KVRows.close)
    _freeze = call(OneKindCache._freeze)

    def __enter__(self):
        self._body.check_open()
        return self

    def __exit__(self, *exc_info):
        # Views that are still alive keep the memory; it goes with the last of them.
        self._body.__exit__()

    def __reduce__(self):
        raise TypeError("a KVCache cannot be pickled: it is memory of this process. "
                        "Write it with save() and use KVCache.restore")

    def __len__(self):
        return self._body.seq_len

    def __repr__(self):
        return repr(self._body)

    _repr_html_ = kv_html

    def __del__(self):
        if self._one.is_left_open() if self._one is not None else self._layered.is_left_open():
            warnings.warn(f"unclosed '{self.name}': {self!r}", ResourceWarning, stacklevel=1,
                          source=self)


cdef KVCache _around(type cls, body):
    """A cache that holds a body which is made."""
    cdef KVCache cache = cls.__new__(cls)
    cache.hold(body)
    cache._is_made = True
    return cache
