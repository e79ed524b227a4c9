"""The KV cache in device memory."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, Self, Unpack

import numpy as np
import numpy.typing as npt

from unimem._core.block import Block
from unimem.backends import cuda_driver
from unimem.base.arguments import flag, integer, one_of
from unimem.cuda.block import refuse_placement, unsupported
from unimem.cuda.kernels import Five, RowKernels, Rows, Tokens
from unimem.cuda.tape import Tape
from unimem.kv import snapshot
from unimem.kv.cache.device import KVDevice
from unimem.kv.cache.spec import KVSpec
from unimem.kv.layer_specs import LayerState
from unimem.kv.types import block_bytes, block_values, kv_type
from unimem.system.placement import PlacementOptions, check_placement

__all__ = ["KVCache"]

# A q8_0 block of 32 values, which kernels copy as 17 float16.
_BLOCK_BYTES = block_bytes("q8_0")

Span = tuple[int, int, int, int, int]
"""Tokens, first layer, layers, first row, and the address of an int32 that is that row, or 0."""


class KVCache(KVDevice):
    """K and V of all layers of one stream (optionally a batch), in memory of a GPU.

    `unimem.KVCache` of fixed storage, with CuPy arrays: the same rows, positions, states and
    errors, which are kept on the host. Work on the memory is queued on a stream: no call waits or
    allocates. A token counts as soon as its rows are queued: a reader on another stream must wait
    for these first (an event). Appends take a stream; all other copies (`trim_to` with
    `keep_first`, tokens that a `reserve` moves, `copy`, `save`) use CuPy's current one.

    Trimming moves no byte: the tokens begin at a later row. When the last row is used they move to
    the first, in pieces as long as the free rows there: trim a good part at once, not token by
    token. An interrupt meanwhile is raised after all have moved. If the device fails meanwhile,
    tokens are lost, and every later call raises RuntimeError.

    One thread writes; others may read views of existing tokens. A view keeps the memory alive, and
    stays valid until its rows are written anew. A forked child has none of the memory, and
    ClosedError says so there.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim, max_seq_len, batch, dtype, budget_bytes
        As for `unimem.KVCache`.
    window, spare_rows, grow, rotate, layers
        Not supported on a device.
    order : {"token"}
        A device has no other order.
    tape : cuda.Tape, optional
        Where the storage is taken, such as ``layout.history``; by default a block of its own.
    arrays : {"cupy", "torch"}
        What `layer` returns. Tensors of torch are slices of one tensor for K and one for V of each
        layer, which are made once.
    name, device, pinned, **placement
        As for `cuda.Tape`; all but the name only without `tape`.

    Attributes
    ----------
    dtype, v_dtype, name, budget_bytes : str, str, str, int or None
        As for `unimem.KVCache`.
    arrays : str
        As given.
    window, grow, rotate, n_growths : None, bool, bool, int
        Always None, False, False and 0.

    Raises
    ------
    ValueError, TapeFull, CacheFull, CapacityError, TypeError, MemoryError, PlacementError
        As `unimem.KVCache` and `cuda.Block`.
    NotImplementedError
        An unsupported option, or placement of device memory.

    Examples
    --------
    >>> import cupy
    >>> from unimem import cuda
    >>> with cuda.KVCache(2, 4, 8, 16) as kv:
    ...     for layer in range(2):
    ...         kv.append(layer, cupy.ones((3, 4, 8), "float16"), cupy.ones((3, 4, 8), "float16"))
    ...     k, v = kv.layer(0)
    ...     kv.seq_len, k.shape, k.dtype.name
    (3, (1, 4, 3, 8), 'float16')
    """

    _snapshot = None  # for unimem.kv.snapshot: nothing is mapped from a file

    def __new__(cls, *_: Any, layers: object = None, **__: Any) -> Self:
        """Refuse layers that differ, before the dimensions are missed."""
        if isinstance(layers, Sequence) and any(isinstance(layer, LayerState) for layer in layers):
            what = "KVCache: layers that keep a state (layers=)"
            unsupported("states", what, "an array of CuPy for each of these layers")
        if layers is not None:
            what = "KVCache: layers that differ (layers=)"
            unsupported("layers that differ", what, "a fixed cache for each kind of layers")
        return super().__new__(cls)

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        batch: int = 1,
        dtype: npt.DTypeLike = "f16",
        order: Literal["token", "head"] = "token",
        window: int | None = None,
        spare_rows: int = 0,
        budget_bytes: int | None = None,
        grow: bool = False,
        rotate: bool = False,
        tape: Tape | None = None,
        arrays: Literal["cupy", "torch"] = "cupy",
        device: int = 0,
        pinned: bool = False,
        name: str | None = None,
        layers: None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        check_placement("KVCache", placement)
        if window is not None or spare_rows:
            unsupported("ring", "KVCache: a ring (window=)", "a fixed cache, and trim_to")
        if grow:
            what = "KVCache: growing (grow=True)"
            unsupported("grow", what, "a fixed cache of max_seq_len tokens")
        if flag(rotate, "rotate"):
            what = "KVCache: rotated heads (rotate=True)"
            unsupported("rotation", what, "tokens that are rotated already")
        if one_of(order, "order", ("token", "head")) == "head":
            unsupported("rows by head", "KVCache: rows by head (order='head')", "order='token'")
        if block_values(kind := kv_type(dtype)) > 1 and kind != "q8_0":
            unsupported("fewer bits", f"KVCache: dtype={kind!r}", "dtype='q8_0'")
        self.arrays = one_of(arrays, "arrays", ("cupy", "torch"))
        if self.arrays == "torch" and kind == "q8_0":
            raise ValueError(
                "arrays: expected 'cupy' for dtype='q8_0', since torch has no such type, got "
                "'torch': torch.from_dlpack takes what layer(i, dtype='float16') returns"
            )
        dims = n_layers, n_kv_heads, head_dim, max_seq_len
        spec = KVSpec(*dims, batch, dtype, budget_bytes=budget_bytes, name=name)
        nbytes = self._plan(spec)
        if tape is not None:
            if not isinstance(tape, Tape):
                raise TypeError(f"tape: expected a cuda.Tape, got {type(tape).__name__}")
            refuse_placement("tape", tape.block.device, device, pinned, placement)
        driver = cuda_driver.driver(device) if tape is None else tape.block._driver
        self._made_with: dict[str, Any] = {
            "arrays": self.arrays,
            "device": driver.id,
            "pinned": pinned,
            **placement,
        }
        if self.arrays == "torch":
            cuda_driver.torch()
        # Compile before taking memory: the compiler may fail.
        self._kernels = RowKernels(driver, self.dtype)
        self._blocks = RowKernels(driver, "f16") if self.dtype == "q8_0" else None
        self._arriving: list[tuple[int, npt.NDArray[np.uint8]]] = []
        if tape is not None:
            self._place(tape, driver, owns_tape=False)
        else:
            own = Tape(
                nbytes, name=self.name, category="kv", device=device, pinned=pinned, **placement
            )
            try:
                self._place(own, driver, owns_tape=True)
            except BaseException:
                own.__exit__()
                raise

    __signature__ = inspect.signature(__init__)  # __new__ would hide it

    # ---- appending ----

    def append_all(self, k: Any, v: Any, *, stream: Any = None) -> None:
        """Append one token to all layers (batch 1), with one launch.

        Parameters
        ----------
        k, v : cupy.ndarray, torch.Tensor, or an array on the device that has ``__dlpack__``
            ``[n_layers, n_kv_heads, head_dim]``, float32, float16 or bfloat16, or blocks.
        stream : object, optional
            A CUDA stream; as for `append` by default.

        Raises
        ------
        CacheFull, ValueError, TypeError, RuntimeError, BufferError, ClosedError
            As `append`; RuntimeError also if layers differ in length.
        """
        self._append_all(k, v, stream)

    def append_at(self, layer: int, k: Any, v: Any, row: Any, *, stream: Any = None) -> None:
        """Write tokens of one layer at a row that is read when the GPU gets there.

        For CUDA graphs: one captured call writes another row at every replay. The cache counts
        nothing here. Around a replay the host calls ``row = kv.reserve(1)`` and ``kv.commit(1)``,
        and puts that row into device memory. The row is the token's position until tokens in front
        are trimmed; until then a graph may count by itself.

        Parameters
        ----------
        layer : int
            The layer.
        k, v : cupy.ndarray, torch.Tensor, or an array on the device that has ``__dlpack__``
            As for `append`.
        row : cupy.ndarray, or an array on the device that has ``__dlpack__``
            One int32: the row of the first token. Rows outside the cache are not written.
        stream : object, optional
            A CUDA stream; as for `append` by default.

        Raises
        ------
        ValueError, TypeError
            A wrong layer, shape or dtype.
        RuntimeError
            Another thread appends.
        ClosedError
        """
        self._append_at(layer, k, v, row, stream)

    def _write(
        self, k: int, v: int, k_steps: Five, v_steps: Five, given: str, span: Span, stream: int
    ) -> None:
        """Queue the kernel for tokens."""
        n, layer, n_layers, row, row_address = span
        batch, heads, dim, lane = self.batch, self.n_kv_heads, self.head_dim, self.lane_stride
        k_out = self._lane(layer, "k", 0)
        v_out = k_out + batch * lane
        kernels, sizes = self._kernels, (n_layers, batch, heads, n, dim)
        outs = (2 * batch * lane, lane)
        if self._blocks is not None and given == "q8_0":
            # Blocks are copied: to the kernel a block is a head of 17 float16, a head is a layer,
            # and layers or streams, one of which is 1, are streams.
            kernels, given = self._blocks, "f16"
            sizes = (heads, n_layers * batch, dim // 32, n, _BLOCK_BYTES // 2)
            which = 0 if n_layers > 1 else 1
            k_steps, v_steps = _steps_of_blocks(k_steps, which), _steps_of_blocks(v_steps, which)
            outs = (dim // 32 * _BLOCK_BYTES, outs[which])

        def launch(k: int, v: int, steps: Five, k_out: int, v_out: int) -> None:
            rows = Rows(k_out, v_out, *outs, self.row_bytes, row, self.n_rows, row_address)
            kernels.append(Tokens(k, v, given, sizes, steps), rows, stream)

        if k_steps == v_steps:
            launch(k, v, k_steps, k_out, v_out)
        else:
            launch(k, 0, k_steps, k_out, 0)
            launch(v, 0, v_steps, v_out, 0)

    # ---- reading ----

    def layer(
        self,
        i: int,
        dtype: npt.DTypeLike | None = None,
        out: tuple[Any, Any] | None = None,
        *,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """View the tokens of one layer.

        Parameters
        ----------
        i : int
            The layer.
        dtype : dtype-like, optional
            Return copies in this dtype (float32, float16 or bfloat16) instead of views, by one
            launch of a kernel each.
        out : tuple of cupy.ndarray, optional
            Where to write the copies: two C-contiguous arrays of their shape and `dtype`. By
            default they are allocated by CuPy's pool, for CuPy's current stream.
        stream : object, optional
            Stream of the conversion; CuPy's current one by default, another one only with `out`.

        Returns
        -------
        k, v : cupy.ndarray or torch.Tensor
            As `arrays` says, ``[batch, n_kv_heads, n, head_dim]``, the n tokens that this layer
            holds now. Views do not grow, and stay valid until their rows are written anew. Tensors
            count as views of all rows. Views of a ``"q8_0"`` cache
            are ``[batch, n_kv_heads, n, head_dim / 32]`` blocks with the fields ``d`` (float16) and
            ``qs`` (32 int8).

        Raises
        ------
        ValueError, TypeError
            A wrong layer, dtype or `out`.
        ClosedError
        """
        layer, row, n = self._span(i)
        if dtype is None:
            if out is not None:
                raise ValueError("out: expected together with dtype")
            if self.arrays == "cupy":
                return self._view(layer, False, row, n), self._view(layer, True, row, n)
            whole = self._whole.get(layer)
            if whole is None:
                k, v = (self._view(layer, part, 0, self.n_rows) for part in (False, True))
                to_tensor = self._driver.to_tensor
                whole = self._whole[layer] = to_tensor(k), to_tensor(v)
            k, v = whole
            return k.narrow(2, row, n), v.narrow(2, row, n)
        return self._while_held(lambda: self._convert(i, dtype, out, stream))

    def _convert(
        self, i: int, dtype: npt.DTypeLike, out: tuple[Any, Any] | None, stream: Any
    ) -> tuple[Any, Any]:
        layer, row, n = self._span(i)
        wanted, kernel_type = self._wanted(dtype)
        shape = (self.batch, self.n_kv_heads, n, self.head_dim)
        driver = self._driver
        queue = driver.stream(stream)
        is_new = out is None
        if out is None:
            # Work in the current stream may still use what the pool gives.
            if queue != driver.stream():
                raise ValueError(
                    "out: expected together with a stream that is not CuPy's current one"
                )
            out = driver.empty(shape, wanted), driver.empty(shape, wanted)
        if not isinstance(out, Sequence):
            raise TypeError(f"out: expected two CuPy arrays, got {type(out).__name__}")
        if len(out) != 2:
            raise ValueError(f"out: expected two CuPy arrays, got {len(out)}")
        for target in out:
            if not driver.is_array(target):
                raise TypeError(f"out: expected two CuPy arrays, got {type(target).__name__}")
            if target.shape != shape or target.dtype != wanted or not target.flags.c_contiguous:
                raise ValueError(
                    f"out: expected two C-contiguous arrays of shape {shape} and dtype {wanted}, "
                    f"got {target.shape} and {target.dtype}"
                )
        first_lane, step = self._lane(layer, "k", 0), self.batch * self.lane_stride
        for lane, target in zip((first_lane, first_lane + step), out, strict=True):
            to, strides = target.data.ptr, (self.lane_stride, self.row_bytes)
            self._kernels.read(lane, to, kernel_type, shape, *strides, row, queue)
        if is_new and self.arrays == "torch":
            return driver.to_tensor(out[0]), driver.to_tensor(out[1])
        return out

    def _view(self, layer: int, v: bool, row: int, n: int) -> Any:
        address, owner = self._window(layer, v, row, n)
        head_bytes = self.row_bytes // self.n_kv_heads
        item = self._dtype.itemsize
        memory = self._driver.memory(
            address, (self.batch - 1) * self.lane_stride + n * self.row_bytes, owner
        )
        return self._driver.array(
            memory,
            0,
            (self.batch, self.n_kv_heads, n, head_bytes // item),
            self._dtype,
            (self.lane_stride, head_bytes, self.row_bytes, item),
        )

    # ---- forgetting ----

    def enforce_memory_limit(self, max_bytes: int) -> bool:
        """Return False if `capacity_bytes` is at most `max_bytes`: a device gives nothing back.

        Raises
        ------
        NotImplementedError
            `capacity_bytes` is above it. `trim_to` drops tokens, and the memory stays.
        """
        self._span(0)
        if self.capacity_bytes <= integer(max_bytes, "max_bytes"):
            return False
        unsupported(
            "enforce_memory_limit",
            "KVCache.enforce_memory_limit: giving memory back",
            "trim_to drops tokens and keeps the memory, budget_bytes limits it from the start",
        )

    def give_back(self) -> int:
        """Return 0: its memory is one allocation of CuPy's, which stays."""
        return 0

    # ---- copies and snapshots ----

    def copy(self) -> Self:
        """Return a cache with the same tokens, in memory of its own, on CuPy's current stream.

        Raises
        ------
        RuntimeError
            Rows are reserved, or layers differ in length.
        CapacityError, MemoryError, PlacementError
            There is no room for it.
        """
        return self._while_held(self._copy)

    def _copy(self) -> Self:
        self._check_whole("copy")
        n, position = self.seq_len, self.next_position
        other = type(self)(
            self.n_layers,
            self.n_kv_heads,
            self.head_dim,
            self.max_seq_len,
            batch=self.batch,
            dtype=self.dtype,
            budget_bytes=self.budget_bytes,
            name=self.name,
            **self._made_with,
        )
        try:
            other._begin_restore(position, n)
            stream = self._driver.stream()
            for lane in self._lanes():
                to, nbytes = other._lane(*lane), n * self.row_bytes
                self._driver.copy(to, self._first_address(*lane), nbytes, stream)
            other._finish_restore(position, n)
        except BaseException:
            other.__exit__()
            raise
        return other

    def save(
        self,
        path: str | PathLike[str],
        *,
        tokens: Sequence[int] | npt.NDArray[Any] | None = None,
        model: str | None = None,
    ) -> None:
        """Write the tokens to a file, as `unimem.KVCache.save`; either class restores it.

        All tokens are copied to main memory first, on CuPy's current stream, which may raise
        MemoryError.
        """
        self._check_whole("save")
        self._while_held(lambda: snapshot.save(self, path, tokens, model))

    @classmethod
    def restore(
        cls,
        path: str | PathLike[str],
        *,
        mode: Literal["map", "copy"] = "copy",
        tokens: Sequence[int] | npt.NDArray[Any] | None = None,
        model: str | None = None,
        verify: bool | None = None,
        arrays: Literal["cupy", "torch"] = "cupy",
        device: int = 0,
        pinned: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> Self:
        """Make a cache from a file that `save` wrote, here or on `unimem.KVCache`.

        Parameters
        ----------
        path, tokens, model
            As for `unimem.KVCache.restore`.
        mode : {"copy"}
            The file is read into main memory, in parallel, and copied from there. A growing cache
            becomes a fixed one.
        verify : bool, optional
            Without effect: checksums of the data are always compared.
        arrays
            As for the constructor.
        device, pinned, **placement
            As for `cuda.Tape`.

        Raises
        ------
        NotImplementedError
            ``mode="map"``, or a snapshot of a ring.
        SnapshotError, ValueError, TypeError, OSError, CapacityError, MemoryError, PlacementError
            As `unimem.KVCache.restore`.
        """
        if mode == "map":
            unsupported("restore by mapping", "KVCache.restore(mode='map')", "mode='copy'")
        if mode != "copy":
            raise ValueError(f"mode: expected 'copy', got {mode!r}")
        with snapshot.opened(path) as file:
            there = file.facts
            _check_restorable(there)
            assert not isinstance(there, snapshot.LayersSnapshot)
            kv = cls(
                there.n_layers,
                there.n_kv_heads,
                there.head_dim,
                there.max_seq_len,
                batch=there.batch,
                dtype=there.dtype,
                order=there.order,
                arrays=arrays,
                device=device,
                pinned=pinned,
                **placement,
            )
            try:
                file.read_into(kv, tokens, model)
            except BaseException:
                kv.__exit__()
                raise
            return kv

    def verify(self) -> None:
        """Raise ValueError: this cache is never mapped from a file that could be compared."""
        self._span(0)
        snapshot.verify(self)

    def _first_address(self, layer: int, part: Literal["k", "v"], stream: int) -> int:
        """Return the address of the first token that all layers hold, in one lane."""
        return self._lane(layer, part, stream) + self._first_row() * self.row_bytes

    def _rows(self, layer: int, part: Literal["k", "v"], stream: int) -> npt.NDArray[np.uint8]:
        """Copy the tokens of one lane to main memory."""
        rows = _host_rows(self.seq_len * self.row_bytes)
        queue = self._driver.stream()
        begin = self._first_address(layer, part, stream)
        self._driver.copy(rows.ctypes.data, begin, rows.nbytes, queue)
        self._driver.synchronize(queue)
        return rows

    def _begin_restore(self, next_position: int, n: int) -> None:
        self._arriving = []
        super()._begin_restore(next_position, n)

    def _restore_rows(
        self, layer: int, part: Literal["k", "v"], stream: int, n: int, next_position: int
    ) -> npt.NDArray[np.uint8]:
        """Return main memory for the tokens of one lane, from which `_finish_restore` copies."""
        rows = _host_rows(n * self.row_bytes)
        self._arriving.append((self._lane(layer, part, stream), rows))
        return rows

    def _finish_restore(self, next_position: int, n: int) -> None:
        queue = self._driver.stream()
        for address, rows in self._arriving:
            self._driver.copy(address, rows.ctypes.data, rows.nbytes, queue)
        if self._arriving:
            self._driver.synchronize(queue)
        self._arriving = []
        super()._finish_restore(next_position, n)


def _check_restorable(there: snapshot.Snapshot | snapshot.LayersSnapshot) -> None:
    """Raise NotImplementedError for a snapshot of a cache that a device does not have."""
    this, instead = "KVCache.restore of", "restore it with unimem.KVCache"
    if isinstance(there, snapshot.LayersSnapshot):
        unsupported("layers that differ", f"{this} layers that differ", instead)
    if there.window:
        unsupported("ring", f"{this} a ring", instead)
    if there.rotate:
        unsupported("rotation", f"{this} rotated heads", instead)
    if there.v_head_dim != there.head_dim:
        sizes = f"{there.head_dim} and {there.v_head_dim}"
        unsupported("layers that differ", f"{this} heads of {sizes}", instead)
    if there.v_dtype != there.dtype:
        unsupported("fewer bits", f"{this} {there.dtype} and {there.v_dtype}", instead)


def _steps_of_blocks(steps: Five, which: int) -> Five:
    _, _, heads, tokens, blocks = steps
    return heads, steps[which], blocks, tokens, 2


def _host_rows(nbytes: int) -> npt.NDArray[np.uint8]:
    with Block(nbytes, pages="4k", name="snapshot", category="staging") as block:
        return block.as_array("uint8", nbytes)
