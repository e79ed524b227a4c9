"""Scratchpads in device memory."""

from __future__ import annotations

from typing import Unpack

import numpy.typing as npt

from unimem.backends import cuda_driver
from unimem.cuda.block import refuse_placement
from unimem.cuda.kernels import row_kernels
from unimem.cuda.tape import Tape
from unimem.kv.scratchpad import DeviceScratchpad
from unimem.system.placement import PlacementOptions


class Scratchpad(DeviceScratchpad):
    """One append-only buffer ``[max_seq_len, dim]`` of device memory, which never moves.

    As `unimem.Scratchpad`, with CuPy arrays: appending queues a copy, or a converting kernel, on a
    stream, and returns. A token counts as soon as its copy is queued.

    One thread writes; others may read views of existing tokens. A forked child has none of the
    memory, and ClosedError says so there.

    Parameters
    ----------
    max_seq_len, dim, dtype
        As for `unimem.Scratchpad`.
    tape : cuda.Tape, optional
        Where the buffer is taken, such as ``layout.history``; by default a tape of its own.
    name, device, pinned, **placement
        As for `cuda.Tape`; all but the name only without `tape`.

    Attributes
    ----------
    capacity, dim, dtype, name : int, int, numpy.dtype, str
        As for `unimem.Scratchpad`.
    tape : cuda.Tape
        The tape of the buffer.

    Raises
    ------
    ValueError, TypeError, TapeFull, CapacityError, MemoryError, PlacementError, NotImplementedError
        As `unimem.Scratchpad` and `cuda.Block`.

    Examples
    --------
    >>> import cupy
    >>> from unimem import cuda
    >>> with cuda.Scratchpad(64, 8) as pad:
    ...     pad.append(cupy.ones(8, "float32"))
    ...     pad.append_batch(cupy.zeros((2, 8), "float16"))
    ...     pad, pad.as_array().shape
    (Scratchpad(len=3, capacity=64, dim=8), (3, 8))
    """

    tape: Tape

    def __init__(
        self,
        max_seq_len: int,
        dim: int,
        dtype: npt.DTypeLike = "float32",
        *,
        tape: Tape | None = None,
        device: int = 0,
        pinned: bool = False,
        name: str | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        nbytes, stored = self._prepare(max_seq_len, dim, dtype, name)
        if tape is None:
            # Compile before taking memory: the compiler may fail.
            kernels = row_kernels(cuda_driver.driver(device), stored)
            own = Tape(
                nbytes, name=self.name, category="kv", device=device, pinned=pinned, **placement
            )
            super().__init__(own, own.block._driver, kernels, owns_tape=True)
            return
        Tape._require(tape)
        refuse_placement("tape", tape.block.device, device, pinned, placement)
        driver = tape.block._driver
        super().__init__(tape, driver, row_kernels(driver, stored), owns_tape=False)
