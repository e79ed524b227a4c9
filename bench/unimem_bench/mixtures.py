"""Model files of mixtures of experts, larger than the memory that streaming leaves them.

An expert has the bytes of one of Qwen3-30B-A3B: 2.65 MB, in three parts. There are 12 layers of 64
experts, and a token uses 8 of them. All weights are random but those that decide which experts
a token uses, its *routing*:

- ``uniform``: the routers are random as well, so that all experts are used alike;
- ``skewed``: some experts are used much more than others, as Zipf's law has it;
- ``trained``: the routing of a small mixture that was trained here. Its matrices fill a corner of
  the large ones; zeros are around them, so the large model computes what the small one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from unimem_bench.files import made_once
from unimem_bench.models import ModelShape, TensorSpec, write_random
from unimem_bench.trained_mixture import trained_mixture

Routing = Literal["uniform", "skewed", "trained"]

SHAPE = ModelShape(
    hidden=1024, layers=12, heads=16, kv_heads=4, inner=1536, vocab=1024, ctx=2048, head_dim=64,
    experts=64, used=8,
)  # fmt: skip
QUICK_SHAPE = replace(SHAPE, inner=256)
BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: a float16, and 16 bytes with two values each
ONES = 0x99  # two values of 1 times the block's scale
# The routers' share of Zipf's law: with the normal noise of a token, experts of rank r are used
# about as r to the power of -0.9.
ZIPF = 0.7
FIRST_TOKEN = 300  # those before are bytes, and marks


class Mixture(NamedTuple):
    """A mixture's file, and tokens to compute."""

    path: Path
    tokens: NDArray[np.int64]
    expert_bytes: int  # of all routed experts


def write_mixture(folder: Path, routing: Routing, *, quick: bool = False) -> Mixture:
    """Write a mixture into a folder, unless it is there: 2 GB, or a quick one of 340 MB.

    ValueError for an unknown routing; NotMeasured if gguf is not installed, if the disk has no
    room, or if torch is missing for the trained one.
    """
    if routing not in get_args(Routing):
        raise ValueError(f"routing: expected one of {get_args(Routing)}, got {routing!r}")
    shape = QUICK_SHAPE if quick else SHAPE
    tokens = np.random.default_rng(4).integers(FIRST_TOKEN, shape.vocab, 1 << 16)
    change: Callable[[TensorSpec, NDArray[Any]], None] = lambda tensor, content: None  # noqa: E731
    if routing == "skewed":
        change = partial(_skew, np.random.default_rng(5))
    elif routing == "trained":
        small = trained_mixture(folder, quick=quick)
        tokens = small["tokens"]
        change = partial(_embed, small)
    name = f"mixture-{routing}{'-quick' * quick}.gguf"
    path = made_once(folder / name, lambda path: write_random(path, shape, "q4_0", change))
    n_values = 3 * shape.layers * shape.experts * shape.inner * shape.hidden
    return Mixture(path, tokens, n_values // BLOCK * BLOCK_BYTES)


def _blocks(tensor: TensorSpec, content: NDArray[Any]) -> NDArray[np.uint8]:
    """View a tensor of Q4_0 by its dimensions, with blocks in place of the last."""
    *rows, n_values = tensor.shape
    return content.reshape(*rows, n_values // BLOCK, BLOCK_BYTES)


def _skew(rng: np.random.Generator, tensor: TensorSpec, content: NDArray[Any]) -> None:
    """Give all hidden states a constant first block, from which routers prefer some experts."""
    match tensor.name.split(".")[-2]:
        case "token_embd":
            blocks = _blocks(tensor, content)[:, 0]
            blocks[:, :2], blocks[:, 2:] = np.frombuffer(np.float16(1).tobytes(), np.uint8), ONES
        case "attn_output" | "ffn_down_exps":  # nothing is added to it
            _blocks(tensor, content)[..., :BLOCK, :, :2] = 0
        case "ffn_norm":
            content[:BLOCK] = 1
        case "ffn_gate_inp":
            ranks = rng.permutation(len(content)) + 1.0
            content[:, :BLOCK] = -ZIPF * np.log(ranks)[:, None] / BLOCK


def _embed(small: dict[str, NDArray[Any]], tensor: TensorSpec, content: NDArray[Any]) -> None:
    """Put a tensor of the small mixture into the large one's, which is zero elsewhere."""
    found = small.get(tensor.name.removesuffix(".weight"))
    if found is None:  # the output, which decides nothing
        return
    if len(tensor.shape) == 1:
        # The mean of squares is that of the small state and of zeros.
        is_state = tensor.shape[0] != len(found)
        content[: len(found)] = found / (tensor.shape[0] / len(found)) ** 0.5 if is_state else found
    elif tensor.type.name == "F32":
        content[:] = 0
        content[tuple(map(slice, found.shape))] = found
    else:
        quants = import_module("gguf").quants
        blocks = _blocks(tensor, content)
        blocks[..., :2] = 0  # their scale
        made = quants.quantize(np.ascontiguousarray(found), tensor.type)
        made = made.reshape(*found.shape[:-1], -1, BLOCK_BYTES)
        blocks[tuple(map(slice, made.shape))] = made
