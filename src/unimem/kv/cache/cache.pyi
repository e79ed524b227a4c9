from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import numpy.typing as npt

from unimem._core.block import Block
from unimem._core.foreign import AnyArray
from unimem._core.tape import Tape
from unimem.kv.cache.rows import ModelDims
from unimem.kv.layer_specs import Layer
from unimem.kv.types import DType
from unimem.system.placement import Pages, Placement, PlacementOptions

_ArrayT = TypeVar("_ArrayT", bound=AnyArray)

class KVCache:
    name: str
    dtype: DType
    v_dtype: DType
    order: Literal["token", "head"]
    window: int | None
    budget_bytes: int | None
    grow: bool
    rotate: bool
    tape: Tape | None
    block: Block | None
    # A OneKindCache or a LayeredKVCache.
    _body: Any
    @classmethod
    def for_dims(
        cls, dims: ModelDims, *, max_seq_len: int | None = None, **options: Any
    ) -> Self: ...
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
    def copy(self) -> Self: ...
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
    ) -> Self: ...
    def verify(self) -> None: ...
    def address(self, layer: int, part: Literal["k", "v"]) -> int: ...
    def row_of(self, position: int, layer: int = 0) -> int: ...
    def reserve(self, n: int) -> int: ...
    def commit(self, n: int) -> None: ...
    def rollback(self) -> None: ...
    def crop(self, n: int) -> None: ...
    def trim_to(self, n: int, *, keep_first: int = 0) -> bool: ...
    def clear(self) -> None: ...
    def state(self, layer: int) -> npt.NDArray[Any]: ...
    def checkpoint(self) -> int: ...
    @property
    def checkpoints(self) -> tuple[int, ...]: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    @property
    def is_empty(self) -> bool: ...
    @property
    def memory_usage_bytes(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def layers(self) -> tuple[Layer, ...]: ...
    @property
    def n_growths(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def v_row_bytes(self) -> int: ...
    def warm(self, threads: int | None = None) -> None: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def granted(self) -> Placement: ...
    @property
    def closed(self) -> bool: ...
    def give_back(self) -> int: ...
    def _freeze(self, frozen: bool) -> None: ...
    @property
    def capacity_bytes(self) -> int: ...
    def close(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None: ...
