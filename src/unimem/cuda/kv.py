"""The KV cache in device memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Literal, Self, Unpack

import numpy as np
import numpy.typing as npt

from unimem._core.block import Block as HostBlock
from unimem.backends import cuda_driver
from unimem.base.arguments import flag, integer, one_of
from unimem.cuda.block import Block, refuse_placement, unsupported
from unimem.cuda.kernels import row_kernels
from unimem.cuda.tape import Tape
from unimem.kv import snapshot
from unimem.kv.cache.device import KVDevice
from unimem.kv.cache.spec import KVSpec
from unimem.kv.layer_specs import LayerState
from unimem.kv.types import block_values, kv_type
from unimem.system.placement import PlacementOptions, check_placement

_PARTS: tuple[Literal["k", "v"], Literal["k", "v"]] = ("k", "v")


class KVCache(KVDevice):
    """K and V of all layers of one stream (optionally a batch), in memory of a GPU.

    `unimem.KVCache` of fixed storage, with CuPy arrays: the same rows, positions, states and
    errors, which are kept on the host. Work on the memory is queued on a stream: no call waits or
    allocates. A token counts as soon as its rows are queued: a reader on another stream must wait
    for these first (an event). Appends take a stream; all other copies (`trim_to` with
    `keep_first`, tokens that a `reserve` moves, `copy`, `save`, those of a `KVStore`) use CuPy's
    current one, or torch's with ``arrays="torch"``.

    Trimming moves no byte: the tokens begin at a later row. When the last row is used they move to
    the first, in pieces as long as the free rows there: trim a good part at once, not token by
    token. An interrupt meanwhile is raised after all have moved. If the device fails meanwhile,
    tokens are lost, and every later call raises RuntimeError.

    One thread writes; others may read views of existing tokens. A view keeps the memory alive, and
    stays valid until its rows are written anew. A forked child has none of the memory, and
    ClosedError says so there.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim, max_seq_len, batch, dtype, v_head_dim, order, budget_bytes
        As for `unimem.KVCache`.
    window, spare_rows, grow, rotate, layers
        Not supported on a device.
    tape : cuda.Tape, optional
        Where the storage is taken, such as ``layout.history``; by default a block of its own.
    arrays : {"cupy", "torch"}
        What `layer` returns. Tensors of torch are slices of one tensor for K and one for V of each
        layer, which are made once.
    name, device, pinned, **placement
        As for `cuda.Tape`; all but the name only without `tape`.

    Attributes
    ----------
    dtype, v_dtype, order, name, budget_bytes : str, str, str, str, int or None
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
        v_head_dim: int | None = None,
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
        if block_values(kind := kv_type(dtype)) > 1 and kind != "q8_0":
            unsupported("fewer bits", f"KVCache: dtype={kind!r}", "dtype='q8_0'")
        self.arrays = one_of(arrays, "arrays", ("cupy", "torch"))
        if self.arrays == "torch" and kind == "q8_0":
            raise ValueError(
                "arrays: expected 'cupy' for dtype='q8_0', since torch has no such type, got "
                "'torch': torch.from_dlpack takes what layer(i, dtype='float16') returns"
            )
        dims = n_layers, n_kv_heads, head_dim, max_seq_len
        spec = KVSpec(
            *dims,
            batch,
            dtype,
            v_head_dim=v_head_dim,
            order=order,
            budget_bytes=budget_bytes,
            name=name,
        )
        nbytes = self._plan(spec)
        if tape is not None:
            if not isinstance(tape, Tape):
                raise TypeError(f"tape: expected a cuda.Tape, got {type(tape).__name__}")
            refuse_placement("tape", tape.block.device, device, pinned, placement)
        driver = cuda_driver.driver(device) if tape is None else tape.block._driver
        self._made_with: dict[str, Any] = {
            "arrays": self.arrays,
            "order": self.order,
            "device": driver.id,
            "pinned": pinned,
            **placement,
        }
        if self.arrays == "torch":
            cuda_driver.torch()
        # Compile before taking memory: the compiler may fail.
        self._kernels = row_kernels(driver, self.dtype)
        self._blocks = row_kernels(driver, "f16") if self.dtype == "q8_0" else None
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

    def _current_stream(self) -> int:
        """Return the stream of all that is given none."""
        driver: cuda_driver.Driver = self._driver
        return driver.torch_stream() if self.arrays == "torch" else driver.stream()

    # ---- appending ----

    def append_all(self, k: Any, v: Any, *, stream: Any = None) -> None:
        """Append one token to all layers (batch 1), with one launch.

        Parameters
        ----------
        k, v : cupy.ndarray, torch.Tensor, or an array on the device that has ``__dlpack__``
            ``[n_layers, n_kv_heads, head_dim]``, of V `v_head_dim`, float32, float16 or bfloat16,
            or blocks.
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
            As `arrays` says, ``[batch, n_kv_heads, n, head_dim]``, of V `v_head_dim`, the n tokens
            that this layer holds now. Views do not grow, and stay valid until their rows are
            written anew. Tensors count as views of all rows. Views of a ``"q8_0"`` cache are
            ``[batch, n_kv_heads, n, head_dim / 32]`` blocks with the fields ``d`` (float16) and
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
            k, v = self._tensors(layer)
            return k.narrow(2, row, n), v.narrow(2, row, n)
        return self._while_held(lambda: self._convert(i, dtype, out, stream))

    def _tensors(self, layer: int) -> tuple[Any, Any]:
        """Return tensors of all rows of K and V, which are made once; of q8_0 their bytes."""
        whole: tuple[Any, Any] | None = self._whole.get(layer)
        if whole is None:
            k, v = (self._view(layer, part, 0, self.n_rows) for part in (False, True))
            to_tensor = self._driver.to_tensor
            whole = self._whole[layer] = to_tensor(k), to_tensor(v)
        return whole

    def _convert(
        self, i: int, dtype: npt.DTypeLike, out: tuple[Any, Any] | None, stream: Any
    ) -> tuple[Any, Any]:
        layer, row, n = self._span(i)
        wanted, kernel_type = self._wanted(dtype)
        shapes = [(self.batch, self.n_kv_heads, n, dim) for dim in (self.head_dim, self.v_head_dim)]
        driver = self._driver
        here = self._current_stream()
        queue = here if stream is None else driver.stream(stream)
        if out is None:
            # Work in the current stream may still use what the pool gives.
            if queue != here:
                raise ValueError("out: expected together with a stream that is not the current one")
            make = driver.new_tensor if self.arrays == "torch" else driver.empty
            out = make(shapes[0], wanted), make(shapes[1], wanted)
            self._read(layer, row, n, out, kernel_type, queue)
            return out
        if not isinstance(out, Sequence):
            raise TypeError(f"out: expected two CuPy arrays, got {type(out).__name__}")
        if len(out) != 2:
            raise ValueError(f"out: expected two CuPy arrays, got {len(out)}")
        for shape, target in zip(shapes, out, strict=True):
            if not driver.is_array(target):
                raise TypeError(f"out: expected two CuPy arrays, got {type(target).__name__}")
            if target.shape != shape or target.dtype != wanted or not target.flags.c_contiguous:
                raise ValueError(
                    f"out: expected two C-contiguous arrays of shapes {shapes} and dtype "
                    f"{wanted}, got {target.shape} and {target.dtype}"
                )
        self._read(layer, row, n, out, kernel_type, queue)
        return out

    def _read(
        self, layer: int, row: int, n: int, out: Sequence[Any], kernel_type: str, queue: int
    ) -> None:
        """Queue a kernel that converts rows into arrays, for K and for V."""
        lanes = self._lanes_per_stream
        for part, target in zip(_PARTS, out, strict=True):
            to = target.data_ptr() if hasattr(target, "data_ptr") else target.data.ptr
            sizes = self.batch * lanes, self.n_kv_heads // lanes, n, target.shape[3]
            strides = self._lane_stride_of(part), self._row_bytes_of(part)
            lane = self._lane(layer, part, 0)
            self._kernels.read(lane, to, kernel_type, sizes, *strides, row, queue)

    def _view(self, layer: int, v: bool, row: int, n: int) -> Any:
        address, owner = self._window(layer, v, row, n)
        row_bytes, lane_stride = self._row_bytes_of(_PARTS[v]), self._lane_stride_of(_PARTS[v])
        lanes, dtype = self._lanes_per_stream, self._dtype
        head_bytes = row_bytes * lanes // self.n_kv_heads
        if self.arrays == "torch" and dtype.names:
            dtype = np.dtype(np.uint8)  # torch has no blocks
        item = dtype.itemsize
        nbytes = (self.batch * lanes - 1) * lane_stride + n * row_bytes
        shape = self.batch, self.n_kv_heads, n, head_bytes // item
        strides = lanes * lane_stride, lane_stride if lanes > 1 else head_bytes, row_bytes
        memory = self._driver.memory(address, nbytes, owner)
        return self._driver.array(memory, 0, shape, dtype, (*strides, item))

    @property
    def _lanes_per_stream(self) -> int:
        return self.n_kv_heads if self.order == "head" else 1

    def _row_bytes_of(self, part: Literal["k", "v"]) -> int:
        """Return the bytes of a row of one lane."""
        nbytes = self.row_bytes if part == "k" else self.v_row_bytes
        return nbytes // self._lanes_per_stream

    def _lane_stride_of(self, part: Literal["k", "v"]) -> int:
        return self.lane_stride if part == "k" else self.v_lane_stride

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
            v_head_dim=self.v_head_dim,
            budget_bytes=self.budget_bytes,
            name=self.name,
            **self._made_with,
        )
        try:
            other.arrays = self.arrays
            other._begin_restore(position, n)
            stream = self._current_stream()
            for lane in self._lanes():
                to, nbytes = other._lane(*lane), n * self._row_bytes_of(lane[1])
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
                v_head_dim=there.v_head_dim,
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
        return self._lane(layer, part, stream) + self._first_row() * self._row_bytes_of(part)

    def _rows(self, layer: int, part: Literal["k", "v"], stream: int) -> npt.NDArray[np.uint8]:
        """Copy the tokens of one lane to main memory."""
        rows = _host_rows(self.seq_len * self._row_bytes_of(part))
        queue = self._current_stream()
        begin = self._first_address(layer, part, stream)
        self._driver.copy(rows.ctypes.data, begin, rows.nbytes, queue)
        self._driver.synchronize(queue)
        return rows

    @contextmanager
    def _pinned(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Take main memory that the device reads and writes by itself."""
        with Block(
            nbytes, device=self._driver.id, pinned=True, name="chunk", category="staging"
        ) as block:
            host: Any = block.host
            yield host.as_array("uint8", nbytes)

    def _copy_chunk(
        self, row: int, lanes: Sequence[npt.NDArray[np.uint8]], *, to_device: bool
    ) -> None:
        """Copy tokens between the rows from one on, and pinned memory; wait for it.

        `lanes` are K and V of each layer, ``[tokens, bytes of all heads]``.
        """
        queue, n_lanes = self._current_stream(), self._lanes_per_stream
        for number, rows in enumerate(lanes):
            part = _PARTS[number % 2]
            row_bytes = self._row_bytes_of(part)
            for head in range(n_lanes if row_bytes else 0):
                there = self._lane(number // 2, part, head) + row * row_bytes, row_bytes
                here = rows.ctypes.data + head * row_bytes, n_lanes * row_bytes
                ways = (*there, *here) if to_device else (*here, *there)
                self._driver.copy_rows(*ways, (len(rows), row_bytes), queue)
        self._driver.synchronize(queue)

    def _begin_restore(self, next_position: int, n: int) -> None:
        self._arriving = []
        super()._begin_restore(next_position, n)

    def _restore_rows(
        self, layer: int, part: Literal["k", "v"], stream: int, n: int, next_position: int
    ) -> npt.NDArray[np.uint8]:
        """Return main memory for the tokens of one lane, from which `_finish_restore` copies."""
        rows = _host_rows(n * self._row_bytes_of(part))
        self._arriving.append((self._lane(layer, part, stream), rows))
        return rows

    def _finish_restore(self, next_position: int, n: int, trimmed: int = 0) -> None:
        queue = self._current_stream()
        for address, rows in self._arriving:
            self._driver.copy(address, rows.ctypes.data, rows.nbytes, queue)
        if self._arriving:
            self._driver.synchronize(queue)
        self._arriving = []
        super()._finish_restore(next_position, n, trimmed)


def _check_restorable(there: snapshot.Snapshot | snapshot.LayersSnapshot) -> None:
    """Raise NotImplementedError for a snapshot of a cache that a device does not have."""
    this, instead = "KVCache.restore of", "restore it with unimem.KVCache"
    if isinstance(there, snapshot.LayersSnapshot):
        unsupported("layers that differ", f"{this} layers that differ", instead)
    if there.window:
        unsupported("ring", f"{this} a ring", instead)
    if there.rotate:
        unsupported("rotation", f"{this} rotated heads", instead)
    if there.v_dtype != there.dtype:
        unsupported("fewer bits", f"{this} {there.dtype} and {there.v_dtype}", instead)


def _host_rows(nbytes: int) -> npt.NDArray[np.uint8]:
    if nbytes == 0:  # there is no V
        return np.empty(0, np.uint8)
    with HostBlock(nbytes, pages="4k", name="snapshot", category="staging") as block:
        return block.as_array("uint8", nbytes)
