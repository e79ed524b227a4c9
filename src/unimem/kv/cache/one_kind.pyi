from typing import Any

import numpy.typing as npt

from unimem.kv.cache.spec import KVSpec
from unimem.kv.cache.storage import KVStorage

class OneKindCache(KVStorage):
    # For unimem.kv.snapshot.
    _snapshot: Any
    def __init__(self, wanted: KVSpec) -> None: ...
    def layer(self, i: int, dtype: npt.DTypeLike | None = None, out: Any = None) -> Any: ...
    # For unimem.transformers.
    def _append_token(self, layer: int, k: int, v: int) -> int: ...
    def _all_rows(self, i: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
