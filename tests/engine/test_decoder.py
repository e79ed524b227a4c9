"""The decoder's promises beside right numbers: memory, failures, conversations."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import unimem as um
from support.models.decoders import (
    append_foreign,
    greedy,
    interrupted,
    small_models_gain,
    tokens,
)
from support.models.make import TINY, write_model
from unimem.engine import Decoder
from unimem.system.limits import Limit

__all__ = ["small_models_gain"]  # a fixture

PROMPT = [1, 270, 280, 290]
CTX = 300
GAIN = 0.05  # so that the rounding of activations does not grow from layer to layer


@pytest.fixture(scope="module", params=["f32", "q4_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is mapped, and one that `auto` repacks here."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder / f"{request.param}.gguf", shape=TINY, kind=request.param, gain=GAIN)


@pytest.fixture
def decoder(model: Path) -> Iterator[Decoder]:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        yield decoder


def after(decoder: Decoder, prompt: list[int], n: int) -> list[int]:
    """Return the n tokens after a prompt in a new conversation."""
    decoder.reset()
    decoder.prefill(prompt)
    return greedy(decoder, n)


# ---- conversations -----------------------------------------------------------------------


def test_batches_of_any_size_give_what_single_tokens_give(decoder: Decoder) -> None:
    prompt = tokens(290)
    for token in prompt:
        one_by_one = decoder.prefill([token])
    expected, then = one_by_one.copy(), greedy(decoder, 8)
    for cut in (1, 2, 127, 128, 129, 256, 290):
        decoder.reset()
        for part in filter(None, (prompt[:cut], prompt[cut:])):
            logits = decoder.prefill(part)
        np.testing.assert_allclose(logits, expected, atol=1e-2 * expected.std())
        assert greedy(decoder, 8) == then


@pytest.mark.parametrize("window", [None, 64])
def test_tokens_that_a_conversation_begins_with_stay(model: Path, window: int | None) -> None:
    first, last = tokens(150), tokens(30, seed=1)
    with Decoder(model, ctx=CTX, threads=1, window=window) as decoder:

        def n_computed(ids: list[int]) -> int:
            with patch.object(
                Decoder, "prefill", autospec=True, side_effect=Decoder.prefill
            ) as prefill:
                decoder.set_tokens(ids)
            assert decoder.token_ids.tolist() == ids
            return sum(len(call.args[1]) for call in prefill.call_args_list)

        assert n_computed(first) == 150
        assert n_computed(first) == 1
        assert n_computed(first + last) == 30
        then = greedy(decoder, 8)
        assert n_computed(first[:100]) == (1 if window is None else 100)
        assert n_computed(first + last) == 80
        assert greedy(decoder, 8) == then == after(decoder, first + last, 8)
        for ids, error in (([], ValueError), ([-1], ValueError), ([1] * 301, um.CacheFull)):
            with pytest.raises(error):
                decoder.set_tokens(ids)
        assert decoder.token_ids[:-8].tolist() == first + last
        decoder.kv.trim_to(20)
        assert n_computed([*decoder.token_ids.tolist(), 5]) == 189
        decoder.kv.trim_to(20)
        greedy(decoder, 64)  # a ring is full again
        assert n_computed([*decoder.token_ids.tolist(), 5]) == 254


def test_rows_beyond_the_conversation_have_no_influence(model: Path, decoder: Decoder) -> None:
    # Rows beyond the conversation are masked, and hold rows of earlier conversations.
    first = decoder.prefill([5]).copy()
    decoder.reset()
    expected = decoder.prefill(PROMPT).copy()
    later = greedy(decoder, 20)
    with um.Layout.for_model(model, ctx=CTX, threads=1) as layout:
        # NaN in every byte that the decoder will get.
        for tape in (layout.scratch, layout.history):
            tape.block.as_array()[:] = 0xFF
        with Decoder(model, ctx=CTX, threads=1, layout=layout) as other:
            np.testing.assert_array_equal(other.prefill([5]), first)
            after(other, tokens(250, seed=1), 40)
            other.reset()
            np.testing.assert_array_equal(other.prefill(PROMPT), expected)
            assert greedy(other, 20) == later
            other.reset()
            np.testing.assert_array_equal(other.prefill([5]), first)


def test_logits_of_another_cache_choose_no_token(decoder: Decoder) -> None:
    prompt, kv = tokens(20), decoder.kv

    def replace() -> None:
        kv.crop(19)
        append_foreign(decoder, 1)

    changes: tuple[Callable[[], object], ...] = (
        lambda: None,  # nothing was prefilled yet
        decoder.reset,
        kv.clear,
        decoder.layout.clear_talk,
        replace,
        lambda: kv.crop(19),
        lambda: kv.trim_to(0),
        lambda: append_foreign(decoder, 1),
    )
    for change in changes:
        change()
        held = kv.seq_len
        with pytest.raises(RuntimeError, match="no logits to choose by: prefill"):
            decoder.generate_next_token()
        assert kv.seq_len == held
        decoder.reset()
        likeliest = int(decoder.prefill(prompt).argmax())
    # Changes that keep the last token keep its logits.
    kv.trim_to(10)
    append_foreign(decoder, 2)
    kv.crop(10)
    assert decoder.generate_next_token() == likeliest


def test_clear_talk_begins_a_new_conversation(decoder: Decoder) -> None:
    expected = after(decoder, PROMPT, 12)
    decoder.layout.clear_pass()
    decoder.layout.clear_talk()
    assert decoder.kv.seq_len == 0
    decoder.prefill(PROMPT)
    assert greedy(decoder, 12) == expected


def test_a_new_conversation_ends_an_old_generator(decoder: Decoder) -> None:
    for begin in (
        decoder.reset,
        lambda: decoder.set_tokens([5, 6]),
        lambda: decoder.set_tokens([*PROMPT, 5]),
    ):
        old = decoder.generate(PROMPT, 50, stop_at_eog=False)
        next(old)
        begin()
        ids = decoder.token_ids.tolist()
        with pytest.raises(RuntimeError, match="new conversation"):
            list(old)
        assert decoder.token_ids.tolist() == ids


def test_a_prompt_may_change_after_the_call(decoder: Decoder) -> None:
    prompt = np.array(PROMPT, np.int32)
    text = decoder.generate(prompt, 6)
    prompt[:] = 7
    assert list(text) == list(decoder.generate(PROMPT, 6))


def test_seeds(decoder: Decoder) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 0}

    def text(seed: int | None) -> str:
        return "".join(decoder.generate(PROMPT, 40, seed=seed, **options))

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) == 4
    assert text(None) != text(None)
    decoder.reset()
    decoder.prefill(PROMPT)
    stream, pieces = decoder.tokenizer.stream(), []
    for _ in range(40):
        token = decoder.generate_next_token(seed=1, **options)
        if token in decoder.tokenizer.eog_ids:
            break
        pieces.append(stream.push(token))
    assert "".join(pieces) + stream.flush() == text(1)

    def begin_anew() -> list[int]:
        decoder.set_tokens(PROMPT[:1])
        return [decoder.generate_next_token(seed=1, **options) for _ in range(5)]

    assert begin_anew() == begin_anew()


def test_generate_stops_where_the_file_says(decoder: Decoder, tmp_path: Path) -> None:
    third = after(decoder, PROMPT, 3)[-1]
    whole = "".join(decoder.generate(PROMPT, 6))
    kind = Path(decoder.weights.files[0]).stem
    stopping = write_model(tmp_path / "stop.gguf", shape=TINY, kind=kind, eos=third, gain=GAIN)
    with Decoder(stopping, ctx=CTX, threads=1) as other:
        assert other.tokenizer.eos_id == third
        short = "".join(other.generate(PROMPT, 6))
        assert whole.startswith(short)
        assert len(short) < len(whole)
        assert "".join(other.generate(PROMPT, 6, stop_at_eog=False)) == whole


def test_two_decoders_at_once(model: Path, decoder: Decoder) -> None:
    with Decoder(model, ctx=50, threads=2, kv_dtype="f32") as other:
        for _ in range(2):
            for each in (decoder, other):
                each.reset()
                each.prefill(PROMPT)
            pairs = [(decoder.generate_next_token(), other.generate_next_token()) for _ in range(9)]
            assert all(a == b for a, b in pairs)


def test_token_ids_need_no_tokenizer(model: Path, decoder: Decoder, tmp_path: Path) -> None:
    name = b"\x05\0\0\0\0\0\0\0llama"
    # The first is the architecture, the second the tokenizer.
    before, between, behind = model.read_bytes().split(name)
    path = tmp_path / "m.gguf"
    path.write_bytes(before + name + between + name.replace(b"llama", b"lllll") + behind)
    with Decoder(path, ctx=CTX, threads=1) as other:
        assert after(other, PROMPT, 5) == after(decoder, PROMPT, 5)
        for use in (lambda: other.tokenize("x"), lambda: other.generate(PROMPT, 5)):
            with pytest.raises(ValueError, match="lllll"):
                use()
        assert other.kv.seq_len == len(PROMPT) + 5


# ---- memory ------------------------------------------------------------------------------


def test_one_logits_vector(decoder: Decoder) -> None:
    logits = decoder.prefill(PROMPT)
    address, before = logits.ctypes.data, logits.copy()
    decoder.generate_next_token()
    assert decoder.logits.ctypes.data == address
    assert decoder.prefill([5]).ctypes.data == address
    assert decoder.layout.scratch.owns(logits)
    assert not np.array_equal(logits, before)


@pytest.mark.parametrize("window", [None, 40])
def test_nothing_moves_and_nothing_is_taken(model: Path, window: int | None) -> None:
    with Decoder(model, ctx=CTX, window=window, threads=1) as decoder:
        decoder.prefill(PROMPT)
        layout = decoder.layout
        layout.freeze()

        def state() -> tuple[Any, ...]:
            takes = layout.scratch.n_takes, layout.history.n_takes
            return decoder.addresses(), layout.stat(), takes

        before = state()
        decoder.prefill(tokens(200))
        greedy(decoder, 90)
        decoder.reset()
        decoder.prefill(tokens(7))
        assert state() == before


def test_every_buffer_lies_on_a_tape(decoder: Decoder) -> None:
    scratch, history = decoder.layout.scratch, decoder.layout.history
    for name, address in decoder.addresses().items():
        # Nodes that write to the cache, or look at it, lie there.
        in_cache = name[:2] in ("k.", "v.") or name.startswith("value.")
        assert scratch.owns(address) or (in_cache and history.owns(address)), name


# ---- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        *((prompt, ValueError) for prompt in ([], [-1], [1, TINY.vocab], [1.5], [True], [[1, 2]])),
        *((prompt, ValueError) for prompt in (["a"], [2**70])),
        ([1] * (CTX + 1), um.CacheFull),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused(decoder: Decoder, prompt: Any, error: type[Exception]) -> None:
    logits = decoder.prefill(PROMPT).copy()
    for use in (lambda: decoder.prefill(prompt), lambda: decoder.generate(prompt, 4)):
        with pytest.raises(error):
            use()
    assert decoder.kv.seq_len == len(PROMPT)
    np.testing.assert_array_equal(decoder.logits, logits)
    assert greedy(decoder, 5) == after(decoder, PROMPT, 5)


def test_bad_options_leave_the_conversation(decoder: Decoder) -> None:
    logits = decoder.prefill(PROMPT).copy()
    options: dict[str, Any] = {"temperature": -1, "top_k": 1.5, "top_p": 0, "seed": "x"}
    for name, value in options.items():
        for use in (decoder.generate_next_token, lambda **o: decoder.generate(PROMPT, 4, **o)):
            with pytest.raises(ValueError, match=name):
                use(**{name: value})
    for n in (-1, 1.5, True, "many"):
        with pytest.raises(ValueError, match="n:"):
            decoder.generate(PROMPT, n)  # type: ignore[arg-type]
    assert decoder.kv.seq_len == len(PROMPT)
    np.testing.assert_array_equal(decoder.logits, logits)


@pytest.mark.parametrize("ctx", [1, CTX])
def test_full(model: Path, ctx: int) -> None:
    with Decoder(model, ctx=ctx, threads=1) as decoder:
        logits = decoder.prefill(tokens(ctx)).copy()
        with pytest.raises(um.CacheFull, match="no room for 1 more token:") as caught:
            decoder.generate_next_token()
        assert (caught.value.limit, caught.value.used, caught.value.asked) == (ctx, ctx, 1)
        np.testing.assert_array_equal(decoder.logits, logits)


def test_lengths_are_checked_first(decoder: Decoder) -> None:
    logits = decoder.prefill(PROMPT).copy()
    with pytest.raises(um.CacheFull, match=f"a prompt of {len(PROMPT)} tokens and {CTX} more"):
        decoder.generate(PROMPT, CTX)
    with pytest.raises(um.CacheFull, match=f"a prompt of {CTX - 1} tokens and 5 more"):
        decoder.generate([1] * (CTX - 1), np.uint8(5))  # type: ignore[arg-type]
    assert list(decoder.generate(PROMPT, np.uint8(0))) == []  # type: ignore[arg-type]
    assert decoder.kv.seq_len == len(PROMPT)
    np.testing.assert_array_equal(decoder.logits, logits)
    list(decoder.generate(PROMPT, CTX - len(PROMPT) + 1, stop_at_eog=False))
    assert decoder.kv.seq_len == CTX


def test_interrupted_batches_leave_no_token(decoder: Decoder) -> None:
    expected = after(decoder, PROMPT, 6)
    decoder.kv.crop(len(PROMPT))
    with interrupted(decoder, 2):
        decoder.prefill(tokens(200))
    assert decoder.kv.seq_len == len(PROMPT)
    with pytest.raises(RuntimeError, match="prefill"):
        decoder.generate_next_token()
    decoder.kv.crop(len(PROMPT) - 1)
    decoder.prefill(PROMPT[-1:])
    assert greedy(decoder, 6) == expected


def test_an_interrupted_step_leaves_no_half_mask(decoder: Decoder) -> None:
    logits = []
    for is_interrupted in (False, True):
        decoder.reset()
        decoder.prefill(tokens(255))
        decoder.prefill([3])
        if is_interrupted:
            # With the 257th row attention reads more rows, and the mask is rewritten.
            with interrupted(decoder):
                decoder.prefill([4])
            assert decoder.kv.seq_len == 256
        logits.append(decoder.prefill([4]).copy())
    np.testing.assert_array_equal(logits[0], logits[1])


def test_views_in_the_way_leave_the_logits(model: Path) -> None:
    with Decoder(model, ctx=20, threads=1) as decoder:
        decoder.prefill(tokens(20))
        k, v = decoder.kv.layer(0)
        decoder.kv.trim_to(10)
        logits = decoder.logits.copy()
        # No row is free, and the tokens cannot move to the front.
        with pytest.raises(BufferError, match="views"):
            decoder.generate_next_token()
        np.testing.assert_array_equal(decoder.logits, logits)
        del k, v
        assert decoder.generate_next_token() == int(logits.argmax())


@pytest.mark.parametrize(
    "options", [{"ctx": 0}, {"ctx": 1.5}, {"threads": 0}, {"kv_dtype": "q3"}, {"threads": 10**6}]
)
def test_bad_options_of_the_decoder(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).removeprefix("kv_")):
        Decoder(model, **options)


@pytest.mark.usefixtures("gives_memory_back")
def test_a_layout_that_is_too_small(model: Path) -> None:
    needed = um.plan(model, ctx=CTX, threads=1)
    for scratch, history in (
        (needed.scratch_bytes - 4096, needed.history_bytes),
        (needed.scratch_bytes, needed.history_bytes - 64),
    ):
        with um.Layout(4096, scratch, history) as layout:
            with pytest.raises(um.TapeFull) as caught:
                Decoder(model, ctx=CTX, threads=1, layout=layout)
            assert caught.value.asked + caught.value.used > caught.value.limit
            assert layout.scratch.used_bytes == layout.history.used_bytes == 0


def test_too_large_for_the_machine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(um.CapacityError, match="available"):
        Decoder(model, ctx=2**30)
    # A layout is only address space until it is used.
    needed = um.plan(model, ctx=CTX, threads=1)
    used = needed.total_bytes - needed.required_bytes // 2
    room = Limit("a cgroup", needed.total_bytes, used, "")
    with um.Layout.for_model(model, ctx=CTX, threads=1) as layout:
        monkeypatch.setattr("unimem.system.limits.memory_limits", lambda: (room,))
        with pytest.raises(um.CapacityError, match="available"):
            Decoder(model, ctx=CTX, threads=1, layout=layout)
        assert layout.scratch.used_bytes == layout.history.used_bytes == 0
        layout.scratch.warm()
        layout.history.warm()
        Decoder(model, ctx=CTX, threads=1, layout=layout).close()


# ---- the end -----------------------------------------------------------------------------


@pytest.mark.usefixtures("gives_memory_back")
def test_closing(model: Path, tmp_path: Path) -> None:
    decoder, session = Decoder(model, ctx=CTX, threads=1), tmp_path / "talk"
    assert repr(decoder).endswith(f"layers, 0 of {CTX} tokens, 1 thread)")
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(decoder)
    logits = decoder.prefill(PROMPT)
    with pytest.raises(BufferError):
        decoder.close()
    assert decoder.generate_next_token() >= 0  # nothing was closed
    del logits
    gc.collect()
    decoder.close()
    decoder.close()
    assert repr(decoder) == "Decoder(closed)"
    for use in (
        decoder.reset,
        decoder.report,
        decoder.addresses,
        decoder.generate_next_token,
        decoder.__enter__,
        lambda: decoder.logits,
        lambda: decoder.token_ids,
        lambda: decoder.prefill(PROMPT),
        lambda: decoder.generate("x", 1),
        lambda: decoder.save_session(session),
        lambda: decoder.resume(session),
    ):
        with pytest.raises(um.ClosedError):
            use()
    # Leaving a `with` does not raise.
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        logits = decoder.prefill(PROMPT)
        expected = logits.copy()
    np.testing.assert_array_equal(logits, expected)
    assert not session.exists()


def test_a_tape_may_take_the_weights_back(model: Path) -> None:
    with um.Tape("4M") as tape:
        weights = um.open_weights(model, tape=tape)
        with Decoder(weights, ctx=CTX, threads=1) as decoder:
            text = decoder.generate(PROMPT, 50, stop_at_eog=False)
            next(text)
            greedy(decoder, 2)
            tape.clear()
            for use in (decoder.generate_next_token, lambda: next(text)):
                with pytest.raises(um.ClosedError, match="took the memory back"):
                    use()


@pytest.mark.usefixtures("gives_memory_back")
@pytest.mark.parametrize("load", ["map", "copy", "direct"])
def test_a_borrowed_layout_is_not_closed(model: Path, load: Any) -> None:
    with um.open_weights(model, load=load) as weights:
        layout = um.Layout.for_model(weights, ctx=CTX, threads=1)
        decoder = Decoder(weights, ctx=CTX, threads=1, layout=layout)
        expected = after(decoder, PROMPT, 4)
        for borrowed in (layout, weights):
            with pytest.raises(BufferError):
                borrowed.close()
        assert after(decoder, PROMPT, 4) == expected
        decoder.close()
        assert not weights.closed
        assert not layout.closed
        layout.close()


def test_left_open_warns(model: Path) -> None:
    decoder = Decoder(model, ctx=10, threads=1)
    with pytest.warns(ResourceWarning, match=r"unclosed Decoder of .*\.gguf"):
        del decoder
