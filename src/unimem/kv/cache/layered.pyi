from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeVar, Unpack, overload

import numpy.typing as npt

from unimem._core.foreign import AnyArray
from unimem.kv.cache.parts import KVParts
from unimem.kv.layer_specs import Layer
from unimem.system.placement import PlacementOptions

_ArrayT = TypeVar("_ArrayT", bound=AnyArray)

class MixedKVCache(KVParts):
    def __init__(
        self,
        *,
        layers: Sequence[Layer],
        max_seq_len: int,
        batch: int = 1,
        dtype: npt.DTypeLike = "f16",
        order: Literal["token", "head"] = "token",
        spare_rows: int = 0,
        budget_bytes: int | None = None,
        grow: bool = False,
        rotate: bool = False,
        checkpoints: int = 0,
        checkpoint_every: int | None = None,
        name: str | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None: ...
    def append(self, layer: int, k: AnyArray, v: AnyArray) -> None: ...
    def append_all(
        self, k: AnyArray | Sequence[AnyArray], v: AnyArray | Sequence[AnyArray]
    ) -> None: ...
    def reserve(self, n: int) -> tuple[int | None, ...]: ...  # type: ignore[override]
    def commit(self, n: int) -> None: ...
    def rollback(self) -> None: ...
    def crop(self, n: int) -> None: ...
    def trim_to(self, n: int, *, keep_first: int = 0) -> bool: ...
    def clear(self) -> None: ...
    def enforce_memory_limit(self, max_bytes: int) -> bool: ...
    def give_back(self) -> int: ...
    @overload
    def layer(
        self, i: int, dtype: npt.DTypeLike | None = None, out: None = None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
    @overload
    def layer(
        self, i: int, dtype: npt.DTypeLike, out: tuple[_ArrayT, _ArrayT]
    ) -> tuple[_ArrayT, _ArrayT]: ...
    def address(self, layer: int, part: Literal["k", "v"]) -> int: ...
    def row_of(self, position: int, layer: int = 0) -> int: ...
    def copy(self) -> MixedKVCache: ...
    def save(
        self,
        path: str | PathLike[str],
        *,
        tokens: Sequence[int] | npt.NDArray[Any] | None = None,
        model: str | None = None,
    ) -> None: ...
    def verify(self) -> None: ...
