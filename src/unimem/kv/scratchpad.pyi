from types import TracebackType
from typing import Any, Generic, Self, SupportsIndex, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from unimem._core.foreign import AnyArray
from unimem._core.tape import DeviceTape, Tape
from unimem.system.placement import PlacementOptions

_TapeT = TypeVar("_TapeT")

class _Rows(Generic[_TapeT]):
    tape: _TapeT
    name: str
    capacity: int
    dim: int
    dtype: np.dtype[Any]
    def crop(self, n: int) -> None: ...
    def clear(self) -> None: ...
    @property
    def is_empty(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def _freeze(self, frozen: bool) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None: ...

class _HostRows(_Rows[Tape]):
    def append(self, vec: AnyArray) -> None: ...
    def append_batch(self, rows: AnyArray) -> None: ...

class Scratchpad(_HostRows):
    def __init__(
        self,
        max_seq_len: int,
        dim: int,
        dtype: npt.DTypeLike = "float32",
        *,
        tape: Tape | None = None,
        name: str | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None: ...
    def as_array(self) -> npt.NDArray[Any]: ...

class DeviceScratchpad(_Rows[DeviceTape]):
    def __init__(self, tape: DeviceTape, driver: Any, kernels: Any, *, owns_tape: bool) -> None: ...
    def _prepare(
        self, max_seq_len: int, dim: int, dtype: npt.DTypeLike, name: str | None
    ) -> tuple[int, str]: ...
    def append(self, vec: Any, *, stream: Any = None) -> None: ...
    def append_batch(self, rows: Any, *, stream: Any = None) -> None: ...
    def as_array(self) -> Any: ...

class PagedScratchpad(_HostRows):
    block_tokens: int
    def __init__(
        self,
        max_tokens: int,
        dim: int,
        dtype: npt.DTypeLike = "float32",
        *,
        block_tokens: int = 16,
        name: str | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None: ...
    def get_token(self, i: SupportsIndex) -> npt.NDArray[Any]: ...
    def as_array(self) -> npt.NDArray[Any]: ...
    @property
    def block_table(self) -> npt.NDArray[np.int32]: ...
    @property
    def n_blocks(self) -> int: ...
    @property
    def n_blocks_in_use(self) -> int: ...
