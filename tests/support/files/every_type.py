"""A GGUF file with a value and a tensor of every type, written by gguf-py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.files import gguf_files as gf

gguf = pytest.importorskip("gguf", reason="gguf (extra test) is the other side of the comparison")
T = gguf.GGUFValueType
SCALARS: dict[str, tuple[Any, Any]] = {
    "u8": (200, T.UINT8),
    "i8": (-100, T.INT8),
    "u16": (60000, T.UINT16),
    "i16": (-30000, T.INT16),
    "u32": (4_000_000_000, T.UINT32),
    "i32": (-2_000_000_000, T.INT32),
    "f32": (0.1, T.FLOAT32),
    "true": (True, T.BOOL),
    "false": (False, T.BOOL),
    "text": ("größer than ASCII: \U0001f600", T.STRING),
    "empty": ("", T.STRING),
    "u64": (2**64 - 1, T.UINT64),
    "i64": (-(2**63), T.INT64),
    "f64": (0.1, T.FLOAT64),
}
ARRAYS: dict[str, tuple[Any, Any]] = {
    f"{key}[]": ([value, value], kind) for key, (value, kind) in SCALARS.items()
}
METADATA = SCALARS | ARRAYS | {"nested": ([[1, 2], [3], [4, 5, 6]], T.ARRAY)}


def blocks(name: str, n_values: int, seed: int) -> np.ndarray[Any, Any]:
    """Rows of random bytes of a type, three of them."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    row_bytes = n_values // block_values * block_bytes
    return gf.random_bytes(3 * row_bytes, seed).reshape(3, row_bytes)


# gguf-py has 40 bytes for a block of Q8_1; ggml, whose format it is, has 36.
TENSOR_TYPES = [kind for kind in gguf.GGMLQuantizationType if kind.name != "Q8_1"]


def write_every_type(path: Path) -> None:
    """A file by gguf-py with every type of metadata and of tensor."""
    tensors: dict[str, tuple[Any, Any]] = {
        f"t.{kind.name}": (blocks(kind.name, 512, kind), kind)
        for kind in TENSOR_TYPES
        if not kind.name.startswith(("F", "I8", "I16", "I32", "I64")) or kind.name == "BF16"
    }
    for name in ("float32", "float16", "float64", "int8", "int16", "int32", "int64"):
        kind = gguf.GGMLQuantizationType[name.upper().replace("FLOAT", "F").replace("INT", "I")]
        tensors[f"t.{kind.name}"] = (np.arange(30, dtype=name).reshape(5, 3, 2, 1), kind)
    tensors["scalar"] = (np.float32(7).reshape(()), gguf.GGMLQuantizationType.F32)
    gf.write_with_gguf_py(path, METADATA, tensors)


M = gf.MARK


def tensors(*rows: tuple[str, int, int, bool]) -> tuple[bytes, int | None]:
    """F32 tensors of a name, a length and an offset; the last says that its offset is marked."""
    parts: list[gf.Part] = []
    for name, n, offset, marked in rows:
        *before, last = gf.tensor(name, (n,), gf.F32, offset)
        parts += [*before, *([M] if marked else []), last]
    return gf.with_data(gf.head(len(rows), 0), *parts)
