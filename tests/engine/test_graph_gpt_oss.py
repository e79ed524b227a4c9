"""The graph of gpt-oss against its formulas, in NumPy and float64.

Test models are compared with llama.cpp beside those of other architectures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest

import unimem as um
from support.models.decoders import sizes, tokens
from support.models.make import OAI_SCALING, Shape, write_model
from unimem.engine import Decoder, UnsupportedModel

Array: TypeAlias = Any  # float64
WINDOW, N_USED, BASE = 48, 3, 150000.0
SHAPE = Shape(hidden=64, layers=4, heads=4, kv_heads=2, inner=64, vocab=320, ctx=600, head_dim=32)


def tensors(path: Path) -> dict[str, Array]:
    return {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(path).tensors}


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x: Array) -> Array:
    """Rotate heads, [tokens, heads, size], by their positions, as YaRN (arXiv 2309.00071) does."""
    size, factor, original = (
        x.shape[-1],
        OAI_SCALING["factor"],
        OAI_SCALING["original_context_length"],
    )
    pairs = np.arange(size // 2)

    def pair_of(turns: float) -> Array:
        """Return which pair turns that many times in the original context."""
        return size * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(BASE))

    low, high = max(np.floor(pair_of(32)), 0), min(np.ceil(pair_of(1)), size - 1)
    slow = np.clip((pairs - low) / (high - low), 0, 1)
    frequency = BASE ** (-2 * pairs / size) * (slow / factor + 1 - slow)
    angle = np.arange(len(x))[:, None, None] * frequency
    a, b = np.split(x, 2, -1)
    cos, sin = np.cos(angle), np.sin(angle)
    return (1 + 0.1 * np.log(factor)) * np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(w: dict[str, Array], blk: str, x: Array, window: int | None) -> Array:
    def heads(name: str) -> Array:
        flat = x @ w[f"{blk}.{name}.weight"].T + w[f"{blk}.{name}.bias"]
        return flat.reshape(len(x), -1, SHAPE.head)

    q, k, v = rotated(heads("attn_q")), rotated(heads("attn_k")), heads("attn_v")
    k, v = (np.repeat(each, SHAPE.heads // SHAPE.kv_heads, 1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(SHAPE.head)
    ago = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
    scores[:, (ago < 0) | (ago >= (window or len(x)))] = -np.inf
    sinks = np.broadcast_to(w[f"{blk}.attn_sinks.weight"][:, None, None], (*scores.shape[:2], 1))
    shares = softmax(np.concatenate([scores, sinks], -1))[..., :-1]
    found = np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1)
    return found @ w[f"{blk}.attn_output.weight"].T + w[f"{blk}.attn_output.bias"]


def mixture(w: dict[str, Array], blk: str, x: Array) -> Array:
    def linear(name: str, expert: int, x: Array) -> Array:
        tensor = f"{blk}.ffn_{name}_exps"
        return w[f"{tensor}.weight"][expert] @ x + w[f"{tensor}.bias"][expert]

    out = np.zeros_like(x)
    for i, scores in enumerate(
        x @ w[f"{blk}.ffn_gate_inp.weight"].T + w[f"{blk}.ffn_gate_inp.bias"]
    ):
        chosen = np.argsort(-scores)[:N_USED]
        for expert, share in zip(chosen, softmax(scores[chosen]), strict=True):
            gate = np.minimum(linear("gate", expert, x[i]), 7)
            up = np.clip(linear("up", expert, x[i]), -7, 7)
            out[i] += share * linear("down", expert, gate / (1 + np.exp(-1.702 * gate)) * (up + 1))
    return out


def reference(path: Path, ids: list[int]) -> Array:
    """Compute the logits, [tokens, vocab], of a text."""
    w = tensors(path)
    x = w["token_embd.weight"][ids]
    for layer in range(SHAPE.layers):
        blk = f"blk.{layer}"
        window = None if layer % 2 else WINDOW
        x = x + attention(w, blk, norm(x, w[f"{blk}.attn_norm.weight"]), window)
        x = x + mixture(w, blk, norm(x, w[f"{blk}.post_attention_norm.weight"]))
    return norm(x, w["output_norm.weight"]) @ w["output.weight"].T


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("model") / "m.gguf", "gpt-oss", SHAPE, "f32")
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(("gate_exps.bias", "up_exps.bias")):
            tensor.data[:] *= 20  # some are beyond the limit of 7
    return path


@pytest.mark.parametrize("load", ["map", "copy", "stream"])
def test_logits_are_those_of_the_formulas(load: Any, model: Path) -> None:
    text = tokens(90, first=3)
    with Decoder(model, ctx=128, threads=1, load=load, kv_dtype="f32") as decoder:
        first = decoder.prefill(text[:80]).copy()
        ours = np.array([first, *(decoder.prefill([token]).copy() for token in text[80:])])
    theirs = reference(model, text)[79:]
    assert np.abs(ours - theirs).max() <= 1e-3 * theirs.std()


def test_a_prompt_has_the_logits_of_single_tokens(model: Path) -> None:
    text = tokens(70, first=3)
    with Decoder(model, ctx=128, threads=1) as decoder:
        batch = decoder.prefill(text).copy()
        decoder.reset()
        for token in text:
            each = decoder.prefill([token])
        assert np.abs(batch - each).max() <= 0.01 * batch.std()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention.sliding_window": 0}, "sliding_window' must be an integer above 0"),
        ({"expert_count": 7}, r"ffn_gate_inp.weight' has shape \[64, 8\], expected \[64, 7\]"),
        (
            {"attention.head_count": 2, "attention.head_count_kv": 1},
            r"sinks.weight' has shape \[4\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "gpt-oss", SHAPE, "f32", metadata=change)
    with pytest.raises(UnsupportedModel, match=said):
        Decoder(path, ctx=8, threads=1)


def test_the_plan_is_that_of_a_mixture_whose_layers_slide(model: Path) -> None:
    with Decoder(model, ctx=200, threads=1) as decoder:
        windows: Any = decoder.kv.window
        assert windows == (WINDOW, None) * 2
        assert sizes(decoder.report()) == sizes(um.plan(model, ctx=200, threads=1))
