from typing import Literal

node_address: int
"""Address of the function for ``ggml_map_custom1``; its `userdata` is the size of a block."""

def rotation_block(head_dim: int, part: Literal["k", "v"]) -> int: ...
