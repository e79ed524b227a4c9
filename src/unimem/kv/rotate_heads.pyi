from typing import Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from unimem._core.foreign import AnyArray

_ArrayT = TypeVar("_ArrayT", bound=AnyArray)

@overload
def rotate_heads(
    x: AnyArray, part: Literal["k", "v"] = "k", *, out: None = None
) -> NDArray[np.float32]: ...
@overload
def rotate_heads(x: AnyArray, part: Literal["k", "v"] = "k", *, out: _ArrayT) -> _ArrayT: ...
