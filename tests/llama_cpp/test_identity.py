from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

import unimem as um
from support.contracts.things import MODEL
from support.files.gguf_files import write_with_gguf_py
from support.models import make
from unimem.llama_cpp.identity import model_hash, options_of

USUAL = {
    **{"rope_scaling_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0},
    **{"yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0},
    **{"yarn_beta_slow": 1.0, "yarn_orig_ctx": 0, "n_seq_max": 1, "kv_unified": False},
}


def llama(
    lora: Path | None = None,
    overrides: Any = None,
    model: Path = MODEL,
    n_ctx: int = 512,
    **params: Any,
) -> Any:
    given = SimpleNamespace(**(USUAL | params))
    path = None if lora is None else str(lora)
    own = {"lora_path": path, "lora_scale": 0.5, "kv_overrides": overrides}
    own |= {"model_path": str(model), "n_ctx": lambda: n_ctx}
    return SimpleNamespace(context_params=given, **own)


def test_a_model_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = make.write_model(tmp_path / "m.gguf", shape=make.TINY)
    with um.open_weights(path) as weights:
        assert model_hash(path) == weights.content_hash()


def test_options_that_change_rows_have_a_name(tmp_path: Path) -> None:
    lora = tmp_path / "lora.gguf"
    lora.write_bytes(b"a")
    found = [
        options_of(llama(lora)),
        options_of(llama(rope_freq_base=1e6)),
        options_of(llama(overrides={"llama.rope.freq_base": 1e6})),
    ]
    lora.write_bytes(b"b")
    found.append(options_of(llama(lora)))
    assert options_of(llama()) == ""
    assert len(set(found)) == 4
    assert found[1] == '{"rope_freq_base": 1000000.0}'


def test_factors_for_long_contexts_have_a_name(tmp_path: Path) -> None:
    """llama.cpp takes those of RoPE by the size of the context, for the first tokens too."""
    path, key = tmp_path / "m.gguf", "none.rope.scaling.original_context_length"
    u32, f32 = GGUFValueType.UINT32, GGMLQuantizationType.F32
    factors = {"rope_factors_long.weight": (np.ones(8, np.float32), f32)}
    write_with_gguf_py(path, {"none.context_length": (65536, u32), key: (4096, u32)}, factors)

    def is_long(n_ctx: int, **more: Any) -> bool:
        return "rope_factors" in options_of(llama(model=path, n_ctx=n_ctx, **more))

    assert [is_long(n_ctx) for n_ctx in (4096, 4352)] == [False, True]
    assert [is_long(8192, n_seq_max=2, kv_unified=unified) for unified in (False, True)] == [
        False,
        True,
    ]
    assert not is_long(8192, overrides={key: 8192})
    write_with_gguf_py(path, {"none.context_length": (65536, u32)}, factors)
    assert [is_long(n_ctx) for n_ctx in (65536, 65792)] == [False, True]


def test_a_missing_adapter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        options_of(llama(tmp_path / "lora.gguf"))
