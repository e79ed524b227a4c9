from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem.kv.layer_specs import LayerState
from unimem.system.placement import PlacementOptions

class LayerStates:
    states: tuple[LayerState, ...]
    name: str
    block: Block
    batch: int
    n_checkpoints: int
    every: int
    state_bytes: int
    def __init__(
        self,
        states: tuple[LayerState, ...],
        batch: int,
        checkpoints: int,
        every: int | None,
        name: str,
        placement: PlacementOptions | dict[str, Any],
    ) -> None: ...
    @staticmethod
    def storage_bytes(states: Sequence[LayerState], batch: int, checkpoints: int) -> int: ...
    @property
    def positions(self) -> list[int]: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def warm(self, threads: int | None = None) -> None: ...
    # For unimem.kv.snapshot.
    def _slot(self, slot: int) -> NDArray[np.uint8]: ...
    def _slots(self) -> list[int]: ...
    def _adopt(self, positions: Sequence[int]) -> None: ...
