# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""KV caches in memory that the CPU cannot touch: the part of `cuda.KVCache` run for each token.

Positions and rows are kept on the host, as for every cache. All that touches the memory is queued
on a stream of the driver: a plain copy, or a kernel.
"""
import warnings

from unimem.errors import ClosedError
from unimem.kv.types import KV_TYPES, kv_type

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport dtype_of
from unimem._core.dlpack cimport DLTensor
from unimem._core.foreign cimport described, dtype_of_tensor
from unimem.kv.inputs cimport (
    Given, check_token_shapes, check_types, find_bytes, fits_tokens, layer_number, on_device,
    refuse_tokens,
)
from unimem.kv.row_kernels cimport Append, RowKernels, Side
from unimem.kv.types cimport BLOCK_VALUES
from unimem.kv.cache.rows cimport KVRows, is_v
from unimem._core.region cimport Region, new_window
from unimem._core.tape cimport DeviceTape

#: from unimem.kv.cache.spec import KVSpec
#: from unimem.system.placement import Placement
#: _T = TypeVar("_T")

cnp.import_array()

cdef enum:
    # One launch costs less than two copies, but a kernel copies many bytes more slowly.
    FEW_BYTES = 65536
    BLOCK_HALVES = 17  # the elements of two bytes of a q8_0 block

# The axes of given arrays that are layers, streams, heads, tokens and values; -1 is none.
cdef int[5] _TOKEN_MAJOR = [-1, -1, 1, 0, 2]
cdef int[5] _HEAD_MAJOR = [-1, 0, 1, 2, 3]
cdef int[5] _OF_ALL_LAYERS = [0, -1, 1, -1, 2]


@cython.final
@cython.freelist(8)
cdef class DeviceTokens:
    cdef void find_along(self, const int *axes, int64_t[5] out) noexcept:
        cdef int i
        for i in range(5):
            out[i] = 0 if axes[i] < 0 else self.steps[axes[i]]


cdef void _permute(int64_t[5] steps, int layer, int stream, int head) noexcept:
    steps[0], steps[1], steps[2] = steps[layer], steps[stream], steps[head]


cdef const int *_axes(um.um_kv_order order) noexcept:
    if order == um.UM_KV_TOKEN_MAJOR:
        return _TOKEN_MAJOR
    return _HEAD_MAJOR


cdef um.um_status _move(void *context, void *to, const void *from_, size_t nbytes) noexcept:
    cdef KVDevice cache = <KVDevice>context
    try:
        cache.move_bytes(<uintptr_t>to, <uintptr_t>from_, nbytes)
    except BaseException as error:
        cache._held_back = error
        return um.UM_E_IO
    return um.UM_OK


cdef class KVDevice(KVRows):
    """The base of `cuda.KVCache`: fixed storage on a device's tape.

    A subclass calls `_plan`, sets `_kernels` and `_blocks`, and calls `_place` with a tape.
    """
    #: _dtype: np.dtype[Any]
    #: _whole: dict[int, tuple[Any, Any]]
    #: _blocks: RowKernels | None

    def _plan(self, wanted: KVSpec) -> int:
        """Check a `KVSpec`, and return the bytes of its storage."""
        self.describe(&self._spec, wanted)
        return self.plan_fixed(&self._spec, &self._storage)

    def _place(self, DeviceTape tape not None, driver: Any, *, bint owns_tape) -> None:
        """Take the storage that `_plan` has described."""
        self._storage.base = tape.take_raw(self._storage_bytes, 256)
        self._driver = driver
        self._copy = <Copy><uintptr_t>driver.copy_address
        self._device, self._device_type = driver.id, driver.device_type
        self._views = Region.__new__(Region)
        self._whole = {}
        self.start(&self._spec, &self._storage)
        um.um_kv_set_mover(&self.kv, _move, <void *>self)
        self._tape = tape
        self._owns_tape = owns_tape

    # ---- where its memory is ----

    cdef Region open_region(self):
        if self._closed or self._tape is None:
            raise ClosedError(f"KVCache '{self.name}' is closed")
        if not self._tape._open:
            if self._owns_tape and self._tape._left_out is not None:
                raise ClosedError(f"KVCache '{self.name}' {self._tape._left_out}")
            self._tape.check_open()
        if self._is_torn:
            raise RuntimeError(f"KVCache '{self.name}' has lost tokens: the device failed while "
                               "they were moved. Close it, and compute them again in a new cache")
        return self._views

    cdef bint has_views(self, list ranges) except -1:
        if self._whole:
            self._whole.clear()  # those that nobody uses are no views
        return KVRows.has_views(self, ranges)

    cdef Py_ssize_t n_users(self):
        cdef Py_ssize_t n
        if self._whole:
            self._whole.clear()
        n = self._tape._n_views() if self._owns_tape and self._tape._open else 0
        return n + (self._writing or self._n_busy > 0)

    cdef object end(self):
        self._closed = True
        if self._whole:
            self._whole.clear()
        if self._owns_tape:
            self._tape.__exit__()

    # ---- tokens that move ----

    cdef int move_bytes(self, uintptr_t to, uintptr_t from_, size_t nbytes) except -1:
        # A device copies in any order: copy pieces that are no longer than the distance.
        cdef size_t most = to - from_ if to > from_ else from_ - to, left = nbytes, n, at
        if self._moving is None:  # Python code runs before the first byte moves
            if self._stream is None:
                self._stream = self._current_stream()
            self._moving = self._tape._memory
        while left > 0:
            n = min(left, most)
            left -= n
            at = left if to > from_ else nbytes - left - n
            self.move_piece(to + at, from_ + at, n)
            self._has_moved = True
        return 0

    cdef int move_piece(self, uintptr_t to, uintptr_t from_, size_t nbytes) except -1:
        # A signal's handler may raise before or after the copy. Copying a piece twice is harmless,
        # and half a move is not: so the error is kept until all has moved. An error of the driver
        # is raised again by the second copy.
        try:
            self._driver.copy(to, from_, nbytes, self._stream)
        except BaseException as error:
            self._held_back = error
            self._driver.copy(to, from_, nbytes, self._stream)
        return 0

    cdef object end_move(self, um.um_status status, um.um_error *err, str doing):
        error, self._held_back = self._held_back, None
        self._is_torn = status != um.UM_OK and self._has_moved
        self._has_moved = self._writing = False
        self._moving = self._stream = None
        if error is not None:
            raise error
        KVRows.end_move(self, status, err, doing)

    # ---- appending ----

    cdef DeviceTokens exchanged(self, object x, void **queue, str what):
        cdef DLTensor tensor
        cdef DeviceTokens found
        cdef cnp.npy_intp item, step
        cdef int axis
        owner = described(&tensor, queue, x, what)
        if (owner is None or tensor.device_type != self._device_type
                or tensor.device_id != self._device or not 0 <= tensor.n_dims <= 5):
            return None
        found = DeviceTokens.__new__(DeviceTokens)
        found.owner, found.dtype = owner, dtype_of_tensor(&tensor, what)
        found.n_dims = tensor.n_dims
        item = step = found.dtype.itemsize
        for axis in range(tensor.n_dims - 1, -1, -1):
            found.sizes[axis] = tensor.shape[axis]
            found.steps[axis] = step if tensor.strides == NULL else tensor.strides[axis] * item
            step *= found.sizes[axis]
        find_bytes(&found.bytes, <uintptr_t>tensor.data + tensor.byte_offset, found.n_dims,
                   found.sizes, found.steps, item)
        return found

    cdef DeviceTokens find(self, object x, str what):
        cdef DeviceTokens found = DeviceTokens.__new__(DeviceTokens)
        cdef tuple shape, strides
        cdef int axis
        # Arrays of the driver's own type need no call.
        if type(x) is not self._array_type or <int>x.data.device_id != self._device:
            array = on_device(self._driver, x, what)
            if array is x:
                self._array_type = type(x)
            x = array
        found.owner, found.dtype = x, x.dtype
        shape, strides = x.shape, x.strides
        found.n_dims = <int>len(shape)
        for axis in range(min(found.n_dims, 5)):
            found.sizes[axis], found.steps[axis] = shape[axis], strides[axis]
        find_bytes(&found.bytes, x.data.ptr, min(found.n_dims, 5), found.sizes, found.steps,
                   found.dtype.itemsize)
        return found

    cdef tuple find_pair(self, object k, object v, object stream):
        cdef DeviceTokens first, second
        cdef void *queue = NULL
        if type(k) is type(v):
            first = self.exchanged(k, &queue, "k")
            second = None if first is None else self.exchanged(v, NULL, "v")
            if second is not None:
                return first, second, (<uintptr_t>queue if stream is None
                                       else self.number_of_stream(stream))
        return self.find(k, "k"), self.find(v, "v"), self.number_of_stream(stream)

    cdef object number_of_stream(self, object stream):
        return stream if type(stream) is int else self._driver.stream(stream)

    cdef int check_given(self, Given *out, DeviceTokens k, DeviceTokens v, str doing) except -1:
        cdef um.um_kv_spec *s = &self.kv.spec
        check_types(out, k.dtype, v.dtype, s.type, doing)
        if not fits_tokens(out, k.n_dims, k.sizes, v.n_dims, v.sizes, self._batch, self._heads,
                           s.head_dim, self._v_head_dim):
            refuse_tokens(out, self._batch, self._heads, s.head_dim, doing, tuple(k.owner.shape),
                          tuple(v.owner.shape), self._v_head_dim)
        return 0

    cdef int check_apart(self, DeviceTokens given, str doing) except -1:
        cdef uintptr_t base = <uintptr_t>self.kv.base
        # A device reads and writes overlapping memory in any order.
        if given.bytes.low < base + self._storage_bytes and base < given.bytes.end:
            raise ValueError(f"{doing}: expected tokens in memory of their own, got a view of this "
                             "cache: append a copy")
        return 0

    cdef int find_rows_on(self, object stream, um.um_error *err, uint64_t n) except -1:
        self._stream = stream
        try:
            return self.find_rows(err, n)
        finally:
            self._stream = None

    cdef uintptr_t row_address(self, uint32_t layer, bint v, uint64_t row) noexcept:
        return (<uintptr_t>um.um_kv_lane(&self.kv, layer, v, 0)
                + row * (self.kv.v_row_bytes if v else self.kv.row_bytes))

    cdef int copy_rows(self, uintptr_t to, uintptr_t from_, size_t nbytes,
                       object stream) except -1:
        cdef int status = -1
        cdef uintptr_t queue = stream
        if nbytes == 0:  # there is no V
            return 0
        if self._copy != NULL:
            with nogil:
                status = self._copy(to, from_, nbytes, queue)
        if status != 0:  # as in a thread that is new to CUDA; the method raises the driver's errors
            self._driver.copy(to, from_, nbytes, stream)
        return 0

    cdef int write(self, DeviceTokens k, DeviceTokens v, um.um_dtype given, const int *axes,
                   const Span *span, uintptr_t stream) except -1:
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef int64_t lane, lanes = self.heads_apart()
        cdef int64_t of_layer = s.batch * (self.kv.lane_stride + self.kv.v_lane_stride), of_outer
        cdef int64_t outer = <int64_t>span.n_layers * self._batch  # one of both is 1
        cdef int which = 0 if span.n_layers > 1 else 1, part
        cdef RowKernels kernels = self._kernels
        cdef str named = KV_TYPES[given]
        cdef Append a
        cdef Side *side
        a.n, a.n_rows, a.row, a.row_address = span.n, self.kv.n_rows, span.row, span.row_address
        a.layers, a.streams = span.n_layers, self._batch
        if given == um.UM_Q8_0:
            kernels, named = self._blocks, "f16"
            a.layers, a.streams = self._heads, outer
        elif lanes > 1:
            a.layers, a.streams = outer, lanes
        for part in range(2):
            side = &a.sides[part]
            side.given = v.bytes.at if part else k.bytes.at
            side.out = <uintptr_t>um.um_kv_lane(&self.kv, span.layer, part, 0)
            side.heads, side.dim = self._heads, self._v_head_dim if part else s.head_dim
            side.row_bytes = self.kv.v_row_bytes if part else self.kv.row_bytes
            (v if part else k).find_along(axes, side.strides)
            lane = self.kv.v_lane_stride if part else self.kv.lane_stride
            of_outer = of_layer if which == 0 else lane * lanes
            side.layer_stride, side.lane_stride = of_layer, lane * lanes
            if given == um.UM_Q8_0:
                # Blocks are copied. To the kernel a block is a head of float16, a head is a layer,
                # and layers or streams are streams.
                side.heads, side.dim = side.dim // BLOCK_VALUES, BLOCK_HALVES
                side.layer_stride = lane if lanes > 1 else side.heads * 2 * BLOCK_HALVES
                side.lane_stride = of_outer
                _permute(side.strides, 2, which, 4)
                side.strides[4] = 2
            elif lanes > 1:  # to the kernel a head is a stream, and layers or streams are layers
                side.heads = 1
                side.layer_stride, side.lane_stride = of_outer, lane
                _permute(side.strides, which, 2, 2)
        return kernels.queue_append(named, &a, stream)

    @cython.critical_section
    def append(self, layer: int, k: Any, v: Any, *, stream: Any = None) -> None:
        """Append tokens to one layer.

        Parameters
        ----------
        layer : int
            The layer's number.
        k, v : cupy.ndarray, torch.Tensor, or an array on the device that has ``__dlpack__``
            ``[n, n_kv_heads, head_dim]`` (batch 1) or ``[batch, n_kv_heads, n, head_dim]``, of V
            `v_head_dim`, with any strides, both of one dtype, float32, float16 or bfloat16. They
            cost one launch of a kernel, which converts, rounding to nearest even; many tokens of
            the cache's dtype in ``[n, n_kv_heads, head_dim]`` without gaps cost two asynchronous
            copies. A ``"q8_0"`` cache takes blocks, too, as `layer` shows them. The arrays may be
            changed or dropped once the stream has passed the append.
        stream : object, optional
            A CUDA stream; by default torch's current one if k and v are its tensors, else CuPy's.

        Raises
        ------
        CacheFull
            There is no room for all n.
        ValueError, TypeError
            A wrong layer, shape, dtype or byte order; tokens in this cache's own memory, which a
            device would read and write in any order.
        RuntimeError
            Rows are reserved, or another thread appends; the cache has lost tokens.
        BufferError
            After trimming, tokens have to move to the first rows, and views lie over those.
        ClosedError

        Notes
        -----
        When it raises, no token was appended. In a CUDA graph an append writes the same rows at
        every replay, and counts once: see `append_at`.
        """
        cdef um.um_error err
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef Given given
        cdef DeviceTokens keys, values
        cdef uint64_t row = 0
        cdef size_t k_bytes, v_bytes
        cdef uint32_t index
        cdef Span span
        self.open_region()  # first: a forked child has no driver to ask
        keys, values, stream = self.find_pair(k, v, stream)
        index = layer_number(layer, s.n_layers, "layer")
        self.check_given(&given, keys, values, "KVCache.append")
        self.begin_change()
        self.check_apart(keys, "KVCache.append")
        self.check_apart(values, "KVCache.append")
        while um.um_kv_append_begin(&self.kv, index, given.n, &row, &err) != um.UM_OK:
            if not self.find_rows_on(stream, &err, given.n):
                self.fail(&err, "append")
        if given.n == 0:
            return
        _held = self._tape._memory  # during a call of CUDA another thread may close the cache
        self._writing = True
        try:
            k_bytes, v_bytes = given.n * self.kv.row_bytes, given.n * self.kv.v_row_bytes
            if (max(k_bytes, v_bytes) > FEW_BYTES and given.type == s.type and s.batch == 1
                    and keys.bytes.in_order and values.bytes.in_order
                    and (given.order == um.UM_KV_TOKEN_MAJOR or given.n == 1)):
                self.copy_rows(self.row_address(index, False, row), keys.bytes.at, k_bytes, stream)
                self.copy_rows(self.row_address(index, True, row), values.bytes.at, v_bytes, stream)
            else:
                span = Span(given.n, index, 1, row, 0)
                self.write(keys, values, given.type, _axes(given.order), &span, stream)
        finally:
            self._writing = False
        um.um_kv_append_end(&self.kv, index, given.n)

    @cython.critical_section
    def _append_all(self, k: Any, v: Any, stream: Any) -> None:
        """Append one token of all layers."""
        cdef um.um_error err
        cdef Given given
        cdef DeviceTokens keys, values
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef uint64_t row = 0
        cdef Span span
        cdef str doing = "KVCache.append_all"
        self.open_region()
        keys, values, stream = self.find_pair(k, v, stream)
        check_types(&given, keys.dtype, values.dtype, s.type, doing)
        check_token_shapes(&given, tuple(keys.owner.shape), tuple(values.owner.shape), s.n_layers,
                           self._heads, s.head_dim, self._v_head_dim, doing)
        if self._batch != 1:
            raise ValueError("KVCache.append_all: batch is not 1")
        self.begin_change()
        self.check_apart(keys, doing)
        self.check_apart(values, doing)
        while um.um_kv_reserve(&self.kv, 1, &row, &err) != um.UM_OK:
            if not self.find_rows_on(stream, &err, 1):
                self.fail(&err, "append_all")
        _held = self._tape._memory
        self._writing = True
        try:
            span = Span(1, 0, s.n_layers, row, 0)
            self.write(keys, values, given.type, _OF_ALL_LAYERS, &span, stream)
        except BaseException:
            um.um_kv_rollback(&self.kv)
            raise
        finally:
            self._writing = False
        if um.um_kv_commit(&self.kv, 1, &err) != um.UM_OK:
            self.fail(&err, "append_all")

    @cython.critical_section
    def _append_at(self, layer: int, k: Any, v: Any, row: Any, stream: Any) -> None:
        """Write tokens of one layer at the row that an int32 on the device holds at that time."""
        cdef Given given
        cdef DeviceTokens keys, values, at
        cdef str doing = "KVCache.append_at"
        cdef uint32_t index
        cdef Span span
        self.open_region()
        at = self.exchanged(row, NULL, "row")
        if at is None:
            at = self.find(row, "row")
        if at.dtype != dtype_of("int32") or at.bytes.end - at.bytes.low != 4:
            raise TypeError(f"row: expected one int32, got {at.dtype} of shape "
                            f"{tuple(at.owner.shape)}")
        keys, values, stream = self.find_pair(k, v, stream)
        index = layer_number(layer, self.kv.spec.n_layers, "layer")
        self.check_given(&given, keys, values, doing)
        self.begin_change()
        self.check_apart(keys, doing)
        self.check_apart(values, doing)
        if given.n == 0:
            return
        _held = self._tape._memory
        self._writing = True
        try:
            span = Span(given.n, index, 1, 0, at.bytes.at)
            self.write(keys, values, given.type, _axes(given.order), &span, stream)
        finally:
            self._writing = False

    # ---- reading ----

    @cython.critical_section
    def _span(self, i: int) -> tuple[int, int, int]:
        """Return a layer's number, the row of its first token, and the number of its tokens."""
        cdef uint64_t first = 0, n
        cdef uint32_t layer = layer_number(i, self.kv.spec.n_layers, "i")
        self.open_region()
        n = um.um_kv_layer_len(&self.kv, layer, &first)
        return layer, um.um_kv_row(&self.kv, first), n

    @cython.critical_section
    def _window(self, uint32_t layer, bint v, uint64_t row, uint64_t n) -> tuple[int, object]:
        """Return where n rows of K or V begin, and the objects that a view of them holds."""
        cdef Region region = self.open_region()
        cdef uintptr_t data = self.row_address(layer, v, row)
        # Only in the first stream: rows lie and move alike in all streams.
        window = new_window(region, data - <uintptr_t>self.kv.base,
                            n * (self.kv.v_row_bytes if v else self.kv.row_bytes))
        return data, (window, self._tape._memory)

    @cython.critical_section
    def _lane(self, layer: int, part: Literal["k", "v"], stream: int) -> int:
        """Return the address of row 0 of a lane."""
        self.open_region()
        return <uintptr_t>um.um_kv_lane(&self.kv, layer, is_v(part), stream)

    def _first_row(self) -> int:
        """Return the row of the first token that all layers hold."""
        return self.first_row()

    def _check_whole(self, str doing) -> None:
        """Raise unless all layers hold the same tokens, and no row is reserved."""
        self.open_region()
        self.check_whole(doing)

    def _while_held(self, read: Callable[[], _T]) -> _T:
        """Call a function that reads rows; meanwhile no row moves, and the memory stays."""
        self.open_region()
        _held = self._tape._memory
        self._n_busy += 1
        try:
            return read()
        finally:
            self.end_busy()

    def _wanted(self, dtype: npt.DTypeLike) -> tuple[np.dtype[Any], str]:
        """Return a dtype that rows can be converted to, and its name for kernels."""
        wanted = dtype_of(dtype)
        if wanted.name not in ("float32", "float16", "bfloat16") or not wanted.isnative:
            raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {wanted}")
        return wanted, kv_type(wanted)

    # ---- figures and the end ----

    @property
    def tape(self) -> Any:
        """The tape that was given, or None."""
        return None if self._owns_tape else self._tape

    @property
    def block(self) -> Any:
        """The cache's own block, or None if it lies on a tape."""
        return self._tape.block if self._owns_tape else None

    @property
    def lane_stride(self) -> int:
        """Bytes from K of one stream to the next, and of the last one to V."""
        return self.kv.lane_stride

    @property
    def v_lane_stride(self) -> int:
        """Bytes from V of one stream to the next, and of the last one to the next layer."""
        return self.kv.v_lane_stride

    @property
    def resident_bytes(self) -> int:
        """Bytes of the storage: device memory and pinned memory are always resident."""
        self.open_region()
        return self._storage_bytes

    @property
    def granted(self) -> Placement:
        """The placement of the memory, as `cuda.Block.granted`."""
        self.open_region()
        return self._tape.block.granted

    @property
    def closed(self) -> bool:
        """Whether the cache was closed, or is in a forked child."""
        return self._closed or self._tape is None or not self._tape._open

    def warm(self, threads: int | None = None) -> None:
        """Do nothing: the memory is always resident."""
        self.open_region()

    def _freeze(self, bint frozen) -> None:
        """Do nothing: all memory is committed at once."""

    def __del__(self):
        if not self._closed and self._owns_tape and self._tape._open:
            warnings.warn(f"unclosed '{self.name}': {self!r}", ResourceWarning, stacklevel=1,
                          source=self)
            self.end()
