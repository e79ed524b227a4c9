"""Models whose layers differ, and mixtures of experts: over long texts, against llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.models import llama_cpp
from support.models.decoders import logits_of, sizes, tokens
from support.models.make import Shape, write_model
from unimem.engine import Decoder, UnsupportedModel
from unimem.engine.model import Model

CTX, WINDOW = 2600, 48
SHAPE = Shape(
    hidden=128, layers=7, heads=4, kv_heads=2, inner=256, vocab=1024, ctx=4096, head_dim=64
)
SHAPES = {
    "gemma3": SHAPE,
    "qwen3moe": replace(SHAPE, layers=3, inner=64),
    "gpt-oss": replace(SHAPE, layers=4, inner=64),
}


def write(path: Path, arch: str, kind: str = "f32", **options: Any) -> Path:
    return write_model(path, arch, SHAPES[arch], kind, **options)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "m.gguf", "gemma3")


# ---- llama.cpp ---------------------------------------------------------------------------


class Talk:
    """A text of n tokens that is cropped, trimmed, saved, and gone on with in another process.

    Three of ten tokens are a prompt, and the others follow one by one.
    """

    def __init__(self, n: int) -> None:
        ids = iter(tokens(2 * n, seed=7, first=259, vocab=SHAPE.vocab))

        def take(share: float) -> list[int]:
            return [next(ids) for _ in range(int(share * n))]

        self.prompt, self.first, self.second = take(0.3), take(0.65), take(0.05)
        self.n_dropped, self.kept, self.n_trimmed = n // 50, n // 7, n // 5
        self.after_trim, self.resumed = take(0.05), take(0.05)

    def steps(self) -> list[list[Any]]:
        """Return the steps for llama.cpp."""
        n = len(self.prompt) + len(self.first)
        return [
            ["batch", self.prompt],
            ["each", self.first],
            ["remove", n - self.n_dropped, n],
            ["each", self.second],
            ["remove", self.kept, self.kept + self.n_trimmed],
            ["each", self.after_trim + self.resumed],
        ]

    def logits(self, path: Path, saved: Path, **options: Any) -> Iterator[NDArray[Any]]:
        """Yield the logits of a decoder, and of the one that goes on."""
        with Decoder(path, threads=1, **options) as decoder:
            kv = decoder.kv
            yield decoder.prefill(self.prompt).copy()
            for token in self.first:
                yield decoder.prefill([token]).copy()
            kv.crop(kv.seq_len - self.n_dropped)
            for token in self.second:
                yield decoder.prefill([token]).copy()
            kept = kv.seq_len - self.kept - self.n_trimmed
            assert kv.trim_to(kept, keep_first=self.kept)
            for token in self.after_trim:
                yield decoder.prefill([token]).copy()
            decoder.save_session(saved)
            last, n = decoder.logits.copy(), kv.seq_len
        with Decoder(path, threads=1, **options) as decoder:
            np.testing.assert_array_equal(decoder.resume(saved), last)
            assert decoder.kv.seq_len == n
            for token in self.resumed:
                yield decoder.prefill([token]).copy()


@pytest.mark.parametrize(
    ("arch", "kv_dtype", "n"),
    [
        ("gemma3", "f16", 200),
        ("qwen3moe", "q8_0", 200),
        ("gpt-oss", "q8_0", 200),
        pytest.param("gemma3", "q8_0,q4_0", 200, marks=pytest.mark.slow),
        *(
            pytest.param(arch, kv_dtype, 2000, marks=pytest.mark.slow)
            for arch in SHAPES
            for kv_dtype in ("f16", "q8_0", "q4_0")
        ),
    ],
)
def test_a_long_talk_is_that_of_llama_cpp(arch: str, kv_dtype: str, n: int, tmp_path: Path) -> None:
    talk = Talk(n)
    # A ring has 128 rows beside its window, which a crop can bring back.
    path = write(tmp_path / "m.gguf", arch)
    options: dict[str, Any] = {"ctx": n + 100, "kv_dtype": kv_dtype}
    theirs = llama_cpp.follow(path, talk.steps(), **options)
    ours = np.array(list(talk.logits(path, tmp_path / "session", **options)))
    # The last bit may differ, and with four bits a level is a tenth of a value.
    bound = 0.08 if kv_dtype.endswith("q4_0") else 0.01
    assert ours.shape == theirs.shape
    far = np.abs(ours - theirs).max(axis=1) > bound * theirs.std()
    # Where two experts are as good to a rounding, each side may choose another one for this token.
    assert far.mean() <= (0 if arch == "gemma3" else 0.02), np.nonzero(far)
    # Without a ring, rows have the same order until tokens are trimmed.
    if arch == "qwen3moe" and llama_cpp.has_our_kernels():
        same = slice(1 + len(talk.first) + len(talk.second))
        np.testing.assert_array_equal(ours[same], theirs[same])


GEMMAS: dict[str, dict[str, Any]] = {
    "layers that see all have other angles": {
        "metadata": {
            **{"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 20000.0},
            **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        }
    },
    # Known by the number of its layers.
    "27b": {"shape": replace(SHAPE, layers=62, heads=2, kv_heads=1, head_dim=32, inner=64)},
}


@pytest.mark.parametrize("name", GEMMAS)
def test_other_gemmas(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shape": SHAPE, "kind": "f16"} | GEMMAS[name]
    path = write_model(tmp_path / "m.gguf", "gemma3", **options)
    prompt = tokens(100, first=259, vocab=SHAPE.vocab)
    theirs = llama_cpp.follow(path, [["batch", prompt[:80]], ["each", prompt[80:]]], ctx=128)
    with Decoder(path, ctx=128, threads=1) as decoder:
        parts = [prompt[:80], *([token] for token in prompt[80:])]
        ours = np.array([decoder.prefill(part).copy() for part in parts])
    assert np.abs(ours - theirs).max() <= 0.01 * theirs.std()


SLIGHTLY_WRONG: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {"metadata": {"attention.sliding_window": WINDOW - 1}}),
    ("gemma3", {"metadata": {"attention.sliding_window_pattern": 7}}),
    ("gemma3", {"metadata": {"rope.freq_base_swa": 12000.0}}),
    ("gemma3", {"metadata": {"rope.freq_base": 0.5e6}}),
    ("qwen3moe", {"metadata": {"expert_used_count": 2}}),
    ("gpt-oss", {"metadata": {"attention.sliding_window": WINDOW - 1}}),
    ("gpt-oss", {"metadata": {"attention.sliding_window_pattern": 1}}),
    ("gpt-oss", {"metadata": {"rope.scaling.factor": 24.0}}),
    ("gpt-oss", {"metadata": {"rope.freq_base_swa": 10000.0}}),
]


@pytest.mark.parametrize(("arch", "change"), SLIGHTLY_WRONG, ids=str)
def test_slightly_wrong_metadata_change_logits(
    arch: str, change: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    for i, options in enumerate(({}, change)):
        path = write(tmp_path / f"{i}.gguf", arch, **options)
        with Decoder(path, ctx=256, threads=1) as decoder:
            found.append(logits_of(decoder, tokens(140, first=259, vocab=SHAPE.vocab), 1)[1])
    assert np.abs(found[0] - found[1]).max() > 0.03 * found[0].std()


# ---- layers that slide -------------------------------------------------------------------


def test_layers_keep_what_they_see(gemma3: Path) -> None:
    with Decoder(gemma3, ctx=CTX, threads=1) as decoder:
        windows: Any = decoder.kv.window
        assert windows == (WINDOW,) * 5 + (None, WINDOW)
        rings = um.KVCache.storage_bytes(
            layers=[um.LayerKV(2, 64, window=WINDOW)] * 6, max_seq_len=CTX, spare_rows=128
        )
        whole = um.KVCache.storage_bytes(1, 2, 64, CTX)
        assert decoder.kv.capacity_bytes == rings + -(-whole // 4096) * 4096
        assert decoder.layout.history.used_bytes == 0
    # A window as long as the context has no ring.
    with Decoder(gemma3, ctx=WINDOW, threads=1) as decoder:
        assert decoder.kv.window is None
        assert decoder.kv.tape is decoder.layout.history


@pytest.mark.parametrize("window", [20, WINDOW, 100])
def test_a_window_for_all_layers(gemma3: Path, window: int) -> None:
    """Sliding layers see the smaller window."""
    with (
        Decoder(gemma3, ctx=500, threads=1, window=window) as ring,
        Decoder(gemma3, ctx=500, threads=1) as full,
    ):
        full._forward.windows = (window, min(window, WINDOW))
        for n in (30, 1, 1, 130, 1, 200, 1, 1):
            part = tokens(n, seed=n, first=259, vocab=SHAPE.vocab)
            a, b = ring.prefill(part), full.prefill(part)
            assert np.abs(a - b).max() <= 0.01 * b.std()
        assert ring.kv.next_position == full.kv.seq_len
        # The longer ring says how many tokens there are.
        assert ring.kv.seq_len == window


def test_k_and_v_of_two_types(gemma3: Path) -> None:
    options: dict[str, Any] = {"ctx": 300, "threads": 1, "kv_dtype": "q8_0,q4_0"}
    prompt = tokens(250, first=259, vocab=SHAPE.vocab)
    with (
        Decoder(gemma3, **options) as decoder,
        Decoder(gemma3, **options | {"kv_dtype": "f32"}) as exact,
    ):
        kv: Any = decoder.kv
        assert (kv.dtype, kv.v_dtype) == (("q8_0",) * 7, ("q4_0",) * 7)
        assert sizes(decoder.report()) == sizes(um.plan(gemma3, **options))
        a, b = decoder.prefill(prompt), exact.prefill(prompt)
        assert 0 < np.abs(a - b).max() <= 0.4 * b.std()


def test_going_back_too_far_is_refused_and_changes_nothing(gemma3: Path) -> None:
    prompt = tokens(400, first=259, vocab=SHAPE.vocab)
    with Decoder(gemma3, ctx=500, threads=1) as decoder:
        decoder.prefill(prompt)
        with pytest.raises(ValueError, match=r"overwritten: expected n of at least \d+, got 100"):
            decoder.kv.crop(100)
        assert decoder.kv.seq_len == 400
        decoder.kv.crop(390)
        again = decoder.prefill(prompt[390:]).copy()
        decoder.reset()
        assert np.abs(decoder.prefill(prompt) - again).max() <= 0.01 * again.std()


def test_a_full_context_says_so(gemma3: Path) -> None:
    with Decoder(gemma3, ctx=200, threads=1) as decoder:
        decoder.prefill(tokens(200, vocab=SHAPE.vocab))
        with pytest.raises(um.CacheFull, match="200 of 200 are used"):
            decoder.generate_next_token()
        assert decoder.kv.seq_len == 200
        # Reusing the rows of trimmed tokens moves the others.
        decoder.kv.trim_to(100)
        assert len({decoder.generate_next_token() for _ in range(50)}) > 1
        assert (decoder.kv.seq_len, decoder.kv.next_position) == (150, 250)


def test_a_session_of_another_kind_is_refused(gemma3: Path, tmp_path: Path) -> None:
    saved = {}
    for ctx in (WINDOW, 200):
        saved[ctx] = tmp_path / f"{ctx}"
        with Decoder(gemma3, ctx=ctx, threads=1) as decoder:
            decoder.prefill([1, 2, 3])
            decoder.save_session(saved[ctx])
    for ctx, other, said in ((200, WINDOW, "are alike"), (WINDOW, 200, "differ, and")):
        with Decoder(gemma3, ctx=ctx, threads=1) as decoder:
            decoder.prefill([5])
            with pytest.raises(um.SnapshotError, match=said):
                decoder.resume(saved[other])
            assert decoder.kv.seq_len == 1
    with (
        Decoder(gemma3, ctx=200, threads=1, kv_dtype="f32") as decoder,
        pytest.raises(um.SnapshotError, match="with layers="),
    ):
        decoder.resume(saved[200])


# ---- what is refused ---------------------------------------------------------------------


def test_unsupported_metadata_are_named(tmp_path: Path) -> None:
    wrong = [
        ("gemma3", {"final_logit_softcapping": 30.0}, "softcapping"),
        ("gemma3", {"attention.sliding_window": 0}, "sliding_window' must be an integer above 0"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "pattern' must be an integer above 0"),
        ("gemma3", {"rope.freq_base_swa": 0.5}, "rope.freq_base_swa' is 0.5"),
        ("qwen3moe", {"expert_used_count": 9}, "9, more than"),
        ("qwen3moe", {"expert_count": 7}, r"ffn_gate_inp.*\[128, 8\], expected \[128, 7\]"),
        ("qwen3moe", {"expert_feed_forward_length": 32}, r"shape \[128, 64, 8\], expected \[128"),
    ]
    for arch, metadata, said in wrong:
        path = write(tmp_path / "m.gguf", arch, metadata=metadata)
        with pytest.raises(UnsupportedModel, match=said):
            Decoder(path, ctx=8, threads=1)


def test_the_largest_gemma_scales_its_heads_otherwise(gemma3: Path) -> None:
    with um.open_weights(gemma3) as weights:
        model = Model.from_weights(weights)
    assert model.attention_scale == 64**-0.5
    dims = replace(model.dims, num_layers=62, hidden_size=5376, num_attention_heads=32)
    assert replace(model, dims=dims).attention_scale == np.float32(168) ** np.float32(-0.5)
