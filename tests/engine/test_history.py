"""The decoder on every kind of KV cache: types, windows in a ring, tokens that were trimmed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import unimem as um
from support.models.decoders import WIDE_HEADS as SHAPE
from support.models.decoders import (
    Computation,
    computing_by,
    greedy,
    interrupted,
    sizes,
    small_models_gain,
    tokens,
)
from support.models.make import TINY, write_model
from support.project.tiers import examples
from unimem.engine import Decoder, UnsupportedModel
from unimem.planning.needs import PREFILL_BATCH

__all__ = ["small_models_gain"]  # a fixture

CTX = 1200
WINDOW = 40
GAIN = 0.05  # so that the rounding of activations does not grow from layer to layer
# The effect of adding up rows in another order, as a part of the logits' standard deviation: it is
# 1e-6 with f32, and 2e-3 where ggml adds up in 16 bits.
ORDER = 5e-3


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=SHAPE, kind="f32")


@pytest.fixture(scope="module", params=["f32", pytest.param("q4_0", marks=pytest.mark.slow)])
def model(
    request: pytest.FixtureRequest, exact: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model that is mapped, and one that `auto` repacks here."""
    if request.param == "f32":
        return exact
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_model(path, shape=SHAPE, kind=request.param, gain=GAIN)


@pytest.fixture
def ring(model: Path) -> Iterator[Decoder]:
    with Decoder(model, ctx=CTX, window=WINDOW, threads=1) as decoder:
        yield decoder


def full_cache(model: Path, window: int = WINDOW, **options: Any) -> Decoder:
    """Return a decoder that keeps all tokens, with the mask of a window."""
    decoder = Decoder(model, ctx=CTX, threads=1, **options)
    decoder._forward.windows = (window,)
    return decoder


def n_kv_of(decoder: Decoder) -> int:
    """Return how many rows attention of a token reads."""
    return decoder._decode.masks[0].n_kv


def assert_close(a: NDArray[Any], b: NDArray[Any], order: float = ORDER) -> None:
    assert np.abs(a - b).max() <= order * b.std()


def prefill_both(
    a: Decoder, b: Decoder, *parts: list[int], check: Callable[..., None] = assert_close
) -> None:
    """Prefill the same, and compare the logits."""
    for part in parts:
        check(a.prefill(part), b.prefill(part))


# ---- types --------------------------------------------------------------------------------


# The effect of rounding keys and values, in standard deviations of the logits.
@pytest.mark.parametrize(
    ("kv_dtype", "bound"),
    [
        ("f16", 0.01),
        ("float16", 0.01),
        ("bf16", 0.05),
        ("q8_0", 0.05),
        ("q5_1", 0.2),
        ("q5_0", 0.2),
        ("q4_1", 0.4),
        ("q4_0", 0.4),
        ("iq4_nl", 0.4),
        ("q8_0,q4_1", 0.4),
    ],
)
def test_a_type_of_cache_rounds_the_logits(model: Path, kv_dtype: str, bound: float) -> None:
    logits = []
    for kind in ("f32", kv_dtype):
        with Decoder(model, ctx=CTX, threads=1, kv_dtype=kind) as decoder:
            logits.append([decoder.prefill(part).copy() for part in (tokens(300), [7])])
            planned = sizes(um.plan(model, ctx=CTX, kv_dtype=kind))["kv"]
            assert sizes(decoder.report())["kv"] == planned >= decoder.kv.capacity_bytes
    exact, rounded = np.array(logits)
    assert 0 < np.abs(exact - rounded).max() <= bound * exact.std()


def test_heads_that_are_no_whole_blocks(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shape=TINY, kind="f32")
    with pytest.raises(UnsupportedModel, match=r"heads have 16; f16, bf16 and f32 work"):
        Decoder(path, ctx=10, kv_dtype="q8_0")
    with pytest.raises(ValueError, match="head_dim"):
        um.plan(path, kv_dtype="q8_0")
    Decoder(path, ctx=10, kv_dtype="bf16").close()


# ---- windows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "kv_dtype"), [(1, "f16"), (40, "q8_0"), (300, "f32"), (300, "bf16")]
)
def test_a_ring_is_a_full_cache_with_the_same_mask(model: Path, window: int, kv_dtype: str) -> None:
    with (
        Decoder(model, ctx=CTX, window=window, threads=1, kv_dtype=kv_dtype) as ring,
        full_cache(model, window, kv_dtype=kv_dtype) as full,
    ):
        assert ring.kv.n_rows < CTX
        # Steps, batches below and above the window, and far beyond the ring's end.
        for i, n in enumerate((1, 3, 1, 1, 150, 1, 1, 20, 500, 1, 1, 129, 60, 1, 128, 1, 1)):
            part = tokens(n, seed=i)
            a, b = ring.prefill(part), full.prefill(part)
            assert ring.kv.next_position == full.kv.next_position
            assert ring.kv.seq_len == min(window, full.kv.seq_len)
            if n_kv_of(ring) == n_kv_of(full) and ring.kv.next_position <= ring.kv.n_rows:
                np.testing.assert_array_equal(a, b)
            assert_close(a, b)
        for _ in range(100):
            assert ring.generate_next_token() == full.generate_next_token()
            assert_close(ring.logits, full.logits)
        assert ring.kv.next_position > 2 * ring.kv.n_rows


def test_graphs_of_one_size_give_the_same_bits(model: Path) -> None:
    with Decoder(model, ctx=CTX, window=200, threads=1) as ring, full_cache(model, 200) as full:
        assert ring.kv.n_rows > 256
        for part in (tokens(50), tokens(100), [1], [2], tokens(80), *([i] for i in range(20))):
            prefill_both(ring, full, part, check=np.testing.assert_array_equal)
            assert n_kv_of(ring) == n_kv_of(full) or len(part) > 1
        assert 200 < ring.kv.next_position <= 256


def test_a_window_is_not_all(model: Path, ring: Decoder) -> None:
    with Decoder(model, ctx=CTX, threads=1) as full:
        prefill_both(ring, full, tokens(WINDOW))
        with pytest.raises(AssertionError):
            prefill_both(ring, full, tokens(1))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.sampled_from([1, 1, 2, 7, 39, 40, 41, 128, 129, 300])),
        st.tuples(st.just("crop"), st.integers(0, 150)),
        st.tuples(st.just("trim"), st.integers(0, 45)),
        st.tuples(st.sampled_from(["reset", "clear"]), st.just(0)),
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def pair(exact: Path) -> Iterator[tuple[Decoder, Decoder]]:
    with (
        Decoder(exact, ctx=CTX, window=WINDOW, threads=1, kv_dtype="f32") as ring,
        full_cache(exact, kv_dtype="f32") as full,
    ):
        yield ring, full


@settings(deadline=None, max_examples=examples(150))
@given(STEPS)
@example(  # far beyond the ring's end
    [("prefill", n) for n in (300, 300, 100, 1, 1)]
    + [(step, n) for back in (1, 5, 30) for step, n in (("crop", back), ("prefill", 60))]
    + [("clear", 0), ("prefill", 300), ("trim", 10), *(("prefill", n) for n in (1, 1, 20, 1, 40))]
)
def test_any_steps_of_a_ring(pair: tuple[Decoder, Decoder], steps: list[tuple[str, int]]) -> None:
    ring, full = pair
    for decoder in pair:
        decoder.reset()
    for seed, (step, n) in enumerate(steps):
        before = ring.kv.seq_len, ring.kv.next_position
        if step == "prefill":
            if ring.kv.next_position + n > CTX:
                continue
            part = tokens(n, seed)
            assert_close(ring.prefill(part), full.prefill(part), 1e-4)
        elif step in ("reset", "clear"):
            ring.reset() if step == "reset" else ring.kv.clear()
            full.reset()
        elif step == "trim":
            # The ring may refuse to trim tokens that it does not show.
            if ring.kv.trim_to(n):
                full.kv.trim_to(n)
        elif (back := min(n, ring.kv.seq_len)) <= min(full.kv.seq_len, PREFILL_BATCH):
            try:
                ring.kv.crop(ring.kv.seq_len - back)
            except ValueError:
                # A prompt of several batches has overwritten the rows.
                assert (ring.kv.seq_len, ring.kv.next_position) == before
            else:
                full.kv.crop(full.kv.seq_len - back)
        assert ring.kv.next_position == full.kv.next_position
        assert ring.kv.seq_len == min(WINDOW, full.kv.seq_len)


def test_the_context_ends_a_conversation_in_a_ring(model: Path) -> None:
    with Decoder(model, ctx=300, window=WINDOW, threads=1) as ring:
        ring.prefill(tokens(299))
        with pytest.raises(um.CacheFull) as caught:
            ring.prefill([1, 2])
        assert (caught.value.limit, caught.value.used, caught.value.asked) == (300, 299, 2)
        ring.generate_next_token()
        for use in (ring.generate_next_token, lambda: ring.generate(tokens(200), 102)):
            with pytest.raises(um.CacheFull):
                use()
        assert "".join(ring.generate(tokens(200), 101, stop_at_eog=False))


def test_a_prompt_that_is_interrupted_counts_in_whole_batches(ring: Decoder) -> None:
    ring.prefill(tokens(9))
    prompt = tokens(600, seed=2)
    with interrupted(ring, 3):
        ring.prefill(prompt)
    assert ring.kv.next_position == 9 + 2 * PREFILL_BATCH
    assert ring.kv.seq_len == WINDOW
    with pytest.raises(RuntimeError, match="prefill"):
        ring.generate_next_token()
    resumed = ring.prefill(prompt[2 * PREFILL_BATCH :]).copy()
    ring.reset()
    ring.prefill(tokens(9))
    np.testing.assert_array_equal(ring.prefill(prompt), resumed)


def test_a_model_that_slides_runs_with_its_window(tmp_path: Path) -> None:
    slides = {"attention.sliding_window": 64}
    path = write_model(tmp_path / "m.gguf", shape=SHAPE, kind="f32", metadata=slides)
    for window in (None, 65):
        with pytest.raises(UnsupportedModel, match="64"):
            Decoder(path, ctx=65, window=window, threads=1)
    assert um.plan(path).max_ctx == 64
    assert um.plan(path, window=64).max_ctx == SHAPE.ctx
    with Decoder(path, threads=1) as decoder:
        assert decoder.ctx == 64
    with Decoder(path, window=64, threads=1) as decoder:
        assert decoder.ctx == SHAPE.ctx
        decoder.prefill(tokens(500))


# ---- memory of a ring ---------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["f16", "q8_0"])
def test_a_ring_has_the_planned_size(model: Path, kv_dtype: str) -> None:
    planned = sizes(um.plan(model, ctx=CTX, window=WINDOW, kv_dtype=kv_dtype, threads=1))
    with Decoder(model, ctx=CTX, window=WINDOW, kv_dtype=kv_dtype, threads=1) as decoder:
        assert sizes(decoder.report()) == planned
        decoder.prefill(tokens(600))
        report, cache, history = decoder.report(), decoder.kv, decoder.layout.history
        (kv,) = [row for row in report.rows if row.category == "kv"]
        lanes_bytes = 2 * SHAPE.layers * cache.row_bytes
        assert cache.capacity_bytes == cache.n_rows * lanes_bytes
        # The tape has a page, which is unused.
        assert kv.nbytes == cache.capacity_bytes + history.block.nbytes
        assert history.used_bytes == 0
        assert kv.active_bytes == kv.high_water_bytes == cache.memory_usage_bytes
        assert kv.active_bytes == WINDOW * lanes_bytes
        assert kv.resident_bytes == cache.capacity_bytes
        mapped = [*decoder._memory.blocks, decoder.layout.scratch.block]
        beside = planned["other"] + planned["diagnostics"]  # the header, and published figures
        own = kv.nbytes + sum(block.committed_bytes for block in mapped)
        assert report.total_bytes == own + beside
        assert report.facts["window"] == WINDOW


def test_a_ring_is_placed_as_the_layout(model: Path) -> None:
    with (
        um.Layout.for_model(model, ctx=CTX, window=WINDOW, threads=1, pages="4k") as layout,
        Decoder(model, ctx=CTX, window=WINDOW, threads=1, layout=layout) as decoder,
    ):
        assert decoder.kv.block is not None
        assert decoder.kv.block.requested["pages"] == "4k"
        assert decoder.kv.tape is None
        decoder.prefill(tokens(100))
        layout.clear_talk()
        assert decoder.kv.is_empty


@pytest.mark.usefixtures("gives_memory_back")
def test_a_ring_with_views_is_not_closed(model: Path) -> None:
    decoder = Decoder(model, ctx=CTX, window=WINDOW, threads=1)
    decoder.prefill(tokens(60))
    k, v = decoder.kv.layer(0)
    assert k.shape == (1, SHAPE.kv_heads, WINDOW, SHAPE.head)
    with pytest.raises(BufferError):
        decoder.close()
    assert decoder.generate_next_token() >= 0  # nothing was closed
    del k, v
    gc.collect()
    decoder.close()


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "many", CTX + 1])
def test_bad_windows(model: Path, window: Any) -> None:
    for make in (Decoder, um.plan, um.Layout.for_model):
        with pytest.raises(ValueError, match="window"):
            make(model, ctx=CTX, window=window)


@pytest.mark.usefixtures("gives_memory_back")
def test_a_failure_gives_the_ring_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with um.Layout.for_model(model, ctx=CTX, window=WINDOW, threads=1) as layout:
        monkeypatch.setattr("unimem.engine.decoder.Graph", None)
        with pytest.raises(AttributeError):
            Decoder(model, ctx=CTX, window=WINDOW, threads=1, layout=layout)
        assert layout.scratch.used_bytes == layout.history.used_bytes == 0


# ---- a plain cache that was trimmed -------------------------------------------------------


@contextmanager
def hidden(decoder: Decoder, begin: int, end: Callable[[], int]) -> Iterator[None]:
    """Hide rows of a full cache from attention."""

    def compute(call: Callable[[], int], _given: Computation) -> int:
        for graph in (decoder._decode, decoder._prefill):
            graph.masks[0].values[:, begin : end()] = -np.inf
        return call()

    with computing_by(decoder, compute):
        yield


@pytest.mark.parametrize("keep_first", [0, 4])
def test_a_trimmed_cache_is_a_full_one_with_the_same_mask(model: Path, keep_first: int) -> None:
    # The trimmed cache is short, so that its rows move to the front again and again.
    hidden_to = keep_first
    with (
        Decoder(model, ctx=200, threads=1) as short,
        Decoder(model, ctx=CTX, threads=1) as full,
        hidden(full, keep_first, lambda: hidden_to),
    ):
        prefill_both(short, full, tokens(150))
        for i in range(8):
            short.kv.trim_to(50, keep_first=keep_first)
            assert short.kv.seq_len == 50 + keep_first
            hidden_to = short.kv.next_position - 50
            prefill_both(short, full, *(tokens(n, seed=i) for n in (1, 30, 1, 50, 1)))
            assert short.kv.next_position == full.kv.next_position == 150 + 83 * (i + 1)
            assert greedy(short, 3) == greedy(full, 3)
            for decoder in (short, full):
                decoder.kv.crop(decoder.kv.seq_len - 3)
        assert short.kv.next_position > 4 * short.ctx
        room = short.ctx - short.kv.seq_len
        with pytest.raises(um.CacheFull):
            short.prefill(tokens(room + 1))
        short.prefill(tokens(room))


def test_memory_may_be_given_back_between_calls(model: Path) -> None:
    options: dict[str, Any] = {"ctx": CTX, "threads": 1, "kv_dtype": "f32"}
    with (
        um.Layout.for_model(model, pages="4k", **options) as layout,
        Decoder(model, layout=layout, **options) as decoder,
        Decoder(model, **options) as trimmed,
    ):
        lanes = 2 * SHAPE.layers
        token_bytes = lanes * decoder.kv.row_bytes
        for other in (decoder, trimmed):
            other.prefill(tokens(1000))
        before = decoder.kv.resident_bytes
        assert decoder.kv.enforce_memory_limit(100 * token_bytes)
        assert decoder.kv.seq_len == 100
        assert before - decoder.kv.resident_bytes >= 900 * token_bytes - 2 * 4096 * lanes
        trimmed.kv.trim_to(100)
        same_bits = np.testing.assert_array_equal
        prefill_both(decoder, trimmed, *map(tokens, (1, 60, 1)), check=same_bits)
        decoder.reset()
        trimmed.reset()
        prefill_both(decoder, trimmed, tokens(300), check=same_bits)
