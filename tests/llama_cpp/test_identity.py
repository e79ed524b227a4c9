from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unimem as um
from support.models import make
from unimem.llama_cpp.identity import model_hash, options_of

USUAL = {
    **{"rope_scaling_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0},
    **{"yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0},
    **{"yarn_beta_slow": 1.0, "yarn_orig_ctx": 0},
}


def llama(lora: Path | None = None, overrides: Any = None, **params: Any) -> Any:
    given = SimpleNamespace(**(USUAL | params))
    path = None if lora is None else str(lora)
    own = {"lora_path": path, "lora_scale": 0.5, "kv_overrides": overrides}
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


def test_a_missing_adapter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        options_of(llama(tmp_path / "lora.gguf"))
