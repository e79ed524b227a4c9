"""Three tapes of device memory for three lifetimes: weights, scratch, history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from os import PathLike
from types import MappingProxyType
from typing import Any, Self, Unpack

from unimem.base.arguments import integer
from unimem.base.text import format_bytes
from unimem.cuda.block import Block
from unimem.cuda.tape import Tape
from unimem.errors import CapacityError
from unimem.layout import Lifetimes
from unimem.models.dims import ModelDims
from unimem.planning.gpu_bytes import RESERVE_BYTES, bytes_needed
from unimem.planning.plan import plan
from unimem.planning.result import Check
from unimem.system.placement import PlacementOptions, check_placement
from unimem.weights.opened import Weights, open_weights


class Layout(Lifetimes[Tape]):
    """The device memory of one model and one conversation.

    As `unimem.Layout`: `weights` is never cleared, `scratch` by `clear_pass` after a token,
    `history` by `clear_talk` at a new talk.

    Several threads may take from the tapes; one clears, freezes and closes. A forked child has none
    of the memory, and ClosedError says so there. Device memory never faults, so `freeze` warms
    nothing.

    Parameters
    ----------
    weights, scratch, history : int or Block
        A size in bytes, or a `cuda.Block`.
    device, pinned, **placement
        As for `cuda.Block`; for the tapes that are given as sizes.

    Attributes
    ----------
    weights, scratch, history : Tape
        The three tapes.

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
    weights: 0.0/1.0 MiB | scratch: 0.0/0.1 MiB | history: 0.0/1.0 MiB
    """

    weights: Tape

    def __init__(
        self,
        weights: int | str | Block,
        scratch: int | str | Block,
        history: int | str | Block,
        *,
        device: int = 0,
        pinned: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        def new_tape(size_or_block: int | str | Block, name: str) -> Tape:
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
        check_placement("Layout", placement)  # also if all tapes have blocks
        super().__init__(weights, scratch, history, new_tape)
        # The place of each tensor, and its array, which the layout keeps for the next caller.
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
        """Make the layout that a model needs on a GPU, and copy its tensors there.

        `scratch` has the bytes of `DecodeBuffers` of float16, and `history` those of a `KVCache`
        for `ctx` tokens.

        Parameters
        ----------
        path_or_weights : path-like or Weights
            A model file, or an opened one, which stays open and is not needed any more.
        ctx : int, optional
            Tokens of context; by default the smallest of the model's, 4096 and what fits beside
            512 MiB for kernels and libraries.
        batch : int, default 1
            Sequences that are decoded at once.
        kv_dtype : str, default "f16"
            Type of the KV cache.
        device : int, default 0
            CUDA's number of the GPU.
        progress : callable, optional
            As for `Weights.to_device`.

        Returns
        -------
        Layout
            Its `tensors` are those of `Weights.to_device`.

        Raises
        ------
        GGUFError, OSError
            The file cannot be used.
        ValueError
            An option is out of range, or the model's dimensions are unknown.
        CapacityError
            The model does not fit into free device memory; nothing was taken.

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
        # Raises if dimensions of the model are unknown.
        dims = replace(ModelDims.from_weights(weights), max_batch_size=batch)
        name = f"cuda:{integer(device, 'device')}"
        needed = plan(
            weights,
            ctx=None if ctx is None else int(ctx),
            batch=dims.max_batch_size,
            kv_dtype=kv_dtype,
            device=name,
        )
        sizes = (bytes_needed(weights), needed.scratch_bytes, needed.history_bytes)
        (check,) = (check for check in needed.checks if check.name == name)
        if not check.fits:
            raise _capacity_error(check, needed.ctx, sizes, RESERVE_BYTES if ctx is None else 0)
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

        A read-only view, which becomes empty when the layout is closed. Its arrays keep their
        memory.
        """
        self._check_open()
        if len(self._tensors) < len(self._places):  # closing was interrupted
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
        # Only arrays of callers count as users.
        self._tensors.clear()
        try:
            super().close()
        except BaseException:
            self._fill()
            raise

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()
        super().__exit__()


def _capacity_error(
    check: Check, ctx: int | None, sizes: Sequence[int], reserved: int
) -> CapacityError:
    """Return the error for three tapes, and bytes reserved for kernels, that do not fit."""
    kept = f" and {format_bytes(reserved)} for kernels" if reserved else ""
    return CapacityError(
        f"{check.name}: the model needs {format_bytes(check.needed_bytes)} for {ctx} tokens "
        f"({', '.join(map(format_bytes, sizes))} of weights, scratch and history{kept}, in whole "
        f"pages of 2 MiB), and {format_bytes(check.available_bytes)} are free: a smaller ctx or "
        "batch, kv_dtype 'q8_0', or a model of fewer bits",
        check.available_bytes,
        0,
        check.needed_bytes,
    )
