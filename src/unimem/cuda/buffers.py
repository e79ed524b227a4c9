"""The buffers of a decode step in device memory."""

from __future__ import annotations

from typing import Any, Unpack

import numpy.typing as npt

from unimem.buffers.decode_buffers import DecodeBufferSet
from unimem.cuda.block import refuse_placement
from unimem.cuda.tape import Tape
from unimem.models.dims import ModelDims
from unimem.system.placement import PlacementOptions


class DecodeBuffers(DecodeBufferSet[Any]):
    """The 26 buffers of one decode step in device memory, at addresses that never change.

    As `unimem.DecodeBuffers`, with CuPy arrays: the same names, sizes, places and figures. A CUDA
    graph that was captured with them can be replayed while they are open.

    One thread at a time makes a step. A forked child has none of the memory, and ClosedError says
    so there.

    Parameters
    ----------
    dims : ModelDims
        The model.
    tape : cuda.Tape, optional
        Where the buffers are taken; by default a tape of their own.
    dtype : {"float16", "bfloat16", "float32"}
        Type of the activations.
    name, device, pinned, **placement
        As for `cuda.Tape`; all but the name only without `tape`.

    Raises
    ------
    ValueError, TypeError
        An unknown dtype, wrong dimensions, or buffers that are too large.
    CapacityError, FrozenError, ClosedError, MemoryError, PlacementError, NotImplementedError
        As `cuda.Tape` and its `take`; nothing was taken then.

    Examples
    --------
    >>> import unimem as um
    >>> from unimem import cuda
    >>> dims = um.ModelDims(64, 176, 8, 4, 8, 512, 5, 512, max_batch_size=4)
    >>> with cuda.DecodeBuffers(dims) as db:
    ...     db.memory_bytes == db.tape.used_bytes, db.batch(2).qkv_out.shape
    (True, (2, 128))
    """

    def __init__(
        self,
        dims: ModelDims,
        *,
        tape: Tape | None = None,
        dtype: npt.DTypeLike = "float16",
        name: str | None = None,
        device: int = 0,
        pinned: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        if tape is not None:
            Tape._require(tape)
            refuse_placement("tape", tape.block.device, device, pinned, placement)

        def new_tape(nbytes: int) -> Tape:
            return Tape(
                nbytes,
                name=self.name,
                category="scratch",
                device=device,
                pinned=pinned,
                **placement,
            )

        self._make(dims, dtype, name, tape, new_tape)

    @staticmethod
    def _address_of(array: Any) -> int:
        return int(array.data.ptr)
