from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from unimem._core.tape import Bump, Tape
from unimem.system.placement import PlacementOptions

_TapeT = TypeVar("_TapeT", bound=Bump[Any])

class Cell:
    id: int
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def as_array(self, dtype: Any = "uint8", shape: int | Sequence[int] | None = None) -> Any: ...

class Cells(Generic[_TapeT]):
    tape: _TapeT
    cell_bytes: int
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

class Grid(Cells[Tape]):
    def __init__(
        self,
        cell_bytes: int,
        n_cells: int,
        *,
        name: str | None = None,
        category: str = "scratch",
        **placement: Unpack[PlacementOptions],
    ) -> None: ...

class DeviceGrid(Cells[Any]):
    def __init__(
        self, cell_bytes: int, n_cells: int, new_tape: Callable[[int], Bump[Any]]
    ) -> None: ...
