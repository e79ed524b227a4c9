from typing import Any

from unimem.kv.cache.one_kind import OneKindCache
from unimem.kv.cache.spec import LayersSpec
from unimem.kv.layer_specs import Layer
from unimem.kv.states import LayerStates

class LayeredKVCache:
    # For unimem.kv.snapshot and unimem.kv.store.copy_rows.
    _snapshot: Any
    _first: int
    _parts: tuple[OneKindCache, ...]
    _states: LayerStates | None
    batch: int
    layers: tuple[Layer, ...]
    n_layers: int
    rotate: bool
    def __init__(self, wanted: LayersSpec) -> None: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def next_position(self) -> int: ...
    def crop(self, n: int) -> None: ...
    def clear(self) -> None: ...
    def _finish_restore(self, next_position: int, n: int) -> None: ...
