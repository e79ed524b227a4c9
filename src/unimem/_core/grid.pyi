from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy.typing as npt

from unimem._core.tape import Tape
from unimem.placement import PlacementOptions

class Cell:
    id: int
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def as_array(
        self, dtype: npt.DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> npt.NDArray[Any]: ...

class Grid:
    tape: Tape
    cell_bytes: int
    def __init__(
        self,
        cell_bytes: int,
        n_cells: int,
        *,
        name: str | None = None,
        category: str = "scratch",
        **placement: Unpack[PlacementOptions],
    ) -> None: ...
    def take(self) -> Cell: ...
    def give(self, cell: Cell) -> None: ...
    @property
    def n_available(self) -> int: ...
    @property
    def n_cells(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None: ...
