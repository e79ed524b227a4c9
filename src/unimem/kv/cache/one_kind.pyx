# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""KV caches whose layers are alike: appends, views and copies of their rows.

An append checks its arguments, then calls the core. If the core has no row for it, the storage
makes room, and the call is tried again. Rows that a file maps are touched under the guard.
"""
import numpy as np

from unimem.base.arguments import flag
from unimem.kv.cache.spec import KVSpec

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport bytes_of, dtype_of, new_array, size_of
from unimem._core.lock cimport NO_GIL
from unimem.kv.inputs cimport (
    Given, check_token, check_tokens, contiguous, layer_number, pair_of, shape_of,
)
from unimem.kv.types cimport kv_type, number_of_type
from unimem.kv.cache.storage cimport KVStorage
from unimem._core.region cimport Region, new_window
from unimem._core.tape cimport Tape

cnp.import_array()

# Releasing the interpreter's lock costs more than copying this many rows.
cdef enum:
    FEW_ROWS = 64


@cython.nonecheck(False)
cdef inline bint _is_ready(KVStorage kv) noexcept nogil:
    """Return whether `begin_change` would pass; without the interpreter's lock."""
    if kv._closed or kv._writing:
        return False
    return kv.tape._region is not None if kv._region is None else kv._region.block.base != NULL


# Calls that touch rows. If pages are mapped from a file, `mapped` is their block, and the call runs
# under the guard, since they may be lost; NULL: all pages are the cache's own.

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


cdef class OneKindCache(KVStorage):
    """A cache of one kind of layers: rows, and the storage that they lie in.

    Its public methods are those of `KVCache`, which documents them.
    """

    def __init__(self, wanted: KVSpec) -> None:
        cdef um.um_kv_spec spec
        cdef bint is_ring = wanted.window is not None
        cdef dict placement = dict(wanted.placement)
        self.describe(&spec, wanted)
        self._spec = wanted
        if size_of(wanted.spare_rows, "spare_rows") and not is_ring:
            raise ValueError("spare_rows: expected together with window")
        cdef bint is_growing = flag(wanted.grow, "grow")
        if is_ring and is_growing:
            raise ValueError("window and grow: a ring's memory is taken at once: expected one of "
                             "them")
        if wanted.tape is not None:
            Tape._require(wanted.tape)
            if is_ring or is_growing:
                raise ValueError("tape: fixed storage is taken from it once: expected no window "
                                 "and no grow beside it")
            if placement:
                raise ValueError("a tape is placed already: "
                                 f"{', '.join(placement)} not accepted beside tape=")
        if is_ring:
            self.place_ring(&spec, wanted.spare_rows, placement)
        elif is_growing:
            self.place_growing(&spec, placement)
        else:
            self.place_fixed(&spec, wanted.tape, placement)

    # ---- appending ----

    @cython.final
    cdef bint append_few(self, layer, k, v) noexcept:
        """Append NumPy's own arrays of float16 or float32 if there is room, or change nothing.

        This is the part of `append_tokens` that most calls need, with checks in C alone.
        """
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef um.um_error err
        cdef cnp.npy_intp *sizes
        cdef long index
        cdef int number, overflow
        if NO_GIL or not (cnp.PyArray_CheckExact(k) and cnp.PyArray_CheckExact(v)
                          and PyLong_CheckExact(layer)):
            return False
        number = cnp.PyArray_TYPE(<cnp.ndarray>k)
        sizes = cnp.PyArray_DIMS(<cnp.ndarray>k)
        if (number != cnp.PyArray_TYPE(<cnp.ndarray>v)
                or (number != cnp.NPY_FLOAT16 and number != cnp.NPY_FLOAT32)
                or not cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>k)
                or not cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>v)
                or cnp.PyArray_NDIM(<cnp.ndarray>k) != 3 or cnp.PyArray_NDIM(<cnp.ndarray>v) != 3
                or self._batch != 1 or self._v_head_dim != s.head_dim or sizes[0] > FEW_ROWS
                or sizes[1] != self._heads or sizes[2] != s.head_dim
                or not cnp.PyArray_CompareLists(sizes, cnp.PyArray_DIMS(<cnp.ndarray>v), 3)
                or self._file is not None or not _is_ready(self)):
            return False
        index = PyLong_AsLongAndOverflow(layer, &overflow)  # -1: too large
        if not 0 <= index < s.n_layers:
            return False
        return um.um_kv_append(
            &self.kv, <uint32_t>index, cnp.PyArray_DATA(<cnp.ndarray>k),
            cnp.PyArray_DATA(<cnp.ndarray>v),
            um.UM_F16 if number == cnp.NPY_FLOAT16 else um.UM_F32, um.UM_KV_TOKEN_MAJOR,
            <uint64_t>sizes[0], &err) == um.UM_OK

    @cython.final
    cdef int append_tokens(self, layer, k, v) except -1:
        cdef um.um_error err
        cdef cnp.ndarray ka, va
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef Region _held = None
        cdef um.um_block *mapped
        cdef um.um_status status
        cdef uint32_t index
        cdef Given given
        if self.append_few(layer, k, v):
            return 0
        ka, va = contiguous(k, "k"), contiguous(v, "v")
        index = layer_number(layer, s.n_layers, "layer")
        check_tokens(&given, ka, va, self.given_blocks(), self._batch, self._heads, s.head_dim,
                     self._v_head_dim, "KVCache.append")
        # From here on no Python code runs. Without the interpreter's lock another thread may close
        # the tape.
        if NO_GIL:
            _held = self.open_region()
        if not _is_ready(self):
            self.begin_change()
        while True:
            mapped = NULL
            if self._file is not None:
                mapped = self.mapped(self.next_row(index), given.n)
            if given.n > FEW_ROWS:
                _held = self.open_region()  # no other thread closes the cache meanwhile
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
    def append_all(self, k: Any, v: Any) -> None:
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
        """Return the type whose blocks are accepted; float32 if K and V have two types."""
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
            # ALL_LAYERS is never a valid layer index.
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
    def _append_token(self, layer: int, uintptr_t k, uintptr_t v) -> int:
        """Append a token of the cache's dtype, and return its row.

        k and v are addresses of ``[batch, n_kv_heads, 1, head_dim]``.

        Raises
        ------
        CacheFull, CapacityError, MemoryError, PlacementError, RuntimeError, BufferError, OSError,
        TypeError
            As `append`.
        """
        cdef uint64_t first = 0, n
        cdef uint32_t index = layer_number(layer, self.kv.spec.n_layers, "layer")
        if k == 0 or v == 0:  # as of torch's tensors of zeros
            raise TypeError("k: expected an array in main memory, got one without memory")
        self.append_rows(index, <const void *>k, <const void *>v, self.kv.spec.type, 1)
        n = um.um_kv_layer_len(&self.kv, index, &first)
        return um.um_kv_row(&self.kv, first + n - 1)

    @cython.critical_section
    def _all_rows(self, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """View all usable rows of a layer; of a ring, in both images.

        The views hold the memory as those of `layer` do. A growing cache gets more rows later.
        """
        cdef uint32_t layer = layer_number(i, self.kv.spec.n_layers, "i")
        cdef uint64_t n = self.kv.usable_rows * (1 if self.kv.spec.window == 0 else 2)
        return self._view(layer, False, 0, n), self._view(layer, True, 0, n)

    cdef uint64_t next_row(self, uint32_t layer):
        """Return the row behind the last token of a layer."""
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

    def strides(self, part: Literal["k", "v"]) -> tuple[int, int]:
        """Return the bytes from row to row, and from head to head, of the first stream's K or V."""
        cdef bint v = part == "v"
        cdef size_t row = self.kv.v_row_bytes if v else self.kv.row_bytes
        if self.heads_apart() == 1:
            return row, row // self._heads
        return row, self.kv.v_lane_stride if v else self.kv.lane_stride

    @cython.critical_section
    def layer(self, i: int, dtype: npt.DTypeLike | None = None, out: Any = None) -> Any:
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
        cdef Region _held = self.open_region()  # no other thread closes the cache meanwhile
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
    def enforce_memory_limit(self, max_bytes: int | str) -> bool:
        cdef size_t most = bytes_of(max_bytes, "max_bytes")
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
    def copy(self) -> OneKindCache:
        cdef OneKindCache other
        self.open_region()
        self.check_whole("copy")
        other = OneKindCache(self._spec._replace(tape=None))
        n, position = self.seq_len, self.next_position
        try:
            other._begin_restore(position, n)
            for lane in self._lanes():
                self.copy_rows(other._restore_rows(*lane, n, position), self._rows(*lane))
            other._finish_restore(position, n, self.kv.first)
        except BaseException:
            other.end()
            raise
        return other

    @staticmethod
    def mapped_from(fields: dict[str, Any], int fd, path: str, list offsets: list[int], n: int,
                    next_position: int) -> OneKindCache:
        """Return a growing cache whose first rows are mapped from a file, privately.

        Parameters
        ----------
        fields : dict
            The fields of a `KVSpec`; `grow` and `window` are ignored.
        fd, path : int, str
            The file, which may be closed afterwards, and its name for errors.
        offsets : list of int
            Where the rows of each lane begin in the file, in whole pages, and fill whole pages.
        n, next_position : int
            The number of tokens, and the position behind the last.
        """
        cdef OneKindCache cache = OneKindCache(KVSpec(**fields)._replace(
            grow=True, window=None, spare_rows=0, placement={"pages": "4k"}))
        try:
            cache.overlay(fd, path, offsets, n)
            cache._finish_restore(next_position, n)
        except BaseException:
            cache.end()
            raise
        return cache

    @property
    def _pieces(self):
        """All objects that have memory: this one."""
        return (self,)

    def check_open(self) -> None:
        self.open_region()

    def check_saveable(self) -> None:
        self.open_region()
        self.check_whole("save")

    cdef bint is_left_open(self):
        """Return whether storage of its own was never closed."""
        return not self._closed and self._region is not None
