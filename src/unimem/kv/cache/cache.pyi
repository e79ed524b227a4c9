from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import numpy.typing as npt

from unimem._core.foreign import AnyArray
from unimem._core.tape import Tape
from unimem.kv.cache.storage import KVMemory
from unimem.kv.layer_specs import Layer
from unimem.kv.states import LayerStates
from unimem.system.placement import Pages, PlacementOptions

_ArrayT = TypeVar("_ArrayT", bound=AnyArray)

def set_mixed(kind: type[KVCache]) -> None: ...

class KVCache(KVMemory):
    @overload
    def __new__(
        cls,
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
    ) -> Self: ...
    @overload
    def __new__(
        cls,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        batch: int = 1,
        dtype: npt.DTypeLike = "f16",
        k_dtype: npt.DTypeLike | None = None,
        v_dtype: npt.DTypeLike | None = None,
        v_head_dim: int | None = None,
        order: Literal["token", "head"] = "token",
        window: int | None = None,
        spare_rows: int = 0,
        budget_bytes: int | None = None,
        grow: bool = False,
        rotate: bool = False,
        tape: Tape | None = None,
        name: str | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> Self: ...
    @overload
    @staticmethod
    def storage_bytes(
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        *,
        batch: int = 1,
        dtype: npt.DTypeLike = "f16",
        order: Literal["token", "head"] = "token",
        k_dtype: npt.DTypeLike | None = None,
        v_dtype: npt.DTypeLike | None = None,
        v_head_dim: int | None = None,
    ) -> int: ...
    @overload
    @staticmethod
    def storage_bytes(
        *,
        layers: Sequence[Layer],
        max_seq_len: int,
        batch: int = 1,
        dtype: npt.DTypeLike = "f16",
        order: Literal["token", "head"] = "token",
        spare_rows: int = 0,
        checkpoints: int = 0,
        pages: Pages = "auto",
    ) -> int: ...
    def append(self, layer: int, k: AnyArray, v: AnyArray) -> None: ...
    def append_all(self, k: AnyArray, v: AnyArray) -> None: ...
    @overload
    def layer(
        self, i: int, dtype: npt.DTypeLike | None = None, out: None = None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
    @overload
    def layer(
        self, i: int, dtype: npt.DTypeLike, out: tuple[_ArrayT, _ArrayT]
    ) -> tuple[_ArrayT, _ArrayT]: ...
    def enforce_memory_limit(self, max_bytes: int) -> bool: ...
    def copy(self) -> KVCache: ...
    def save(
        self,
        path: str | PathLike[str],
        *,
        tokens: Sequence[int] | npt.NDArray[Any] | None = None,
        model: str | None = None,
    ) -> None: ...
    @classmethod
    def restore(
        cls,
        path: str | PathLike[str],
        *,
        mode: Literal["map", "copy"] = "map",
        tokens: Sequence[int] | npt.NDArray[Any] | None = None,
        model: str | None = None,
        verify: bool | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> KVCache: ...
    def verify(self) -> None: ...
    # For unimem.transformers.
    def _append_token(self, layer: int, k: int, v: int) -> int: ...
    def _all_rows(self, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
    # For unimem.kv.snapshot.
    _snapshot: Any
    @staticmethod
    def _of_layers(
        layers: tuple[Layer, ...],
        parts: list[Any],
        max_seq_len: int,
        states: LayerStates | None = None,
    ) -> KVCache: ...
    @classmethod
    def _mapped(
        cls,
        fields: dict[str, Any],
        fd: int,
        path: str,
        offsets: list[int],
        n: int,
        next_position: int,
    ) -> Self: ...
