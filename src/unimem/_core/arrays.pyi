from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

def as_dtype(
    dtype: object, among: Collection[str] | None = None, what: str = "dtype"
) -> np.dtype[Any]: ...
def checked_size(n: int, what: str, least: int = 0) -> int: ...
def array_within(
    name: str,
    base: int,
    nbytes: int,
    offset: int,
    shape: int | tuple[int, ...] | None,
    dtype: DTypeLike,
) -> tuple[tuple[int, ...], np.dtype[Any]]: ...
