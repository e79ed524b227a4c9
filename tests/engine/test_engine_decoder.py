"""What the decoder promises beside the right numbers: memory, failures, conversations."""

from __future__ import annotations

import ctypes
import gc
import pickle
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
from models.make import TINY, write_model
from unimem.accounting import published
from unimem.engine import Decoder, UnsupportedModel
from unimem.planning.needs import token_bytes
from unimem.system.limits import Limit

PROMPT = [1, 270, 280, 290]
CTX = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", shape=TINY, kind="f32")


@pytest.fixture
def decoder(model: Path) -> Iterator[Decoder]:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        yield decoder


def greedy(decoder: Decoder, n: int) -> list[int]:
    return [decoder.generate_next_token() for _ in range(n)]


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, TINY.vocab, n)]


def test_batches_of_any_size_give_what_single_tokens_give(decoder: Decoder) -> None:
    prompt = tokens(290)
    for token in prompt:
        one_by_one = decoder.prefill([token])
    expected, then = one_by_one.copy(), greedy(decoder, 8)
    for cut in (1, 2, 127, 128, 129, 256, 290):
        decoder.reset()
        for part in (prompt[:cut], prompt[cut:]):
            if part:
                logits = decoder.prefill(part)
        np.testing.assert_allclose(logits, expected, atol=1e-2 * expected.std())
        assert greedy(decoder, 8) == then


def test_what_is_not_computed_yet_has_no_influence(model: Path) -> None:
    # Rows beyond the conversation are masked, and hold what an earlier one left there.
    with Decoder(model, ctx=CTX, threads=1) as fresh:
        expected = fresh.prefill(PROMPT).copy()
        later = greedy(fresh, 20)
    with um.Layout.for_model(model, ctx=CTX, threads=1) as layout:
        # NaN in every byte that the decoder will get.
        for tape in (layout.scratch, layout.history):
            tape.block.as_array()[:] = 0xFF
        with Decoder(model, ctx=CTX, threads=1, layout=layout) as decoder:
            decoder.prefill(tokens(250, seed=1))
            greedy(decoder, 40)
            decoder.reset()
            np.testing.assert_array_equal(decoder.prefill(PROMPT), expected)
            assert greedy(decoder, 20) == later


def test_the_cache_may_be_cropped(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    expected = greedy(decoder, 12)
    decoder.prefill(tokens(200))
    decoder.kv.crop(len(PROMPT) - 1)
    decoder.prefill(PROMPT[-1:])
    assert greedy(decoder, 12) == expected


def test_logits_of_another_cache_choose_no_token(decoder: Decoder) -> None:
    prompt = tokens(20)

    def clear() -> None:
        decoder.kv.clear()

    def crop() -> None:
        decoder.kv.crop(19)

    def drop_all() -> None:
        decoder.kv.trim_to(0)

    def append(n: int = 1) -> None:
        rows = np.zeros((n, TINY.kv_heads, TINY.head), "float32")
        for layer in range(TINY.layers):
            decoder.kv.append(layer, rows, rows)

    def replace() -> None:
        crop()
        append()

    for change in (clear, crop, drop_all, append, replace, decoder.layout.clear_talk):
        decoder.reset()
        decoder.prefill(prompt)
        change()
        held = decoder.kv.seq_len
        with pytest.raises(RuntimeError, match="no logits to choose by"):
            decoder.generate_next_token()
        assert decoder.kv.seq_len == held
    # What leaves the last token where it is leaves its logits, too.
    decoder.reset()
    likeliest = int(decoder.prefill(prompt).argmax())
    decoder.kv.trim_to(10)
    append(2)
    decoder.kv.crop(10)
    assert decoder.generate_next_token() == likeliest


def test_clear_talk_begins_a_new_conversation(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    expected = greedy(decoder, 12)
    decoder.layout.clear_pass()
    decoder.layout.clear_talk()
    assert decoder.kv.seq_len == 0
    decoder.prefill(PROMPT)
    assert greedy(decoder, 12) == expected


def test_one_logits_vector(decoder: Decoder) -> None:
    decoder.reset()
    logits = decoder.prefill(PROMPT)
    address, before = logits.ctypes.data, logits.copy()
    decoder.generate_next_token()
    assert decoder.logits.ctypes.data == address
    assert decoder.prefill([5]).ctypes.data == address
    assert decoder.layout.scratch.owns(logits)
    assert not np.array_equal(logits, before)


def test_nothing_moves_and_nothing_is_taken(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    layout = decoder.layout
    layout.freeze()
    addresses, stat = decoder.addresses(), layout.stat()
    takes = layout.scratch.n_takes, layout.history.n_takes
    decoder.prefill(tokens(200))
    greedy(decoder, 60)
    decoder.reset()
    decoder.prefill(tokens(7))
    assert decoder.addresses() == addresses
    assert layout.stat() == stat
    assert (layout.scratch.n_takes, layout.history.n_takes) == takes


def test_every_buffer_lies_on_a_tape(decoder: Decoder) -> None:
    scratch, history = decoder.layout.scratch, decoder.layout.history
    for name, address in decoder.addresses().items():
        # Nodes that write to the cache, or look at it, lie there.
        in_cache = name[:2] in ("k.", "v.") or name.startswith("value.")
        assert scratch.owns(address) or (in_cache and history.owns(address)), name


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ValueError),
        ([-1], ValueError),
        ([1, TINY.vocab], ValueError),
        ([1.5], ValueError),
        ([True], ValueError),
        ([[1, 2]], ValueError),
        (["a"], ValueError),
        ([2**70], ValueError),
        ([1] * (CTX + 1), um.CacheFull),
        ([1] * (CTX - len(PROMPT) + 1), um.CacheFull),
    ],
)
def test_a_bad_prompt_leaves_the_conversation(
    decoder: Decoder, prompt: Any, error: type[Exception]
) -> None:
    logits = decoder.prefill(PROMPT).copy()
    with pytest.raises(error):
        decoder.prefill(prompt)
    if len(prompt) != CTX - len(PROMPT) + 1:
        with pytest.raises(error):
            decoder.generate(prompt, 4)
    assert decoder.kv.seq_len == len(PROMPT)
    np.testing.assert_array_equal(decoder.logits, logits)
    expected = greedy(decoder, 5)
    decoder.reset()
    decoder.prefill(PROMPT)
    assert greedy(decoder, 5) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": "x"},
    ],
)
def test_a_bad_option_leaves_the_conversation(decoder: Decoder, options: dict[str, Any]) -> None:
    logits = decoder.prefill(PROMPT).copy()
    with pytest.raises(ValueError, match=next(iter(options))):
        decoder.generate_next_token(**options)
    with pytest.raises(ValueError, match=next(iter(options))):
        decoder.generate(PROMPT, 4, **options)
    assert decoder.kv.seq_len == len(PROMPT)
    np.testing.assert_array_equal(decoder.logits, logits)


@pytest.mark.parametrize("n", [-1, 1.5, True, "many"])
def test_a_bad_length(decoder: Decoder, n: Any) -> None:
    with pytest.raises(ValueError, match="n:"):
        decoder.generate(PROMPT, n)


def test_full(decoder: Decoder) -> None:
    decoder.prefill(tokens(CTX - 2))
    greedy(decoder, 2)
    logits = decoder.logits.copy()
    with pytest.raises(um.CacheFull, match="no room for 1 more token:") as caught:
        decoder.generate_next_token()
    assert (caught.value.limit, caught.value.used, caught.value.asked) == (CTX, CTX, 1)
    np.testing.assert_array_equal(decoder.logits, logits)


def test_generate_checks_its_length_first(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    with pytest.raises(um.CacheFull, match=f"a prompt of {len(PROMPT)} tokens and {CTX} more"):
        decoder.generate(PROMPT, CTX)
    assert decoder.kv.seq_len == len(PROMPT)
    list(decoder.generate(PROMPT, CTX - len(PROMPT) + 1, stop_at_eog=False))
    assert decoder.kv.seq_len == CTX


def test_no_logits_yet(decoder: Decoder) -> None:
    with pytest.raises(RuntimeError, match="prefill"):
        decoder.generate_next_token()
    decoder.prefill(PROMPT)
    decoder.reset()
    with pytest.raises(RuntimeError, match="prefill"):
        decoder.generate_next_token()


def test_interrupted_batches_leave_no_token(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.prefill(PROMPT)
    expected = greedy(decoder, 6)
    decoder.kv.crop(len(PROMPT))
    compute, calls = type(decoder._prefill).compute, 0

    def interrupted(graph: Any) -> None:
        nonlocal calls
        calls += 1
        compute(graph)
        if calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(decoder._prefill), "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.prefill(tokens(200))
    assert calls == 2
    assert decoder.kv.seq_len == len(PROMPT)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="prefill"):
        decoder.generate_next_token()
    decoder.kv.crop(len(PROMPT) - 1)
    decoder.prefill(PROMPT[-1:])
    assert greedy(decoder, 6) == expected


def test_an_interrupted_step_leaves_no_half_mask(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the 257th row attention reads more of them, and the mask is made anew.
    decoder.prefill(tokens(255))
    decoder.prefill([3])
    expected = decoder.prefill([4]).copy()
    decoder.reset()
    decoder.prefill(tokens(255))
    decoder.prefill([3])
    with monkeypatch.context() as patch:

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("unimem.engine.attention._show", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.prefill([4])
    assert decoder.kv.seq_len == 256
    np.testing.assert_array_equal(decoder.prefill([4]), expected)


def test_views_in_the_way_leave_the_logits(model: Path) -> None:
    with Decoder(model, ctx=20, threads=1) as decoder:
        decoder.prefill(tokens(20))
        k, v = decoder.kv.layer(0)
        decoder.kv.trim_to(10)
        logits = decoder.logits.copy()
        # The rows are used up, and the tokens cannot move to the front.
        with pytest.raises(BufferError, match="views"):
            decoder.generate_next_token()
        np.testing.assert_array_equal(decoder.logits, logits)
        del k, v
        assert decoder.generate_next_token() == int(logits.argmax())


def test_a_new_conversation_ends_an_old_generator(decoder: Decoder) -> None:
    old = decoder.generate(PROMPT, 50, stop_at_eog=False)
    next(old)
    decoder.reset()
    with pytest.raises(RuntimeError, match="new conversation"):
        list(old)


def test_seeds(decoder: Decoder) -> None:
    def text(seed: int | None) -> str:
        pieces = decoder.generate(PROMPT, 40, temperature=1.5, top_k=0, seed=seed)
        return "".join(pieces)

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) == 4
    assert text(None) != text(None)
    step_by_step = []
    decoder.reset()
    decoder.prefill(PROMPT)
    for _ in range(40):
        token = decoder.generate_next_token(temperature=1.5, top_k=0, seed=1)
        if token in decoder.tokenizer.eog_ids:
            break
        step_by_step.append(token)
    stream = decoder.tokenizer.stream()
    pieces = [stream.push(token) for token in step_by_step]
    assert "".join(pieces) + stream.flush() == text(1)


def test_generate_stops_where_the_file_says(decoder: Decoder, tmp_path: Path) -> None:
    decoder.prefill(PROMPT)
    third = greedy(decoder, 3)[-1]
    whole = "".join(decoder.generate(PROMPT, 6))
    stopping = write_model(tmp_path / "stop.gguf", shape=TINY, kind="f32", eos=third)
    with Decoder(stopping, ctx=CTX, threads=1) as other:
        assert other.tokenizer.eos_id == third
        short = "".join(other.generate(PROMPT, 6))
        assert whole.startswith(short)
        assert len(short) < len(whole)
        assert "".join(other.generate(PROMPT, 6, stop_at_eog=False)) == whole


def test_the_report_accounts_for_every_mapping(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    layout, rows = decoder.layout, {row.category: row for row in decoder.report().rows}
    scratch, history, weights = layout.scratch.block, layout.history.block, decoder.weights
    mapped = [*weights.blocks, scratch, history]
    beside = {"other": weights._parts[0].file.header.copied_bytes, "diagnostics": published.NBYTES}
    in_blocks = decoder.report().total_bytes - sum(beside.values())
    assert in_blocks == sum(block.committed_bytes for block in mapped)
    padding = weights.blocks[0].committed_bytes - weights.nbytes
    vectors = {"logits": 4 * TINY.vocab, "tokens": token_bytes(CTX)}
    assert {category: row.nbytes for category, row in rows.items()} == {
        "weights:f32": weights.nbytes,
        "weights:padding": padding,
        "kv": history.nbytes,
        "scratch": scratch.nbytes - sum(vectors.values()),
        **vectors,
        **beside,
    }
    assert all(row.resident_bytes == row.nbytes for row in rows.values())
    kv = rows["kv"]
    assert kv.active_bytes == kv.high_water_bytes == decoder.kv.memory_usage_bytes
    used = layout.scratch.used_bytes - sum(vectors.values())
    assert rows["scratch"].active_bytes == rows["scratch"].high_water_bytes == used
    decoder.reset()
    (row,) = [row for row in decoder.report().rows if row.category == "kv"]
    assert (row.active_bytes, row.high_water_bytes) == (0, kv.active_bytes)
    facts = decoder.report().facts
    assert facts["ggml"]
    assert facts["cpu_features"]
    assert ("advice" in facts) is not facts["tinyblas"]
    assert "6.0 KiB from malloc" in facts["ggml_own"]
    assert "the stacks of 0 threads;" in facts["ggml_own"]  # beside the one that calls


def test_what_ggml_takes_from_malloc(run_python: Any) -> None:
    """What its calls add to what malloc has handed out, without malloc's caches of threads."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this C library has no mallinfo2 (glibc 2.33 has it)")
    done = run_python(
        """
        import ctypes
        from unimem.engine import Decoder, embedded_model
        from unimem.system import ggml

        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        Info = type("Info", (ctypes.Structure,), {
            "_fields_": [(name, ctypes.c_size_t) for name in names.split()]})
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = Info

        def handed_out():
            info = mallinfo2()
            return info.uordblks + info.hblkhd

        def counted(call):
            def wrapped(*arguments):
                before = handed_out()
                result = call(*arguments)
                taken[0] += handed_out() - before
                return result
            return wrapped

        taken = [0]
        for name in ("init", "_threadpool_new", "graph_plan", "graph_compute"):
            setattr(ggml, name, counted(getattr(ggml, name)))
        for n in (1, 2, 16):
            taken[0] = 0
            with Decoder(embedded_model(), ctx=128, threads=n) as decoder:
                "".join(decoder.generate("Once upon a time", 4))
            assert 0 < taken[0] <= ggml.own_bytes(n), (n, taken[0])
        """,
        GLIBC_TUNABLES="glibc.malloc.tcache_count=0",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("gives_memory_back")
def test_closing(model: Path) -> None:
    decoder = Decoder(model, ctx=CTX, threads=1)
    assert repr(decoder).endswith(f"layers, 0 of {CTX} tokens, 1 thread)")
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
        lambda: decoder.logits,
        lambda: decoder.prefill(PROMPT),
        lambda: decoder.generate("x", 1),
        decoder.__enter__,
    ):
        with pytest.raises(um.ClosedError):
            use()


@pytest.mark.usefixtures("gives_memory_back")
def test_leaving_a_with_never_raises(model: Path) -> None:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        logits = decoder.prefill(PROMPT)
        expected = logits.copy()
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.usefixtures("gives_memory_back")
def test_what_is_borrowed_stays_open_and_cannot_be_closed_underneath(model: Path) -> None:
    with um.open_weights(model) as weights:
        layout = um.Layout.for_model(weights, ctx=CTX, threads=1)
        decoder = Decoder(weights, ctx=CTX, threads=1, layout=layout)
        decoder.prefill(PROMPT)
        expected = greedy(decoder, 4)
        with pytest.raises(BufferError):
            layout.close()
        with pytest.raises(BufferError):
            weights.close()
        decoder.reset()
        decoder.prefill(PROMPT)
        assert greedy(decoder, 4) == expected
        decoder.close()
        assert not weights.closed
        assert not layout.closed
        layout.close()


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
    room = Limit(
        "a cgroup", needed.total_bytes, needed.total_bytes - needed.required_bytes // 2, ""
    )
    with um.Layout.for_model(model, ctx=CTX, threads=1) as layout:
        monkeypatch.setattr("unimem.system.limits.memory_limits", lambda: (room,))
        with pytest.raises(um.CapacityError, match="available"):
            Decoder(model, ctx=CTX, threads=1, layout=layout)
        assert layout.scratch.used_bytes == layout.history.used_bytes == 0
        layout.scratch.warm()
        layout.history.warm()
        Decoder(model, ctx=CTX, threads=1, layout=layout).close()


@pytest.mark.parametrize(
    "options", [{"ctx": 0}, {"ctx": 1.5}, {"threads": 0}, {"kv_dtype": "q3"}, {"threads": 10**6}]
)
def test_bad_options_of_the_decoder(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options)).removeprefix("kv_")):
        Decoder(model, **options)


def test_one_token_of_context(model: Path) -> None:
    with Decoder(model, ctx=1, threads=1) as decoder:
        assert decoder.prefill([3]).shape == (TINY.vocab,)
        with pytest.raises(um.CacheFull):
            decoder.generate_next_token()


def test_two_decoders_at_once(model: Path, decoder: Decoder) -> None:
    with Decoder(model, ctx=50, threads=2, kv_dtype="f32") as other:
        for _ in range(2):
            decoder.reset()
            other.reset()
            decoder.prefill(PROMPT)
            other.prefill(PROMPT)
            pairs = [(decoder.generate_next_token(), other.generate_next_token()) for _ in range(9)]
            assert all(a == b for a, b in pairs)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf", shape=TINY, kind="f32", metadata={"attention.sliding_window": 64}
    )
    with pytest.raises(UnsupportedModel, match="64"):
        Decoder(path, ctx=65)
    with Decoder(path, threads=1) as decoder:
        assert decoder.ctx == 64


def test_no_pickle(decoder: Decoder) -> None:
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(decoder)


def test_left_open_warns(model: Path) -> None:
    decoder = Decoder(model, ctx=10, threads=1)
    with pytest.warns(ResourceWarning, match=r"unclosed Decoder of .*tiny\.gguf"):
        del decoder


def test_token_ids_need_no_tokenizer(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(
        model.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lllll")
    )
    named = path.read_bytes().replace(b"lllll", b"llama", 1)
    path.write_bytes(named)  # the first is the architecture, the second the tokenizer
    with Decoder(path, ctx=CTX, threads=1) as other, Decoder(model, ctx=CTX, threads=1) as decoder:
        other.prefill(PROMPT)
        decoder.prefill(PROMPT)
        assert greedy(other, 5) == greedy(decoder, 5)
        with pytest.raises(ValueError, match="lllll"):
            other.tokenize("x")
        with pytest.raises(ValueError, match="lllll"):
            other.generate(PROMPT, 5)
        assert other.kv.seq_len == len(PROMPT) + 5
