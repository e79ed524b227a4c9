"""A decoder with a store of prefixes: stored tokens are not computed, and texts are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import unimem as um
from support.models.decoders import WIDE_HEADS as SHAPE
from support.models.decoders import greedy, interrupted, logits_of, tokens
from support.models.make import write_model
from unimem.engine import Decoder, UnsupportedModel
from unimem.engine.stored_prefixes import model_name

PROMPT = tokens(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=SHAPE, kind="f32")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 28, chunk_tokens=128) as store:
        yield store


KINDS: dict[str, dict[str, Any]] = {
    **{"f16": {}, "q8_0": {"kv_dtype": "q8_0"}, "window": {"window": 400}}
}


def opened(model: Path, store: um.KVStore | None = None, **options: Any) -> Decoder:
    return Decoder(model, ctx=600, threads=1, store=store, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_restored_tokens_are_those_that_were_computed(
    model: Path, store: um.KVStore, kind: str
) -> None:
    with opened(model, **KINDS[kind]) as decoder:
        expected, logits = logits_of(decoder, PROMPT, 20)
    for n_restored in (0, 2):
        with opened(model, store, **KINDS[kind]) as decoder:
            chosen, rows = logits_of(decoder, PROMPT, 20)
            assert store.stat().restored_chunks == n_restored
            assert chosen == expected
            assert np.array_equal(rows, logits)


def test_a_prompt_that_is_known_is_not_computed(model: Path, store: um.KVStore) -> None:
    with opened(model, store) as decoder:
        decoder.prefill(PROMPT[:256])
    with (
        opened(model, store) as decoder,
        patch.object(Decoder, "_compute", autospec=True, side_effect=Decoder._compute) as compute,
    ):
        decoder.prefill(PROMPT)
        assert len(compute.call_args[0][1]) == 300 - 256
        decoder.prefill(PROMPT[:4])  # in the middle of a conversation
        assert len(compute.call_args[0][1]) == 4
        # The last token is always computed.
        decoder.reset()
        decoder.prefill(PROMPT[:256])
        assert len(compute.call_args[0][1]) == 128
        assert store.longest([*PROMPT, *PROMPT[:4]], model=model_name(decoder.weights),
                             kv=decoder.kv) == 256  # fmt: skip
        decoder.save_session(Path(store.folder).parent / "session")  # all ids are known


def test_an_interrupted_prompt_leaves_no_token(model: Path, store: um.KVStore) -> None:
    with opened(model, store) as decoder:
        decoder.prefill(PROMPT)
        decoder.reset()
        with interrupted(decoder):
            decoder.prefill(PROMPT)
        assert decoder.kv.is_empty
        decoder.prefill(PROMPT)
        assert decoder.kv.seq_len == 300


def test_a_store_that_fails_costs_no_token(model: Path, store: um.KVStore) -> None:
    with opened(model, store) as decoder:
        error = OSError(28, "No space left on device")
        with (
            patch.object(um.KVStore, "put", side_effect=error),
            patch.object(um.KVStore, "restore_into", side_effect=error),
            pytest.warns(um.PlacementWarning) as warned,
        ):
            decoder.prefill(PROMPT)
        assert [str(w.message).partition(" KVStore")[0] for w in warned] == [
            "nothing was taken from",
            "tokens were not put into",
        ]
        assert decoder.kv.seq_len == 300


@pytest.mark.parametrize("chunk_tokens", [16, 32, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_any_size_leave_the_text_as_it_is(
    model: Path, tmp_path: Path, kind: str, chunk_tokens: int
) -> None:
    """Prompts that begin alike are restored in whole batches only."""
    options: dict[str, Any] = {"ram_bytes": 0, "disk_bytes": 1 << 28}
    others = [[*PROMPT[:n], *tokens(60, seed=n)] for n in (260, 200, 150)]
    prompts = [PROMPT[:257], *others, PROMPT[:129], PROMPT]
    with um.KVStore(tmp_path / "s", chunk_tokens=chunk_tokens, **options) as store:
        for prompt in prompts:
            with opened(model, **KINDS[kind]) as decoder:
                expected, logits = logits_of(decoder, prompt, 3)
            with opened(model, store, **KINDS[kind]) as decoder:
                chosen, rows = logits_of(decoder, prompt, 3)
            assert chosen == expected
            assert np.array_equal(rows, logits)
        assert store.stat().restored_chunks > 0


def test_tokens_of_other_batches_are_not_put(model: Path, store: um.KVStore) -> None:
    """A prompt that continues inside of a batch, and generated tokens, are computed anew."""
    with opened(model) as decoder:
        decoder.prefill(PROMPT[:100])
        chosen = [decoder.generate_next_token() for _ in range(60)]
        ids = [*PROMPT[:100], *chosen, *PROMPT[100:240]]
        decoder.reset()
        expected, logits = logits_of(decoder, ids, 3)
    with opened(model, store) as decoder:
        decoder.prefill(PROMPT[:100])
        assert [decoder.generate_next_token() for _ in range(60)] == chosen
        decoder.prefill(PROMPT[100:240])
        assert store.stat().put_chunks == 0
        for n_restored in (0, 2):
            decoder.reset()
            assert logits_of(decoder, ids, 3)[0] == expected
            assert store.stat().restored_chunks == n_restored
        decoder.reset()
        assert np.array_equal(logits_of(decoder, ids, 3)[1], logits)


def test_a_resumed_conversation_has_no_whole_batches(
    model: Path, store: um.KVStore, tmp_path: Path
) -> None:
    with opened(model) as decoder:
        decoder.prefill(PROMPT[:100])
        greedy(decoder, 156)
        decoder.save_session(tmp_path / "session")
    with opened(model, store) as decoder:
        decoder.prefill(tokens(256, seed=1))
        decoder.resume(tmp_path / "session")
        before = store.stat().put_chunks
        decoder.prefill(PROMPT[:128])
        assert store.stat().put_chunks == before


def test_models_of_one_fingerprint_are_told_apart(tmp_path: Path, model: Path) -> None:
    other = write_model(tmp_path / "m.gguf", shape=SHAPE, kind="f32", seed=1)
    with um.open_weights(model, load="map") as one, um.open_weights(other, load="map") as two:
        assert one.fingerprint == two.fingerprint
        assert model_name(one) != model_name(two)
        with um.open_weights(model, load="copy") as again:
            assert model_name(again) == model_name(one)


# ---- layers that slide ----

WINDOW = 48
# The tokens after 256 restored ones are one batch, as without a store.
LONG = tokens(256 + 16, seed=3)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3") / "m.gguf"
    return write_model(path, "gemma3", replace(SHAPE, layers=7), "f32")


@pytest.fixture(params=[WINDOW, pytest.param(16, marks=pytest.mark.slow)])
def chunks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[um.KVStore]:
    options: dict[str, Any] = {"ram_bytes": 0, "disk_bytes": 1 << 28}
    with um.KVStore(tmp_path / "chunks", chunk_tokens=request.param, **options) as store:
        yield store


@pytest.mark.parametrize("kv_dtype", ["f16", pytest.param("q8_0,q4_0", marks=pytest.mark.slow)])
def test_windows_are_restored_whole(gemma3: Path, tmp_path: Path, kv_dtype: str) -> None:
    """Rings have no more rows than without a store."""
    expected = {}
    with opened(gemma3, kv_dtype=kv_dtype) as decoder:
        capacity, n_rows = decoder.kv.capacity_bytes, decoder.kv.n_rows
        for n in (len(LONG), 140):
            decoder.reset()
            expected[n] = logits_of(decoder, LONG[:n], 20)
    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 28, chunk_tokens=16) as store:
        for n, n_restored in ((len(LONG), 0), (len(LONG), 256), (140, 128)):
            with opened(gemma3, store, kv_dtype=kv_dtype) as decoder:
                assert (decoder.kv.capacity_bytes, decoder.kv.n_rows) == (capacity, n_rows)
                chosen, rows = logits_of(decoder, LONG[:n], 20)
                assert decoder._prefixes is not None
                assert decoder._prefixes.n_restored == n_restored
                assert chosen == expected[n][0]
                assert np.array_equal(rows, expected[n][1])


def test_a_hit_may_end_at_any_chunk(gemma3: Path, chunks: um.KVStore) -> None:
    size = chunks.chunk_tokens
    with opened(gemma3, chunks) as decoder:
        decoder.prefill(LONG[:128])
        decoder.prefill(LONG[128:])  # continues behind a whole batch
        assert decoder._prefixes is not None
        assert decoder._prefixes.n_stored == 256 // size * size
        model = model_name(decoder.weights)
        for n in range(0, len(LONG), 7):
            found = chunks.longest([*LONG[:n], 1 << 20], model=model, kv=decoder.kv)
            assert found == min(n, 256) // size * size


def test_a_chunk_that_no_ring_keeps_is_refused(gemma3: Path, store: um.KVStore) -> None:
    with pytest.raises(UnsupportedModel, match=f"chunk_tokens={WINDOW} or fewer"):
        opened(gemma3, store)
    # With a context as long as the window, there is no ring.
    Decoder(gemma3, ctx=WINDOW, threads=1, store=store).close()


def test_a_store_of_another_type_is_refused(model: Path) -> None:
    with pytest.raises(TypeError, match=r"store: expected a unimem\.KVStore"):
        opened(model, "folder")  # type: ignore[arg-type]
