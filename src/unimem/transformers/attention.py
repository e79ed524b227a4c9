"""Attention for models whose queries share keys, without copies of the keys.

Torch's attention expects one query head for each head of keys. For grouped queries transformers
copies the keys for each query head (`repeat_kv`), or lets torch do so (``enable_gqa=True``), which
is slow on a CPU. But the queries of a group are equivalent to queries of one head at several
places: [batch, heads, n, dim] is also [batch, kv_heads, group * n, dim]. So a decode step reads
each key once.

Attention sinks and soft caps, which torch's attention lacks, are computed here as well, in pieces
whose scores fit into a processor's cache.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from unimem.transformers.rows import attend_token

NAME = "unimem"
# More tokens are a prompt, for which torch's own kernels are best.
_MOST_TOKENS = 16
_PIECE_SCORES = 1 << 20
# Arguments of transformers that do not change the result, or only by the mask.
_WITHOUT_EFFECT = frozenset(
    """
    cache_position cu_seq_lens_k cu_seq_lens_q logits_to_keep max_length_k max_length_q
    num_items_in_batch output_attentions output_hidden_states output_router_logits position_ids
    return_dict seq_idx sliding_window use_cache
""".split()
)
# Models that "sdpa" refuses only for their sinks or soft caps.
_SINKS_OR_CAPS = frozenset(
    """
    flint gemma2 gpt_oss granite_swa granitemoe_swa hy_v4 mimo_v2_flash vaultgemma
""".split()
)


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
    ``[batch, kv_heads, tokens, head_dim]``, mask ``[batch, 1, n, tokens]`` or None, `s_aux` (a sink
    of each head), `softcap`, `position_bias` and `indices` (the only tokens that each query attends
    to, ``[batch, n, any]``). The output is ``[batch, n, heads, head_dim]``.

    Raises
    ------
    NotImplementedError
        Further arguments, which could change the result.
    """
    sinks, cap, bias, indices = map(
        kwargs.pop, ("s_aux", "softcap", "position_bias", "indices"), (None,) * 4
    )
    if unknown := sorted(
        name
        for name, given in kwargs.items()
        if given is not None and given is not False and name not in _WITHOUT_EFFECT
    ):
        raise NotImplementedError(
            f"attention '{NAME}': expected arguments that it knows, got {', '.join(unknown)} from "
            f"{type(module).__name__}: model.set_attn_implementation('eager')"
        )
    batch, heads, n, dim = query.shape
    kv_heads, mask = key.shape[1], attention_mask
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = key.shape[2] == n and sinks is cap is indices is None
    mask = _causal(n, key) if mask is None and n > 1 and is_causal and not plain else mask
    if indices is not None:
        chosen = torch.zeros(batch, 1, n, key.shape[2], dtype=torch.bool, device=key.device)
        mask = _masked(mask, chosen.scatter(-1, indices.long()[:, None], True))
    if sinks is not None or cap is not None:
        if bias is not None:
            raise NotImplementedError(
                f"attention '{NAME}': expected no position_bias beside s_aux or softcap, got both "
                f"from {type(module).__name__}: model.set_attn_implementation('eager')"
            )
        scale = dim**-0.5 if scaling is None else scaling
        output = _weighed(query, key, value, mask, scale, sinks, cap, dropout)
        return output.transpose(1, 2).contiguous(), None
    packs = bias is None and (mask is None or mask.shape[1] == 1)
    if packs and n == 1:
        output = attend_token(query, key, value, mask, dropout, scaling)
        return output.transpose(1, 2).contiguous(), None
    # Several tokens without a mask are causal, which packed queries cannot express.
    if not (packs and kv_heads < heads and n <= _MOST_TOKENS and mask is not None):
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=bias,
        )
        return output, None
    # [batch, 1, n, tokens]: the same for each query head of a group.
    shape = (mask.shape[0], 1, heads // kv_heads, n, mask.shape[-1])
    mask = mask[:, :, None].expand(shape).reshape(mask.shape[0], 1, -1, mask.shape[-1])
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, -1, dim),
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
    )
    output = output.reshape(batch, heads, n, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def _causal(n: int, key: torch.Tensor) -> torch.Tensor:
    """Return the mask of the last n tokens, which Gemma 4 computes; torch's is of the first."""
    tokens = key.shape[2]
    mask = torch.ones(n, tokens, dtype=torch.bool, device=key.device)
    return mask.tril(tokens - n)[None, None]


def mask_of(
    *, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **given: Any
) -> torch.Tensor | None:
    """Return the mask of ``"sdpa"``, and one for the prompt of a cache that shows unused rows.

    There ``"sdpa"`` needs none, since torch's queries without a mask are the first tokens. Those of
    `packed_attention` are the last ones.
    """
    skips = allow_is_causal_skip and q_length in (1, kv_length)
    mask: torch.Tensor | None = sdpa_mask(
        q_length=q_length, kv_length=kv_length, allow_is_causal_skip=skips, **given
    )
    return mask


def _masked(mask: torch.Tensor | None, chosen: torch.Tensor) -> torch.Tensor:
    """Return a mask that shows the chosen tokens only."""
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _weighed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    cap: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attend with a sink of each head or capped scores; ``[batch, heads, n, head_dim]``."""
    batch, heads, n, dim = query.shape
    kv_heads, tokens = key.shape[1:3]
    of_one = batch * heads * tokens
    # A compiler takes a quotient for a constant, so a token has none.
    step = n if n == 1 or n * of_one <= _PIECE_SCORES else max(1, _PIECE_SCORES // of_one)
    made = []
    for first in range(0, n, step):
        piece = query[:, :, first : first + step].reshape(batch, kv_heads, -1, dim)
        scores = (piece @ key.transpose(2, 3)).float() * scale
        scores = scores.view(batch, heads, -1, tokens)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            shown = mask[:, :, first : first + step]
            least = torch.finfo(torch.float32).min
            scores = (
                scores.masked_fill(~shown, least) if shown.dtype == torch.bool else scores + shown
            )
        if sinks is not None:
            sink = sinks.float().reshape(1, -1, 1, 1).expand(batch, heads, scores.shape[2], 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :tokens].to(value.dtype)
        weights = torch.nn.functional.dropout(weights, dropout)
        output = weights.reshape(batch, kv_heads, -1, tokens) @ value
        made.append(output.view(batch, heads, -1, value.shape[-1]))
    return torch.cat(made, 2)


def _check(model: PreTrainedModel, wanted: str | None) -> None:
    """Raise ValueError for a model that attends in a way of its own."""
    if wanted == NAME and not model._supports_sdpa:
        if model.config.model_type in _SINKS_OR_CAPS:
            return
        raise ValueError(
            f"attention '{NAME}': expected a model whose attention torch can compute, got "
            f"{type(model).__name__}, which allows no 'sdpa': "
            "model.set_attn_implementation('eager')"
        )


def register() -> None:
    """Make ``attn_implementation="unimem"`` known to transformers, for models that allow it.

    transformers compares a registered name with no model, so its own check is wrapped.
    """
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, mask_of)
    allowed = PreTrainedModel.get_correct_attn_implementation
    if getattr(allowed, "__module__", "") == __name__:
        return

    @wraps(allowed, assigned=("__doc__", "__name__", "__qualname__"))
    def checked(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        _check(self, requested)
        found: str = allowed(self, requested, *args, **kwargs)
        return found

    PreTrainedModel.get_correct_attn_implementation = checked
