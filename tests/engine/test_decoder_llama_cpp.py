"""The decoder against llama.cpp: the same tokens, and the same logits to the bit.

Where both sides do not have the same kernels, or ROUNDED says so, logits differ by rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models import llama_cpp
from support.models.decoders import logits_of, tokens
from support.models.make import SMALL, small, write_model
from support.project.checkout import STORIES, needs_stories
from unimem.backends import ggml, ggml_orders
from unimem.engine import Decoder
from unimem.weights.loading import EngineLoad

# Activations are quantized before each product: where the sides round differently, a bit becomes a
# quantum. The blocks of a quantized model add little, so that this does not grow from layer to
# layer. Mistakes in the graph show in the f16 models, whose blocks add much.
QUANTIZED = 0.01
ROUNDED = {
    # llama.cpp scales queries by a root before attention, and the engine the products in it. For
    # heads of 32, the root is no power of two.
    **{"gemma3 q8_0": 0.01, "gemma3 q4_0": 0.01},
    # The engine leaves embeddings that are looked up as well in the file's order.
    "qwen2 q4_0 bias tied": 1e-5,
    "f32": 0.01,  # llama.cpp attends over a cache of f32 in f16
}
"""The deviations of logits on the same kernels, as shares of their standard deviation."""


def scaling(kind: str, **more: float) -> dict[str, Any]:
    rope = {f"rope.scaling.{name}": value for name, value in more.items()}
    return {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, **rope}


# The other models have an architecture, type or scaling of these.
FAST = {"qwen2 q8_0 bias tied", "qwen3 f16 wide heads", "llama bf16", "rope factors", "rope yarn"}
FAST |= {"qwen3moe f16", "gpt-oss f16"}

GPT_OSS = small(inner=128, head_dim=64)
OTHER_KV = ("f32", "bf16", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q8_0,q4_0")

# By default a llama of kind f16.
MODELS: dict[str, dict[str, Any]] = {
    "llama q8_0": {"kind": "q8_0", "gain": QUANTIZED},
    "qwen2 q8_0 bias tied": {"arch": "qwen2", "kind": "q8_0", "tied": True, "gain": QUANTIZED},
    "qwen3 q8_0": {"arch": "qwen3", "kind": "q8_0", "gain": QUANTIZED},
    "llama f16": {},
    "llama f32 bias": {"kind": "f32", "bias": True, "seed": 1},
    "qwen2 f16": {"arch": "qwen2", "seed": 1},
    "qwen3 f16": {"arch": "qwen3", "seed": 3},
    "qwen3 f16 wide heads": {"arch": "qwen3", "shape": small(head_dim=64), "seed": 1},
    "mistral f16": {"shape": small(head_dim=40)},
    "llama bf16": {"kind": "bf16", "gain": QUANTIZED},
    "rope factors": {"rope_factors": True, "seed": 5},
    "rope linear": {"seed": 4, "metadata": scaling("linear")},
    "rope none": {"metadata": scaling("none")},
    "gemma3 q8_0": {"arch": "gemma3", "shape": small(layers=7), "kind": "q8_0", "gain": 0.003},
    "qwen3moe f16": {"arch": "qwen3moe", "shape": small(inner=128)},
    "qwen3moe q8_0": {"arch": "qwen3moe", "kind": "q8_0", "gain": QUANTIZED},
    "gpt-oss f16": {"arch": "gpt-oss", "shape": GPT_OSS},
    "gpt-oss mxfp4": {"arch": "gpt-oss", "shape": GPT_OSS, "kind": "mxfp4", "gain": QUANTIZED},
    "rope yarn": {
        "arch": "qwen2",
        "seed": 4,
        "metadata": {"rope.freq_base": 1e6, **scaling("yarn", original_context_length=256)},
    },
}


# Types that both sides repack, which is llama.cpp's default.
KINDS = [
    name for kind, name in ggml.MATMUL_TYPES.items() if ggml_orders.find_order(kind, (256, 64))
]
OTHER_SEED = ("q4_K", "mxfp4")  # if the likeliest experts or tokens are in doubt
REPACKED: dict[str, dict[str, Any]] = {
    **{f"llama {kind}": {"kind": kind, "seed": 5 * (kind == "q2_K")} for kind in KINDS},
    "qwen2 q4_0 bias tied": {"arch": "qwen2", "tied": True},
    "qwen3 q4_0 wide heads": {"arch": "qwen3", "shape": small(head_dim=64)},
    "mistral q4_0": {"shape": small(head_dim=40)},
    "yarn q4_0": MODELS["rope yarn"] | {"seed": 7},
    "gemma3 q4_0": {"arch": "gemma3", "shape": small(layers=7), "gain": 0.003},
    "gpt-oss mxfp4": MODELS["gpt-oss mxfp4"] | {"seed": 1},
    **{
        f"qwen3moe {kind}": {"arch": "qwen3moe", "kind": kind, "seed": int(kind in OTHER_SEED)}
        for kind in KINDS
    },
}


REPACKED_FAST = {"qwen2 q4_0 bias tied", "qwen3moe q4_0"}


def prompt_of(n: int) -> list[int]:
    return [1, *tokens(n - 1, seed=7, first=259, vocab=SMALL.vocab)]


def assert_same(
    path: Path,
    n_prompt: int,
    n: int = 64,
    threads: int = 1,
    load: EngineLoad = "map",
    bound: float = 0.01,
    rounded: float = 0.0,
    **options: Any,
) -> None:
    prompt = prompt_of(n_prompt)
    expected, theirs = llama_cpp.greedy(
        path, prompt, n, repack=load == "repack", threads=threads, **options
    )
    second, first = np.partition(theirs, -2, axis=1)[:, -2:].T
    assert (first - second).min() > 0.02 * theirs.std(), "in doubt by rounding: take another seed"
    with Decoder(path, threads=threads, load=load, **options) as decoder:
        assert decoder.report().facts["load"] == load
        chosen, ours = logits_of(decoder, prompt, n)
    assert chosen == expected
    assert len(set(chosen)) > 1 or "tied" in path.name
    llama_cpp.assert_same_logits(ours, theirs, bound=bound, rounded=rounded)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in MODELS],
)
def test_tokens_and_logits(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name.replace(' ', '-')}.gguf"
    write_model(path, **{"kind": "f16"} | MODELS[name])
    assert_same(path, n_prompt=12, ctx=512, rounded=ROUNDED.get(name, 0.0))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in REPACKED_FAST else [pytest.mark.slow])
        for name in REPACKED
    ],
)
def test_repacked(name: str, tmp_path: Path) -> None:
    if not KINDS:
        pytest.skip("this build of ggml has no orders of its own on this CPU")
    path = tmp_path / f"{name.replace(' ', '-')}.gguf"
    options: dict[str, Any] = {"kind": "q4_0", "gain": QUANTIZED}
    write_model(path, **options | REPACKED[name])
    rounded = ROUNDED.get(name, 0.0)
    assert_same(path, n_prompt=140, n=32, ctx=512, load="repack", rounded=rounded)


@pytest.mark.parametrize("n_prompt", [12, 140])  # with tiles, and without them
def test_q4_k_m_made_by_llama_cpp(n_prompt: int, tmp_path: Path) -> None:
    source = write_model(tmp_path / "f16.gguf", kind="f16", gain=QUANTIZED)
    assert_same(llama_cpp.quantize(source, tmp_path / "q4_k_m.gguf"), n_prompt, n=32, ctx=512)


@pytest.mark.parametrize(
    ("kv_dtype", "rotate"),
    [
        ("f16", None),
        ("q8_0", None),
        *(pytest.param(each, None, marks=pytest.mark.slow) for each in OTHER_KV),
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in ("q8_0", "q4_0")),
    ],
)
def test_long_prompts_cross_batches_and_buckets(
    tmp_path: Path, kv_dtype: str, rotate: bool | None
) -> None:
    # Two batches, the last one partial; then attention reads the next bucket of rows.
    # Both sides rotate heads of 64 for a quantized cache by default.
    seed = 2 if kv_dtype == "iq4_nl" else 1  # if the likeliest token is in doubt
    path = write_model(tmp_path / "f16.gguf", kind="f16", shape=small(head_dim=64), seed=seed)
    threads = 2 if kv_dtype == "f16" else 1
    # On other kernels the last bit may differ, and with four bits a level is a tenth of a value.
    bound = 0.01 if kv_dtype.startswith(("f", "bf")) or kv_dtype == "q8_0" else 0.05
    options: dict[str, Any] = {"ctx": 512, "kv_dtype": kv_dtype, "rotate": rotate, "bound": bound}
    options["rounded"] = ROUNDED.get(kv_dtype, 0.0)
    assert_same(path, n_prompt=245, n=20, threads=threads, **options)


def test_a_slightly_wrong_angle_would_be_seen(tmp_path: Path) -> None:
    logits = []
    for freq_base in (10000.0, 12000.0):
        path = tmp_path / f"{freq_base}.gguf"
        write_model(path, kind="f16", metadata={"rope.freq_base": freq_base})
        with Decoder(path, ctx=512, threads=1) as decoder:
            logits.append(decoder.prefill(prompt_of(40)).copy())
    assert np.abs(logits[0] - logits[1]).max() > 0.05 * logits[0].std()


@needs_stories
def test_the_story_continues_as_with_llama_cpp() -> None:
    with Decoder(STORIES, threads=1) as decoder:
        text = "".join(decoder.generate("Once upon a time", 60))
    assert text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park. One day, "
        "she saw a big, red ball. She wanted to play with it, but it was too high."
    )
