"""Sessions: a conversation that was saved goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.system.ggml", reason="the engine needs ggml: pip install '.[run]'", exc_type=ImportError
)

import unimem as um
from models.make import Shape, write_model
from unimem.engine import Decoder
from unimem.errors import SnapshotError
from unimem.kv import snapshot

SHAPE = Shape(hidden=64, layers=2, heads=4, kv_heads=4, inner=128, vocab=320, ctx=2000, head_dim=64)
CTX = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=SHAPE, kind="f32")


@pytest.fixture
def decoder(model: Path) -> Iterator[Decoder]:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        yield decoder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "talk.session"


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, SHAPE.vocab, n)]


def greedy(decoder: Decoder, n: int) -> list[int]:
    return [decoder.generate_next_token() for _ in range(n)]


KINDS: dict[str, dict[str, Any]] = {
    "f16": {},
    "f32": {"kv_dtype": "f32"},
    "q8_0": {"kv_dtype": "q8_0"},
    "window": {"window": 50},
    "window q8_0": {"window": 50, "kv_dtype": "q8_0"},
    "window bf16": {"window": 300, "kv_dtype": "bf16"},
}


@pytest.mark.usefixtures("gives_memory_back")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 40, 500])
def test_it_goes_on_as_if_it_had_not_stopped(
    model: Path, path: Path, kind: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Decoder(model, ctx=CTX, threads=1, **KINDS[kind]) as first:
        first.prefill(tokens(n))
        made = greedy(first, 9)
        logits = first.logits.copy()
        first.save_session(path)
        expected = greedy(first, 20)
    saved = snapshot.describe(path)
    assert saved.tokens is not None
    assert saved.tokens.tolist() == tokens(n) + made
    with Decoder(model, ctx=CTX, threads=1, **KINDS[kind]) as second:
        second.prefill(tokens(70, seed=1))  # another conversation
        computed = []
        compute = type(second._decode).compute

        def counted(graph: Any) -> None:
            computed.append(graph.n_tokens)
            compute(graph)

        monkeypatch.setattr(type(second._decode), "compute", counted)
        # The last step is taken again, bit for bit; nothing is prefilled.
        np.testing.assert_array_equal(second.resume(path), logits)
        assert computed == [1]
        assert second.kv.next_position == n + 9
        assert second.kv.seq_len == min(n + 9, second.kv.window or CTX)
        assert greedy(second, 20) == expected
        second.save_session(path)
    saved = snapshot.describe(path)
    assert saved.tokens is not None
    assert saved.tokens.tolist() == tokens(n) + made + expected


def test_a_prompt_may_follow(model: Path, decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(100))
    decoder.save_session(path)
    expected = decoder.prefill(tokens(40, seed=1)).copy()
    with Decoder(model, ctx=CTX, threads=1) as other:
        other.resume(path)
        np.testing.assert_allclose(
            other.prefill(tokens(40, seed=1)), expected, atol=1e-3 * expected.std()
        )


def test_it_may_go_on_in_a_longer_context(model: Path, decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(CTX - 10))
    decoder.save_session(path)
    expected = greedy(decoder, 10)
    with Decoder(model, ctx=2 * CTX, threads=1) as longer:
        longer.resume(path)
        assert greedy(longer, 10) == expected
        greedy(longer, 10)
    with Decoder(model, ctx=CTX - 11, threads=1) as shorter:
        shorter.prefill([3])
        expected_logits = shorter.logits.copy()
        with pytest.raises(um.CacheFull, match=f"session of {CTX - 10} tokens.*{CTX - 11}"):
            shorter.resume(path)
        np.testing.assert_array_equal(shorter.logits, expected_logits)
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


def test_the_cache_may_have_been_cropped_or_trimmed(
    model: Path, decoder: Decoder, path: Path
) -> None:
    decoder.prefill(tokens(100))
    decoder.kv.crop(60)
    decoder.prefill(tokens(20, seed=1))
    decoder.kv.trim_to(30, keep_first=4)
    decoder.prefill([7])
    decoder.save_session(path)
    expected = greedy(decoder, 10)
    saved = snapshot.describe(path)
    assert (saved.seq_len, saved.next_position) == (35, 81)
    assert saved.tokens is not None
    assert saved.tokens.tolist() == tokens(60 + 40)[:60] + tokens(20, seed=1) + [7]
    with Decoder(model, ctx=CTX, threads=1) as other:
        other.resume(path)
        assert (other.kv.seq_len, other.kv.next_position) == (35, 81)
        assert greedy(other, 10) == expected


def test_ids_are_known_beyond_the_context(model: Path, path: Path) -> None:
    with Decoder(model, ctx=100, threads=1) as short:
        all_tokens: list[int] = []
        for i in range(12):
            part = tokens(60, seed=i)
            short.prefill(part)
            all_tokens += part
            short.kv.trim_to(30)
        short.save_session(path)
        expected = greedy(short, 5)
        saved = snapshot.describe(path)
        assert saved.tokens is not None
        assert saved.tokens.tolist() == all_tokens
        short.resume(path)
        assert greedy(short, 5) == expected


def test_there_must_be_something_to_save(decoder: Decoder, path: Path) -> None:
    with pytest.raises(RuntimeError, match="nothing to save"):
        decoder.save_session(path)
    decoder.prefill(tokens(5))
    decoder.reset()
    with pytest.raises(RuntimeError, match="nothing to save"):
        decoder.save_session(path)
    decoder.prefill(tokens(5))
    decoder.kv.crop(0)
    with pytest.raises(RuntimeError, match="nothing to save"):
        decoder.save_session(path)
    assert not path.exists()


def test_tokens_of_somebody_else_have_no_ids(decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(5))
    append_foreign(decoder, 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="positions 5 to"):
            decoder.save_session(path)
        decoder.prefill([3])
    decoder.kv.crop(5)
    decoder.save_session(path)
    decoder.prefill([4])
    decoder.save_session(path)
    assert snapshot.describe(path).next_position == 6


def append_foreign(decoder: Decoder, n: int) -> None:
    rows = np.zeros((n, SHAPE.kv_heads, SHAPE.head), "float32")
    for layer in range(SHAPE.layers):
        decoder.kv.append(layer, rows, rows)


def test_as_many_tokens_of_somebody_else_have_no_ids_either(decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(20))
    decoder.kv.crop(18)
    append_foreign(decoder, 2)
    with pytest.raises(RuntimeError, match="positions 18 to 19 are not known"):
        decoder.save_session(path)
    decoder.prefill([3])
    decoder.kv.trim_to(10)
    with pytest.raises(RuntimeError, match="positions 18 to 20 are not known"):
        decoder.save_session(path)
    assert not path.exists()
    decoder.kv.crop(7)
    decoder.save_session(path)
    saved = snapshot.describe(path)
    assert saved.tokens is not None
    assert saved.tokens.tolist() == tokens(20)[:18]


@pytest.mark.parametrize("how", ["clear", "crop"])
def test_what_was_read_into_the_cache_has_no_ids(decoder: Decoder, path: Path, how: str) -> None:
    decoder.prefill(tokens(12, seed=1))
    decoder.save_session(path)
    before = path.read_bytes()
    decoder.reset()
    decoder.prefill(tokens(12))
    decoder.kv.clear()
    snapshot.read_into(decoder.kv, path)
    if how == "crop":
        decoder.kv.crop(11)
    with pytest.raises(RuntimeError, match="positions 0 to"):
        decoder.save_session(path)
    assert path.read_bytes() == before


def test_what_was_interrupted_has_no_ids(
    decoder: Decoder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.prefill(tokens(5))
    note = decoder._note_ids

    def interrupted(*arguments: Any) -> None:
        note(*arguments)
        raise KeyboardInterrupt

    for n in (1, 3):
        monkeypatch.setattr(decoder, "_note_ids", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.prefill(tokens(n, seed=1))
        monkeypatch.undo()
        decoder.save_session(path)
        assert snapshot.describe(path).next_position == 5
        append_foreign(decoder, n)
        with pytest.raises(RuntimeError, match="positions 5 to"):
            decoder.save_session(path)
        decoder.kv.crop(5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_the_one_that_was_saved(model: Path, path: Path, kind: str) -> None:
    with Decoder(model, ctx=CTX, threads=1, **KINDS[kind]) as decoder:
        decoder.prefill(tokens(100))
        decoder.kv.trim_to(6)  # the last token had seen more
        expected = [part.tobytes() for i in range(SHAPE.layers) for part in decoder.kv.layer(i)]
        decoder.save_session(path)
        logits = decoder.resume(path).copy()
        found = [part.tobytes() for i in range(SHAPE.layers) for part in decoder.kv.layer(i)]
        assert found == expected
        # The logits are those of the last token with what there is to see.
        decoder.kv.crop(5)
        np.testing.assert_array_equal(decoder.prefill(tokens(100)[-1:]), logits)
        found = [part.tobytes() for i in range(SHAPE.layers) for part in decoder.kv.layer(i)]
        assert found != expected


def assert_as_before(decoder: Decoder, logits: Any) -> None:
    np.testing.assert_array_equal(decoder.logits, logits)
    assert decoder.kv.next_position == 33


def test_sessions_of_something_else_are_refused(
    model: Path, decoder: Decoder, path: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other.gguf", shape=SHAPE, kind="f16")
    with Decoder(other, ctx=CTX, threads=1) as foreign:
        foreign.prefill(tokens(10))
        foreign.save_session(path)
    logits = decoder.prefill(tokens(33)).copy()
    with pytest.raises(SnapshotError, match="session of model") as caught:
        decoder.resume(path)
    assert str(path) in str(caught.value)
    assert_as_before(decoder, logits)
    fingerprint = decoder.weights.fingerprint
    decoder.kv.save(path, model=fingerprint)
    with pytest.raises(SnapshotError, match="no tokens to go on from"):
        decoder.resume(path)
    decoder.kv.save(path, tokens=[SHAPE.vocab] * 33, model=fingerprint)
    with pytest.raises(SnapshotError, match=f"token {SHAPE.vocab} is not among"):
        decoder.resume(path)
    with pytest.raises(SnapshotError):
        decoder.resume(model)
    with pytest.raises(FileNotFoundError):
        decoder.resume(tmp_path / "nowhere")
    assert_as_before(decoder, logits)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"kv_dtype": "f32"}, "dtype"), ({"window": 50}, "window")],
)
def test_sessions_of_another_kind_of_cache_are_refused(
    model: Path, decoder: Decoder, path: Path, options: dict[str, Any], match: str
) -> None:
    decoder.prefill(tokens(33))
    decoder.save_session(path)
    with Decoder(model, ctx=CTX, threads=1, **options) as other:
        logits = other.prefill(tokens(33, seed=1)).copy()
        with pytest.raises(SnapshotError, match=match):
            other.resume(path)
        assert_as_before(other, logits)
        other.generate_next_token()


@pytest.mark.parametrize("where", ["flipped", "short"])
def test_a_damaged_session_is_refused(decoder: Decoder, path: Path, where: str) -> None:
    decoder.prefill(tokens(40, seed=1))
    decoder.save_session(path)
    raw = bytearray(path.read_bytes())
    if where == "flipped":
        raw[-5000] ^= 1
    else:
        del raw[-100:]
    path.write_bytes(raw)
    decoder.reset()
    with pytest.raises(SnapshotError, match=str(path)):
        decoder.resume(path)
    assert decoder.kv.is_empty
    decoder.prefill(tokens(33))
    expected = greedy(decoder, 5)
    decoder.reset()
    logits = decoder.prefill(tokens(33)).copy()
    with pytest.raises(SnapshotError, match=str(path)):
        decoder.resume(path)
    assert_as_before(decoder, logits)
    assert greedy(decoder, 5) == expected


def test_an_interrupt_leaves_an_empty_cache(
    decoder: Decoder, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.prefill(tokens(33))
    decoder.save_session(path)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder._decode, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.resume(path)
    monkeypatch.undo()
    assert decoder.kv.is_empty
    with pytest.raises(RuntimeError, match="nothing to save"):
        decoder.save_session(path)
    decoder.resume(path)
    assert decoder.kv.seq_len == 33


def test_a_resumed_conversation_ends_an_old_generator(decoder: Decoder, path: Path) -> None:
    decoder.prefill(tokens(33))
    decoder.save_session(path)
    old = decoder.generate(tokens(4), 50, stop_at_eog=False)
    next(old)
    decoder.resume(path)
    with pytest.raises(RuntimeError, match="new conversation"):
        list(old)


def test_a_closed_decoder_says_so(model: Path, path: Path) -> None:
    decoder = Decoder(model, ctx=CTX, threads=1)
    decoder.prefill(tokens(3))
    decoder.close()
    for use in (decoder.save_session, decoder.resume):
        with pytest.raises(um.ClosedError):
            use(path)
    assert not path.exists()
