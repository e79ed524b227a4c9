"""Sessions: a saved conversation goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.models.decoders import WIDE_HEADS as SHAPE
from support.models.decoders import (
    Computation,
    append_foreign,
    computing_by,
    greedy,
    interrupted,
    small_models_gain,
    tokens,
)
from support.models.make import write_model
from unimem.engine import Decoder
from unimem.errors import SnapshotError
from unimem.kv import snapshot

__all__ = ["small_models_gain"]  # a fixture

CTX = 600


@pytest.fixture(scope="module", params=["f32", pytest.param("q4_0", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is mapped, and one that `auto` repacks here."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    return write_model(path, shape=SHAPE, kind=request.param)


@pytest.fixture
def decoder(model: Path) -> Iterator[Decoder]:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        yield decoder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.session"


def ids_in(path: Path) -> list[int]:
    """Return the tokens of a session."""
    ids = snapshot.describe(path).tokens
    assert ids is not None
    return [int(token) for token in ids]


def check_refused(decoder: Decoder, path: Path, reason: str) -> None:
    """Saving is refused for this reason, and the file is unchanged."""
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(RuntimeError, match=reason):
        decoder.save_session(path)
    assert (path.read_bytes() if path.exists() else None) == before


KINDS: dict[str, dict[str, Any]] = {
    **{"f16": {}, "f32": {"kv_dtype": "f32"}, "q8_0": {"kv_dtype": "q8_0"}},
    **{"window": {"window": 50}, "window q8_0": {"window": 50, "kv_dtype": "q8_0"}},
    "window bf16": {"window": 300, "kv_dtype": "bf16"},
    "q8_0 and q4_0": {"kv_dtype": "q8_0,q4_0"},
}


# ---- what is saved -----------------------------------------------------------------------


@pytest.mark.usefixtures("gives_memory_back")
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_if_it_had_not_stopped(model: Path, path: Path, kind: str) -> None:
    with (
        Decoder(model, ctx=CTX, threads=1, **KINDS[kind]) as first,
        Decoder(model, ctx=CTX, threads=1, **KINDS[kind]) as second,
    ):
        computed: list[int] = []

        def counted(compute: Callable[[], int], given: Computation) -> int:
            computed.append(given.graph)
            return compute()

        for n in (1, 40, 500):
            first.reset()
            first.prefill(tokens(n))
            made = greedy(first, 9)
            logits = first.logits.copy()
            first.save_session(path)
            expected = greedy(first, 20)
            assert ids_in(path) == tokens(n) + made
            old = second.generate(tokens(70, seed=1), 50, stop_at_eog=False)
            next(old)
            computed.clear()
            # The last step is computed again, bit for bit; nothing is prefilled.
            with computing_by(second, counted):
                np.testing.assert_array_equal(second.resume(path), logits)
            assert (computed, second.kv.next_position) == ([second._decode.address], n + 9)
            assert second.kv.seq_len == min(n + 9, second.kv.window or CTX)
            assert greedy(second, 20) == expected
            second.save_session(path)
            assert ids_in(path) == tokens(n) + made + expected
            prompt = tokens(40, seed=2)
            a, b = first.prefill(prompt), second.prefill(prompt)
            np.testing.assert_allclose(b, a, atol=1e-3 * a.std())
            with pytest.raises(RuntimeError, match="new conversation"):
                next(old)


def test_it_may_go_on_in_a_longer_context(model: Path, decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(CTX - 10))
    decoder.save_session(path)
    expected = greedy(decoder, 10)
    with Decoder(model, ctx=2 * CTX, threads=1) as longer:
        longer.resume(path)
        assert greedy(longer, 10) == expected
        greedy(longer, 10)
    with Decoder(model, ctx=CTX - 11, threads=1) as shorter:
        logits = shorter.prefill([3]).copy()
        with pytest.raises(um.CacheFull, match=f"session of {CTX - 10} tokens.*{CTX - 11}"):
            shorter.resume(path)
        np.testing.assert_array_equal(shorter.logits, logits)
        assert shorter.kv.seq_len == 1


def test_a_ring_s_session_needs_a_context_for_its_positions(model: Path, path: Path) -> None:
    with Decoder(model, ctx=CTX, window=50, threads=1) as ring:
        ring.prefill(tokens(400))
        ring.save_session(path)
    with (
        Decoder(model, ctx=399, window=50, threads=1) as shorter,
        pytest.raises(um.CacheFull, match="session of 400 tokens"),
    ):
        shorter.resume(path)
    with Decoder(model, ctx=400, window=50, threads=1) as just:
        just.resume(path)
        with pytest.raises(um.CacheFull):
            just.generate_next_token()


def test_so_does_a_session_of_layers_that_all_slide(tmp_path: Path, path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", "gemma3", SHAPE, "f32")
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        assert decoder.kv.window
        decoder.prefill(tokens(100))
        decoder.save_session(path)
    with Decoder(model, ctx=99, threads=1) as shorter:
        shorter.prefill([3])
        with pytest.raises(um.CacheFull, match="session of 100 tokens"):
            shorter.resume(path)
        assert shorter.token_ids.tolist() == [3]


def test_the_cache_may_be_cropped_or_trimmed(model: Path, decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(100))
    decoder.kv.crop(60)
    decoder.prefill(tokens(20, seed=1))
    decoder.kv.trim_to(30, keep_first=4)
    decoder.prefill([7])
    decoder.save_session(path)
    expected = greedy(decoder, 10)
    assert ids_in(path) == tokens(100)[:60] + tokens(20, seed=1) + [7]
    with Decoder(model, ctx=CTX, threads=1) as other:
        other.resume(path)
        assert (other.kv.seq_len, other.kv.next_position) == (35, 81)
        assert greedy(other, 10) == expected


def test_ids_are_known_beyond_the_context(model: Path, path: Path) -> None:
    with Decoder(model, ctx=100, threads=1) as short:
        parts = [tokens(60, seed=i) for i in range(12)]
        for part in parts:
            short.prefill(part)
            short.kv.trim_to(30)
        short.save_session(path)
        expected = greedy(short, 5)
        assert ids_in(path) == list(chain(*parts))
        short.resume(path)
        assert greedy(short, 5) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_the_one_that_was_saved(model: Path, path: Path, kind: str) -> None:
    with Decoder(model, ctx=CTX, threads=1, **KINDS[kind]) as decoder:

        def shown() -> list[bytes]:
            return [part.tobytes() for i in range(SHAPE.layers) for part in decoder.kv.layer(i)]

        decoder.prefill(tokens(100))
        decoder.kv.trim_to(6)  # the last token had seen more
        expected = shown()
        decoder.save_session(path)
        logits = decoder.resume(path).copy()
        assert shown() == expected
        # The logits are computed from the tokens that are left.
        decoder.kv.crop(5)
        np.testing.assert_array_equal(decoder.prefill(tokens(100)[-1:]), logits)
        assert shown() != expected


def test_the_ids_of_tokens_are_shown_as_far_as_they_are_known(decoder: Decoder) -> None:
    assert decoder.token_ids.size == 0
    decoder.prefill(tokens(5))
    shown = decoder.token_ids
    append_foreign(decoder, 2)
    decoder.prefill([3])
    assert decoder.token_ids.tolist() == tokens(5)
    decoder.kv.crop(3)
    assert decoder.token_ids.tolist() == tokens(5)[:3]
    decoder.prefill([9])
    assert decoder.token_ids.tolist() == [*tokens(5)[:3], 9]
    assert (str(shown.dtype), shown.tolist()) == ("int32", tokens(5)), "a copy stays as it is"


# ---- what cannot be saved ----------------------------------------------------------------


def test_there_must_be_something_to_save(decoder: Decoder, path: Path) -> None:
    for empty in (decoder.reset, lambda: decoder.kv.crop(0)):
        check_refused(decoder, path, "nothing to save")
        decoder.prefill(tokens(5))
        empty()
    check_refused(decoder, path, "nothing to save")


def test_appended_tokens_have_no_ids(decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(5))
    append_foreign(decoder, 3)
    for _ in range(2):
        check_refused(decoder, path, "positions 5 to")
        decoder.prefill([3])
    decoder.kv.crop(5)
    decoder.save_session(path)
    decoder.prefill([4])
    decoder.save_session(path)
    assert ids_in(path) == [*tokens(5), 4]
    # The same number of tokens as before changes nothing.
    decoder.prefill(tokens(14))
    decoder.kv.crop(18)
    append_foreign(decoder, 2)
    check_refused(decoder, path, "positions 18 to 19 are not known")
    decoder.prefill([3])
    decoder.kv.trim_to(10)
    check_refused(decoder, path, "positions 18 to 20 are not known")
    decoder.kv.crop(7)
    decoder.save_session(path)
    assert ids_in(path) == [*tokens(5), 4, *tokens(14)[:12]]


@pytest.mark.parametrize("n_left", [12, 11])
def test_restored_tokens_have_no_ids(decoder: Decoder, path: Path, n_left: int) -> None:
    decoder.prefill(tokens(12, seed=1))
    decoder.save_session(path)
    decoder.reset()
    decoder.prefill(tokens(12))
    decoder.kv.clear()
    snapshot.read_into(decoder.kv, path)
    decoder.kv.crop(n_left)
    check_refused(decoder, path, "positions 0 to")


def test_interrupted_tokens_have_no_ids(decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(5))
    for n in (1, 3):
        with interrupted(decoder):
            decoder.prefill(tokens(n, seed=1))
        decoder.save_session(path)
        assert ids_in(path) == tokens(5)
        append_foreign(decoder, n)
        check_refused(decoder, path, "positions 5 to")
        decoder.kv.crop(5)


# ---- what cannot be resumed --------------------------------------------------------------


def check_not_resumed(decoder: Decoder, path: Path, reason: str | None = None) -> None:
    """A session is refused for this reason, in the middle of a conversation."""
    decoder.reset()
    logits = decoder.prefill(tokens(33)).copy()
    with pytest.raises(SnapshotError, match=reason) as caught:
        decoder.resume(path)
    assert str(path) in str(caught.value)
    np.testing.assert_array_equal(decoder.logits, logits)
    assert decoder.kv.next_position == 33
    followed = greedy(decoder, 5)
    decoder.reset()
    decoder.prefill(tokens(33))
    assert greedy(decoder, 5) == followed


def test_sessions_of_other_models_are_refused(
    model: Path, decoder: Decoder, path: Path, tmp_path: Path
) -> None:
    # The last has the headers of the model, and other matrices.
    kinds: list[dict[str, Any]] = [{"kind": "f16"}, {"kind": model.stem, "seed": 1}]
    for options in kinds:
        other = write_model(tmp_path / "other.gguf", shape=SHAPE, **options)
        with Decoder(other, ctx=CTX, threads=1) as foreign:
            foreign.prefill(tokens(10))
            foreign.save_session(path)
        check_not_resumed(decoder, path, "session of model.*open the weights that it was saved")
    decoder.kv.save(path, tokens=tokens(38), model=decoder.weights.fingerprint)
    check_not_resumed(decoder, path, "session of model")
    name = decoder.weights.content_hash()
    decoder.kv.save(path, model=name)
    check_not_resumed(decoder, path, "no tokens to go on from")
    decoder.kv.save(path, tokens=[SHAPE.vocab] * decoder.kv.seq_len, model=name)
    check_not_resumed(decoder, path, f"token {SHAPE.vocab} is not among")
    with um.KVCache(layers=decoder.kv.layers, max_seq_len=CTX) as kv:
        kv.save(path, model=name)
    check_not_resumed(decoder, path, "layers differ")
    check_not_resumed(decoder, model)
    with pytest.raises(FileNotFoundError):
        decoder.resume(tmp_path / "nowhere")
    assert decoder.kv.next_position == 38


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_dtype": "f32"}, "dtype"),
        ({"window": 50}, "window"),
        ({"rotate": True}, "with rotate=False, and this one has True"),
    ],
)
def test_sessions_of_another_kind_of_cache_are_refused(
    model: Path, decoder: Decoder, path: Path, options: dict[str, Any], reason: str
) -> None:
    decoder.prefill(tokens(33))
    decoder.save_session(path)
    with Decoder(model, ctx=CTX, threads=1, **options) as other:
        check_not_resumed(other, path, reason)


@pytest.mark.parametrize("damage", ["flipped", "short"])
def test_a_damaged_session_is_refused(decoder: Decoder, path: Path, damage: str) -> None:
    decoder.prefill(tokens(40, seed=1))
    decoder.save_session(path)
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        raw[-5000] ^= 1
    else:
        del raw[-100:]
    path.write_bytes(raw)
    decoder.reset()
    with pytest.raises(SnapshotError):
        decoder.resume(path)
    assert decoder.kv.is_empty
    check_not_resumed(decoder, path)


def test_a_file_that_is_replaced_meanwhile_changes_nothing(
    decoder: Decoder, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checked file is read, even if another one takes its name in between."""
    other, check = tmp_path / "other.session", snapshot.OpenSnapshot.check
    decoder.prefill(tokens(20, seed=1))
    decoder.save_session(other)
    decoder.reset()
    decoder.prefill(tokens(33))
    decoder.save_session(path)

    def replaced_after(file: snapshot.OpenSnapshot) -> None:
        check(file)
        other.replace(path)

    monkeypatch.setattr(snapshot.OpenSnapshot, "check", replaced_after)
    decoder.resume(path)
    assert decoder.kv.seq_len == 33
    assert len(ids_in(path)) == 20


def test_an_interrupt_leaves_an_empty_cache(decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(33))
    decoder.save_session(path)
    with interrupted(decoder):
        decoder.resume(path)
    assert decoder.kv.is_empty
    check_refused(decoder, path, "nothing to save")
    decoder.resume(path)
    assert decoder.kv.seq_len == 33
