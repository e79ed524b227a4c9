"""Grids of device memory."""

from __future__ import annotations

from typing import Unpack

from unimem._core.grid import DeviceGrid
from unimem.base.arguments import string
from unimem.cuda.tape import Tape
from unimem.system.placement import PlacementOptions


class Grid(DeviceGrid):
    """Cells of one size in device memory, taken and given back in any order.

    As `unimem.Grid`, with CuPy arrays. The free list is in main memory.

    Any number of threads may take and give at the same time, without a lock. A forked child has
    none of the memory, and ClosedError says so there.

    Parameters
    ----------
    cell_bytes : int or str
        Size of a cell, in bytes or as ``"64K"``; cells lie at multiples of 64 bytes.
    n_cells : int
        Number of cells, below 2**32 - 2.
    name, category, device, pinned, **placement
        As for `cuda.Tape`.

    Attributes
    ----------
    tape : Tape
        The tape of the cells, for them alone.

    Raises
    ------
    ValueError, TypeError, MemoryError, PlacementError, NotImplementedError
        As `cuda.Block`.

    Examples
    --------
    >>> from unimem import cuda
    >>> with cuda.Grid(4096, 8) as grid:
    ...     cell = grid.take()
    ...     block = cell.as_array("float16", (16, 128))
    ...     grid.n_available
    7
    """

    tape: Tape

    def __init__(
        self,
        cell_bytes: int | str,
        n_cells: int,
        *,
        name: str | None = None,
        category: str = "scratch",
        device: int = 0,
        pinned: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        def new_tape(nbytes: int) -> Tape:
            return Tape(
                nbytes,
                name=string(name, "name", "grid"),
                category=category,
                device=device,
                pinned=pinned,
                **placement,
            )

        super().__init__(cell_bytes, n_cells, new_tape)
