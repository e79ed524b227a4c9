from typing import Literal

node_address: int
"""Of the function, as ``ggml_map_custom1`` takes it; its `userdata` is the size of a block."""

def rotation_block(head_dim: int, part: Literal["k", "v"]) -> int: ...
