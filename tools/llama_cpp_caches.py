"""Ask llama.cpp how large caches and compute buffers of each architecture are, and record it.

Run with unimem and `xllamacpp` installed: ``python tools/llama_cpp_caches.py [ARCHITECTURE...]``.
For each architecture a small GGUF file is made: llama.cpp itself names the tensors that the
metadata asks for. A process of its own loads the file, makes contexts without allocating them, and
prints the sizes of the KV cache, of states and of compute buffers. They are recorded in
tests/planning/data/llama_cpp_caches.json, against which tests/planning/test_llama_cpp.py holds
the planner.

The structures of llama.cpp's header are those of build b11549 (xllamacpp 2026.10.11549).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WHEEL = "2026.10.11549"
RECORD = Path(__file__).parents[1] / "tests/planning/data/llama_cpp_caches.json"

# ---- the files ----------------------------------------------------------------------------------

LAYERS, HIDDEN, HEADS, VOCAB, WINDOW = 8, 256, 4, 256, 1024
_FULL_THEN_STATE = [2 if i % 4 == 3 else 0 for i in range(LAYERS)]  # heads of K and V
_SLIDING = [int(i % 4 != 3) for i in range(LAYERS)]
# What llama.cpp b11549 demands of all architectures, or reads of some.
COMMON: dict[str, Any] = {
    "context_length": 131072,
    "vocab_size": VOCAB,
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": 512,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.group_norm_epsilon": 1e-5,
    "attention.group_norm_groups": 8,
}
# What it demands of some architectures: added to a file when llama.cpp misses it.
DEMANDED: dict[str, Any] = {
    "activation.situ_beta": 4.0,
    "activation.situ_linear_beta": 25.0,
    "adapters.count": 1,
    "adapters.lora_rank": 4,
    "adapters.token_ids_activate": [1],
    "adapters.token_ids_substitute": [2],
    "attention.clamp_kqv": 1.0,
    "attention.compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128],
    "attention.compress_rope_freq_base": 160000.0,
    "attention.decay_lora_rank": 64,
    "attention.iclr_lora_rank": 64,
    "attention.value_residual_mix_lora_rank": 64,
    "attention.gate_lora_rank": 64,
    "attention.indexer.block_size": 4,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 128,
    "attention.indexer.kpool": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.top_k": 64,
    "attention.indexer.types": [1, 0] * (LAYERS // 2),
    "attention.key_length_mla": 192,
    "attention.key_length_mla_swa": 192,
    "attention.key_length_swa": 64,
    "attention.kv_lora_rank": 512,
    "attention.kv_lora_rank_swa": 256,
    "attention.output_group_count": 4,
    "attention.output_lora_rank": 32,
    "attention.q_lora_rank": 64,
    "attention.relative_buckets_count": 8,
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": _SLIDING,
    "attention.value_length_mla": 128,
    "attention.value_length_mla_swa": 128,
    "attention.value_length_swa": 64,
    "attn_res.block_size": 4,
    "convnext.block_count": 2,
    "convnext.embedding_length": HIDDEN,
    "decision.block_count": 2,
    "decision.head_count": 2,
    "decision.routing_block_count": 2,
    "embedding_length_per_layer_input": 32,
    "expert_chunk_feed_forward_length": 128,
    "expert_count": 4,
    "expert_feed_forward_length": 128,
    "expert_gating_func": 2,
    "expert_group_scale": 1.0,
    "expert_latent_length": 128,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 128,
    "expert_used_count": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
    "experts_per_group": 2,
    "features_length": HIDDEN,
    "hash_layer_count": 0,
    "hrm.h_cycles": 2,
    "hrm.l_cycles": 1,
    "hrm.layers_per_stack": 2,
    "hyper_connection.count": 4,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
    "hyper_connection.sinkhorn_iterations": 2,
    "interleave_moe_layer_step": 2,
    "kda.gate_lower_bound": -5.0,
    "kda.head_dim": 128,
    "leading_dense_block_count": 1,
    "logit_scale": 1.0,
    "posnet.block_count": 2,
    "posnet.embedding_length": HIDDEN,
    "residual_scale": 1.0,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [16, 24, 24, 0],
    "rope.freq_base_swa": 10000.0,
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.group_count": 4,
    "ssm.inner_size": 2048,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 16,
    "swiglu_clamp_exp": 7.0,
    "target_hidden_size": HIDDEN,
    "target_layers": [1, 2, 3],
    "time_decay_extra_dim": 64,
    "time_mix_extra_dim": 32,
    "use_parallel_residual": False,
    "wkv.head_size": 64,
}
# Keys of some architectures that llama.cpp reads but does not demand, and those that differ.
_MLA = {
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
}
_STATES = {"attention.head_count_kv": _FULL_THEN_STATE}
_ALL_HEADS = {"attention.head_count_kv": HEADS}
_TYPES = {"tokenizer.ggml.token_type_count": 1}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa", "mistral4"), _MLA),
    "hy_v4": _MLA,
    "dots3note": _MLA | {"attention.key_length_swa": 320, "attention.value_length_swa": 256},
    **{
        name: _MLA | {"attention.head_count_kv": [int(n > 0) for n in _FULL_THEN_STATE]}
        for name in ("kimi-linear", "kimi-k3", "bailingmoe3")
    },
    "glm5-next": _MLA
    | {
        "attention.head_count_kv": [int(n > 0) for n in _FULL_THEN_STATE],
        "attention.key_length": 512,
        "rope.dimension_count": 0,
    },
    **dict.fromkeys(("jamba", "granitehybrid"), _STATES | {"ssm.inner_size": 2 * HIDDEN}),
    "plamo2": _STATES | {"ssm.inner_size": 2 * HIDDEN, "ssm.group_count": 0},
    "mamba": {"ssm.inner_size": 2 * HIDDEN},
    **dict.fromkeys(("lfm2", "lfm2moe"), _STATES),
    **{
        name: _STATES
        | {
            "feed_forward_length": [
                0 if n or i % 2 else 512 for i, n in enumerate(_FULL_THEN_STATE)
            ]
        }
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    **dict.fromkeys(("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v3"), _TYPES),
    "deepseek4": {"expert_gating_func": 4, "attention.head_count_kv": 1},
    "mimo2": {
        "attention.key_length": 192,
        "attention.value_length": 128,
        "attention.key_length_swa": 192,
        "attention.value_length_swa": 128,
    },
    **{
        name: {"attention.sliding_window": WINDOW}
        for name in (
            "afmoe",
            "gemma2",
            "gemma3",
            "laguna",
            "llama4",
            "mellum",
            "modern-bert",
            "olmo2",
            "phi3",
            "plamo3",
            "smallthinker",
            "exaone4",
        )
    },
    "apertus": {f"xielu.{name}": 1.0 for name in ("alpha_n", "alpha_p", "beta", "eps")},
    "gemma3n": {"block_count": 30},
    "gemma4": {"attention.shared_kv_layers": 4},
    "gemma4-assistant": {"embedding_length_out": 512},
    "minimax-01": {"full_attention_interval": 4},
    **dict.fromkeys(("t5", "t5encoder", "olmoe", "dots1", "deepseek2-ocr"), _ALL_HEADS),
    "jina-bert-v2": _ALL_HEADS | _TYPES,
    **dict.fromkeys(("plm", "minicpm3"), _ALL_HEADS | {"rope.dimension_count": 32}),
    "minimax-m3": {"attention.indexer.head_count": 2, "leading_dense_block_count": 1},
    "chameleon": {"vocab_size": 10240},
    "qwen3tts": {"vocab_size": 3072},
    "rwkv7": {"attention.gate_lora_rank": 64},
    **{name: {"token_shift_count": 1} for name in ("rwkv6qwen2", "arwkv7")},
    "eagle3": {"target_layers": [1, 2, 3], "target_hidden_size": HIDDEN, "block_count": 1},
    "dflash": {"target_layers": [1, 2, 3]},
}
# Files of the same architectures that say more or less, by the architecture and a word.
_NEXTN = {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{name} predicts": _NEXTN
        for name in (
            "glm4moe",
            "qwen35",
            "qwen35moe",
            "qwen3next",
            "deepseek2",
            "hy_v3",
            "ernie4_5-moe",
        )
    },
    **{
        f"{name} counts": {"attention.sliding_window_pattern": 3}
        for name in ("gemma3", "cohere2", "olmo2", "gpt-oss", "laguna", "llama4", "smallthinker")
    },
    **{
        f"{name} lists": {"attention.sliding_window_pattern": _SLIDING}
        for name in ("gemma2", "gemma3", "cohere2moe", "laguna", "smallthinker", "modern-bert")
    },
    **{
        f"{name} sees all": {"attention.sliding_window": 0}
        for name in ("gemma3", "llama4", "afmoe")
    },
    "exaone4 of 64": {"block_count": 64},
    **{
        f"{name} predicts": _NEXTN | more
        for name, more in (
            ("minimax-m3", {}),
            ("minimax-m2", {}),
            ("mimo2", {"attention.sliding_window_pattern": [*_SLIDING, 0]}),
            ("step35", {"attention.sliding_window_pattern": [*_SLIDING, 0]}),
            ("hy_v4", {}),
            ("qwen4exp", {}),
            (
                "nemotron_h_moe",
                {
                    "attention.head_count_kv": [*_FULL_THEN_STATE, 2],
                    "feed_forward_length": [512, 0] * 4 + [0],
                },
            ),
        )
    },
    "llama by layer": {"attention.head_count_kv": [1, 2, 4, 1, 2, 4, 1, 2]},
    "deepseek2 in full": {
        "attention.head_count_kv": HEADS,
        "attention.key_length": 192,
        "attention.value_length": 128,
        "attention.key_length_mla": 0,
        "attention.value_length_mla": 0,
    },
    "lfm2 slides": {"attention.sliding_window": WINDOW},
    "qwen35 lists": {"attention.recurrent_layers": [1, 0] * (LAYERS // 2)},
    "qwen3 embeds": {"attention.causal": False},
    **{
        f"{name} predicts": _NEXTN | {"attention.indexer.types": None}
        for name in ("deepseek32", "glm-dsa")
    },
    "glm-dsa shares": {"context_length": 1 << 20},
    "glm-dsa lists": {"attention.indexer.types": [1, 0, 0, 1] * (LAYERS // 4)},
    "qwen4exp counts grams": {
        "attention.compress_ratios": [4] * LAYERS,
        "ple.layers": [0],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "ple.layer_multipliers": (1, 3, 5),
        "ple.head_offsets": (0, 64, 128, 192),
        "ple.head_vocab_sizes": (64,) * 4,
        "embedding_length_per_layer_input": HIDDEN // 4,
    },
    "qwen35 by three": {"full_attention_interval": 3},
}


def _real(hidden: int, heads: int, kv: int, size: int, ff: int, vocab: int) -> dict[str, Any]:
    """Return the keys of a file that is as wide as a published one, in fewer layers."""
    return {
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": min(size, 128),
        "feed_forward_length": ff,
        "vocab_size": vocab,
    }


def _experts(used: int, width: int, n: int = 16) -> dict[str, Any]:
    return {
        "expert_count": n,
        "expert_used_count": used,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
    }


def _states(inner: int, size: int, rank: int, groups: int) -> dict[str, Any]:
    return {
        "ssm.inner_size": inner,
        "ssm.state_size": size,
        "ssm.time_step_rank": rank,
        "ssm.group_count": groups,
    }


_SHORT = {"block_count": 2, "leading_dense_block_count": 1}
_MLA_OF = {name: x for name, x in _MLA.items() if name != "attention.head_count_kv"}
#: The compute buffers of files that are as wide as published ones.
WIDE: dict[str, dict[str, Any]] = {
    "llama as 8B": _real(4096, 32, 8, 128, 14336, 128256),
    "llama as 70B": _SHORT | _real(8192, 64, 8, 128, 28672, 128256),
    "llama4 as Scout": _SHORT | _real(5120, 40, 8, 128, 16384, 202048) | _experts(1, 8192),
    "qwen3 as 0.6B": _real(1024, 16, 8, 128, 3072, 151936),
    "qwen3moe as 30B": _real(2048, 32, 4, 128, 6144, 151936) | _experts(8, 768, 128),
    "qwen3next as 80B": _real(2048, 16, 2, 256, 5120, 151936)
    | {"block_count": 4}
    | _experts(10, 512)
    | _states(4096, 128, 32, 16),
    "qwen35 as 27B": _real(5120, 24, 4, 256, 17408, 248320) | _states(6144, 128, 48, 16),
    "gemma3 as 27B": _real(5376, 32, 16, 128, 21504, 262144),
    "gemma3n as E4B": _real(2048, 8, 2, 256, 2048, 65536),
    "gpt-oss as 20B": _SHORT | _real(2880, 64, 8, 64, 2880, 201088) | _experts(4, 2880),
    "deepseek2 as 671B": _SHORT
    | _real(7168, 128, 1, 576, 18432, 129280)
    | _MLA_OF
    | _experts(8, 2048)
    | {"attention.q_lora_rank": 1536},
    "deepseek32 as 671B": _SHORT
    | _real(7168, 128, 1, 576, 18432, 129280)
    | _MLA_OF
    | _experts(8, 2048)
    | {"attention.q_lora_rank": 1536, "attention.indexer.head_count": 64},
    "kimi-linear as 48B": _SHORT
    | _real(2304, 32, 1, 576, 9216, 163840)
    | _MLA_OF
    | _experts(8, 1024)
    | {"attention.head_count_kv": [0, 1]},
    "glm4moe as 355B": _SHORT | _real(5120, 96, 8, 128, 12288, 151552) | _experts(8, 1536),
    "step35 as 196B": _SHORT
    | _real(4096, 64, 8, 128, 11264, 128896)
    | _experts(8, 1280)
    | {"attention.sliding_window_pattern": [1, 0]},
    "minimax-m3 as wide": _SHORT
    | _real(3072, 48, 8, 128, 12288, 200064)
    | _experts(4, 3072)
    | {"attention.indexer.head_count": 8},
    "mamba2 as 2.7B": {"embedding_length": 2560, "vocab_size": 50288} | _states(5120, 128, 80, 1),
    "nemotron_h as 56B": {
        "embedding_length": 8192,
        "vocab_size": 131072,
        "attention.head_count": 64,
        "attention.key_length": 128,
        "attention.value_length": 128,
    }
    | _states(16384, 256, 256, 8),
    "falcon-h1 as 34B": _SHORT
    | _real(5120, 20, 4, 128, 21504, 261120)
    | _states(8192, 256, 128, 2),
    "jamba as 52B": {
        "embedding_length": 4096,
        "vocab_size": 65536,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "feed_forward_length": 14336,
    }
    | {"ssm.inner_size": 8192, "ssm.state_size": 16, "ssm.time_step_rank": 256},
    "rwkv7 as 2.9B": {
        "embedding_length": 2560,
        "feed_forward_length": 10240,
        "vocab_size": 65536,
    },
    "chameleon as 7B": _real(4096, 32, 32, 128, 11008, 65536),
    "grok with heads": _real(2048, 32, 2, 64, 512, 256),
    "minimax-01 with heads": {"attention.head_count": 32},
    "hy_v4 as wide": {"embedding_length": 2048},
    "t5 as 3B": _real(1024, 32, 32, 128, 16384, 32128) | {"context_length": 512},
    "bert as large": _real(1024, 16, 16, 64, 4096, 30522),
}
VARIANTS |= WIDE


def values_of(arch: str, demanded: Iterable[str]) -> dict[str, Any]:
    """Return the metadata of an architecture's file, without the prefix."""
    return COMMON | {name: DEMANDED[name] for name in demanded} | OWN.get(arch, {})


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Write a value with its type, as GGUF numbers them; a tuple has 64 bits."""
    if isinstance(value, tuple):
        return struct.pack(f"<IIQ{len(value)}Q", 9, 10, len(value), *value)
    if isinstance(value, list):
        kind, code = {str: (8, ""), float: (6, "f"), bool: (7, "?")}.get(type(value[0]), (5, "i"))
        items = b"".join(struct.pack("<" + code, x) if code else _string(x) for x in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    kind, code = {bool: (7, "?"), float: (6, "f")}.get(type(value), (4, "I"))
    return struct.pack("<I" + code, kind, value)


def write(path: Path, arch: str, values: Mapping[str, Any], tensors: Sequence[Any] = ()) -> None:
    """Write a GGUF file of float32 tensors, given as names and dimensions, with data of holes."""
    general: dict[str, Any] = {
        "general.architecture": arch,
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(values["vocab_size"])],
        "tokenizer.ggml.scores": [0.0] * values["vocab_size"],
    }
    prefix = {"xielu": "", "tokenizer": ""}
    keys = general | {
        prefix.get(name.partition(".")[0], f"{arch}.") + name: value
        for name, value in values.items()
    }
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))
    head += b"".join(_string(key) + _value(value) for key, value in keys.items())
    offset = 0
    for name, ne in tensors:
        head += _string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, 0, offset)
        nbytes = 4
        for n in ne:
            nbytes *= n
        offset += -(-nbytes // 32) * 32
    path.write_bytes(head)
    os.truncate(path, -(-len(head) // 32) * 32 + offset)


# ---- llama.cpp, in a process of its own ---------------------------------------------------------


class _ModelParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("n_gpu", "split", "load", "lazy", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("tensor_split", "progress", "data", "kv")),
        *(
            (name, ctypes.c_bool)
            for name in ("vocab_only", "check", "extra", "no_host", "no_alloc", "load_mtp")
        ),
    ]


class _ContextParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        *((name, ctypes.c_uint32) for name in ("n_rs_seq", "n_outputs", "n_outputs_per_seq")),
        *((name, ctypes.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type")),
        *((name, ctypes.c_int32) for name in ("rope", "pooling", "attention", "flash")),
        *((f"float{i}", ctypes.c_float) for i in range(6)),
        *(("yarn_orig_ctx", ctypes.c_uint32), ("defrag", ctypes.c_float)),
        *((name, ctypes.c_void_p) for name in ("cb_eval", "cb_data")),
        *((name, ctypes.c_int32) for name in ("type_k", "type_v")),
        *((name, ctypes.c_size_t) for name in ("moe_cache", "abort", "abort_data")),
        *((name, ctypes.c_bool) for name in ("embeddings", "offload", "no_perf", "op_offload")),
        *((name, ctypes.c_bool) for name in ("swa_full", "kv_unified")),
        *((name, ctypes.c_size_t) for name in ("samplers", "n_samplers", "ctx_other")),
    ]


class _Gguf(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def _load_library() -> Any:
    import xllamacpp  # type: ignore[import-not-found]

    lib = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    lib.llama_model_default_params.restype = _ModelParams
    lib.llama_context_default_params.restype = _ContextParams
    for name in ("gguf_init_from_file", "llama_model_init_from_user", "llama_init_from_model"):
        getattr(lib, name).restype = ctypes.c_void_p
    lib.llama_model_load_from_file.restype = ctypes.c_void_p
    lib.ggml_get_name.restype = ctypes.c_char_p
    return lib


def child(what: str, path: str, asked: list[list[int]]) -> None:
    """Print llama.cpp's log, and the tensors of a file's model, or a line before each context."""
    lib = _load_library()

    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

    @kind  # type: ignore[untyped-decorator]
    def log(_level: int, text: bytes, _data: object) -> None:
        os.write(1, text)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)  # type: ignore[untyped-decorator]
    def tell(tensor: int, _data: object) -> None:
        ne = list((ctypes.c_int64 * 4).from_address(tensor + 16))
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        name = lib.ggml_get_name(ctypes.c_void_p(tensor)).decode()
        os.write(1, f"\ntensor {json.dumps([name, ne])}\n".encode())

    lib.llama_log_set(log, None)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu, params.load_mtp = 0, True
    if what == "tensors":
        found = lib.gguf_init_from_file(path.encode(), _Gguf(True, None))
        lib.llama_model_init_from_user(ctypes.c_void_p(found), tell, None, params)
        return
    params.no_alloc, params.load = True, 0
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        return
    for n_ctx, n_seq, unified, mtp, *back in asked:
        os.write(1, f"\ncontext {n_ctx} {n_seq} {unified} {mtp}\n".encode())
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = n_ctx, n_seq, bool(unified)
        options.n_rs_seq = sum(back)
        options.ctx_type, options.swa_full = mtp, False  # as llama-server's default
        made = lib.llama_init_from_model(ctypes.c_void_p(model), options)
        if made:
            lib.llama_free(ctypes.c_void_p(made))
        os.write(1, b"\nmade\n" if made else b"\nrefused\n")


# ---- asking it ----------------------------------------------------------------------------------

#: Contexts, conversations, whether they share one cache, and whether it is the predictors' own.
#: For files with states, one more context can go back by three tokens.
ASKED = [
    *([n, 1, 0, 0] for n in (4096, 32768, 131072)),
    *([32768, 4, unified, 0] for unified in (1, 0)),
    [4096, 64, 1, 0],
    [32768, 1, 0, 1],
]
BACK = [4096, 4, 0, 0, 3]
_NOT_FOUND = re.compile(r"key not found in model: (\S+)")
_FAILED = re.compile(r"GGML_ASSERT|GGML_ABORT|fatal error|error loading model:|what\(\)")
_EXPERTS = [name for name in DEMANDED if name.startswith("expert_")]


def _run(what: str, path: Path, asked: Sequence[Any] = ()) -> list[str]:
    """Run `child` in a process of its own; return its lines, and its status if it failed."""
    words = [sys.executable, __file__, what, str(path), json.dumps(asked)]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        check=False,
    )
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return [*lines, f"status {done.returncode}"] if done.returncode else lines


def refusal_of(lines: Sequence[str]) -> str:
    """Return llama.cpp's own words for why it loads no model or makes no context."""
    found = [line for line in lines if _FAILED.search(line)]
    found += [line for line in lines if re.search("rror|failed|requires|^status", line)]
    return re.sub(r"^/\S*/", "", found[0]) if found else "it says nothing"


def make(
    arch: str, path: Path, own: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, list[int]]], list[str]]:
    """Write the file of an architecture; return its metadata, tensors, and llama.cpp's log."""
    demanded: list[str] = []
    while True:
        values = {
            name: x for name, x in (values_of(arch, demanded) | dict(own)).items() if x is not None
        }
        write(path, arch, values)
        lines = _run("tensors", path)
        missing = next((found[1] for line in lines if (found := _NOT_FOUND.search(line))), "")
        name = missing.removeprefix(f"{arch}.")
        if name in DEMANDED and name not in values:
            demanded.append(name)
        elif "expert_count" not in values and (
            any(map(_FAILED.search, lines)) or lines[-1].startswith("status")
        ):
            demanded += _EXPERTS
        else:
            break
    named = dict(json.loads(line[7:]) for line in lines if line.startswith("tensor "))
    tensors = [(name, ne) for name, ne in named.items() if not name.endswith("scale")]
    if tensors:
        write(path, arch, values, tensors)
    return values, tensors, lines


def sizes_of(lines: Iterable[str]) -> dict[str, list[float]]:
    """Return the MiB that a context's log prints: of K and V, of each state, of compute buffers."""
    found: dict[str, list[float]] = {"kv": [], "states": [], "compute": []}
    for line in lines:
        if re.match(r"llama_kv_cache: size =", line):
            found["kv"] += map(float, re.findall(r"[KV] \(f16\): +([\d.]+) MiB", line))
        elif re.match(r"llama_memory_recurrent: size =", line):
            found["states"] += map(float, re.findall(r"[RSP] \(f32\): +([\d.]+) MiB", line))
        elif re.match(r"llama_dsv4_comp_state: .* ratio =", line):
            found["states"] += map(float, re.findall(r"size = +([\d.]+) MiB", line))
        elif "compute buffer size" in line:
            found["compute"] += map(float, re.findall(r"size = +([\d.]+) MiB", line))
    return found


def packed(tensors: Iterable[tuple[str, list[int]]]) -> list[list[Any]]:
    """List tensors with their dimensions and the blocks that have them, each name once."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, ne in tensors:
        number = re.search(r"(?<=blk\.)\d+", name)
        blocks = found.setdefault((re.sub(r"(?<=blk\.)\d+", "*", name), tuple(ne)), [])
        blocks += [int(number[0])] if number else []
    return [[name, ne, blocks] for (name, ne), blocks in found.items()]


def unpacked(found: Iterable[Sequence[Any]]) -> list[tuple[str, list[int]]]:
    """Undo `packed`, but for the order."""
    return [
        (name.replace("*", str(block)), ne) for name, ne, blocks in found for block in blocks or [0]
    ]


def record(arch: str, path: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp prints for an architecture's file, or why it does not load it."""
    values, tensors, lines = make(arch, path, own)
    found: dict[str, Any] = {"arch": arch, "values": values, "n_tensors": len(tensors)}
    found["tensors"] = packed(tensors)
    if not tensors:
        return found | {"refused": refusal_of(lines)}
    printed = []
    asked = [one for one in ASKED if not one[3] or values.get("nextn_predict_layers")]
    lines = _run("caches", path, asked)
    starts = [i for i, line in enumerate(lines) if line.startswith("context ")]
    if not starts:
        return found | {"refused": refusal_of(lines)}
    parts = [lines[i:j] for i, j in zip(starts, [*starts[1:], len(lines)], strict=True)]
    for i, one in enumerate(asked):
        if i >= len(parts):  # an earlier context ended the process
            parts.append(_run("caches", path, [one]))
        sizes: dict[str, Any] = sizes_of(parts[i])
        if "made" not in parts[i]:  # it printed the sizes first, and then met our tensors
            sizes["then"] = refusal_of(parts[i])
            if not (sizes["kv"] or sizes["states"]):
                return found | {"refused": sizes["then"]}
        printed.append(sizes)
    found["printed"] = printed
    if printed[0]["states"]:
        found["back"] = sizes_of(_run("caches", path, [BACK]))
    return found


def main(names: Sequence[str]) -> None:
    """Record the sizes of architectures, by default of all that were recorded."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {"files": {}}
    known |= {"xllamacpp": WHEEL, "asked": ASKED}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or list(known["files"]):
            arch, _, variant = name.partition(" ")
            found = record(arch, Path(folder) / "m.gguf", VARIANTS[name] if variant else {})
            known["files"][name] = found
            print(name, found.get("refused") or found["printed"], flush=True)
    lines = [f" {json.dumps(name)}: {json.dumps(one)}" for name, one in known["files"].items()]
    head = {name: value for name, value in known.items() if name != "files"}
    text = json.dumps(head)[:-1] + ', "files": {\n' + ",\n".join(lines) + "\n}}\n"
    RECORD.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] in (["tensors"], ["caches"]):
        child(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(sys.argv[1:])
