"""Tiny random models of transformers, with windows shorter than the conversations."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
import torch
import transformers

from unimem.transformers import KVCache

# Threads cost these models far more than they save.
torch.set_num_threads(1)

WINDOW = 8
VOCAB = 96
LAYERS, HEADS, DIM = 3, 2, 8
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": None},
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_CHUNKS = ["chunked_attention", "full_attention", "chunked_attention"]

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "gemma": ("Gemma2", {"sliding_window": WINDOW, "layer_types": _MIXED}),
    "chunks": ("Llama", {"attention_chunk_size": WINDOW, "layer_types": _CHUNKS}),
    # Heads of V are smaller than those of K (MLA).
    "latent": (
        "DeepseekV3",
        {
            **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
            **{"v_head_dim": 8, "head_dim": 4, "num_key_value_heads": 4, "n_group": 1},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"topk_group": 1, "first_k_dense_replace": 1},
        },
    ),
    "moe": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}),
}


def config(kind: str, **changes: Any) -> Any:
    """The configuration of a kind of model."""
    name, options = CONFIGS[kind]
    made = getattr(transformers, f"{name}Config")(**(_SIZES | options | changes))
    made.bos_token_id = None
    return made


@cache
def model(kind: str, dtype: str = "float32", seed: int = 0) -> Any:
    """A model with random weights, the same each time."""
    torch.manual_seed(seed)
    name, _ = CONFIGS[kind]
    made = getattr(transformers, f"{name}ForCausalLM")(config(kind))
    made.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return made.to(getattr(torch, dtype)).eval()


def prompts(batch: int, n: int = 12, seed: int = 0) -> Any:
    """Random ids [batch, n]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, n), generator=generator)


def tokenizer() -> Any:
    """Return a tokenizer of words of a letter and a number, as many as the models know."""
    words = {"<pad>": 0} | {f"{'abcdefgh'[i % 8]}{i}": i for i in range(1, VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


def states(n: int, batch: int = 2, seed: int = 0, dtype: Any = torch.float32) -> tuple[Any, Any]:
    """Random keys and values of n tokens."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, HEADS, n, DIM, generator=generator).to(dtype)
    return k, v


def both(kind: str, **options: Any) -> tuple[KVCache, Any]:
    """An empty cache of unimem, and one of transformers."""
    made = config(kind)
    return KVCache(made, **options), transformers.DynamicCache(config=made)
