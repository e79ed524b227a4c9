"""unimem: the memory layer for LLM inference.

Weights, scratch and history on placed blocks and bump-allocated tapes; KV caches whose addresses
never change; zero-copy GGUF. The engine that drives ggml over this memory is `unimem.engine`.
"""

import sys

if sys.platform != "linux":
    raise ImportError(f"unimem runs on Linux only, and this is {sys.platform}")

from unimem._core import status as _status
from unimem._core.block import Block
from unimem._core.grid import Cell, Grid
from unimem._core.library import get_include, get_library
from unimem._core.tape import Tape
from unimem.accounting.measure import Measured, measure
from unimem.accounting.report import Report, report
from unimem.base.distributions import warn_of_namesake as _warn_of_namesake
from unimem.buffers.buffer_plan import BufferPlan, BufferUse
from unimem.buffers.decode_buffers import DecodeBuffers, ForwardScratch
from unimem.errors import (
    CacheFull,
    CapacityError,
    ClosedError,
    FormatError,
    FrozenError,
    GGUFError,
    GridFull,
    PlacementError,
    PlacementWarning,
    SafetensorsError,
    SnapshotError,
    TapeFull,
)
from unimem.governor import Governor
from unimem.kv.cache.cache import KVCache
from unimem.kv.layer_specs import LayerKV, LayerState
from unimem.kv.paged import PagedKVCache, Sequence
from unimem.kv.rotate_heads import rotate_heads
from unimem.kv.scratchpad import PagedScratchpad, Scratchpad
from unimem.kv.store.store import KVStore
from unimem.layout import Layout, Stat
from unimem.models.dims import ModelDims
from unimem.planning.plan import plan
from unimem.planning.result import Plan
from unimem.staging.stage import Stage, stage
from unimem.system.doctor import Machine, doctor
from unimem.system.placement import Placement, PlacementOptions
from unimem.weights.opened import Weights, open_weights
from unimem.weights.repack.repack import repack
from unimem.weights.repack.repacked import Repacked
from unimem.weights.tensors import StreamedTensor, Tensor

__all__ = [
    "Block",
    "BufferPlan",
    "BufferUse",
    "CacheFull",
    "CapacityError",
    "Cell",
    "ClosedError",
    "DecodeBuffers",
    "FormatError",
    "ForwardScratch",
    "FrozenError",
    "GGUFError",
    "Governor",
    "Grid",
    "GridFull",
    "KVCache",
    "KVStore",
    "LayerKV",
    "LayerState",
    "Layout",
    "Machine",
    "Measured",
    "ModelDims",
    "PagedKVCache",
    "PagedScratchpad",
    "Placement",
    "PlacementError",
    "PlacementOptions",
    "PlacementWarning",
    "Plan",
    "Repacked",
    "Report",
    "SafetensorsError",
    "Scratchpad",
    "Sequence",
    "SnapshotError",
    "Stage",
    "Stat",
    "StreamedTensor",
    "Tape",
    "TapeFull",
    "Tensor",
    "Weights",
    "doctor",
    "get_include",
    "get_library",
    "measure",
    "open_weights",
    "plan",
    "repack",
    "report",
    "rotate_heads",
    "stage",
]

__version__ = _status.VERSION
_warn_of_namesake()
