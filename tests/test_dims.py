"""Dimensions: checked, and read from a model's metadata."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um

DIMS = um.ModelDims(
    hidden_size=64,
    intermediate_size=172,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=512,
    num_layers=5,
    max_seq_len=512,
)


def test_derived() -> None:
    assert (DIMS.q_size, DIMS.kv_size) == (64, 32)
    assert (DIMS.quantized, DIMS.max_batch_size) == (False, 1)


def test_immutable_and_comparable() -> None:
    with pytest.raises(FrozenInstanceError):
        DIMS.hidden_size = 1  # type: ignore[misc]
    assert replace(DIMS, num_layers=6) != DIMS
    assert hash(replace(DIMS)) == hash(DIMS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("intermediate_size", -1),
        ("vocab_size", 2**31),
        ("num_layers", 1.0),
        ("max_seq_len", None),
        ("max_batch_size", True),
        ("quantized", 1),
        ("num_kv_heads", 3),
        ("head_dim", 7),
    ],
)
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        replace(DIMS, **{name: value})


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_from_weights(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from models.make import small, write_model

    shape = small(layers=2, head_dim=48 if arch == "qwen3" else None)
    for kind in ("f16", "q8_0"):
        path = write_model(tmp_path / f"{kind}.gguf", arch, shape, kind)
        with um.open_weights(path) as weights:
            dims = um.ModelDims.from_weights(weights)
        assert dims == um.ModelDims(
            hidden_size=256,
            intermediate_size=768,
            num_attention_heads=8,
            num_kv_heads=2,
            head_dim=shape.head,
            vocab_size=1024,
            num_layers=2,
            max_seq_len=1024,
            quantized=kind == "q8_0",
        )


def test_another_architecture(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from models.make import TINY, write_model

    path = write_model(tmp_path / "m.gguf", "gpt2", TINY)
    with (
        um.open_weights(path) as weights,
        pytest.raises(ValueError, match=r"gpt2.*llama, qwen2, qwen3"),
    ):
        um.ModelDims.from_weights(weights)
