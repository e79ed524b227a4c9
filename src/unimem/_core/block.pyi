from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

import numpy.typing as npt

from unimem.placement import Pages, Placement

class Requested(TypedDict):
    nbytes: int
    pages: Pages

class Block:
    name: str
    category: str
    def __init__(
        self,
        nbytes: int,
        *,
        pages: Pages = "auto",
        warm: bool | int = False,
        strict: bool = False,
        name: str | None = None,
        category: str = "other",
    ) -> None: ...
    @staticmethod
    def map(
        path: str | PathLike[str],
        *,
        offset: int = 0,
        nbytes: int | None = None,
        mode: Literal["r", "c"] = "r",
        name: str | None = None,
        category: str = "weights",
    ) -> Block: ...
    @staticmethod
    def _map_fd(
        fd: int,
        offset: int,
        nbytes: int,
        mode: Literal["r", "c"],
        name: str,
        category: str = "weights",
    ) -> Block: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def requested(self) -> Requested: ...
    @property
    def granted(self) -> Placement: ...
    @property
    def closed(self) -> bool: ...
    def as_array(
        self,
        dtype: npt.DTypeLike = "uint8",
        shape: int | Sequence[int] | None = None,
        offset: int = 0,
    ) -> npt.NDArray[Any]: ...
    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def warm(self, threads: int | None = None) -> None: ...
    def _warm_range(self, offset: int, nbytes: int, threads: int | None = None) -> None: ...
    def _resident_range(self, offset: int, nbytes: int) -> int: ...
    def verify(self) -> Placement: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None: ...
