"""The places of values: live values do not overlap, and the plan bounds the memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.models.decoders import logits_of, tokens
from support.models.make import TINY, Shape, write_model
from unimem.engine import Decoder, UnsupportedModel
from unimem.engine.graph import Graph, Headers
from unimem.planning.needs import PREFILL_BATCH, scratch_parts

ARCHS = ("llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "gpt-oss")


def check_lifetimes(graph: Graph) -> None:
    """Live values do not overlap, and others share memory."""
    values = graph.values
    for step in range(values.uses[-1].last + 1):
        together = sorted(
            (values.offsets[use.name], use.nbytes)
            for use in values.uses
            if use.first <= step <= use.last
        )
        for (offset, nbytes), (after, _) in pairwise([*together, (values.total_bytes, 0)]):
            assert offset + nbytes <= after
    assert values.total_bytes < sum(use.nbytes for use in values.uses) / 2


@pytest.mark.parametrize("arch", ARCHS)
def test_values_lie_where_they_are_planned_and_apart(arch: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", arch, TINY, "f32")
    with Decoder(path, ctx=200, threads=2) as decoder:
        check_lifetimes(decoder._decode)
        check_lifetimes(decoder._prefill)
        graph = decoder._prefill
        for n_tokens in (graph.batch, 1, 7, graph.batch):
            graph.resize(n_tokens)
            addresses = graph.addresses()
            for name, offset in graph.values.offsets.items():
                assert addresses[int(name)] == graph._arena + offset


@pytest.mark.parametrize(("arch", "rotate"), [*((each, False) for each in ARCHS), ("qwen2", True)])
def test_sharing_changes_no_bit(
    arch: str, rotate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(TINY, head_dim=64) if rotate else TINY
    path = write_model(tmp_path / "m.gguf", arch, shape, "f32")
    needed = um.plan(path, ctx=200, threads=1)

    def logits() -> NDArray[Any]:
        with (
            um.Layout(4096, needed.scratch_bytes * 40, needed.history_bytes) as layout,
            Decoder(path, ctx=200, threads=1, layout=layout, rotate=rotate) as decoder,
        ):
            return logits_of(decoder, tokens(150), 2)[1]

    def side_by_side(uses: list[um.BufferUse]) -> um.BufferPlan:
        return um.BufferPlan([replace(use, first=0, last=0) for use in uses])

    shared = logits()
    monkeypatch.setattr("unimem.engine.graph.BufferPlan", side_by_side)
    np.testing.assert_array_equal(shared, logits())


# ---- the plan ----------------------------------------------------------------------------

SHAPES = {
    "tiny": TINY,
    "deep": replace(TINY, layers=30),
    "narrow inside": replace(TINY, inner=32),
    "wide inside": replace(TINY, inner=1024),
    "wide heads": replace(TINY, head_dim=128),
    "few wide heads": replace(TINY, heads=2, kv_heads=2, head_dim=64, inner=32),
    "many heads": replace(TINY, heads=32, kv_heads=32, head_dim=4),
    "ordinary": Shape(hidden=256, layers=4, heads=8, kv_heads=2, inner=768, vocab=999, ctx=2000),
}


def check_scratch(decoder: Decoder) -> dict[str, int]:
    """The plan's parts cover the taken memory, and little more: small models are mostly headers."""
    n_rows, experts = decoder._history.n_rows, decoder._model.experts
    stream = decoder.weights.stream
    most_slots = None if stream is None else sum(kind.n_pieces for kind in stream._table.kinds)
    parts = scratch_parts(
        decoder.dims, decoder.ctx, decoder.threads, n_rows, experts, most_slots=most_slots
    )
    taken, planned = decoder.layout.scratch.used_bytes, sum(parts.values())
    assert taken <= planned <= decoder.layout.scratch.total_bytes
    assert planned <= 1.6 * taken + 64 * 1024
    return parts


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, "qwen2") for name in SHAPES),
        ("tiny", "llama"),
        ("tiny", "qwen3"),
        ("deep", "qwen3"),
        ("tiny", "gemma3"),
        ("tiny", "qwen3moe"),
        ("narrow inside", "gpt-oss"),
        *(
            pytest.param(name, arch, marks=pytest.mark.slow)
            for arch in ("gemma3", "qwen3moe", "gpt-oss")
            for name in SHAPES
        ),
    ],
)
def test_the_plan_bounds_what_is_taken(name: str, arch: str, tmp_path: Path) -> None:
    kind = "f16" if name in ("many heads", "ordinary") else "f32"
    rope_factors = arch == "llama"
    path = tmp_path / "m.gguf"
    biased = arch not in ("gemma3", "qwen3moe", "gpt-oss")
    write_model(path, arch, SHAPES[name], kind, bias=biased, rope_factors=rope_factors)
    for ctx, threads in ((1, 1), (2, 3), (77, 1), (PREFILL_BATCH, 3), (600, 1), (600, 3)):
        with Decoder(path, ctx=ctx, threads=threads) as decoder:
            parts = check_scratch(decoder)
            values = [graph.values for graph in (decoder._decode, decoder._prefill)]
            assert max(each.total_bytes for each in values) <= parts["values"]
            assert all(each.total_bytes <= 1.02 * each.lower_bound_bytes for each in values)
            n_layers = decoder.dims.num_layers
            headers = Headers.bytes_needed(len(decoder.weights.tensors), n_layers)
            assert headers + 2 * Graph.bytes_needed(decoder._model) <= parts["headers"]
            on_tape = um.plan(path, ctx=ctx).history_bytes if decoder.kv.tape else 0
            assert decoder.layout.history.used_bytes == on_tape
            if ctx == 600 and name in ("tiny", "ordinary"):
                assert sum(parts.values()) <= 1.25 * decoder.layout.scratch.used_bytes


@pytest.mark.parametrize(
    ("arch", "name"),
    [*(("qwen3moe", name) for name in ("tiny", "wide inside", "narrow inside")),
     ("gpt-oss", "tiny"), ("gpt-oss", "narrow inside")],
)  # fmt: skip
def test_the_plan_bounds_waves_of_experts(arch: str, name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", arch, SHAPES[name], "f32")
    for ctx in (1, 2, 600):
        with Decoder(path, ctx=ctx, threads=2, load="stream", weights_budget="1G") as decoder:
            parts = check_scratch(decoder)
            assert decoder._prefill.values.total_bytes <= parts["values"]
            n_waves = decoder._prefill._headers.n_waves
            nodes = [Graph.bytes_needed(decoder._model, n) for n in (0, n_waves)]
            assert nodes[0] < nodes[1] < parts["headers"] - nodes[0]


@pytest.mark.parametrize(
    ("kv_dtype", "window"),
    [
        ("f32", None),
        ("q8_0", None),
        ("f16", 5),
        ("bf16", 5),
        ("f16", 400),
        ("q8_0", 400),
        ("q4_1", None),
    ],
)
def test_the_plan_bounds_other_caches(kv_dtype: str, window: int | None, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shape=SHAPES["wide heads"], kind="f32")
    for ctx, threads in ((400, 1), (3000, 3)):
        with Decoder(path, ctx=ctx, threads=threads, kv_dtype=kv_dtype, window=window) as decoder:
            check_scratch(decoder)


# ---- models ------------------------------------------------------------------------------


def test_errors_name_supported_features(tmp_path: Path) -> None:
    def refuse(reason: str, **options: Any) -> None:
        path = write_model(tmp_path / "m.gguf", shape=TINY, kind="f32", **options)
        with pytest.raises(UnsupportedModel, match=reason):
            Decoder(path, ctx=8, threads=1)

    refuse("llama, qwen2, qwen3, gemma3, qwen3moe, gpt-oss", arch="gpt2")
    refuse("1 tensor that the engine does not know", arch="qwen3", rope_factors=True)
    for key, value, reason in (
        ("expert_count", 8, "mixtures of experts are not supported for llama: those of qwen3moe"),
        ("attention.causal", False, "causal"),
        ("rope.scaling.type", "longrope", "longrope.*none, linear and yarn"),
        ("attention.layer_norm_rms_epsilon", 0.0, "epsilon"),
        ("rope.dimension_count", 8, "rope.dimension_count"),
        ("attention.value_length", 8, "value_length"),
        ("attention.head_count_kv", 3, "num_kv_heads"),
        ("feed_forward_length", 64, "shape"),
        ("block_count", 3, "no tensor 'blk.2"),
        ("block_count", 1, "does not know.*blk.1"),
    ):
        refuse(reason, metadata={key: value})


@pytest.mark.parametrize(
    "kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "tq1_0", "tq2_0", "mxfp4"]
)
def test_quantized_models_compute_what_their_values_say(kind: str, tmp_path: Path) -> None:
    shape = Shape(hidden=256, layers=1, heads=4, kv_heads=2, inner=256, vocab=300, ctx=64)
    logits = []
    for dequantized in (False, True):
        path = tmp_path / f"{dequantized}.gguf"
        write_model(path, shape=shape, kind=kind, dequantized=dequantized)
        with Decoder(path, threads=1) as decoder:
            logits.append(decoder.prefill([1, 270, 280, 290, 265]).copy())
    # Activations are quantized to 8 bits on the way.
    assert np.abs(logits[0] - logits[1]).max() <= 0.08 * logits[1].std()
