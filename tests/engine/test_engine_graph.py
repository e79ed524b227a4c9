"""Where values lie: no two that live at once overlap, and the plan bounds what is taken."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.system.ggml", reason="the engine needs ggml: pip install '.[run]'", exc_type=ImportError
)

import unimem as um
from models.make import TINY, Shape, write_model
from unimem.engine import Decoder, UnsupportedModel
from unimem.engine.graph import Graph, Headers
from unimem.planning.needs import PREFILL_BATCH, scratch_parts
from unimem.system import ggml


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_values_that_live_at_once_are_apart(arch: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", arch, TINY, "f32")
    with Decoder(path, ctx=200, threads=2) as decoder:
        for graph in (decoder._decode, decoder._prefill):
            values = graph.values
            for step in range(values.uses[-1].last + 1):
                together = sorted(
                    (values.offsets[use.name], use.nbytes)
                    for use in values.uses
                    if use.first <= step <= use.last
                )
                for (offset, nbytes), (after, _) in pairwise([*together, (values.total_bytes, 0)]):
                    assert offset + nbytes <= after
            assert values.total_bytes < sum(use.nbytes for use in values.uses) / 3


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_addresses_are_the_planned_ones_for_every_number_of_tokens(
    arch: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", arch, TINY, "f32")
    with Decoder(path, ctx=200, threads=2) as decoder:
        graph = decoder._prefill
        for n_tokens in (graph.batch, 1, 7, graph.batch):
            graph.resize(n_tokens)
            addresses = graph.addresses()
            for name, offset in graph.values.offsets.items():
                assert addresses[int(name)] == graph._arena + offset


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_sharing_memory_changes_no_result(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", arch, TINY, "f32")
    prompt = [int(t) for t in np.random.default_rng(0).integers(0, TINY.vocab, 150)]

    def logits() -> list[NDArray[Any]]:
        needed = um.plan(path, ctx=200, threads=2)
        with (
            um.Layout(4096, needed.scratch_bytes * 40, needed.history_bytes) as layout,
            Decoder(path, ctx=200, threads=2, layout=layout) as decoder,
        ):
            first = decoder.prefill(prompt).copy()
            decoder.generate_next_token()
            return [first, decoder.logits.copy()]

    shared = logits()

    def side_by_side(uses: list[um.BufferUse]) -> um.BufferPlan:
        return um.BufferPlan([replace(use, first=0, last=0) for use in uses])

    monkeypatch.setattr("unimem.engine.graph.BufferPlan", side_by_side)
    for a, b in zip(shared, logits(), strict=True):
        np.testing.assert_array_equal(a, b)


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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_plan_bounds_what_is_taken(name: str, arch: str, tmp_path: Path) -> None:
    kind = "f16" if name in ("many heads", "ordinary") else "f32"
    path = write_model(
        tmp_path / "m.gguf", arch, SHAPES[name], kind, bias=True, rope_factors=arch == "llama"
    )
    for ctx in (1, 2, 77, PREFILL_BATCH, 600):
        for threads in (1, 3):
            with Decoder(path, ctx=ctx, threads=threads) as decoder:
                parts = scratch_parts(decoder.dims, ctx, threads, ctx)
                graphs = decoder._decode, decoder._prefill
                values = max(graph.values.total_bytes for graph in graphs)
                assert values <= parts["values"]
                for graph in graphs:
                    most = 1.02 * graph.values.lower_bound_bytes
                    assert graph.values.total_bytes <= most
                headers = Headers.bytes_needed(
                    len(decoder.weights.tensors), decoder.dims.num_layers
                )
                headers += 2 * Graph.bytes_needed(decoder.dims.num_layers)
                assert headers <= parts["headers"]
                taken, planned = decoder.layout.scratch.used_bytes, sum(parts.values())
                assert taken <= planned <= decoder.layout.scratch.total_bytes
                history = um.plan(path, ctx=ctx).history_bytes
                assert decoder.layout.history.used_bytes == history
                # Not much more than that either: small models have much of headers.
                assert planned <= 1.6 * taken + 64 * 1024
                if ctx == 600 and name in ("tiny", "ordinary"):
                    assert planned <= 1.25 * taken


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("window", [None, 5, 400])
def test_the_plan_bounds_what_other_caches_take(
    kv_dtype: str, window: int | None, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", shape=SHAPES["wide heads"], kind="f32")
    for ctx in (400, 3000):
        for threads in (1, 3):
            with Decoder(
                path, ctx=ctx, threads=threads, kv_dtype=kv_dtype, window=window
            ) as decoder:
                parts = scratch_parts(decoder.dims, ctx, threads, decoder.kv.n_rows)
                taken, planned = decoder.layout.scratch.used_bytes, sum(parts.values())
                assert taken <= planned <= decoder.layout.scratch.total_bytes
                assert planned <= 1.6 * taken + 64 * 1024


def test_ggml_s_own_sizes() -> None:
    for n in (16, 48, 200, 1000, 3000, 20000):
        overhead = ggml.graph_overhead_custom(n, False)
        assert overhead <= n * 68 + 4096
    assert ggml.tensor_overhead() == 368


def test_what_is_refused_names_what_is_supported(tmp_path: Path) -> None:
    def refuse(match: str, **options: Any) -> None:
        path = write_model(tmp_path / "m.gguf", shape=TINY, kind="f32", **options)
        with pytest.raises(UnsupportedModel, match=match):
            Decoder(path, ctx=8, threads=1)

    refuse("llama, qwen2, qwen3", arch="gpt2")
    refuse("experts", metadata={"expert_count": 8})
    refuse("causal", metadata={"attention.causal": False})
    refuse("longrope.*none, linear and yarn", metadata={"rope.scaling.type": "longrope"})
    refuse("epsilon", metadata={"attention.layer_norm_rms_epsilon": 0.0})
    refuse("rope.dimension_count", metadata={"rope.dimension_count": 8})
    refuse("value_length", metadata={"attention.value_length": 8})
    refuse("num_kv_heads", metadata={"attention.head_count_kv": 3})
    refuse("shape", metadata={"feed_forward_length": 64})
    refuse("no tensor 'blk.2", metadata={"block_count": 3})
    refuse("does not know.*blk.1", metadata={"block_count": 1})
    refuse("1 tensor that the engine does not know", arch="qwen3", rope_factors=True)


@pytest.mark.parametrize(
    "kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "tq1_0", "tq2_0", "mxfp4"]
)
def test_quantized_models_compute_what_their_values_say(kind: str, tmp_path: Path) -> None:
    shape = Shape(hidden=256, layers=2, heads=4, kv_heads=2, inner=512, vocab=300, ctx=64)
    logits = []
    for dequantized in (False, True):
        path = write_model(
            tmp_path / f"{dequantized}.gguf", shape=shape, kind=kind, dequantized=dequantized
        )
        with Decoder(path, threads=2) as decoder:
            logits.append(decoder.prefill([1, 270, 280, 290, 265]).copy())
    # Activations are quantized to 8 bits on the way.
    assert np.abs(logits[0] - logits[1]).max() <= 0.08 * logits[1].std()
