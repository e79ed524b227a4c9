"""A real model, SmolLM2-135M from its GGUF file, says the same with this cache as with another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

import unimem as um
from support.models.architectures import CACHE
from support.project.checkout import ROOT
from unimem.engine.text.tokenizer import Tokenizer
from unimem.transformers import KVCache

MODEL = ROOT / "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason="SmolLM2-135M is not here: make models"),
]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
}
TEXT = "The memory of a language model has three parts: weights, scratch and history. " * 8


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    with um.open_weights(MODEL) as weights:
        return torch.tensor([Tokenizer.from_metadata(weights.metadata).encode(TEXT)])


@pytest.fixture
def cache(model: Any) -> Iterator[KVCache]:
    with KVCache.for_model(model) as cache:
        yield cache


def say(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> list[int]:
    torch.manual_seed(0)
    mask, given = torch.ones_like(ids), {"max_new_tokens": 24, "pad_token_id": 0} | options
    said = model.generate(ids, attention_mask=mask, **{CACHE: cache}, **given)
    return [int(token) for token in said[0, ids.shape[1] :]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "unimem"])
def test_tokens_are_those_of_dynamic_cache(
    attention: str, way: str, model: Any, ids: torch.Tensor, cache: KVCache
) -> None:
    model.set_attn_implementation(attention)
    expected = say(model, ids, transformers.DynamicCache(), **WAYS[way])
    assert say(model, ids, cache, **WAYS[way]) == expected


def test_a_conversation_goes_on_from_a_file_and_from_a_store(
    model: Any, ids: torch.Tensor, cache: KVCache, tmp_path: Path
) -> None:
    model.set_attn_implementation("sdpa")
    expected = say(model, ids, cache, do_sample=False)
    path = tmp_path / "talk.kv"
    with (
        um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 28, chunk_tokens=32) as store,
        KVCache.for_model(model) as again,
    ):
        cache.crop(ids.shape[1] - cache.get_seq_length())
        cache.save(path, tokens=ids)
        n = cache.put_into(store, ids)
        assert n == ids.shape[1] // 32 * 32
        assert again.restore_from(store, ids) == n
        assert say(model, ids, again, do_sample=False) == expected
    with KVCache.restore(path, model=model, tokens=ids) as other:
        other.crop(-1)  # generate computes the last token of a prompt
        assert say(model, ids, other, do_sample=False) == expected
