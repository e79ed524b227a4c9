"""Layers with states, beside layers with tokens or alone, generate as with transformers' cache."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

import unimem as um
from support.models import architectures
from support.models import tiny_transformers as tiny
from unimem.transformers import KVCache
from unimem.transformers.layers import Group
from unimem.transformers.states import StateLayer, TokensAndStates

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gives_memory_back")]

NAMES = "bamba falcon_h1 falcon_mamba jamba kimi_linear lfm2 mamba mamba2 qwen3_next".split()


def generated(model: Any, cache: Any, **options: Any) -> Any:
    ids = architectures.ids(2, 12)
    given = {architectures.cache_name(model): cache}
    more = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **given, **more, **options).tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_the_tokens_of_dynamic_cache(name: str, how: str) -> None:
    model = architectures.model(name)
    options = {"num_beams": 3} if how == "beams" else {}
    expected = generated(model, transformers.DynamicCache(config=model.config), **options)
    with KVCache.for_model(model) as cache:
        assert generated(model, cache, **options) == expected
        states = cache._states()
        assert states
        held = [kv.state(0).ctypes.data for layer in states for kv in layer.caches]
        addresses = {state.data_ptr() for one in states for state in one._tensors().values()}
        assert addresses == {*held}
        assert cache.capacity_bytes >= sum(kv.capacity_bytes for one in states for kv in one.caches)
        with copy.deepcopy(cache) as other:
            before = [state.clone() for one in states for state in one._tensors().values()]
            cache.reset()
            after = [state for one in other._states() for state in one._tensors().values()]
            assert all(map(torch.equal, before, after))
        assert generated(model, cache, **options) == expected


def test_what_states_cannot_do_is_refused(tmp_path: Path) -> None:
    model = architectures.model("qwen3_next")
    with KVCache.for_model(model) as cache:
        generated(model, cache)
        with pytest.raises(NotImplementedError, match="save: expected layers of keys and values"):
            cache.save(tmp_path / "chat.kv")
        with pytest.raises(ValueError, match="layers have states that do not go back"):
            cache.crop(-1)
        with (
            um.KVStore(tmp_path / "s", ram_bytes=1 << 20) as store,
            pytest.raises(NotImplementedError, match="put_into: expected layers"),
        ):
            cache.put_into(store, architectures.ids())


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("layer", [1, 2])
def test_states_that_are_ahead_end_with_a_rollback(name: str, layer: int) -> None:
    """Lengths alone do not tell: attention may have all of the tokens, or none."""
    model, ids = architectures.model(name), architectures.ids(n=15)
    how = {architectures.cache_name(model): (cache := KVCache.for_model(model))}
    with cache, torch.no_grad():
        model(ids[:, :11], **how)
        model(ids[:, 11:12], **how)
        cache.rollback()  # of whole passes: nothing is dropped
        assert cache.get_seq_length() == 12
        with (
            patch.object(model.model.layers[layer], "forward", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            model(ids[:, 12:], **how)
        with pytest.raises(RuntimeError, match=r"copy: layers differ, .* interrupted"):
            cache.copy()
        with pytest.raises(ValueError, match="states that do not: the cache is empty"):
            cache.rollback()
        assert cache.get_seq_length() == 0
        logits = model(ids, **how).logits
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits)
        cache.copy().close()


@pytest.mark.parametrize("name", ["rwkv", "xlstm", "xlm"])
def test_models_with_other_caches_are_refused(name: str) -> None:
    config = transformers.AutoConfig.for_model(name)
    with pytest.raises(NotImplementedError, match=f"{name} has a cache of its own"):
        KVCache(config)


def test_encoders_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="t5 has an encoder"):
        KVCache(transformers.T5Config())


@pytest.mark.parametrize(
    "name", ["bloom", "deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3", "mpt"]
)
def test_models_without_a_longest_text_or_with_two_widths_are_served(name: str) -> None:
    model = architectures.model(name)
    expected = generated(model, transformers.DynamicCache(config=model.config))
    with KVCache.for_model(model) as cache:
        assert generated(model, cache) == expected


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_layer_is_copied_without_its_cache(call: Any) -> None:
    """A copy would write to the memory of the original."""
    owner = KVCache(tiny.config("llama"))
    group = Group(None, owner._options)
    for layer in (
        owner.layers[0],
        StateLayer(1, {}),
        TokensAndStates(1, owner, group, group.add()),
    ):
        with pytest.raises(TypeError, match=f"{type(layer).__name__}: expected a copy of the cac"):
            call(layer)


@pytest.mark.filterwarnings("ignore:Dynamo does not know:UserWarning")
def test_a_compiled_first_pass_makes_its_states() -> None:
    """Compiled code follows calls of caches, which have to be functions of Python."""
    model, ids, logits = architectures.model("lfm2"), architectures.ids(1, 8), []
    for forward in (model.forward, torch.compile(model.forward, backend="eager")):
        with torch.no_grad(), KVCache.for_model(model, max_seq_len=64) as cache:
            given = {architectures.cache_name(model): cache, "use_cache": True}
            logits.append(forward(ids, **given).logits)
    assert torch.allclose(*logits, atol=1e-5)
