"""First tokens from a store are not computed again, and give the same results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch

import unimem as um
from support.models import architectures
from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.transformers import KVCache

pytestmark = pytest.mark.slow

N = 40


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=16) as store:
        yield store


def talk(model: Any, cache: Any, ids: Any, n: int = 6) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
    )


def model_of(kind: str, dtype: str) -> Any:
    """A model whose windows are as long as these conversations."""
    if kind != "gemma":
        return tiny.model(kind, dtype)
    with patch.dict(tiny.CONFIGS["gemma"][1], sliding_window=64):
        return tiny.model.__wrapped__(kind, dtype)


# Latents (MLA), one head for all queries, and heads of another size in layers of full attention.
HEADS = "deepseek_v2 deepseek_v3 longcat_flash minicpm3 youtu falcon gemma3n_text gemma4_text"


@pytest.mark.parametrize("name", HEADS.split())
def test_tokens_are_found_whatever_heads_a_model_keeps(name: str, store: um.KVStore) -> None:
    model, ids = architectures.model(name), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        assert cache.restore_from(store, ids, put=True) == 0
        expected = talk(model, cache, ids)
        assert cache.put_into(store, ids) == 32
    compiled = architectures.model(name)
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager")
    for again in (model, compiled):
        with KVCache.for_model(again) as cache:
            assert cache.restore_from(store, ids) == 32
            if again is model:
                assert torch.equal(talk(model, cache, ids), expected)


def test_a_model_without_the_layers_of_the_cache_is_refused(store: um.KVStore) -> None:
    model, ids = tiny.model("llama"), tiny.prompts(1, N)
    other = tiny.config("gemma")  # its first layer of full attention is the second one
    with KVCache(other) as cache, patch.object(model.model, "layers", model.model.layers[:1]):
        with pytest.raises(ValueError, match=r"gives no keys and values to layers \[1\]"):
            cache.restore_from(store, ids, model=model)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_known_tokens_are_restored_and_generate_says_the_same(
    kind: str, dtype: str, store: um.KVStore
) -> None:
    model, ids = model_of(kind, dtype), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        assert cache.restore_from(store, ids) == 0
        expected = talk(model, cache, ids)
        assert cache.put_into(store, expected) == 32  # of 45 tokens, whole chunks
    # Another question after the same beginning, and the same in a cache that was used before.
    other = torch.cat([ids[:, :35], tiny.prompts(1, 9, seed=5)], 1)
    with KVCache.for_model(model) as cache:
        said = talk(model, cache, other).tolist()
    with KVCache.for_model(model) as cache:
        for given, answer in ((ids, expected.tolist()), (other, said)):
            assert cache.restore_from(store, given[0].tolist()) == 32 == cache.get_seq_length()
            assert talk(model, cache, given).tolist() == answer
            cache.reset()
        # The last token is left to compute.
        assert cache.restore_from(store, ids[:, :32]) == 16
    assert store.stat().restored_chunks == 5 * len(cache._groups)


def test_restored_keys_are_the_bytes_that_were_computed(store: um.KVStore) -> None:
    model, ids = tiny.model("llama"), tiny.prompts(1, N)
    with KVCache.for_model(model) as first, KVCache.for_model(model) as second:
        talk(model, first, ids)
        first.put_into(store, ids)
        second.restore_from(store, ids)
        for one, two in zip(first.layers, second.layers, strict=True):
            assert torch.equal(one.keys[:, :, :32], two.keys)
            assert torch.equal(one.values[:, :, :32], two.values)


def test_tokens_that_one_kind_of_layers_lacks_are_computed(store: um.KVStore) -> None:
    model, ids = model_of("gemma", "float32"), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        expected = talk(model, cache, ids)
        cache.put_into(store, ids)
    # One chunk of either kind is damaged: both have one chunk less then, or none.
    for path in sorted(Path(store.folder).glob("*.kv"))[::3]:
        path.write_bytes(bytes(path.stat().st_size))
    with KVCache.for_model(model) as cache:
        with pytest.warns(um.PlacementWarning, match="was removed"):
            n = cache.restore_from(store, ids)
        assert n in (0, 16)
        assert {layer.get_seq_length() for layer in cache.layers} == {n}
        assert talk(model, cache, ids).tolist() == expected.tolist()


def test_foreign_prefixes_are_refused_or_not_found(store: um.KVStore) -> None:
    model, ids = tiny.model("llama"), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        talk(model, cache, ids)
        cache.put_into(store, ids)
        with pytest.raises(ValueError, match=r"reset\(\) first"):
            cache.restore_from(store, ids)
        with pytest.raises(TypeError, match=r"expected a unimem\.KVStore"):
            cache.put_into("folder", ids)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"of shape \[1, n\]"):
            cache.put_into(store, torch.cat([ids, ids]))
        with pytest.raises(ValueError, match="ids of one stream, got None"):
            cache.put_into(store, None)
        assert cache.get_seq_length() == N + 5
    for other, dtype in ((tiny.model("llama", seed=3), None), (model, "bf16")):
        with KVCache.for_model(other, dtype=dtype) as cache:
            assert cache.restore_from(store, ids) == 0
    with KVCache(model.config) as cache, pytest.raises(ValueError, match="expected model="):
        cache.restore_from(store, ids)
    with KVCache.for_model(model) as cache:
        talk(model, cache, tiny.prompts(2, N))
        with pytest.raises(ValueError, match="one stream, got one of batch=2"):
            cache.put_into(store, ids)


@pytest.mark.parametrize("kind", ["mistral", "gemma"])
def test_full_windows_are_put_while_their_rows_pass(kind: str, store: um.KVStore) -> None:
    """A ring here has 128 rows, so the windows before the ends of its last chunks are there."""
    model, ids = tiny.model(kind), tiny.prompts(1, 200)
    with KVCache.for_model(model, spare_rows=0) as cache:
        expected = talk(model, cache, ids).tolist()
        assert (cache.caches[0].n_rows, cache.caches[0].seq_len) == (128, tiny.WINDOW)
        assert cache.put_into(store, expected[0]) == 192
    other = torch.cat([ids[:, :150], tiny.prompts(1, 12, seed=5)], 1)
    early = torch.cat([ids[:, :90], tiny.prompts(1, 12, seed=5)], 1)
    for given, n in ((ids, 192), (other, 144), (early, 0)):
        with KVCache.for_model(model) as cache:
            answer = talk(model, cache, given).tolist()
        with KVCache.for_model(model) as cache:
            assert cache.restore_from(store, given) == n == cache.get_seq_length()
            assert talk(model, cache, given).tolist() == answer
    assert expected[0][:200] == ids[0].tolist()


@pytest.mark.parametrize("pieces", [(200,), (90, 110), (16, 1, 183)])
@pytest.mark.parametrize("kind", ["mistral", "gemma"])
def test_a_prompt_longer_than_the_window_is_put_while_it_passes(
    kind: str, pieces: tuple[int, ...], store: um.KVStore
) -> None:
    model, ids = tiny.model(kind), tiny.prompts(1, 200)
    early = torch.cat([ids[:, :50], tiny.prompts(1, 12, seed=5)], 1)
    with KVCache.for_model(model, spare_rows=0) as cache:
        cache.restore_from(store, early, put=True)
        cache.reset()  # a prompt that never came leaves nothing behind
        assert cache.restore_from(store, ids, put=True) == 0
        for part in ids.split(list(pieces), 1):
            before = cache.caches[0].n_rows
            with torch.no_grad():
                logits = model(part, **{CACHE: cache}).logits
        assert before > 200
        assert cache.caches[0].n_rows == 128
        assert cache.put_into(store, ids) == 192
        plain = model(ids, use_cache=False).logits[:, -1]
        torch.testing.assert_close(logits[:, -1], plain, rtol=1e-4, atol=1e-5)
    for given, n in ((ids, 192), (early, 48)):
        with KVCache.for_model(model) as cache:
            answer = talk(model, cache, given).tolist()
        with KVCache.for_model(model) as cache:
            assert cache.restore_from(store, given) == n
            assert talk(model, cache, given).tolist() == answer


def test_a_store_that_closes_before_a_prompt_passed_is_a_warning(tmp_path: Path) -> None:
    model, ids = tiny.model("mistral"), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=16) as store:
            cache.restore_from(store, ids, put=True)
        with pytest.warns(um.PlacementWarning, match="were not put into"):
            said = talk(model, cache, ids)
        cache.reset()
        assert talk(model, cache, ids).tolist() == said.tolist()
        cache.reset()
        with pytest.raises(ValueError, match="put: expected"):
            cache.restore_from(store, ids, put=1)  # type: ignore[arg-type]


def test_a_prompt_of_several_streams_is_a_warning(store: um.KVStore) -> None:
    model, ids = tiny.model("mistral"), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        expected = model.generate(ids, **{CACHE: cache}, num_beams=2, max_new_tokens=6).tolist()
    with KVCache.for_model(model) as cache:
        cache.restore_from(store, ids, put=True)
        with pytest.warns(um.PlacementWarning, match="one stream, got one of batch=2"):
            said = model.generate(ids, **{CACHE: cache}, num_beams=2, max_new_tokens=6)
    assert said.tolist() == expected


@pytest.mark.parametrize(
    "inputs", [{"image_token_id": 95}, {"sound_config": {"audio_token_index": 95}}]
)
def test_only_the_text_before_an_image_or_a_sound_is_kept(
    inputs: dict[str, Any], store: um.KVStore
) -> None:
    model, ids = tiny.model.__wrapped__("mistral"), tiny.prompts(1, N).clamp(max=94)
    model.config.update(inputs)
    ids[0, 20] = 95
    with KVCache.for_model(model) as cache:
        assert cache.restore_from(store, ids, put=True) == 0
        talk(model, cache, ids)
        assert cache.put_into(store, ids) == 16
        cache.reset()
        assert cache.restore_from(store, ids) == 16
        cache.reset()
        assert cache.restore_from(store, ids[:, :16]) == 0  # the last one is left to compute


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_keys_of_one_length_are_refused(rope: str, store: um.KVStore) -> None:
    sizes = {"original_max_position_embeddings": 16, "factor": 4.0, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope == "longrope" else {}
    config = tiny.config("llama", rope_parameters={"rope_type": rope, **sizes, **factors})
    model, ids = type(tiny.model("llama"))(config).eval(), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        with pytest.raises(NotImplementedError, match="restore_from: expected keys that do not"):
            cache.restore_from(store, ids)
        talk(model, cache, ids)
        with pytest.raises(NotImplementedError, match="put_into: expected keys that do not dep"):
            cache.put_into(store, ids)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_another_adapter_finds_no_prefix(store: um.KVStore) -> None:
    peft = pytest.importorskip("peft", reason="PEFT makes adapters")
    model = tiny.model.__wrapped__("llama")
    config = peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, config, "one")
    model.add_adapter("two", config)
    ids = tiny.prompts(1, N)

    def known() -> int:
        with KVCache.for_model(model.base_model.model) as cache:
            return cache.restore_from(store, ids)

    with KVCache.for_model(model.base_model.model) as cache:
        talk(model, cache, ids)
        assert cache.put_into(store, ids) == 32
    assert known() == 32
    model.set_adapter("two")
    assert known() == 0
    with model.disable_adapter():
        assert known() == 0
    model.set_adapter("one")
    assert known() == 32


def test_an_interrupted_prompt_leaves_no_token(store: um.KVStore) -> None:
    model, ids = model_of("gemma", "float32"), tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        expected = talk(model, cache, ids)
        cache.put_into(store, ids)
        cache.reset()
        restore_into = store.restore_into
        restored: list[int] = []

        def interrupted(*args: Any, **options: Any) -> int:
            if restored:
                raise KeyboardInterrupt
            restored.append(restore_into(*args, **options))
            return restored[0]

        with (
            patch.object(um.KVStore, "restore_into", side_effect=interrupted),
            pytest.raises(KeyboardInterrupt),
        ):
            cache.restore_from(store, ids)
        assert cache.get_seq_length() == 0
        assert talk(model, cache, ids).tolist() == expected.tolist()
