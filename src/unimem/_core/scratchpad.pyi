from types import TracebackType
from typing import Any, Self, SupportsIndex, Unpack

import numpy as np
import numpy.typing as npt

from unimem._core.tape import Tape
from unimem.placement import PlacementOptions

class _Rows:
    tape: Tape
    name: str
    capacity: int
    dim: int
    dtype: np.dtype[Any]
    def append(self, vec: npt.NDArray[Any]) -> None: ...
    def append_batch(self, rows: npt.NDArray[Any]) -> None: ...
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

class Scratchpad(_Rows):
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

class PagedScratchpad(_Rows):
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
