"""Tiny random models of transformers' architectures, by the name of their configuration."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaModel

# Threads cost these models far more than they save.
torch.set_num_threads(1)

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
# Scores below zero are zero: with few heads they are often equal, and chosen by chance.
_INDEXED: dict[str, Any] = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 16}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA: dict[str, Any] = _LINEAR | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_SHARED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8},
    "vocab_size_per_layer_input": VOCAB,
}
CHANGES: dict[str, dict[str, Any]] = {
    "kimi_linear": _LATENT | _LINEAR | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": _DELTA,
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
    "dots1": {"n_shared_experts": 1},
    "codegen": {"rotary_dim": 4},
    "gemma3n_text": _SHARED | {"num_hidden_layers": 4, "laurel_rank": 8, "altup_num_inputs": 2},
    "gemma4_text": _SHARED | {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "glm_moe_dsa": _LATENT | _INDEXED,
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "nemotron_h": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
        **{"layers_block_type": ["mamba", "attention", "moe"], "num_hidden_layers": None},
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "youtu": _LATENT,
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3},
    "bloom": {"n_layer": 3, "n_head": 4},
    "deepseek_v32": _LATENT | _INDEXED,
    "hy_v4": _LATENT | _INDEXED,
}


def model(name: str, **changes: Any) -> Any:
    """Return a model with random weights, the same each time; its sinks are not zero."""
    torch.manual_seed(0)
    default = AutoConfig.for_model(name)  # a size that it lacks would be kept, and mislead a cache
    known = {*default.to_dict(), *default.attribute_map}
    sizes = {key: size for key, size in _SIZES.items() if key in known}
    config = AutoConfig.for_model(name, **(sizes | CHANGES.get(name, {}) | changes))
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    made = kind.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() > 1 or "sink" in parameter_name:
                parameter.normal_(std=0.2 if parameter.dim() > 1 else 1.0)
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made


def cache_name(model: Any) -> str:
    """Return the name of the cache in calls of a model."""
    given = signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in given)


def ids(batch: int = 1, n: int = 20) -> torch.Tensor:
    """Return random tokens ``[batch, n]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, VOCAB, (batch, n), generator=generator)
