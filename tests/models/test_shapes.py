"""Shapes of models from a config.json and from dimensions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from unimem.models.dims import ARCHITECTURES
from unimem.models.families import GRAPH_KINDS
from unimem.models.shapes import Layers, from_config, from_dims, read_config

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def read(path: str, n: int) -> bytes:
    return Path(path).read_bytes()[:n]


def test_a_config_gives_dimensions_and_layers() -> None:
    shape = from_config(LLAMA, "")
    assert shape.dims == um.ModelDims(64, 128, 8, 4, 8, 100, 2, 512)
    assert shape.cache == (Layers(2, 4, 8, 8),)
    assert shape.unknown == ()
    assert shape.cache == from_dims(shape.dims).cache


@pytest.mark.parametrize(
    ("change", "unknown"),
    [
        ({"model_type": "new"}, ["the scratch", "the KV cache"]),
        ({"num_experts": 8}, ["the scratch"]),
        ({"is_encoder_decoder": True}, ["the KV cache"]),
        ({"hidden_size": "64"}, ["the scratch", "the KV cache"]),
    ],
)
def test_what_is_not_known_has_a_reason(change: dict[str, Any], unknown: list[str]) -> None:
    shape = from_config(LLAMA | change, "")
    assert shape.dims is None
    texts = filter(None, (shape.no_scratch, *shape.unknown))
    assert [text.partition(":")[0] for text in texts] == unknown
    assert shape.is_counted == ("the KV cache" not in unknown)


def test_a_config_is_read_beside_the_model(tmp_path: Path) -> None:
    model = str(tmp_path / "model.safetensors")
    assert read_config(model, read)[1].startswith("no file of it says its dimensions")
    config = tmp_path / "config.json"
    for text, why in (
        ("[]", "no object"),
        ("{", "cannot be used"),
        (" " * (4 << 20) + "{}", "4 MiB"),
    ):
        config.write_text(text)
        found, reason = read_config(model, read)
        assert found is None
        assert why in reason
    config.write_text(json.dumps(LLAMA))
    assert read_config(model, read) == (LLAMA, "")
    shape = from_config(None, "why")
    assert (shape.unknown, shape.no_scratch) == (("the KV cache: why",), "the scratch: why")
    assert not shape.is_counted


def test_the_longest_context_is_bounded_by_the_window_of_all_layers() -> None:
    shape = from_config(LLAMA | {"model_type": "mistral", "sliding_window": 64}, "")
    assert shape.longest_ctx(None) == 512
    assert shape.cache == (Layers(2, 4, 8, 8, 64),)


def test_the_engine_has_a_graph_for_each_of_its_architectures() -> None:
    assert tuple(GRAPH_KINDS) == ARCHITECTURES
