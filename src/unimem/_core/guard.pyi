from typing import Any

from numpy.typing import NDArray

def copy(
    out: NDArray[Any] | bytearray | memoryview, address: int, nbytes: int, what: str
) -> None: ...
