"""The decoder against llama.cpp: the same tokens, and logits that differ by rounding only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip("cyllama", reason="cyllama (extra test) is the peer: pip install '.[test]'")
pytest.importorskip(
    "unimem.system.ggml", reason="the engine needs ggml: pip install '.[run]'", exc_type=ImportError
)

import llama_cpp
from models.make import SMALL, small, write_model
from project import STORIES
from unimem.engine import Decoder

N = 64

# Activations are quantized before each product, and both sides sum in another order where they were
# built for other instructions: a difference of one bit becomes one of a quantum. What the blocks of
# a quantized model add is kept small, so that this does not grow from layer to layer. Mistakes in
# the graph show in the f16 models, whose blocks add much.
QUANTIZED = 0.01

MODELS: dict[str, dict[str, Any]] = {
    "llama q8_0": {"arch": "llama", "kind": "q8_0", "gain": QUANTIZED},
    "qwen2 q8_0 bias tied": {"arch": "qwen2", "kind": "q8_0", "tied": True, "gain": QUANTIZED},
    "qwen3 q8_0": {"arch": "qwen3", "kind": "q8_0", "gain": QUANTIZED},
    "llama f16": {"arch": "llama", "kind": "f16"},
    "llama f32 bias": {"arch": "llama", "kind": "f32", "bias": True, "seed": 1},
    "qwen2 f16": {"arch": "qwen2", "kind": "f16", "seed": 1},
    "qwen3 f16": {"arch": "qwen3", "kind": "f16", "seed": 3},
    "qwen3 f16 wide heads": {
        "arch": "qwen3",
        "kind": "f16",
        "shape": small(head_dim=64),
        "seed": 1,
    },
    "mistral f16": {"arch": "llama", "kind": "f16", "shape": small(head_dim=40)},
    "llama bf16": {"arch": "llama", "kind": "bf16", "gain": QUANTIZED},
    "rope factors": {"arch": "llama", "kind": "f16", "rope_factors": True, "seed": 5},
    "rope linear": {
        "arch": "llama",
        "kind": "f16",
        "seed": 4,
        "metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    },
    "rope none": {
        "arch": "llama",
        "kind": "f16",
        "metadata": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    },
    "rope yarn": {
        "arch": "qwen2",
        "kind": "f16",
        "seed": 4,
        "metadata": {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 256,
            "rope.freq_base": 1e6,
        },
    },
}


def prompt_of(n: int, vocab: int) -> list[int]:
    return [1, *(int(t) for t in np.random.default_rng(7).integers(259, vocab, n - 1))]


def generate(
    path: Path, prompt: list[int], n: int, threads: int = 1, **options: Any
) -> tuple[list[int], NDArray[Any]]:
    rows, tokens = [], []
    with Decoder(path, threads=threads, **options) as decoder:
        decoder.prefill(prompt)
        for _ in range(n):
            rows.append(decoder.logits.copy())
            tokens.append(decoder.generate_next_token())
    return tokens, np.array(rows)


def assert_same(path: Path, n_prompt: int, n: int = N, threads: int = 1, **options: Any) -> None:
    prompt = prompt_of(n_prompt, SMALL.vocab)
    expected, theirs = llama_cpp.greedy(path, prompt, n, **options)
    second, first = np.partition(theirs, -2, axis=1)[:, -2:].T
    assert (first - second).min() > 0.02 * theirs.std(), "in doubt by rounding: take another seed"
    tokens, ours = generate(path, prompt, n, threads, **options)
    assert tokens == expected
    assert len(set(tokens)) > 1 or "tied" in path.name
    assert np.abs(ours - theirs).max() <= 0.01 * theirs.std()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / f"{name.replace(' ', '-')}.gguf", **MODELS[name])
    assert_same(path, n_prompt=12, ctx=512)


def test_q4_k_m_made_by_llama_cpp(tmp_path: Path) -> None:
    source = write_model(tmp_path / "f16.gguf", kind="f16", gain=QUANTIZED)
    path = llama_cpp.quantize(source, tmp_path / "q4_k_m.gguf")
    assert_same(path, n_prompt=12, ctx=512)


@pytest.mark.parametrize("kv_dtype", ["f16", "f32", "bf16", "q8_0"])
def test_long_prompts_cross_batches_and_buckets(tmp_path: Path, kv_dtype: str) -> None:
    # Four batches, the last one partial; the cache then grows from one bucket of rows to the next.
    # What a quantized cache gets, llama.cpp would rotate in heads of 64: that would be seen.
    path = write_model(tmp_path / "f16.gguf", kind="f16", shape=small(head_dim=64), seed=1)
    assert_same(path, n_prompt=490, n=40, threads=2, ctx=1024, kv_dtype=kv_dtype)


def test_a_slightly_wrong_angle_would_be_seen(tmp_path: Path) -> None:
    prompt = prompt_of(40, SMALL.vocab)
    right = write_model(tmp_path / "right.gguf", kind="f16")
    wrong = write_model(tmp_path / "wrong.gguf", kind="f16", metadata={"rope.freq_base": 12000.0})
    (_, a), (_, b) = (generate(path, prompt, 1, ctx=512) for path in (right, wrong))
    assert np.abs(a - b).max() > 0.05 * a.std()


def test_the_story_continues_as_with_llama_cpp() -> None:
    if not STORIES.exists():
        pytest.skip(f"{STORIES.name} is not beside the repository")
    with Decoder(STORIES, threads=1) as decoder:
        text = "".join(decoder.generate("Once upon a time", 60))
    assert text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park. One day, "
        "she saw a big, red ball. She wanted to play with it, but it was too high."
    )
