"""A conversation that is put aside: its memory is free, and it goes on as if it had stayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import unimem as um
from support.models.decoders import WIDE_HEADS as SHAPE
from support.models.decoders import append_foreign, greedy, tokens
from support.models.make import write_model
from unimem.engine import Decoder

PROMPT = tokens(300)
KINDS: dict[str, dict[str, Any]] = {
    **{"f16": {}, "q8_0": {"kv_dtype": "q8_0"}, "window": {"window": 200}}
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, wide = tmp_path_factory.mktemp("models"), replace(SHAPE, layers=7)
    return {
        "llama": write_model(folder / "m.gguf", shape=SHAPE, kind="f32"),
        "gemma3": write_model(folder / "g.gguf", "gemma3", wide, "f32"),
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 28, chunk_tokens=16) as store:
        yield store


@contextmanager
def opened(model: Path, **options: Any) -> Iterator[Decoder]:
    with Decoder(model, ctx=600, threads=1, **options) as decoder:
        yield decoder


def n_chunks(store: um.KVStore) -> int:
    return store.stat().tiers[-1].n_chunks


@pytest.mark.parametrize(
    ("arch", "kind"), [*(("llama", kind) for kind in KINDS), ("gemma3", "f16"), ("gemma3", "q8_0")]
)
def test_the_text_goes_on_as_if_it_had_stayed(
    models: dict[str, Path], store: um.KVStore, arch: str, kind: str
) -> None:
    with opened(models[arch], **KINDS[kind]) as stayed:
        stayed.prefill(PROMPT)
        expected: list[Any] = [
            greedy(stayed, 5),
            greedy(stayed, 5),
            stayed.prefill([7]).copy(),
            greedy(stayed, 5),
        ]
    with opened(models[arch], **KINDS[kind]) as decoder:
        decoder.prefill(PROMPT)
        found: list[Any] = [greedy(decoder, 5)]
        address, before = decoder.kv.address(0, "k"), decoder.kv.resident_bytes
        assert decoder.put_aside(store) > before // 2
        assert (decoder.kv.seq_len, n_chunks(store) > 0) == (0, True)
        assert decoder.put_aside(store) == 0
        assert "put aside" in repr(decoder)
        found.append(greedy(decoder, 5))
        assert n_chunks(store) == 0
        assert decoder.kv.address(0, "k") == address
        decoder.put_aside(store)
        found.append(decoder.prefill([7]).copy())
        decoder.put_aside(store)
        found.append(greedy(decoder, 5))
    assert all(map(np.array_equal, found, expected))


def test_a_generation_goes_on(models: dict[str, Path], store: um.KVStore) -> None:
    with opened(models["llama"]) as decoder, patch.object(decoder, "_tokenizer", _Numbers()):
        expected = list(decoder.generate(PROMPT, 6, seed=1, temperature=0.8))
        found = []
        for piece in decoder.generate(PROMPT, 6, seed=1, temperature=0.8):
            found.append(piece)
            decoder.put_aside(store)
    assert found == expected
    assert n_chunks(store) == 0  # closing drops what is there


class _Numbers:
    """A tokenizer whose texts are numbers."""

    eog_ids = frozenset[int]()

    def stream(self) -> _Numbers:
        return self

    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_what_the_store_lost_is_computed_anew(
    models: dict[str, Path], store: um.KVStore, arch: str
) -> None:
    with opened(models[arch]) as stayed:
        stayed.prefill(PROMPT)
        expected = greedy(stayed, 5)
    with opened(models[arch]) as decoder:
        decoder.prefill(PROMPT)
        decoder.put_aside(store)
        store._tiers[-1].give_back()
        with pytest.warns(um.PlacementWarning, match="are lost, and computed anew: 300 tokens"):
            assert greedy(decoder, 5) == expected


def test_a_damaged_piece_is_noticed(models: dict[str, Path], store: um.KVStore) -> None:
    with opened(models["llama"]) as decoder:
        decoder.prefill(PROMPT)
        decoder.put_aside(store)
        path = next(Path(store.folder).glob("*.kv"))
        with open(path, "r+b") as file:
            file.seek(5000)
            file.write(b"\xa5" * 9)
        with pytest.warns(um.PlacementWarning, match="computed anew"):
            greedy(decoder, 1)


def test_sessions_and_new_conversations(
    models: dict[str, Path], store: um.KVStore, tmp_path: Path
) -> None:
    with opened(models["llama"]) as decoder:
        decoder.prefill(PROMPT)
        decoder.put_aside(store)
        assert "300 tokens, " in decoder.report().facts["put_aside"]
        decoder.save_session(tmp_path / "session")
        assert (decoder.kv.seq_len, decoder.report().facts["put_aside"]) == (300, None)
        decoder.put_aside(store)
        (tmp_path / "bad").write_bytes((tmp_path / "session").read_bytes()[:-1])
        with pytest.raises(um.SnapshotError):
            decoder.resume(tmp_path / "bad")
        assert len(greedy(decoder, 1)) == 1  # the conversation is as before
        decoder.put_aside(store)
        decoder.resume(tmp_path / "session")
        assert (decoder.kv.seq_len, n_chunks(store)) == (300, 0)
        decoder.put_aside(store)
        decoder.reset()
        assert n_chunks(store) == 0


def test_an_interrupted_return_stays_aside(models: dict[str, Path], store: um.KVStore) -> None:
    with opened(models["llama"]) as decoder:
        decoder.prefill(PROMPT)
        decoder.put_aside(store)
        with (
            patch("unimem.kv.store.aside.find_fault", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            greedy(decoder, 1)
        assert decoder.kv.is_empty
        greedy(decoder, 1)
        assert decoder.kv.seq_len == 301


def test_refusals_leave_the_conversation(
    models: dict[str, Path], store: um.KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unimem.system.limits.SHM", str(tmp_path))
    with (
        opened(models["llama"]) as decoder,
        um.KVStore(tmp_path / "ram", ram_bytes=1 << 20, disk_bytes=0) as ram,
        um.KVStore(tmp_path / "small", ram_bytes=0, disk_bytes=1 << 16) as small,
    ):
        with pytest.raises(RuntimeError, match="prefill tokens first"):
            decoder.put_aside(store)
        decoder.prefill(PROMPT)
        with pytest.raises(ValueError, match="expected one with a disk or a server"):
            decoder.put_aside(ram)
        with pytest.raises(TypeError, match=r"store: expected a unimem\.KVStore, got None"):
            decoder.put_aside()
        with (
            pytest.warns(um.PlacementWarning, match="keeps no chunk"),
            pytest.raises(um.CapacityError, match="has no room for"),
        ):
            decoder.put_aside(small)
        assert (decoder.kv.seq_len, n_chunks(store), n_chunks(small)) == (300, 0, 0)
        k, _ = decoder.kv.layer(0)
        before = k.copy()
        assert decoder.put_aside(store) == 0  # a view is alive, and shows the same again
        greedy(decoder, 1)
        assert np.array_equal(k, before)
        del k
        decoder.kv.trim_to(290)
        with pytest.raises(RuntimeError, match="tokens were trimmed"):
            decoder.put_aside(store)
        append_foreign(decoder, 1)
        with pytest.raises(RuntimeError, match="are not known"):
            decoder.put_aside(store)


@pytest.mark.parametrize(("arch", "kind"), [("llama", "window"), ("gemma3", "f16")])
def test_a_trimmed_conversation_is_not_put_aside(
    models: dict[str, Path], store: um.KVStore, arch: str, kind: str
) -> None:
    # If the store lost it, all tokens would be computed anew, and no longer the trimmed ones.
    with opened(models[arch], **KINDS[kind]) as decoder:
        decoder.prefill(PROMPT)
        decoder.kv.trim_to(50)
        decoder.prefill(PROMPT[:200])  # a ring is full again
        with pytest.raises(RuntimeError, match="tokens were trimmed"):
            decoder.put_aside(store)


def test_a_governor_puts_idle_conversations_aside(
    models: dict[str, Path], store: um.KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(models["llama"], store=store) as decoder, um.Governor() as governor:
        governor.add(decoder)
        decoder.prefill(PROMPT)
        governor.give_back()
        assert decoder.kv.seq_len == 300  # a token was just computed
        monkeypatch.setattr("unimem.engine.decoder._IDLE_NS", 0)
        assert governor.give_back() > 0
        assert decoder.kv.is_empty
        (name, nbytes) = governor.events[-1].given_back[-1]
        assert (name.startswith("idle conversation of "), nbytes > 0) == (True, True)
        governor.give_back()
        assert len(greedy(decoder, 1)) == 1
        assert decoder.kv.seq_len == 301
        decoder.kv.trim_to(50)
        assert decoder._put_aside_if_idle() == 0
        assert decoder.kv.seq_len == 50  # tokens that were trimmed cannot be computed anew
