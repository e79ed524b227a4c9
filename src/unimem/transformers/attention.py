"""Attention for models whose queries share keys, without copies of the keys.

Torch's attention expects one query head for each head of keys. For grouped queries transformers
copies the keys for each query head (`repeat_kv`), or lets torch do so (``enable_gqa=True``), which
is slow on a CPU. But the queries of a group are equivalent to queries of one head at several
places: [batch, heads, n, dim] is also [batch, kv_heads, group * n, dim]. So a decode step reads
each key once.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["NAME", "packed_attention", "register"]

NAME = "unimem"
# More tokens are a prompt, for which torch's own kernels are best.
_MOST_TOKENS = 16
# Options that the attention of transformers handles, or refuses.
_OTHERS = ("position_bias", "softcap", "cache")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' ``"sdpa"``, with a few tokens of grouped queries packed.

    The arguments are those of transformers: query ``[batch, heads, n, head_dim]``, key and value
    ``[batch, kv_heads, tokens, head_dim]``, mask ``[batch, 1, n, tokens]`` or None. The output is
    ``[batch, n, heads, head_dim]``.
    """
    batch, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    mask = attention_mask
    # Several tokens without a mask are causal, which packed queries cannot express.
    packs = kv_heads < heads and (n == 1 or (n <= _MOST_TOKENS and mask is not None))
    packs = packs and (mask is None or mask.shape[1] == 1)
    if not packs or any(kwargs.get(name) is not None for name in _OTHERS):
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return output, None
    group = heads // kv_heads
    if mask is not None:
        # [batch, 1, n, tokens]: the same for each query head of a group.
        shape = (mask.shape[0], 1, group, n, mask.shape[-1])
        mask = mask[:, :, None].expand(shape).reshape(mask.shape[0], 1, group * n, -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, group * n, dim),
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
    )
    output = output.reshape(batch, heads, n, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make ``attn_implementation="unimem"`` known to transformers."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
