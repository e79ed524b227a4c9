from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypedDict

import numpy as np
import numpy.typing as npt

from unimem.system.placement import Lock, Pages, Placement

class Requested(TypedDict):
    nbytes: int
    pages: Pages
    numa: str | None
    lock: Lock
    shared: bool | str
    reserve: int

class Block:
    name: str
    category: str
    path: str | None
    def __init__(
        self,
        nbytes: int,
        *,
        pages: Pages = "auto",
        numa: str | None = None,
        lock: Lock = False,
        warm: bool | int = False,
        shared: bool | str = False,
        strict: bool = False,
        reserve: int | None = None,
        name: str | None = None,
        category: str = "other",
    ) -> None: ...
    @staticmethod
    def _mirrored(
        nbytes: int,
        piece_bytes: int,
        *,
        other_bytes: int = 0,
        run: int = 1,
        pages: Pages = "auto",
        numa: str | None = None,
        lock: Lock = False,
        warm: bool | int = False,
        strict: bool = False,
        name: str | None = None,
        category: str = "kv",
    ) -> Block: ...
    @staticmethod
    def _filled(
        nbytes: int,
        fill: Callable[[Block], object],
        *,
        fd: int | None = None,
        pages: Pages = "auto",
        numa: str | None = None,
        lock: Lock = False,
        strict: bool = False,
        name: str | None = None,
        category: str = "other",
    ) -> Block: ...
    @staticmethod
    def map(
        path: str | PathLike[str],
        *,
        offset: int = 0,
        nbytes: int | None = None,
        mode: Literal["r", "c", "r+"] = "r",
        name: str | None = None,
        category: str = "weights",
    ) -> Block: ...
    @staticmethod
    def _map_fd(
        fd: int,
        offset: int,
        nbytes: int,
        mode: Literal["r", "c", "r+"],
        file: str,
        category: str = "weights",
        name: str | None = None,
    ) -> Block: ...
    @staticmethod
    def attach(
        fd_or_path: int | str | PathLike[str],
        *,
        writable: bool = False,
        name: str | None = None,
        category: str = "other",
    ) -> Block: ...
    def sealed_copy(self, *, pages: Pages = "auto", name: str | None = None) -> Block: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def committed_bytes(self) -> int: ...
    @property
    def step_bytes(self) -> int: ...
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
    def warm(
        self,
        threads: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None: ...
    def _warm_range(
        self, offset: int, nbytes: int, threads: int | None = None, *, write: bool = False
    ) -> None: ...
    def _require_room(self, runs: list[tuple[int, int]]) -> None: ...
    @property
    def _is_cache_hidden(self) -> bool: ...
    def _resident_range(self, offset: int, nbytes: int) -> int: ...
    def verify(self) -> Placement: ...
    def repair(self) -> Placement: ...
    def collapse(self) -> Placement: ...
    def commit(self, nbytes: int) -> None: ...
    def release(self, offset: int = 0, nbytes: int | None = None) -> int: ...
    def _discard(self, offset: int, nbytes: int) -> int: ...
    def _overlay(self, offset: int, fd: int, file_offset: int, nbytes: int) -> None: ...
    def advise(
        self,
        advice: Literal["willneed", "sequential", "random", "dontneed", "hugepage", "nohugepage"],
    ) -> None: ...
    def fileno(self) -> int: ...
    def _pages(
        self, offset: int, nbytes: int, nodes: bool = False
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int16] | None]: ...
    def _lock(self, how: Lock, *, asked: Lock | None = None) -> Lock: ...
    def close(self) -> None: ...
    def _check_idle(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None: ...
