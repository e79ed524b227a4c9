"""Tiny random models of transformers' architectures, by the name of their configuration."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

__all__ = ["CACHE", "CHANGES", "VOCAB", "WINDOW", "ids", "model"]

# The name of a cache in calls: "cache" from transformers 5.24 on.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
VOCAB, WINDOW = 96, 8
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW},
    **{"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "use_cache": True},
}
# What a configuration needs beside these sizes.
_LATENT: dict[str, Any] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
    **{"qk_head_dim": 12, "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": 4},
}
_INDEXED: dict[str, Any] = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "kimi_linear": _LATENT | _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": _LINEAR,
    "bamba": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
    },
    "deepseek_v2": _LATENT | {"first_k_dense_replace": 1},
    "deepseek_v3": _LATENT | {"first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "longcat_flash": _LATENT | {"num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "minicpm3": _LATENT,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3},
    "bloom": {"n_layer": 3, "n_head": 4},
    "deepseek_v32": _LATENT | _INDEXED,
    "hy_v4": {"index_topk": 8, "index_n_heads": 2, "q_lora_rank": 16, "o_lora_rank": 16},
}


def model(name: str, **changes: Any) -> Any:
    """Return a model with random weights, the same each time; its sinks are not zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **(_SIZES | CHANGES.get(name, {}) | changes))
    made = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() > 1 or "sink" in parameter_name:
                parameter.normal_(std=0.2 if parameter.dim() > 1 else 1.0)
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made


def ids(batch: int = 1, n: int = 20) -> torch.Tensor:
    """Return random tokens ``[batch, n]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCAB, (batch, n), generator=generator)
