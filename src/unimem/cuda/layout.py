"""Three tapes of device memory for three lifetimes: weights, scratch, history."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral
from os import PathLike
from types import MappingProxyType, TracebackType
from typing import Any, Self, Unpack

from unimem.buffers.dims import ModelDims
from unimem.cuda import upload
from unimem.cuda.block import Block, check_placement
from unimem.cuda.buffers import DecodeBuffers
from unimem.cuda.tape import Tape
from unimem.errors import CapacityError
from unimem.kv.cache import KVCache
from unimem.layout import Lifetimes
from unimem.planning.plan import DEFAULT_CTX
from unimem.system import gpu
from unimem.system.placement import PlacementOptions
from unimem.system.text import format_bytes
from unimem.weights.opened import Weights, open_weights

__all__ = ["RESERVE_BYTES", "Layout", "on_device"]

# What an allocation takes of the device's memory is a multiple of this: cudaMalloc maps pages of
# 2 MiB.
_PAGE_BYTES = 2 << 20
# What a context that is chosen leaves free: CUDA loads kernels when they are first launched, cuBLAS
# takes a workspace of 32 MiB for each stream and thread that multiplies (on Hopper), and CuPy's
# pool has what a step makes beside the layout.
RESERVE_BYTES = 512 << 20


def on_device(nbytes: int) -> int:
    """Tell what an allocation takes of the device's memory."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class Layout(Lifetimes[Tape]):
    """The device memory of one model and one conversation.

    As `unimem.Layout`: `weights` is never cleared, `scratch` by `clear_pass` after a token,
    `history` by `clear_talk` at a new talk.

    The tapes may be taken from in several threads; clearing, freezing and closing are for one. A
    forked child has none of the memory, and ClosedError says so there.

    Parameters
    ----------
    weights, scratch, history : int or Block
        A size in bytes, or a `cuda.Block`.
    device : int, default 0
        CUDA's number of the GPU; for the tapes that are given as sizes.
    pinned : bool, default False
        Host memory that the GPU sees; for the tapes that are given as sizes.
    **placement
        See `PlacementOptions`; only of pinned memory.

    Attributes
    ----------
    weights, scratch, history : Tape
        The three.

    Raises
    ------
    CapacityError
        The device has no room.
    ValueError, TypeError, MemoryError, PlacementError, NotImplementedError
        As `cuda.Block`.

    Examples
    --------
    >>> from unimem import cuda
    >>> with cuda.Layout(1 << 20, 1 << 16, 1 << 20) as layout:
    ...     hidden = layout.scratch.take(1024, "float16")
    ...     layout.clear_pass()
    ...     print(layout.stat())
    weights: 0.0/1.0 MB | scratch: 0.0/0.1 MB | history: 0.0/1.0 MB
    """

    weights: Tape

    def __init__(
        self,
        weights: int | Block,
        scratch: int | Block,
        history: int | Block,
        *,
        device: int = 0,
        pinned: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        def new_tape(size_or_block: int | Block, name: str) -> Tape:
            if isinstance(size_or_block, Block):
                return Tape(size_or_block, name=name)
            return Tape(
                size_or_block, name=name, category=name, device=device, pinned=pinned, **placement
            )

        if isinstance(weights, Weights):
            raise TypeError(
                "weights: expected a size in bytes or a cuda.Block, got Weights, which are in main "
                "memory: Layout.for_model(weights) brings them to the GPU"
            )
        check_placement("Layout", placement)  # which no tape may need
        super().__init__(weights, scratch, history, new_tape)
        # Where each tensor is, and its array, which the layout keeps for the next caller.
        self._places: dict[str, tuple[int, tuple[int, ...], Any]] = {}
        self._tensors: dict[str, Any] = {}

    @classmethod
    def for_model(
        cls,
        path_or_weights: str | PathLike[str] | Weights,
        *,
        ctx: int | None = None,
        batch: int = 1,
        kv_dtype: str = "f16",
        device: int = 0,
        progress: Callable[[int, int], object] | None = None,
    ) -> Self:
        """Make the layout that a model needs on a GPU, and bring its tensors there.

        `scratch` has the bytes of `DecodeBuffers`, of float16, and `history` those of a `KVCache`
        for `ctx` tokens.

        Parameters
        ----------
        path_or_weights : path-like or Weights
            A model file, or an opened one, which stays open and is not needed any more.
        ctx : int, optional
            Tokens of context; by default the smallest of the model's, 4096 and what fits beside
            512 MiB, which stay free for kernels and libraries.
        batch : int, default 1
            Sequences that are decoded at once.
        kv_dtype : str, default "f16"
            Of the KV cache.
        device : int, default 0
            CUDA's number of the GPU.
        progress : callable, optional
            As for `Weights.to_device`.

        Returns
        -------
        Layout
            With the tensors, as `Weights.to_device` returns them, in `tensors`.

        Raises
        ------
        GGUFError, OSError
            The file cannot be used.
        ValueError
            An option is out of range, or the model's dimensions are not known.
        CapacityError
            The model does not fit into the device memory that is free; nothing was taken.

        Examples
        --------
        >>> from unimem import cuda
        >>> with cuda.Layout.for_model("model.gguf", ctx=2048) as layout:
        ...     embedding = layout.tensors["token_embd.weight"]
        """
        if not isinstance(path_or_weights, Weights):
            with open_weights(path_or_weights) as weights:
                return cls.for_model(
                    weights,
                    ctx=ctx,
                    batch=batch,
                    kv_dtype=kv_dtype,
                    device=device,
                    progress=progress,
                )
        is_integer = isinstance(ctx, Integral) and not isinstance(ctx, bool)
        if ctx is not None and not (is_integer and 1 <= ctx < 2**31):
            raise ValueError(f"ctx: expected an integer from 1 to {2**31 - 1}, got {ctx!r}")
        weights = path_or_weights
        dims = replace(ModelDims.from_weights(weights), max_batch_size=batch)

        def history_bytes(n: int) -> int:
            return KVCache.storage_bytes(
                dims.num_layers, dims.num_kv_heads, dims.head_dim, n, batch=batch, dtype=kv_dtype
            )

        weights_bytes = upload.bytes_needed(weights)
        scratch_bytes = DecodeBuffers.bytes_needed(dims)
        free = gpu.driver(device).free_bytes()
        reserved = RESERVE_BYTES if ctx is None else 0
        if ctx is None:
            most = range(1, min(dims.max_seq_len, DEFAULT_CTX) + 1)
            room = free - reserved - on_device(weights_bytes) - on_device(scratch_bytes)
            # Where nothing fits, what is said below is for one token.
            ctx = max(1, bisect_right(most, room, key=lambda n: on_device(history_bytes(n))))
        sizes = (weights_bytes, scratch_bytes, history_bytes(int(ctx)))
        needed = sum(map(on_device, sizes)) + reserved
        if needed > free:
            kept = f" and {format_bytes(reserved)} for kernels" if reserved else ""
            raise CapacityError(
                f"cuda:{device}: the model needs {format_bytes(needed)} for {ctx} tokens "
                f"({', '.join(format_bytes(size) for size in sizes)} of weights, scratch and "
                f"history{kept}, in whole pages of 2 MiB), and {format_bytes(free)} are free: a "
                "smaller ctx or batch, kv_dtype 'q8_0', or a model of fewer bits",
                free,
                0,
                needed,
            )
        layout = cls(*sizes, device=device)
        try:
            tensors = weights.to_device(layout.weights, progress=progress)
            layout._places = {
                name: (array.data.ptr - array.data.mem.ptr, array.shape, array.dtype)
                for name, array in tensors.items()
            }
            layout._tensors = tensors
        except BaseException:
            layout.__exit__()
            raise
        return layout

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The model's tensors by name, as `cupy.ndarray`; empty unless made by `for_model`.

        A read-only view, which is empty once the layout is closed; arrays of it keep their memory.
        """
        self._check_open()
        if len(self._tensors) < len(self._places):  # a close was interrupted
            self._fill()
        return MappingProxyType(self._tensors)

    def _fill(self) -> None:
        for name, place in self._places.items():
            if name not in self._tensors:
                self._tensors[name] = self.weights._new_array(*place)

    def close(self) -> None:
        """Give the memory back; blocks that were passed in stay open.

        Raises
        ------
        BufferError
            Arrays still use a tape, or a caller holds arrays of `tensors`; nothing is closed then.
        """
        # Arrays that only the layout holds do not count; those of callers count without the dict.
        self._tensors.clear()
        try:
            super().close()
        except BaseException:
            self._fill()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._tensors.clear()
        super().__exit__(kind, error, trace)
