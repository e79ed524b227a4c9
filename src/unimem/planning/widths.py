"""The widths of a model's graph: the values that its matrices make of one token."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from unimem.models.dims import ArchMetadata, ModelContents, ModelDims
from unimem.models.fields import MetadataFields

_BLOCK = re.compile(r"(.*blk\.\d+)\.")


class Widths(NamedTuple):
    """Values of one token in the graph of a model.

    Attributes
    ----------
    hidden : int
        Between blocks.
    block : int
        The results of all matrices of a block, of the widest.
    beside : int
        The results of the matrices outside blocks, without the logits.
    heads, keys, index_heads : int
        Heads of queries, the values of all of them, and the heads of an index of keys; of the
        layer with the most.
    streams : int
        Copies of the values between blocks (``hyper_connection.count``).
    """

    hidden: int
    block: int
    beside: int = 0
    heads: int = 0
    keys: int = 0
    index_heads: int = 0
    streams: int = 0


def widths_of_dims(dims: ModelDims) -> Widths:
    """Return the widths of a dense model."""
    block = dims.qkv_size + 2 * dims.hidden_size + 2 * dims.intermediate_size
    return Widths(dims.hidden_size, block, 0, dims.num_attention_heads, dims.q_size)


def widths_of(weights: ModelContents) -> Widths | None:
    """Return the widths of a GGUF file of any architecture; None if it does not say them."""
    arch = str(weights.metadata.get("general.architecture"))
    fields = MetadataFields(ArchMetadata(weights.metadata, arch), arch)
    with suppress(ValueError, LookupError):
        heads = max(fields.listed("attention.head_count") or [0])
        heads = heads or fields.number("attention.head_count") or 0
        used = fields.number("expert_used_count") or 1
        blocks, beside = Counter[str](), 0
        for name, tensor in weights.tensors.items():
            width = _width(name, tensor.ne, used)
            if found := _BLOCK.match(name):
                blocks[found[1]] += width
            elif name not in ("token_embd.weight", "output.weight"):
                beside += width
        return Widths(
            fields.number("embedding_length") or weights.tensors["token_embd.weight"].ne[0],
            max(blocks.values(), default=0),
            beside,
            heads,
            heads * fields.head_size() if heads else 0,
            fields.number("attention.indexer.head_count") or 0,
            fields.number("hyper_connection.count") or 0,
        )
    return None


def _width(name: str, ne: tuple[int, ...], used: int) -> int:
    """Return the values that one tensor makes of a token; `used` experts count."""
    if len(ne) < 2:
        return 0
    if "_embd" in name or name == "token_types.weight":  # a row of it
        return ne[0]
    if len(ne) == 2:
        return ne[1]
    if "exps" in name:
        return ne[1] * min(used, ne[2])
    # A convolution lays its inputs out; other matrices are one for each head.
    return ne[0] * ne[1] + ne[2] if "conv" in name else ne[1] * ne[2]
