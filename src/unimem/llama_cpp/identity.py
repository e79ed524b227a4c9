"""What states depend on besides tokens and layout: the model, and how llama.cpp was started."""

from __future__ import annotations

import json
import os
from collections import ChainMap
from pathlib import Path
from typing import Any

import xxhash

from unimem.weights.opened import open_weights
from unimem.weights.whole_hash import whole_hash

#: Fields of `llama_context_params` that change rows, and the values that mean "as the model says".
_OPTIONS: dict[str, tuple[float, ...]] = {
    "rope_scaling_type": (-1,),
    "rope_freq_base": (0,),
    "rope_freq_scale": (0,),
    "yarn_ext_factor": (-1,),
    "yarn_attn_factor": (-1, 1),
    "yarn_beta_fast": (-1, 32),
    "yarn_beta_slow": (-1, 1),
    "yarn_orig_ctx": (0,),
}


def model_hash(path: str | os.PathLike[str]) -> str:
    """Return the hash of all bytes of a GGUF model. It is remembered: see docs/identity.md.

    Raises
    ------
    FormatError, OSError
        The model cannot be read.
    """
    with open_weights(path, load="map") as weights:
        return whole_hash(weights)


def options_of(llama: Any) -> str:
    """Return what changes rows among the arguments of a `Llama`; "" for none of them."""
    params = llama.context_params
    found: dict[str, Any] = {
        name: value
        for name, usual in _OPTIONS.items()
        if (value := getattr(params, name)) not in usual
    }
    if llama.lora_path:
        digest = xxhash.xxh3_128_hexdigest(Path(llama.lora_path).read_bytes())
        found["lora"] = [digest, llama.lora_scale]
    if llama.kv_overrides:
        found["kv_overrides"] = repr(sorted(llama.kv_overrides.items()))
    if _is_long(llama):
        found["rope_factors"] = "long"
    return json.dumps(found, sort_keys=True) if found else ""


def _is_long(llama: Any) -> bool:
    """Whether a `Llama` has the RoPE factors for long contexts, as llama.cpp chooses them."""
    params = llama.context_params
    n_ctx = llama.n_ctx() // (1 if params.kv_unified else params.n_seq_max)
    with open_weights(llama.model_path, load="map") as weights:
        if "rope_factors_long.weight" not in weights.tensors:
            return False
        meta: Any = ChainMap(llama.kv_overrides or {}, weights.metadata)  # type: ignore[arg-type]
        arch = meta["general.architecture"]
        trained = meta[f"{arch}.context_length"]
        return bool(n_ctx > meta.get(f"{arch}.rope.scaling.original_context_length", trained))
