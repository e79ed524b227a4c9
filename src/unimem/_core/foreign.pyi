from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
from typing_extensions import Buffer

class SupportsDLPack(Protocol):
    def __dlpack__(self, *, stream: None = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

# What calls take that copy from it, or to it.
AnyArray: TypeAlias = npt.NDArray[Any] | SupportsDLPack | Buffer
