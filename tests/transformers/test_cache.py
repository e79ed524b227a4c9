"""The cache beside transformers' own, layer by layer: the same tokens, without copies."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

import unimem as um
from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from support.models.tiny_transformers import DIM, HEADS, LAYERS, both, states
from support.project.doc_examples import check_docs
from unimem.transformers import KVCache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gives_memory_back")]


def step(ours: Any, theirs: Any, n: int, **given: Any) -> None:
    """n tokens in all layers: masks, keys and values are the same."""
    for layer in range(LAYERS):
        assert ours.get_mask_sizes(n, layer) == theirs.get_mask_sizes(n, layer)
    for layer in range(LAYERS):
        k, v = states(n, seed=1000 * layer + ours.get_seq_length(layer), **given)
        got, expected = ours.update(k, v, layer), theirs.update(k, v, layer)
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert ours.get_seq_length() == theirs.get_seq_length()


STEPS = {"a prompt": (12, 1, 1, 1), "token by token": (1,) * 20, "long": (700, 1, 300, 5, 1)}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma", "chunks"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_update_shows_what_dynamic_cache_shows(kind: str, steps: str, dtype: Any) -> None:
    ours, theirs = both(kind, max_seq_len=2000)
    with ours:
        for n in STEPS[steps]:
            step(ours, theirs, n, dtype=dtype)
        assert ours.is_sliding == theirs.is_sliding
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)


def test_keys_are_views_that_never_move() -> None:
    cache = KVCache(tiny.config("llama"), 1000)
    with cache:
        k, _ = cache.update(*states(1), 0)
        (kv,) = cache.caches
        assert k.data_ptr() == kv.address(0, "k")
        for seed in range(600):
            last, _ = cache.update(*states(1, seed=seed), 0)
        assert kv.n_growths > 1
        assert last.data_ptr() == k.data_ptr()
        assert last.shape == (2, HEADS, 601, DIM)
        assert last.stride()[2:] == (DIM, 1)
        assert torch.equal(last[:, :, :1], k)
        first = k.clone()
        cache.close()
        assert torch.equal(k, first)  # a view keeps the memory
        assert torch.equal(last[:, :, :1], first)
        del k, last


def test_crop_and_go_on() -> None:
    ours, theirs = both("gemma", spare_rows=16)
    theirs.activate_past_recording()
    with ours:
        for n, dropped in ((30, 0), (6, 4), (1, 0), (6, 6), (5, 1)):
            step(ours, theirs, n)
            ours.crop(-dropped)
            theirs.crop(-dropped)
            assert ours.get_seq_length() == theirs.get_seq_length()
        with pytest.raises(ValueError, match="at most 37 tokens to drop, got 38"):
            ours.crop(-38)
        step(ours, theirs, 300)
        with pytest.raises(ValueError, match="cannot be dropped, since a window"):
            ours.crop(-300)
        assert ours.get_seq_length() == 337
        ours.reset()
        assert (ours.get_seq_length(), ours.memory_usage_bytes) == (0, 0)
        fresh = transformers.DynamicCache(config=tiny.config("gemma"))
        step(ours, fresh, 9, batch=3)  # of another number of streams
        with pytest.raises(ValueError, match="minus the number of tokens to drop, got 2"):
            ours.crop(2)


def test_an_interrupted_forward_pass_loses_only_its_tokens(tmp_path: Path) -> None:
    """The first layer has a window, and the second, with full attention, has no room."""
    ours, theirs = both("gemma", max_seq_len=20)
    calls: dict[str, Callable[[], object]] = {
        "crop": lambda: ours.crop(-1),
        "copy": ours.copy,
        "save": lambda: ours.save(tmp_path / "chat.kv", model=tiny.model("gemma")),
        "batch_select_indices": lambda: ours.batch_select_indices(torch.tensor([0])),
    }
    with ours:
        step(ours, theirs, 17)
        for n in (17, 18):
            ours.update(*states(4), 0)
            with pytest.raises(um.CacheFull):
                ours.update(*states(4), 1)
            for call, work in calls.items():
                with pytest.raises(RuntimeError, match=f"{call}: .*from {n} to {n + 4} .*rollback"):
                    work()
            ours.rollback()
            assert {layer.length for layer in ours.layers} == {n}
            step(ours, theirs, 1)
        assert os.listdir(tmp_path) == []
        # More tokens than the ring has rows overwrite all earlier ones.
        ours.update(*states(600), 0)
        with pytest.raises(ValueError, match="cannot be dropped, since a window"):
            ours.rollback()
        assert (ours.get_seq_length(), ours.memory_usage_bytes) == (0, 0)
        ours.update(*states(600), 0)
        ours.rollback()
        step(ours, transformers.DynamicCache(config=tiny.config("gemma")), 9, batch=3)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [None, "q8_0"])
def test_streams_are_reordered_repeated_and_selected(kind: str, dtype: str | None) -> None:
    config = tiny.config(kind, head_dim=32)
    ours, theirs = KVCache(config), transformers.DynamicCache(config=config)
    stored = KVCache(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)

    def add(n: int, batch: int) -> None:
        for layer in range(LAYERS):
            k, v = torch.randn(2, batch, HEADS, n, 32, generator=generator)
            for cache in (ours, theirs, stored):
                cache.update(k, v, layer)

    changes: list[tuple[int, int, Callable[[Any], None]]] = [
        (11, 4, lambda cache: cache.reorder_cache(torch.tensor([2, 1, 1, 0]))),
        (1, 4, lambda cache: cache.batch_repeat_interleave(2)),
        (1, 8, lambda cache: cache.batch_select_indices(torch.tensor([5, 0, 3]))),
        (1, 3, lambda cache: cache.reorder_cache(torch.arange(3))),
    ]
    with ours, stored:
        for n, batch, change in changes:
            add(n, batch)
            for cache in (ours, theirs, stored):
                change(cache)
            for layer, other in enumerate(theirs.layers):
                assert torch.equal(ours.layers[layer].keys, other.keys)
                assert torch.equal(ours.layers[layer].values, other.values)
                assert torch.allclose(stored.layers[layer].keys, other.keys, atol=0.03)
        with pytest.raises(ValueError, match="expected 3 streams, got 2"):
            ours.reorder_cache(torch.tensor([0, 1]))
        for wrong in ([0, 1, 3], [0, 1, -1], [0.0, 1.0, 1.5]):
            for thing in (ours, ours.layers[0]):
                with pytest.raises(ValueError, match="expected integers from 0 to 2"):
                    thing.reorder_cache(torch.tensor(wrong))


def test_a_copy_has_memory_of_its_own() -> None:
    ours, theirs = both("gemma")
    with ours:
        step(ours, theirs, 13)
        with copy.deepcopy(ours) as other:
            before = [layer.keys.clone() for layer in other.layers]
            step(ours, theirs, 9)
            assert other.get_seq_length() == 13
            for layer, keys in zip(other.layers, before, strict=True):
                assert torch.equal(layer.keys, keys)
        step(ours, theirs, 1)
        # A copy has only the tokens in the window.
        with ours.copy() as other, pytest.raises(ValueError, match="has not kept those before"):
            other.crop(-2)


def test_a_budget_holds_for_all_layers_together() -> None:
    ours = KVCache(tiny.config("gemma"), 4000, budget_bytes=256 << 10)
    capacities = []

    def fill() -> None:
        for n in range(4000):
            for layer in range(LAYERS):
                ours.update(*states(1, seed=n), layer)
            capacities.append(ours.capacity_bytes)

    with ours, pytest.raises(um.CacheFull, match="budget_bytes"):
        fill()
    assert max(capacities) <= 256 << 10
    assert len(capacities) > 300
    with pytest.raises(um.CacheFull), KVCache(tiny.config("llama"), 4, grow=False) as full:
        full.update(*states(5), 0)


WRONG = {
    "another batch": (
        ValueError,
        r"expected \[2, 2, n, 8\] as before, got \[1, 2, 1, 8\]",
        lambda: states(1, batch=1),
    ),
    "values of another shape": (
        ValueError,
        "keys and values of one shape",
        lambda: (states(1)[0], states(2)[1]),
    ),
    "values of no memory": (
        TypeError,
        "without memory",
        lambda: (states(1)[0], torch._efficientzerotensor((2, HEADS, 1, 8))),
    ),
    "gradients": (RuntimeError, "no_grad", lambda: (states(1)[0].requires_grad_(), states(1)[1])),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tokens_change_nothing(wrong: str) -> None:
    error, said, given = WRONG[wrong]
    with KVCache(tiny.config("llama")) as cache:
        cache.update(*states(3), 0)
        with pytest.raises(error, match=said):
            cache.update(*given(), 0)  # type: ignore[no-untyped-call]
        assert cache.get_seq_length() == 3
        assert torch.equal(cache.layers[0].keys, states(3)[0])


def test_unsupported_models_and_options_are_named() -> None:
    with pytest.raises(NotImplementedError, match="has compressed_sparse_attention: use trans"):
        KVCache(tiny.config("llama", layer_types=["compressed_sparse_attention"] * 3))
    for options, error in (
        ({"max_seq_len": 0}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"grow": "no"}, ValueError),
        ({"spare_rows": -1}, ValueError),
        ({"rotate": 1}, ValueError),
        ({"v_dtype": "f16"}, TypeError),
        ({"order": "token"}, TypeError),
        ({"batch": 2}, TypeError),
        ({"v_head_dim": 8}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            KVCache(tiny.config("llama"), **options)
    with KVCache(tiny.config("llama")) as cache, pytest.raises(TypeError, match="float64"):
        cache.update(*states(1, dtype=torch.float64), 0)


@pytest.mark.parametrize("dtype", ["q8_0", "q8_0,q4_0", "bf16,q8_0", "f32"])
@pytest.mark.parametrize("rotate", [False, True])
def test_attention_sees_keys_that_queries_fit(dtype: str, rotate: bool) -> None:
    """Heads that are stored rotated are shown as they were given."""
    config = tiny.config("gemma", head_dim=64)
    theirs = transformers.DynamicCache(config=config)
    with KVCache(config, dtype=dtype, rotate=rotate) as ours:
        for n in (12, 1, 3, 1):
            for layer in range(LAYERS):
                k, v = torch.randn(2, 1, HEADS, n, 64, generator=torch.Generator().manual_seed(n))
                shown, expected = ours.update(k, v, layer), theirs.update(k, v, layer)
                held = ours.layers[layer].keys, ours.layers[layer].values
                kept = theirs.layers[layer].keys, theirs.layers[layer].values
                for one, other in zip((*shown, *held), (*expected, *kept), strict=True):
                    assert torch.nn.functional.mse_loss(one.float(), other) < 0.01
        assert all(kv.rotate is rotate for kv in ours.caches)
        assert {f"{kv.dtype},{kv.v_dtype}" for kv in ours.caches} == {
            dtype if "," in dtype else f"{dtype},{dtype}"
        }


def test_a_shallow_copy_has_memory_of_its_own_too() -> None:
    ours, theirs = both("gemma")
    with ours:
        step(ours, theirs, 13)
        other = copy.copy(ours)
        assert other.get_seq_length() == 13
        del other
        assert ours.get_seq_length() == 13
        step(ours, theirs, 2)
        with pytest.raises(TypeError, match=r"save\(\) writes a cache"):
            pickle.dumps(ours)


@pytest.mark.parametrize("window", [2, 16])
@pytest.mark.parametrize("n", [3, 17, 60])
def test_a_crop_may_be_longer_than_the_window(window: int, n: int) -> None:
    config = tiny.config("mistral", sliding_window=window)
    ours, theirs = KVCache(config), transformers.DynamicCache(config=config)
    theirs.activate_past_recording()
    with ours:
        step(ours, theirs, 5)
        step(ours, theirs, n)
        for cache in (ours, theirs):
            cache.crop(torch.tensor(-n) if cache is ours else -n)
        assert ours.get_seq_length() == 5
        step(ours, theirs, 1)
        step(ours, theirs, n)
        ours.crop(-ours.get_seq_length())
        assert ours.get_seq_length() == 0
        step(ours, transformers.DynamicCache(config=config), 4)


@pytest.mark.parametrize("more", [0, 3, 30])
def test_all_tokens_can_be_dropped_behind_a_window_that_was_copied(more: int) -> None:
    config = tiny.config("gemma")
    with KVCache(config, spare_rows=2) as cache:
        for layer in range(LAYERS):
            cache.update(*states(40), layer)
        cache.batch_select_indices(torch.tensor([0]))
        for layer in range(LAYERS if more else 0):
            cache.update(*(part[:1] for part in states(more)), layer)
        cache.crop(-40 - more)
        assert {kv.next_position for kv in cache.caches} == {0}
        step(cache, transformers.DynamicCache(config=config), 4)


def test_a_crop_that_no_spare_row_allows_says_so() -> None:
    with KVCache(tiny.config("mistral"), spare_rows=0) as cache:
        for layer in range(LAYERS):
            cache.update(*states(3000), layer)
        rows = cache.caches[0].n_rows
        with pytest.raises(ValueError, match=r"spare_rows= keeps more \(it is 0\)"):
            cache.crop(-rows)
        assert cache.get_seq_length() == 3000


def test_keys_and_values_may_have_two_widths() -> None:
    config = tiny.config("gemma")
    ours, theirs = KVCache(config), transformers.DynamicCache(config=config)
    with ours:
        for n in (12, 1, 1, 3):
            for layer in range(LAYERS):
                k, v = torch.randn(2, HEADS, n, 24), torch.randn(2, HEADS, n, 16)
                got, expected = ours.update(k, v, layer), theirs.update(k, v, layer)
                assert all(map(torch.equal, got, expected))
        ours.batch_repeat_interleave(2)
        theirs.batch_repeat_interleave(2)
        assert torch.equal(ours.layers[1].values, theirs.layers[1].values)
        with copy.deepcopy(ours) as other:
            assert torch.equal(other.layers[0].values, ours.layers[0].values)


def test_it_grows_past_the_length_of_the_configuration() -> None:
    with KVCache(tiny.config("llama", max_position_embeddings=8)) as cache:
        for layer in range(LAYERS):
            cache.update(*states(3000), layer)
        assert cache.get_seq_length() == 3000
        assert cache.get_max_length() == -1
    with (
        KVCache(tiny.config("llama"), 8) as small,
        pytest.raises(um.CacheFull, match="max_seq_len"),
    ):
        small.update(*states(9), 0)


def test_a_closed_cache_says_so() -> None:
    cache = KVCache(tiny.config("llama"))
    cache.update(*states(3), 0)
    layer = cache.layers[0]
    cache.close()
    cache.close()
    calls: list[Callable[[], Any]] = [
        lambda: cache.update(*states(1), 0),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        cache.copy,
        cache.reset,
        cache.rollback,
        layer.reset,
    ]
    for call in calls:
        with pytest.raises(um.ClosedError, match="got a closed one"):
            call()


def test_layers_have_what_layers_of_transformers_have() -> None:
    with KVCache(tiny.config("gemma")) as cache:
        for layer in range(LAYERS):
            cache.update(*states(5), layer)
        names = {name for name in dir(transformers.cache_utils.DynamicLayer) if name[0] != "_"}
        first, second = cache.layers[:2]
        assert names <= {*dir(first)}
        assert (first.device.type, first.dtype) == ("cpu", torch.float32)
        before = second.keys.clone()
        first.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(first.keys, states(5, seed=0)[0].flip(0)[:, :, -5:])
        assert torch.equal(second.keys, before)
        first.offload()
        first.prefetch()
        for call in (
            lambda: first.crop(-1),
            lambda: first.batch_repeat_interleave(2),
            lambda: first.batch_select_indices(torch.tensor([0])),
        ):
            with pytest.raises(NotImplementedError, match="use the cache's"):
                call()  # type: ignore[no-untyped-call]
        first.reset()
        assert cache.get_seq_length() == 0
    del cache
    with pytest.raises(um.ClosedError, match="one that is gone"):
        first.reset()


def test_a_dropped_cache_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            cache = KVCache(tiny.config("gemma"))
            for layer in range(LAYERS):
                cache.update(*states(600), layer)
            del cache
            assert not [row for row in um.report().rows if row.category == "kv" and row.nbytes]
    finally:
        gc.enable()


def test_memory_goes_with_the_cache() -> None:
    cache = KVCache(tiny.config("gemma"))
    cache.update(*states(3), 1)
    assert cache.capacity_bytes > 0
    assert "0 tokens" not in repr(cache.layers[1])
    del cache
    gc.collect()
    assert np.all([row.category != "kv" or not row.nbytes for row in um.report().rows])


@pytest.mark.skipif(CACHE != "cache", reason="the example names the cache as the newest does")
def test_the_example_runs() -> None:
    check_docs(KVCache, "KVCache")
