"""Attention for models whose queries share keys, over keys that are read where they lie.

Torch's attention knows one query head for each head of keys. For grouped queries transformers
either copies the keys once for each query head (`repeat_kv`), or asks torch to
(``enable_gqa=True``), which is slow on a CPU. But the queries of a group are as good as queries of
one head at several places: [batch, heads, n, dim] is also [batch, kv_heads, group * n, dim]. So one
decode step reads each key once, and copies none.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["NAME", "packed_attention", "register"]

NAME = "unimem"
# More tokens at once are a prompt, for which torch's own kernels are at their best.
_MOST_TOKENS = 16
# What only the attention of transformers knows how to do, or to refuse.
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
    """Attend as transformers' ``"sdpa"`` does; a few tokens of grouped queries packed.

    Parameters
    ----------
    module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        As transformers gives them: query ``[batch, heads, n, head_dim]``, key and value
        ``[batch, kv_heads, tokens, head_dim]``, mask ``[batch, 1, n, tokens]`` or None.

    Returns
    -------
    output : torch.Tensor
        ``[batch, n, heads, head_dim]``.
    weights : None
    """
    batch, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    mask = attention_mask
    # Without a mask several tokens are causal, which packed ones cannot say.
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
        # [batch, 1, n, tokens]: the same of each query head of a group.
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
