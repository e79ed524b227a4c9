"""Small GGUF files of random bytes whose tensors are streamed, and the check of what is read."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from support.files import gguf_files as gf
from unimem.weights.stream.stream import Stream

# The bytes of a block of values of a type, and how many it has.
_BLOCKS = {gf.F32: (4, 1), gf.F16: (2, 1), gf.I8: (1, 1), gf.Q8_0: (34, 32)}
Tensors = dict[str, tuple[tuple[int, ...], int]]


def write(path: Path, tensors: Tensors, n_used: int | None = None, arch: str = "none") -> Path:
    """Write tensors of these dimensions (ggml's order) and types; `n_used` experts for a token."""
    entries = [gf.kv("general.architecture", gf.STRING, gf.string(arch))]
    if n_used is not None:
        entries.append(gf.kv(f"{arch}.expert_used_count", gf.UINT32, gf.u32(n_used)))
    rows, data = [], bytearray()
    for i, (name, (ne, kind)) in enumerate(tensors.items()):
        nbytes, n = _BLOCKS[kind]
        rows.append(gf.tensor(name, ne, kind, len(data)))
        data += gf.random_bytes(prod(ne) // n * nbytes, seed=i).tobytes()
        data += bytes(-len(data) % 32)
    raw, _ = gf.join(gf.head(len(rows), len(entries)), *entries, *rows)
    path.write_bytes(raw + bytes(-len(raw) % 32) + data)
    return path


def mixture(n_layers: int = 3, n: int = 8, *, size: int = 96, other: bool = False) -> Tensors:
    """A mixture of n experts a layer; with `other`, the last layer has experts of another type."""
    found: Tensors = {"token_embd.weight": ((64, 10), gf.F32)}
    for i in range(n_layers):
        kind = gf.F16 if other and i == n_layers - 1 else gf.Q8_0
        found[f"blk.{i}.attn_q.weight"] = (64, 64), gf.F16
        found[f"blk.{i}.ffn_gate_exps.weight"] = (64, size, n), gf.Q8_0
        found[f"blk.{i}.ffn_gate_inp.weight"] = (64, n), gf.F32
        found[f"blk.{i}.ffn_up_exps.weight"] = (64, size, n), gf.Q8_0
        found[f"blk.{i}.ffn_up_shexp.weight"] = (64, size), gf.Q8_0
        found[f"blk.{i}.ffn_down_exps.weight"] = (size, 64, n), kind
    return found | {"output_norm.weight": ((64,), gf.F32)}


def with_biases(n_layers: int = 2, n: int = 4) -> Tensors:
    """A mixture with fused matrices and biases of the experts, and a scale for each."""
    found: Tensors = {}
    for i in range(n_layers):
        found[f"blk.{i}.ffn_gate_up_exps.weight"] = (32, 48, n), gf.Q8_0
        found[f"blk.{i}.ffn_gate_up_exps.bias"] = (48, n), gf.F32
        found[f"blk.{i}.ffn_down_exps.weight"] = (32, 32, n), gf.Q8_0
        found[f"blk.{i}.ffn_down_exps.bias"] = (32, n), gf.F32
        found[f"blk.{i}.ffn_down_exps.scale"] = (n,), gf.F32
    return found | {"output.weight": ((32, 10), gf.F16)}


def blocks(n_layers: int = 8) -> Tensors:
    """A model without experts."""
    found: Tensors = {"token_embd.weight": ((64, 10), gf.F32)}
    for i in range(n_layers):
        found[f"blk.{i}.attn_norm.weight"] = (64,), gf.F32
        found[f"blk.{i}.attn_q.weight"] = (64, 64), gf.Q8_0
        found[f"blk.{i}.ffn_up.weight"] = (64, 96), gf.F16
    return found | {"output.weight": ((64, 10), gf.F16)}


def streamed(weights: um.Weights) -> dict[str, um.StreamedTensor]:
    return {name: t for name, t in weights.items() if isinstance(t, um.StreamedTensor)}


def stream(weights: um.Weights) -> Stream:
    assert weights.stream is not None
    return weights.stream


def tensor(weights: um.Weights, name: str) -> um.StreamedTensor:
    found = weights[name]
    assert isinstance(found, um.StreamedTensor), name
    return found


def in_file(tensor: um.Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor in its file; of a streamed one, a row for each piece."""
    n = tensor.n_pieces if isinstance(tensor, um.StreamedTensor) else 1
    data = np.fromfile(tensor.file, np.uint8, tensor.nbytes, offset=tensor.offset)
    return data.reshape(n, -1)


def check(tensor: um.StreamedTensor, ids: Any) -> NDArray[np.int32]:
    """Ask for pieces, and compare the slots with the file; return them."""
    slots = tensor.ensure(ids)
    pool, data = tensor.pool, in_file(tensor)
    for piece, slot in zip(np.ravel(ids), np.ravel(slots), strict=True):
        assert pool[slot].tobytes() == data[piece].tobytes(), (tensor.name, piece, slot)
    return slots
