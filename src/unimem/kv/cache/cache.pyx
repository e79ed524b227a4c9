# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The KV cache: K and V of all layers of one conversation, in memory that never moves."""
import numpy as np

from unimem.base.arguments import flag
from unimem.system.placement import PlacementOptions

cimport cython
cimport numpy as cnp
from cpython.object cimport PyObject, PyTypeObject, newfunc
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport dtype_of, new_array, size_of
from unimem._core.lock cimport NO_GIL
from unimem.kv.arrays cimport (
    Given, check_token, check_tokens, contiguous, kv_type, layer_number, number_of_type, pair_of,
    shape_of,
)
from unimem.kv.cache.storage cimport KVMemory
from unimem._core.region cimport Region, new_window
from unimem._core.tape cimport Tape

cnp.import_array()

# Giving the interpreter's lock up and taking it again costs more than copying a few rows.
cdef uint64_t MANY_ROWS = 64

cdef tuple _PLACEMENT = tuple(PlacementOptions.__annotations__)


@cython.nonecheck(False)
cdef inline bint _is_ready(KVMemory kv) noexcept nogil:
    """Whether `begin_change` would pass, without the lock."""
    if kv._closed or kv._writing:
        return False
    return kv.tape._region is not None if kv._region is None else kv._region.block.base != NULL


# Calls that touch rows: with `mapped`, which is a block that has pages of a file here, under the
# guard, since these may be lost; NULL: all pages are the cache's own.

cdef enum:
    ALL_LAYERS = 0xffffffff

cdef struct Append:
    um.um_kv *kv
    uint32_t layer
    const void *k
    const void *v
    const Given *given
    um.um_error *err
    um.um_status status


cdef void _run_append(void *context) noexcept nogil:
    cdef Append *a = <Append *>context
    if a.layer == ALL_LAYERS:
        a.status = um.um_kv_append_all(a.kv, a.k, a.v, a.given.type, a.err)
    else:
        a.status = um.um_kv_append(a.kv, a.layer, a.k, a.v, a.given.type, a.given.order, a.given.n,
                                   a.err)


cdef um.um_status _append(um.um_kv *kv, const um.um_block *mapped, uint32_t layer, const void *k,
                          const void *v, const Given *given, um.um_error *err) noexcept nogil:
    cdef Append job
    cdef um.um_status status = um.UM_OK
    job.kv, job.layer, job.k, job.v, job.given, job.err = kv, layer, k, v, given, err
    if mapped == NULL:
        _run_append(&job)
    else:
        status = um.um_guard_run(mapped.base, mapped.reserved_nbytes, _run_append, &job, err)
    return status if status != um.UM_OK else job.status


cdef struct Read:
    const um.um_kv *kv
    uint32_t layer
    bint v
    uint64_t first
    uint64_t n
    void *out
    um.um_dtype type
    um.um_error *err
    um.um_status status


cdef void _run_read(void *context) noexcept nogil:
    cdef Read *r = <Read *>context
    r.status = um.um_kv_read(r.kv, r.layer, r.v, r.first, r.n, r.out, r.type, r.err)


cdef um.um_status _read(const um.um_block *mapped, Read *job) noexcept nogil:
    cdef um.um_status status = um.UM_OK
    if mapped == NULL:
        _run_read(job)
    else:
        status = um.um_guard_run(mapped.base, mapped.reserved_nbytes, _run_read, job, job.err)
    return status if status != um.UM_OK else job.status


cdef class KVCache(KVMemory):
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

    def __init__(self, n_layers, n_kv_heads, head_dim, max_seq_len, *, batch=1, dtype="f16",
                 k_dtype=None, v_dtype=None, v_head_dim=None, order="token", window=None,
                 spare_rows=0, budget_bytes=None, grow=False, rotate=False, tape=None, name=None,
                 **placement):
        cdef um.um_kv_spec spec
        for option in placement:
            if option not in _PLACEMENT:
                raise TypeError(f"KVCache: unexpected option {option!r}; placement is "
                                f"{', '.join(_PLACEMENT)}")
        self.describe(&spec, n_layers, n_kv_heads, head_dim, max_seq_len, batch, dtype, window,
                      budget_bytes, name, order, k_dtype, v_dtype, v_head_dim,
                      flag(rotate, "rotate"))
        self._placement = placement
        if size_of(spare_rows, "spare_rows") and window is None:
            raise ValueError("spare_rows: expected together with window")
        cdef bint is_growing = flag(grow, "grow")
        if window is not None and is_growing:
            raise ValueError("window and grow: a ring's memory is taken at once: expected one of "
                             "them")
        if tape is not None:
            Tape._require(tape)
        if tape is not None and (window is not None or is_growing):
            raise ValueError("tape: fixed storage is taken from it once: expected no window and "
                             "no grow beside it")
        if tape is not None and placement:
            raise ValueError("a tape is placed already: "
                             f"{', '.join(placement)} not accepted beside tape=")
        if window is not None:
            self.place_ring(&spec, spare_rows, placement)
        elif is_growing:
            self.place_growing(&spec, placement)
        else:
            self.place_fixed(&spec, tape, placement)

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
        if layers is None:
            return KVMemory.storage_bytes(*dims, **options)
        return _mixed._storage_bytes(layers, *dims, **options)

    # ---- appending ----

    @cython.critical_section
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
        self.append_tokens(layer, k, v)

    @cython.final
    cdef int append_tokens(self, layer, k, v) except -1:
        cdef um.um_error err
        cdef cnp.ndarray ka = contiguous(k, "k"), va = contiguous(v, "v")
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef Region _held = None
        cdef um.um_block *mapped
        cdef um.um_status status
        cdef uint32_t index
        cdef Given given
        index = layer_number(layer, s.n_layers, "layer")
        check_tokens(&given, ka, va, self.given_blocks(), self._batch, self._heads, s.head_dim,
                     self._v_head_dim, "KVCache.append")
        # From here on nothing of Python's runs, and so nobody else; without the interpreter's lock
        # somebody may, who closes the tape.
        if NO_GIL:
            _held = self.open_region()
        if not _is_ready(self):
            self.begin_change()
        while True:
            mapped = NULL
            if self._file is not None:
                mapped = self.mapped(self.next_row(index), given.n)
            if given.n > MANY_ROWS:
                _held = self.open_region()  # nobody closes the cache meanwhile
                self._n_busy += 1
                self._writing = True
                with nogil:
                    status = _append(&self.kv, mapped, index, cnp.PyArray_DATA(ka),
                                     cnp.PyArray_DATA(va), &given, &err)
                self._writing = False
                self.end_busy()
            else:
                status = _append(&self.kv, mapped, index, cnp.PyArray_DATA(ka),
                                 cnp.PyArray_DATA(va), &given, &err)
            if status == um.UM_OK:
                return 0
            if not self.find_rows(&err, given.n):
                self.fail(&err, "append")

    @cython.critical_section
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
        cdef um.um_error err
        cdef um.um_block *mapped
        cdef cnp.ndarray ka = contiguous(k, "k"), va = contiguous(v, "v")
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef Region _held
        cdef Given given
        check_token(&given, ka, va, self.given_blocks(), s.n_layers, self._heads, s.head_dim,
                    self._v_head_dim, "KVCache.append_all")
        if self._batch != 1:
            raise ValueError("KVCache.append_all: batch is not 1")
        if NO_GIL:
            _held = self.open_region()
        if not _is_ready(self):
            self.begin_change()
        while True:
            mapped = NULL
            if self._file is not None:
                mapped = self.mapped(self.next_row(0), 1)
            if _append(&self.kv, mapped, ALL_LAYERS, cnp.PyArray_DATA(ka), cnp.PyArray_DATA(va),
                       &given, &err) == um.UM_OK:
                return
            if not self.find_rows(&err, 1):
                self.fail(&err, "append_all")

    cdef um.um_dtype given_blocks(self) noexcept:
        """The type whose blocks K and V may be; where they have two, that of floats."""
        cdef um.um_kv_spec *s = &self.kv.spec
        return s.type if s.type == s.v_type else um.UM_F32

    # ---- for runtimes in Cython ----

    cdef int append_rows(self, uint32_t layer, const void *k, const void *v, um.um_dtype type,
                         uint64_t n) except -1 nogil:
        cdef um.um_error err
        cdef um.um_status status
        cdef um.um_block *mapped = NULL
        cdef Given given
        given.type, given.order, given.n = type, um.UM_KV_TOKEN_MAJOR, n
        if not _is_ready(self):
            with gil:
                self.begin_change()
        while True:
            if self._file is not None:
                with gil:
                    mapped = self.mapped(self.next_row(layer), n)
            self._writing = True
            # No layer has the number that stands for all of them.
            status = _append(&self.kv, mapped, min(layer, <uint32_t>ALL_LAYERS - 1), k, v, &given,
                             &err)
            self._writing = False
            if status == um.UM_OK:
                return 0
            with gil:
                if not self.find_rows(&err, n):
                    self.fail(&err, "append_rows")

    cdef void *lane(self, uint32_t layer, bint v, uint32_t stream=0) noexcept nogil:
        return um.um_kv_lane(&self.kv, layer, v, stream)

    cdef void *rows(self, uint32_t layer, bint v, uint64_t *out_n,
                    uint32_t stream=0) noexcept nogil:
        cdef size_t row = self.kv.v_row_bytes if v else self.kv.row_bytes
        cdef char *lane = <char *>um.um_kv_lane(&self.kv, layer, v, stream)
        cdef uint64_t first = 0
        out_n[0] = um.um_kv_layer_len(&self.kv, layer, &first)
        return NULL if lane == NULL else lane + um.um_kv_row(&self.kv, first) * row

    # ---- for unimem.transformers: a token, or rows that the caller writes, of one layer ----

    @cython.critical_section
    def _append_token(self, layer, uintptr_t k, uintptr_t v):
        """Append a token that is stored as it is given, and return its row.

        k and v are addresses of ``[batch, n_kv_heads, 1, head_dim]``.

        Raises
        ------
        CacheFull, CapacityError, MemoryError, PlacementError, RuntimeError, BufferError, OSError
            As `append`.
        """
        cdef uint64_t first = 0, n
        cdef uint32_t index = layer_number(layer, self.kv.spec.n_layers, "layer")
        self.append_rows(index, <const void *>k, <const void *>v, self.kv.spec.type, 1)
        n = um.um_kv_layer_len(&self.kv, index, &first)
        return um.um_kv_row(&self.kv, first + n - 1)

    @cython.critical_section
    def _all_rows(self, i):
        """Views of all rows of a layer that can be written now; of a ring, of both images.

        They hold the memory as those of `layer` do. A growing cache has more rows once it has
        grown.
        """
        cdef uint32_t layer = layer_number(i, self.kv.spec.n_layers, "i")
        cdef uint64_t n = self.kv.usable_rows * (1 if self.kv.spec.window == 0 else 2)
        return self._view(layer, False, 0, n), self._view(layer, True, 0, n)

    cdef uint64_t next_row(self, uint32_t layer):
        """The row behind the last token of a layer."""
        cdef uint64_t first = 0, n = um.um_kv_layer_len(&self.kv, layer, &first)
        return um.um_kv_row(&self.kv, first + n)

    # ---- reading ----

    cdef object _view(self, uint32_t layer, bint v, uint64_t first, uint64_t n):
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef Region region = self.open_region()
        cdef object kind = self._v_dtype if v else self._dtype
        cdef size_t row = self.kv.v_row_bytes if v else self.kv.row_bytes, item = kind.itemsize
        cdef size_t lane = self.kv.v_lane_stride if v else self.kv.lane_stride
        cdef size_t head = row // s.n_kv_heads
        cdef char *data = <char *>um.um_kv_lane(&self.kv, layer, v, 0)
        cdef cnp.npy_intp *sizes = [self._batch, self._heads, n, head // item]
        cdef cnp.npy_intp *strides = [s.batch // self._batch * lane,
                                      head if s.n_kv_heads == self._heads else lane, row, item]
        cdef size_t begin
        cdef object windows
        data += first * row
        begin = data - <char *>region.block.base
        if s.batch == 1:
            windows = new_window(region, begin, n * row)
        else:
            windows = tuple([new_window(region, begin + stream * lane, n * row)
                             for stream in range(s.batch)])
        return new_array(data, 4, sizes, strides, kind, windows, True)

    @cython.critical_section
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
        cdef uint64_t first = 0, n, row
        layer = layer_number(i, self.kv.spec.n_layers, "i")
        self.open_region()
        n = um.um_kv_layer_len(&self.kv, layer, &first)
        if dtype is None:
            if out is not None:
                raise ValueError("out: expected together with dtype")
            row = um.um_kv_row(&self.kv, first)
            return self._view(layer, False, row, n), self._view(layer, True, row, n)
        wanted = dtype_of(dtype)
        if wanted.kind != "f" and wanted.name != "bfloat16":
            raise ValueError(f"dtype: expected a floating-point type, got {wanted}")
        shapes = [(self._batch, self._heads, n, dim) for dim in (self.head_dim, self._v_head_dim)]
        if out is None:
            out = tuple([np.empty(shape, wanted) for shape in shapes])
        out, targets = pair_of(out)
        for shape, target in zip(shapes, targets, strict=True):
            if (shape_of(target) != shape or target.dtype != wanted
                    or not target.flags.writeable):
                raise ValueError(f"out: expected two writable arrays of shapes {shapes} and "
                                 f"dtype {wanted}, got {shape_of(target)} and {target.dtype}")
        for v, target in enumerate(targets):
            self._read(layer, v, first, n, target)
        return out

    cdef int _read(self, uint32_t layer, bint v, uint64_t first, uint64_t n,
                   cnp.ndarray out) except -1:
        cdef um.um_error err
        cdef um.um_status status
        cdef um.um_block *mapped = self.mapped(um.um_kv_row(&self.kv, first), n)
        cdef Read job
        cdef cnp.ndarray target = out
        cdef Region _held = self.open_region()  # nobody closes the cache meanwhile
        is_native = out.dtype.isnative and out.dtype.itemsize <= 4
        kind = out.dtype if is_native else dtype_of("float32")
        if kind != out.dtype or not cnp.PyArray_ISCARRAY(out):
            target = np.empty_like(out, kind, order="C", subok=False)
        job.kv, job.layer, job.v, job.first, job.n = &self.kv, layer, v, first, n
        job.out, job.type = cnp.PyArray_DATA(target), number_of_type(kv_type(kind))
        job.err = &err
        self._n_busy += 1
        with nogil:
            status = _read(mapped, &job)
        self.end_busy()
        if status != um.UM_OK:
            self.fail(&err, "layer")
        if target is not out:
            np.copyto(out, target, casting="unsafe")
        return 0

    @cython.critical_section
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
        cdef size_t most = size_of(max_bytes, "max_bytes")
        cdef size_t token = self._n_lanes // 2 * (self.kv.row_bytes + self.kv.v_row_bytes)
        cdef um.um_error err
        cdef uint64_t n, held
        self.begin_change()
        self._most_bytes = self.most_bytes()
        held = um.um_kv_seq_len(&self.kv)
        n = min(held, most // token)
        if self.memory_usage_bytes <= most:
            if self.capacity_bytes <= most or self.resident_bytes <= most:
                return False
            n = held
        self.check_droppable(n)
        if um.um_kv_trim(&self.kv, n, 0, &err) != um.UM_OK:
            self.fail(&err, "enforce_memory_limit")
        self.settle(True)
        return n < held

    # ---- copies and snapshots ----

    @cython.critical_section
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
        cdef um.um_kv_spec *s = &self.kv.spec
        self.open_region()
        self.check_whole("copy")
        spare = self.kv.n_rows - s.window if self.window is not None else 0
        other = KVCache(s.n_layers, self._heads, s.head_dim, s.max_seq_len, batch=self._batch,
                        dtype=self.dtype, v_dtype=self.v_dtype, v_head_dim=self._v_head_dim,
                        rotate=self.rotate, order=self.order, window=self.window,
                        spare_rows=spare, grow=self.grow,
                        budget_bytes=self.budget_bytes, name=self.name, **self._placement)
        n, position = self.seq_len, self.next_position
        try:
            other._begin_restore(position, n)
            for lane in self._lanes():
                self.copy_rows(other._restore_rows(*lane, n, position), self._rows(*lane))
            other._finish_restore(position, n)
        except BaseException:
            other.close()
            raise
        return other

    @classmethod
    def _mapped(cls, fields, int fd, path, list offsets, n, next_position):
        """A growing cache whose first rows are mapped from a file, privately.

        Parameters
        ----------
        fields : dict
            For the class; of these `grow` and `window` are not used.
        fd, path : int, str
            The file, which may be closed afterwards, and what errors call it.
        offsets : list of int
            Of each lane the byte in the file where its rows begin, in whole pages, and whole pages
            of rows follow.
        n, next_position : int
            How many tokens there are, and the position behind the last.
        """
        cdef KVCache cache = cls(**(fields | {"grow": True, "window": None, "pages": "4k"}))
        try:
            cache.overlay(fd, path, offsets, n)
            cache._finish_restore(next_position, n)
        except BaseException:
            cache.close()
            raise
        return cache

    @staticmethod
    def _of_layers(layers, parts, max_seq_len, states=None):
        """A cache of layers that differ, of its parts and states."""
        return _mixed._of_layers(layers, parts, max_seq_len, states)

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

        self.open_region()
        self.check_whole("save")
        snapshot.save(self, path, tokens, model)

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

        return snapshot.restore(cls, path, mode, tokens, model, verify, placement)

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

        self.open_region()
        snapshot.verify(self)


# `KVCache(layers=...)` makes one of the subclass, which makes itself known here. Python has __new__
# for that; the classes of Cython have only its slot.
cdef object _mixed = None
cdef newfunc _new_equal = (<PyTypeObject *>KVCache).tp_new


def set_mixed(kind):
    """Take a class for caches whose layers differ."""
    global _mixed
    _mixed = kind


cdef object _new(type cls, PyObject *arguments, PyObject *options):
    if cls is KVCache and options != NULL and "layers" in <dict>options:
        return _mixed.__new__(_mixed)
    return _new_equal(cls, arguments, options)


(<PyTypeObject *>KVCache).tp_new = <newfunc>_new
