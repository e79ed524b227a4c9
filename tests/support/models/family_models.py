"""Small GGUF models of families whose layers keep different things, as llama.cpp loads them.

A layer keeps the same as in the published model that `FAMILIES` names; the rest is as small as
llama.cpp accepts. Weights are zeros: nothing is computed with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, VOCAB, EXPERTS = 64, 32, 32, 2

# The dimensions of tensors, in ggml's order. E hidden, F inner, V vocabulary, X experts; q, k and v
# the values of all heads, h the heads, K and W those of one head of K and of V.
SHAPES = {
    **{"token_embd": "E V", "output": "E V", "output_norm": "E", "rope_freqs": "K/2"},
    **dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), "E"),
    **{"attn_q": "E q", "attn_k": "E k", "attn_v": "E v", "attn_output": "o E", "attn_qkv": "E z"},
    **{"attn_q_norm": "K", "attn_k_norm": "K", "attn_sinks": "h"},
    **{"ffn_gate": "E F", "ffn_up": "E F", "ffn_down": "F E", "ffn_gate_inp": "E X"},
    **{"ffn_gate_exps": "E F X", "ffn_up_exps": "E F X", "ffn_down_exps": "F E X"},
    **{"ffn_gate_shexp": "E F", "ffn_up_shexp": "E F", "ffn_down_shexp": "F E"},
    "ffn_gate_inp_shexp": "E",
}
QKV = "attn_norm attn_q attn_k attn_v attn_output "
FFN = " ffn_norm ffn_gate ffn_up ffn_down"
EXPERTS_FFN = " ffn_norm ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
SHARED = " ffn_gate_shexp ffn_up_shexp ffn_down_shexp"


def attention(heads: int, kv: Any, k: int, v: int | None = None) -> dict[str, Any]:
    return {
        **{"attention.head_count": heads, "attention.head_count_kv": kv},
        **{"attention.key_length": k, "attention.value_length": k if v is None else v},
    }


def states(kernel: int, inner: int, state: int, rank: int, groups: int | None = None) -> Any:
    keys = {"conv_kernel": kernel, "inner_size": inner, "state_size": state, "group_count": groups}
    keys["time_step_rank"] = rank
    return {f"ssm.{name}": value for name, value in keys.items() if value is not None}


MOE = {"expert_count": EXPERTS, "expert_used_count": 1, "expert_feed_forward_length": INNER}


@dataclass(frozen=True)
class FamilyModel:
    """A model of a family.

    Attributes
    ----------
    arch, layers, keys
        What the metadata says; keys without the architecture.
    tensors
        Names of those of a layer; of layers that attention does not have, `others`.
    shapes
        The dimensions of those that `SHAPES` does not have, or has otherwise.
    """

    arch: str
    layers: int
    keys: dict[str, Any]
    tensors: str
    shapes: dict[str, str] = field(default_factory=dict)
    common: str = ""
    others: str = ""
    attends: Any = None  # of a layer's number: whether it has the first or the others
    hidden: int = HIDDEN


MAMBA = "attn_norm ssm_in ssm_conv1d ssm_conv1d.bias ssm_x ssm_dt ssm_dt.bias ssm_a ssm_d ssm_out"
MAMBA2 = "attn_norm ssm_in ssm_conv1d ssm_conv1d.bias ssm_dt.bias ssm_a ssm_d ssm_norm ssm_out"
NORMS = " post_attention_norm post_ffw_norm"
QK_NORMS = " attn_q_norm attn_k_norm"


def mamba2(inner: int, state: int, heads: int) -> dict[str, str]:
    """Shapes of tensors of a layer with one group."""
    channels = inner + 2 * state
    return {
        **{"ssm_in": f"E {2 * inner + 2 * state + heads}", "ssm_conv1d": f"4 {channels}"},
        **{"ssm_conv1d.bias": f"{channels}", "ssm_dt.bias": f"{heads}", "ssm_a": f"1 {heads}"},
        **{"ssm_d": f"1 {heads}", "ssm_norm": f"{inner} 1", "ssm_out": f"{inner} E"},
    }


# DeepSeek-V2-Lite, with two heads, on which what it keeps does not depend, and dense layers.
DEEPSEEK = {
    **{"attention.kv_lora_rank": 512, "rope.dimension_count": 64, "expert_weights_scale": 1.0},
    **{"leading_dense_block_count": 27, "expert_shared_count": 1},
    "expert_feed_forward_length": INNER,
}
DEEPSEEK_TENSORS = "attn_norm attn_kv_a_norm attn_q attn_kv_a_mqa attn_output" + FFN
DEEPSEEK_SHAPES = {
    **{"attn_kv_a_norm": "512", "attn_q": "E 384", "attn_kv_a_mqa": "E 576"},
    **{"attn_k_b": "128 512 2", "attn_v_b": "512 128 2", "attn_kv_b": "512 512"},
    "attn_output": "256 E",
}
FAMILIES: dict[str, FamilyModel] = {
    "gemma2": FamilyModel(
        "gemma2", 6, attention(8, 4, 256) | {"attention.sliding_window": 4096}, QKV + FFN + NORMS,
    ),
    "gemma3": FamilyModel(
        "gemma3", 14, attention(8, 4, 256) | {"attention.sliding_window": 1024},
        QKV + FFN + NORMS + QK_NORMS,
    ),
    "gemma3n": FamilyModel(
        "gemma3n", 35, attention(8, 2, 256) | {
            "attention.sliding_window": 512, "attention.shared_kv_layers": 15,
            "embedding_length_per_layer_input": 256,
        },
        QKV + FFN + NORMS + QK_NORMS + " inp_gate proj post_norm altup_correct_coef "
        "altup_correct_scale altup_predict_coef altup_router altup_router_norm laurel_l laurel_r "
        "laurel_post_norm",
        {"inp_gate": "E 256", "proj": "256 E", "post_norm": "E", "altup_correct_coef": "4 4",
         "altup_correct_scale": "E", "altup_predict_coef": "4 16", "altup_router": "E 4",
         "altup_router_norm": "E", "laurel_l": "E 64", "laurel_r": "64 E", "laurel_post_norm": "E",
         "per_layer_token_embd": "8960 V", "per_layer_model_proj": "E 8960",
         "per_layer_proj_norm": "256", "altup_proj": "E E 3", "altup_unembd_proj": "E E 3"},
        common="per_layer_token_embd per_layer_model_proj per_layer_proj_norm altup_proj "
        "altup_unembd_proj",
    ),
    "gemma4": FamilyModel(
        "gemma4", 12, attention(8, [4] * 12, 512) | {
            "attention.sliding_window": 512, "attention.key_length_swa": 256,
            "attention.value_length_swa": 256, "attention.shared_kv_layers": 6,
            "embedding_length_per_layer_input": 0, "rope.dimension_count": 512,
            "rope.dimension_count_swa": 256,
            "attention.sliding_window_pattern": [True, True, False] * 4,
        },
        QKV + FFN + NORMS + QK_NORMS, {"rope_freqs": "256"}, common="rope_freqs",
    ),
    "gpt-oss": FamilyModel(
        "gpt-oss", 6, attention(64, 8, 64) | {"attention.sliding_window": 128} | MOE,
        QKV + EXPERTS_FFN.replace(" ffn_norm", "") + " post_attention_norm attn_sinks "
        "attn_q.bias attn_k.bias attn_v.bias attn_output.bias ffn_gate_inp.bias "
        "ffn_gate_exps.bias ffn_up_exps.bias ffn_down_exps.bias", common="output",
    ),
    "llama4": FamilyModel(
        "llama4", 4, attention(40, 8, 128) | MOE | {"interleave_moe_layer_step": 1},
        QKV + EXPERTS_FFN + SHARED,
    ),
    "qwen3moe": FamilyModel(
        "qwen3moe", 4, attention(32, 4, 128) | MOE, QKV + EXPERTS_FFN + QK_NORMS,
    ),
    "qwen3next": FamilyModel(
        "qwen3next", 8, attention(16, 2, 256) | MOE | states(4, 4096, 128, 32, 16) | {
            "expert_shared_feed_forward_length": INNER, "rope.dimension_count": 64,
        },
        QKV + QK_NORMS + " post_attention_norm ffn_gate_inp_shexp"
        + EXPERTS_FFN.replace(" ffn_norm", "") + SHARED,
        {"attn_q": "E 8192", "attn_qkv": "E 8192", "attn_gate": "E 4096", "ssm_conv1d": "4 8192",
         "ssm_dt.bias": "32", "ssm_a": "32", "ssm_ba": "E 64", "ssm_norm": "128",
         "ssm_out": "4096 E"},
        others="attn_norm attn_qkv attn_gate ssm_conv1d ssm_dt.bias ssm_a ssm_ba ssm_norm ssm_out "
        "post_attention_norm ffn_gate_inp_shexp" + EXPERTS_FFN.replace(" ffn_norm", "") + SHARED,
        attends=lambda i: i % 4 == 3,
    ),
    "phi3": FamilyModel(
        "phi3", 2, attention(8, 8, 96) | {"attention.sliding_window": 2047},
        "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down", {"ffn_up": "E 2F"},
        common="output", hidden=768,
    ),
    "llama": FamilyModel(
        "llama", 4, attention(32, 8, 128) | {"attention.sliding_window": 4096}, QKV + FFN,
    ),
    "cohere2": FamilyModel(
        "cohere2", 6, attention(8, 8, 128)
        | {"attention.sliding_window": 4096, "logit_scale": 0.25},
        QKV + FFN.replace(" ffn_norm", ""), hidden=1024,
    ),
    "olmo2": FamilyModel(
        "olmo2", 8, attention(8, 8, 128) | {"attention.sliding_window": 4096},
        "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_gate ffn_up ffn_down" + NORMS,
        {"attn_q_norm": "q", "attn_k_norm": "k"}, hidden=1024, common="output",
    ),
    "deepseek2": FamilyModel(
        "deepseek2", 27, attention(2, 1, 576, 512) | DEEPSEEK
        | {"attention.key_length_mla": 192, "attention.value_length_mla": 128},
        DEEPSEEK_TENSORS + " attn_k_b attn_v_b", DEEPSEEK_SHAPES, common="output",
    ),
    "deepseek2, not compressed": FamilyModel(
        "deepseek2", 27, attention(2, 2, 192, 128) | DEEPSEEK,
        DEEPSEEK_TENSORS + " attn_kv_b", DEEPSEEK_SHAPES, common="output",
    ),
    "mamba": FamilyModel(
        "mamba", 4, states(4, 1536, 16, 48) | {"attention.head_count": 0}, MAMBA,
        {"ssm_in": "E 3072", "ssm_conv1d": "4 1536", "ssm_conv1d.bias": "1536",
         "ssm_x": "1536 80", "ssm_dt": "48 1536", "ssm_dt.bias": "1536", "ssm_a": "16 1536",
         "ssm_d": "1536", "ssm_out": "1536 E"}, hidden=768,
    ),
    "mamba2": FamilyModel(
        "mamba2", 4, states(4, 1536, 128, 24, 1) | {"attention.head_count": 24}, MAMBA2,
        mamba2(1536, 128, 24), hidden=768,
    ),
    "falcon-h1": FamilyModel(
        "falcon-h1", 4, attention(8, 2, 128) | states(4, 3072, 256, 48, 1),
        MAMBA2 + " attn_q attn_k attn_v attn_output ffn_norm. ffn_gate ffn_up ffn_down",
        mamba2(3072, 256, 48) | {"ffn_norm.": "E"},
    ),
    "granitehybrid": FamilyModel(
        "granitehybrid", 4, states(4, 1536, 128, 48, 1) | attention(12, [0, 4, 0, 4], 64),
        QKV + FFN, mamba2(1536, 128, 48), others=MAMBA2 + FFN, attends=lambda i: i % 2,
        hidden=768,
    ),
}  # fmt: skip


def write_family(path: Path, family: FamilyModel, n_ctx: int = 131072) -> Path:
    """Write the model."""
    arch, keys = family.arch, family.keys
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(n_ctx)
    w.add_embedding_length(family.hidden)
    w.add_block_count(family.layers)
    w.add_feed_forward_length(INNER)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_layer_norm_eps(1e-6)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")
    for name, value in keys.items():
        key = f"{arch}.{name}"
        if isinstance(value, list):
            w.add_array(key, value)
        elif isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        else:
            w.add_uint32(key, value)
    for name in f"token_embd output_norm {family.common}".split():
        _add(w, f"{name}.weight", family.shapes.get(name) or SHAPES[name], sizes(family, 0))
    for i in range(family.layers):
        attends = family.attends is None or family.attends(i)
        for name in (family.tensors if attends else family.others).split():
            shape = (family.shapes | {}).get(name) or SHAPES.get(name)
            if shape is None:
                base = name.removesuffix(".bias")
                shape = " ".join((family.shapes.get(base) or SHAPES[base]).split()[1:])
            full = name.rstrip(".") if "." in name else f"{name}.weight"
            if name in ("ssm_a", "ssm_d"):
                full = name
            _add(w, f"blk.{i}.{full}", shape, sizes(family, i))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def sizes(family: FamilyModel, i: int) -> dict[str, int]:
    keys = family.keys
    heads, kv = keys.get("attention.head_count", 0), keys.get("attention.head_count_kv", 0)
    kv = kv[i] if isinstance(kv, list) else kv
    pattern = keys.get("attention.sliding_window_pattern")
    swa = "_swa" if isinstance(pattern, list) and pattern[i] else ""
    k = keys.get(f"attention.key_length{swa}", 0)
    v = keys.get(f"attention.value_length{swa}", 0)
    return {
        **{"E": family.hidden, "F": INNER, "2F": 2 * INNER, "V": VOCAB, "X": EXPERTS, "h": heads},
        **{"q": heads * k, "k": kv * k, "v": kv * v, "o": heads * v, "K": k, "K/2": k // 2},
        "z": heads * k + kv * (k + v),
    }


def _add(w: Any, name: str, shape: str, values: dict[str, int]) -> None:
    ne = [values[each] if each in values else int(each) for each in shape.split()]
    kind = (
        np.float16 if len(ne) > 1 and "ssm_a" not in name and "conv1d" not in name else np.float32
    )
    w.add_tensor(name, np.zeros(ne[::-1], kind))
