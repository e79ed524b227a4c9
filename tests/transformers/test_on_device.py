"""A cache for a model on a GPU does what one in main memory does.

The device is main memory: models and tensors are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
import transformers

import unimem as um
from support.gpu.host_gpu import HostDriver
from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.transformers import KVCache, on_device, operator
from unimem.transformers import cache as cache_module

pytestmark = pytest.mark.slow

N = 20


@pytest.fixture(autouse=True)
def gpu(cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """The device, which holds all models."""
    monkeypatch.setattr(host_gpu, "device_type", 1)
    monkeypatch.setattr(on_device, "_SPARE_ROWS", 4)  # caches are replaced soon
    for module in (on_device, cache_module):
        monkeypatch.setattr(module, "device_of", lambda _: 0)
    return host_gpu


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=16) as store:
        yield store


def here(model: Any, **options: Any) -> KVCache:
    return KVCache.for_model(model, **options, device=None)


def talk(model: Any, cache: Any, ids: Any, n: int = 12, **options: Any) -> Any:
    torch.manual_seed(0)
    how = {"do_sample": False, "pad_token_id": 0, CACHE: cache} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, **how)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 3},
}


@pytest.mark.parametrize(
    ("kind", "options", "way"),
    [
        *(("llama", {}, way) for way in WAYS),
        ("llama", {"max_seq_len": 40}, "greedy"),
        ("gemma", {"grow": False}, "beams"),
        ("moe", {"budget_bytes": 1 << 20}, "greedy"),
        ("chunks", {}, "greedy"),
        *(("latent", {}, way) for way in WAYS),
        ("latent", {"max_seq_len": 40}, "greedy"),
    ],
)
def test_generate_gives_the_tokens_of_a_dynamic_cache(
    gpu: HostDriver, kind: str, options: dict[str, Any], way: str
) -> None:
    model, ids = tiny.model(kind), tiny.prompts(2, N)
    dynamic = transformers.DynamicCache(config=model.config)
    expected = talk(model, dynamic, ids, **WAYS[way]).tolist()
    with KVCache.for_model(model, **options) as cache:
        assert talk(model, cache, ids, **WAYS[way]).tolist() == expected
        assert {type(kv).__module__ for kv in cache.caches} == {"unimem.cuda.kv"}
        assert sum(gpu.allocated.values()) == cache.capacity_bytes
    assert gpu.allocated == {}


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_another_stored_type_gives_the_tokens_of_main_memory(dtype: str) -> None:
    with patch.dict(tiny.CONFIGS["llama"][1], head_dim=32):
        model, ids = tiny.model.__wrapped__("llama"), tiny.prompts(2, N)
    with here(model, dtype=dtype) as cache:
        expected = talk(model, cache, ids).tolist()
    with KVCache.for_model(model, dtype=dtype) as cache:
        assert talk(model, cache, ids).tolist() == expected
        again = cache.copy()
        assert torch.equal(again.layers[0].keys, cache.layers[0].keys)
        again.close()


STEPS: dict[str, Callable[[KVCache], object]] = {
    "crop": lambda cache: cache.crop(-3),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "nothing to drop": lambda cache: cache.rollback(),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_every_call_does_what_it_does_in_main_memory(kind: str) -> None:
    model = tiny.model(kind)
    with KVCache.for_model(model) as ours, here(model) as theirs:
        for i, step in enumerate(STEPS.values()):
            for _ in range(2):
                for cache in (ours, theirs):
                    k, v = tiny.states(5, max(1, cache._batch() or 2), i)
                    for layer in cache.layers:
                        n = layer.get_mask_sizes(5)[0]
                        assert layer.update(k, v)[0].shape[2] == n
            for cache in (ours, theirs):
                step(cache)
            for one, other in zip(ours.layers, theirs.layers, strict=True):
                assert one.get_seq_length() == other.get_seq_length()
                for part in ("keys", "values"):
                    a, b = getattr(one, part), getattr(other, part)
                    assert a is b is None or torch.equal(a, b)


def test_an_interrupted_pass_is_rolled_back() -> None:
    with KVCache.for_model(tiny.model("llama"), 6) as cache:
        for layer in cache.layers:
            layer.update(*tiny.states(4))
        cache.layers[0].update(*tiny.states(2))
        with pytest.raises(um.CacheFull, match="max_seq_len= makes room for more"):
            cache.layers[1].update(*tiny.states(3))
        with pytest.raises(RuntimeError, match="layers differ, from 4 to 6 tokens"):
            cache.crop(-1)
        cache.rollback()
        assert {layer.get_seq_length() for layer in cache.layers} == {4}


@pytest.mark.parametrize(("kind", "n"), [("llama", N), ("gemma", 4), ("gemma", N), ("latent", N)])
@pytest.mark.parametrize("there_first", [True, False])
def test_sessions_go_on_in_the_other_memory(
    there_first: bool, kind: str, n: int, tmp_path: Path
) -> None:
    model, path = tiny.model(kind, "bfloat16"), tmp_path / "chat.kv"
    devices = (0, None) if there_first else (None, 0)
    with KVCache.for_model(model, device=devices[0]) as cache:
        first = talk(model, cache, tiny.prompts(2, n), 3)
        cache.save(path, tokens=first)
        expected = talk(model, cache, first, 30).tolist()
    for device in devices[::-1]:  # there, and back again
        with (
            patch.object(cache_module, "device_of", lambda _, device=device: device),
            KVCache.restore(path, model=model, tokens=first) as again,
        ):
            again.save(path, tokens=first)
            again.batch_select_indices(torch.tensor([1, 0]))
            again.reorder_cache(torch.tensor([1, 0]))
            assert again.get_seq_length() == first.shape[1] - 1
            assert talk(model, again, first, 30).tolist() == expected


def test_a_session_of_a_ring_goes_back_as_far_as_its_window(tmp_path: Path) -> None:
    model, path = tiny.model("mistral"), tmp_path / "chat.kv"
    with here(model) as cache:
        for layer in cache.layers:
            layer.update(*tiny.states(N))
        cache.save(path)
    with KVCache.restore(path, model=model) as again:
        with pytest.raises(ValueError, match="last 2 tokens cannot be dropped, since a window"):
            again.crop(-2)
        again.crop(-1)
        assert again.layers[0].keys.shape[2] == tiny.WINDOW - 1
        again.crop(1 - N)
        assert again.layers[0].keys is None


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral", "latent"])
@pytest.mark.parametrize("there_first", [True, False])
def test_prefixes_go_on_in_the_other_memory_through_pinned_memory(
    gpu: HostDriver, there_first: bool, kind: str, store: um.KVStore
) -> None:
    model, ids = tiny.model(kind, "bfloat16"), tiny.prompts(1, 40)
    pinned: dict[int, int] = {}

    def register(address: int, nbytes: int) -> None:
        pinned[address] = nbytes

    gpu.register = register  # type: ignore[method-assign]
    devices = (0, None) if there_first else (None, 0)
    with KVCache.for_model(model, device=devices[0]) as cache:
        expected = talk(model, cache, ids)
        assert cache.put_into(store, expected) == 48
        n = store.stat().put_chunks
    with KVCache.for_model(model, device=devices[1]) as cache:
        assert cache.restore_from(store, ids) == 32
        assert talk(model, cache, ids).tolist() == expected.tolist()
        assert cache.put_into(store, expected) == 48
        assert store.stat().put_chunks == n
        longer = talk(model, cache, expected, 20)
        assert cache.put_into(store, longer) == 64
    with KVCache.for_model(model, device=devices[0]) as cache:
        assert cache.restore_from(store, longer) == 64
        longest = talk(model, cache, longer).tolist()
    assert longest == talk(model, None, longer).tolist()
    copies = [call for call in gpu.calls if call[0] == "copy rows"]
    assert copies
    for _, one, other, *_ in copies:  # no other main memory is read or written
        ends = one, other
        assert any(
            first <= end < first + nbytes for end in ends for first, nbytes in pinned.items()
        )


def test_a_damaged_chunk_of_a_window_is_a_miss_on_a_device(store: um.KVStore) -> None:
    """A window of 24 tokens needs two chunks of 16: the first is there before the other fails."""
    ids = tiny.prompts(1, 60)
    with patch.dict(tiny.CONFIGS["mistral"][1], sliding_window=24):
        model = tiny.model.__wrapped__("mistral")
    with KVCache.for_model(model) as cache:
        expected = talk(model, cache, ids)
        assert cache.put_into(store, ids[:, :32]) == 32
        files = {*Path(store.folder).glob("*.kv")}
        assert cache.put_into(store, ids[:, :48]) == 48
    (last,) = {*Path(store.folder).glob("*.kv")} - files
    last.write_bytes(bytes(last.stat().st_size))
    with KVCache.for_model(model) as cache, here(model) as ring:
        with pytest.warns(um.PlacementWarning, match="was removed"):
            assert cache.restore_from(store, ids) == 32
        assert ring.restore_from(store, ids) == 32
        for one, other in zip(cache.layers, ring.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)
        with pytest.raises(ValueError, match="last 2 tokens cannot be dropped, since a window"):
            cache.crop(-2)
        assert talk(model, cache, ids).tolist() == expected.tolist()
        assert cache.put_into(store, ids) == 48  # the second chunk is there, the third anew
        cache.reset()
        assert cache.restore_from(store, ids) == 48
        assert talk(model, cache, ids).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("llama", {}), ("gemma", {"max_seq_len": 64}), ("latent", {"max_seq_len": 64})),
        ("llama", {"dtype": "f16", "max_seq_len": 64}),
    ],
)
def test_compiled_steps_give_the_tokens_of_plain_ones(kind: str, options: dict[str, Any]) -> None:
    model = tiny.model(kind)

    def chosen(call: Any) -> list[int]:
        ids, made = tiny.prompts(2, 5), []
        with KVCache.for_model(model, **options) as cache, torch.no_grad():
            for _ in range(9):
                ids = call(ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)
                made += ids.flatten().tolist()
        return made

    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert chosen(call) == chosen(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["append", "append_at"])
def test_the_operators_are_those_of_cuda(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"unimem::{name}", "CUDA")


@pytest.mark.parametrize("call", [torch.ops.unimem.append_at, operator.on_device])
@pytest.mark.parametrize(
    ("stored", "given", "v_dim"),
    [("float16", "float32", 32), ("bfloat16", "bfloat16", 32), ("float16", "bfloat16", 24)],
)
def test_tokens_are_written_at_the_row_that_a_tensor_has(
    cuda: Any, call: Any, stored: str, given: str, v_dim: int
) -> None:
    empty, options = torch.zeros(2, 2, 6, 32), {"batch": 2, "order": "head", "arrays": "torch"}
    with cuda.KVCache(1, 2, 32, 6, dtype=stored, v_head_dim=v_dim, **options) as kv:
        kv.append(0, empty, empty[..., :v_dim])
        rows, expected = kv.layer(0), [part.clone() for part in kv.layer(0)]
        for at in (-1, 0, 2, 5, 9, -7):
            k, v = torch.randn(2, 2, 2, 2, 32).to(getattr(torch, given))
            v = v[..., :v_dim].transpose(1, 2).contiguous().transpose(1, 2)  # as models give it
            call(*rows, k, v, torch.tensor([at], dtype=torch.int32))
            for i in range(max(0, -at), min(2, 6 - at)):
                for part, states in zip(expected, (k, v), strict=True):
                    part[:, :, at + i] = states[:, :, i]
        assert all(map(torch.equal, rows, expected))
        row = torch.zeros(1, dtype=torch.int32)
        wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
            (
                (*rows, k, v, row.long()),
                TypeError,
                "row: expected one int32 on cpu, got torch",
            ),
            ((*rows, k, v[:, :, :1], row), ValueError, "append_at: expected tokens of shapes"),
            ((rows[0], rows[1][:, :, :3], k, v, row), ValueError, "rows that lie alike"),
            ((*rows, k, v.double(), row), TypeError, "append_at: expected float32, float16"),
        ]
        for arguments, error, text in wrong:
            with pytest.raises(error, match=text):
                call(*arguments)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch.ops.unimem.append_at.default, (*rows, k, v, row), test_utils=checks
        )
        del rows


def test_what_a_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = tiny.model("llama"), tiny.states(3)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"rotate": True}, NotImplementedError, "rotated heads"),
        ({"pages": "4k"}, NotImplementedError, "placing device memory"),
        ({"dtype": "q4_0"}, NotImplementedError, "dtype='q4_0'"),
        ({"device": -1}, ValueError, "device: expected an integer from 0"),
        ({"device": "cuda"}, TypeError, "device: expected an integer"),
    ]
    for options, error, text in refused:
        with pytest.raises(error, match=text), KVCache.for_model(model, **options) as cache:
            cache.layers[0].update(*states)
    with pytest.raises(NotImplementedError, match="device: expected None for deepseek_v32"):
        KVCache(transformers.DeepseekV32Config(num_hidden_layers=2), device=0)
    monkeypatch.setattr(on_device, "device_of", lambda _: None)
    with (
        KVCache.for_model(model) as cache,
        pytest.raises(ValueError, match="expected tensors on cuda:0, where the cache is"),
    ):
        cache.layers[0].update(*states)
