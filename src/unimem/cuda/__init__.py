"""unimem on NVIDIA GPUs: the same classes over device memory, with CuPy arrays as views.

Needs CuPy (the extra ``cuda12`` or ``cuda13``) and a device. Features that are False in
`CAPABILITIES` raise NotImplementedError.
"""

from unimem.backends import cuda_driver as _gpu

_gpu.require()

# ruff: noqa: E402 - the imports below need a device
from unimem.cuda.block import CAPABILITIES, Block, set_budget
from unimem.cuda.buffers import DecodeBuffers
from unimem.cuda.grid import Grid
from unimem.cuda.kv import KVCache
from unimem.cuda.layout import Layout
from unimem.cuda.scratchpad import Scratchpad
from unimem.cuda.tape import Tape

__all__ = [
    "CAPABILITIES",
    "Block",
    "DecodeBuffers",
    "Grid",
    "KVCache",
    "Layout",
    "Scratchpad",
    "Tape",
    "set_budget",
]
