"""A cache of fixed shapes on a GPU gives the tokens of one that grows.

The device is main memory, so that no graph of CUDA is captured: what is compiled is compared.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import unimem as um
from support.gpu.host_gpu import HostDriver
from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.transformers import KVCache, on_device
from unimem.transformers import cache as cache_module

pytestmark = pytest.mark.slow

N, ROOM = 20, 48


@pytest.fixture(autouse=True)
def gpu(cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """The device, which holds all models."""
    monkeypatch.setattr(host_gpu, "device_type", 1)
    for module in (on_device, cache_module):
        monkeypatch.setattr(module, "device_of", lambda _: 0)
    return host_gpu


def static(model: Any, max_seq_len: int = ROOM, **options: Any) -> KVCache:
    return KVCache.for_model(model, max_seq_len, static=True, **options)


def talk(model: Any, cache: Any, ids: Any, n: int = 12, **options: Any) -> Any:
    how = {"do_sample": False, "pad_token_id": 0, CACHE: cache} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, **how)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("attention", ["eager", "unimem"])
@pytest.mark.parametrize("kind", ["llama", "gemma", "latent"])
def test_generate_gives_the_tokens_of_a_dynamic_cache(
    kind: str, attention: str, options: dict[str, Any]
) -> None:
    model, ids = copy.deepcopy(tiny.model(kind)), tiny.prompts(2, N)
    model.set_attn_implementation(attention)
    dynamic = transformers.DynamicCache(config=model.config)
    expected = talk(model, dynamic, ids, **options)
    with static(model) as cache:
        assert cache.is_compileable
        assert cache.get_max_length() == ROOM
        assert torch.equal(talk(model, cache, ids, **options), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
        more = talk(model, cache, expected, 4, **options)
    assert torch.equal(more, talk(model, dynamic, expected, 4, **options))


@pytest.mark.parametrize("kind", ["llama", "gemma", "latent"])
def test_all_compiled_steps_are_one_graph_that_asks_no_host(kind: str) -> None:
    model, ids = tiny.model(kind), tiny.prompts(2, N)
    expected = talk(model, transformers.DynamicCache(config=model.config), ids)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, backend=counted, fullgraph=True, dynamic=False)
    with static(model) as cache, torch.no_grad():
        found = [model(ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)]
        rows = [part.data_ptr() for layer in cache.layers for part in layer.rows]
        for _ in range(11):
            found.append(step(found[-1], **{CACHE: cache}).logits[:, -1:].argmax(-1))
        assert [part.data_ptr() for layer in cache.layers for part in layer.rows] == rows
        assert torch.equal(torch.cat([ids, *found], 1), expected)
        assert {kv.seq_len for kv in cache.caches} == {N + 11}
    assert counted.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_layer_shows_the_tokens_that_it_has(kind: str) -> None:
    model = tiny.model(kind)
    with static(model) as cache, KVCache.for_model(model, device=None) as other:
        for n in (N, 3):
            for layer in (*cache.layers, *other.layers):
                layer.update(*tiny.states(n))
            for layer, like in zip(cache.layers, other.layers, strict=True):
                assert torch.equal(layer.keys, like.keys)
                assert torch.equal(layer.values, like.values)
                assert repr(layer) == repr(like)


def test_tokens_without_room_are_refused_or_told_later() -> None:
    model = tiny.model("llama")
    with static(model, 6) as cache:
        for layer in cache.layers:
            layer.update(*tiny.states(4))
        with pytest.raises(um.CacheFull, match="7 tokens do not fit into 6: max_seq_len="):
            cache.layers[0].update(*tiny.states(3))
        for layer in cache.layers:
            layer.group.counts[layer.index].add_(5)  # as a graph does, which cannot raise
        with pytest.raises(um.CacheFull, match="9 tokens do not fit into 6"):
            cache.crop(-1)
        cache.crop(-1)
        assert cache.get_seq_length() == 5
        cache.reset()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", ["llama", "gemma", "latent"])
def test_sessions_go_on_with_fixed_shapes(kind: str, tmp_path: Path) -> None:
    model, path = tiny.model(kind), tmp_path / "chat.kv"
    with KVCache.for_model(model, device=None) as cache:
        first = talk(model, cache, tiny.prompts(2, N))
        cache.save(path, tokens=first)
        expected = talk(model, cache, first).tolist()
    restored: dict[str, Any] = {"mode": "copy", "max_seq_len": ROOM, "static": True}
    with KVCache.restore(path, model=model, tokens=first, **restored) as again:
        with again.copy() as other:
            assert talk(model, other, first).tolist() == expected
        again.batch_select_indices(torch.tensor([1]))
        assert talk(model, again, first[1:]).tolist() == expected[1:]


def test_what_it_lacks_is_refused() -> None:
    model = tiny.model("llama")
    for options in ({"device": None}, {"max_seq_len": None}, {"dtype": "f16"}):
        with pytest.raises(ValueError, match="static: expected False, or a model on a GPU"):
            KVCache.for_model(model, **{"max_seq_len": ROOM, "static": True} | options)
