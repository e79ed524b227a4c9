"""Models of families whose layers keep different things: the keys of published ones.

A layer keeps the same as in the published model that `FAMILIES` names; tensors are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.models.printed_caches import write

HIDDEN = 64


def attention(heads: int, kv: Any, k: int, v: int | None = None) -> dict[str, Any]:
    return {
        **{"attention.head_count": heads, "attention.head_count_kv": kv},
        **{"attention.key_length": k, "attention.value_length": k if v is None else v},
    }


def states(kernel: int, inner: int, state: int, rank: int, groups: int | None = None) -> Any:
    keys = {"conv_kernel": kernel, "inner_size": inner, "state_size": state, "group_count": groups}
    keys["time_step_rank"] = rank
    return {f"ssm.{name}": value for name, value in keys.items() if value is not None}


def slides(window: int) -> dict[str, int]:
    return {"attention.sliding_window": window}


@dataclass(frozen=True)
class FamilyModel:
    """A model of a family, by what its metadata says; keys without the architecture."""

    arch: str
    layers: int
    keys: dict[str, Any]
    hidden: int = HIDDEN


DEEPSEEK = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}
FAMILIES: dict[str, FamilyModel] = {
    "gemma2": FamilyModel("gemma2", 6, attention(8, 4, 256) | slides(4096)),
    "gemma3": FamilyModel("gemma3", 14, attention(8, 4, 256) | slides(1024)),
    "gemma3n": FamilyModel(
        "gemma3n", 35, attention(8, 2, 256) | slides(512) | {"attention.shared_kv_layers": 15},
    ),
    "gemma4": FamilyModel(
        "gemma4", 12, attention(8, [4] * 12, 512) | slides(512) | {
            "attention.key_length_swa": 256, "attention.value_length_swa": 256,
            "attention.shared_kv_layers": 6,
            "attention.sliding_window_pattern": [True, True, False] * 4,
        },
    ),
    "gpt-oss": FamilyModel("gpt-oss", 6, attention(64, 8, 64) | slides(128)),
    "llama4": FamilyModel("llama4", 4, attention(40, 8, 128)),
    "qwen3moe": FamilyModel("qwen3moe", 4, attention(32, 4, 128)),
    "qwen3next": FamilyModel(
        "qwen3next", 8, attention(16, 2, 256) | states(4, 4096, 128, 32, 16),
    ),
    "cohere2": FamilyModel("cohere2", 6, attention(8, 8, 128) | slides(4096), 1024),
    "olmo2": FamilyModel("olmo2", 8, attention(8, 8, 128) | slides(4096), 1024),
    "deepseek2": FamilyModel(
        "deepseek2", 27, attention(2, 1, 576, 512) | DEEPSEEK
        | {"attention.key_length_mla": 192, "attention.value_length_mla": 128},
    ),
    "mamba": FamilyModel("mamba", 4, states(4, 1536, 16, 48) | {"attention.head_count": 0}, 768),
    "mamba2": FamilyModel("mamba2", 4, states(4, 1536, 128, 24, 1), 768),
    "falcon-h1": FamilyModel(
        "falcon-h1", 4, attention(8, 2, 128) | states(4, 3072, 256, 48, 1),
    ),
    "granitehybrid": FamilyModel(
        "granitehybrid", 4, states(4, 1536, 128, 48, 1) | attention(12, [0, 4, 0, 4], 64), 768,
    ),
}  # fmt: skip


def write_family(path: Path, family: FamilyModel, n_ctx: int = 131072) -> Path:
    """Write the model."""
    sizes = {
        "context_length": n_ctx,
        "embedding_length": family.hidden,
        "block_count": family.layers,
        "feed_forward_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 32,
    }
    return write(path, family.arch, sizes | family.keys)
