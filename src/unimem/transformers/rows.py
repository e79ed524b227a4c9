"""Keys and values that torch's attention reads once for all queries of a group.

With ``enable_gqa=True``, which transformers gives for a token without a mask, torch's kernel on a
CPU computes each query head alone. But the queries of a group are equivalent to queries of one head
at several places: [batch, heads, 1, dim] is also [batch, kv_heads, group, dim]. With torch 2.13 and
AVX-512, products of bfloat16 with one query take longer than with two, and those with one query
less than a multiple of four longer than with that multiple. So a query is computed twice there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class Rows(torch.Tensor):  # type: ignore[misc]
    """Keys of a cache: a tensor, but for torch's attention of one token.

    What is computed from it are plain tensors, and its copies are.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def attend_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Attend with one token, ``[batch, heads, 1, dim]``, and a mask ``[batch, 1, 1, tokens]``."""
    batch, heads, _, dim = query.shape
    group = heads // key.shape[1]
    packed = query.reshape(batch, key.shape[1], group, dim)
    if group % 4 == 3 or (group == 1 and query.dtype == torch.bfloat16):
        packed = torch.cat([packed, packed[:, :, :1]], 2)
    output = scaled_dot_product_attention(packed, key, value, mask, dropout, scale=scale)
    return output[:, :, :group].reshape(output.shape[0], heads, 1, -1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend as torch does, by `attend_token` where it can."""
    shape, kv_heads = query.shape, key.shape[1]
    fits = shape[1] % kv_heads == 0 if enable_gqa else shape[1] == kv_heads
    if fits and query.dim() == 4 and shape[2] == 1 and attn_mask is None and not is_causal:
        return attend_token(query, key, value, None, dropout_p, scale)
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
