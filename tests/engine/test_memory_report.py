"""The report of a decoder: every mapping is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models.decoders import sizes, small_models_gain
from support.models.make import TINY, write_model
from unimem.accounting import published
from unimem.engine import Decoder
from unimem.planning.needs import token_bytes

__all__ = ["small_models_gain"]  # a fixture

PROMPT = [1, 270, 280, 290]
CTX = 300


@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_a_report_accounts_for_every_mapping(kind: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / f"{kind}.gguf", shape=TINY, kind=kind)
    with Decoder(path, ctx=CTX, threads=1) as decoder:
        check_report(decoder)


def check_report(decoder: Decoder) -> None:
    decoder.prefill(PROMPT)
    report, layout, weights = decoder.report(), decoder.layout, decoder.weights
    scratch, history = layout.scratch.block, layout.history.block
    beside = {"other": weights._parts[0].file.header.copied_bytes, "diagnostics": published.NBYTES}
    in_blocks = report.total_bytes - sum(beside.values())
    repacked = decoder._memory.repacked
    mapped = [*decoder._memory.blocks, scratch, history]
    assert in_blocks == sum(block.committed_bytes for block in mapped)
    vectors = {"logits": 4 * TINY.vocab, "tokens": token_bytes(CTX)}
    kinds = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items()}
    if repacked is not None:
        kinds |= {f"weights:{kind} repacked": n for kind, n in repacked.types.items()}
    in_weights = sum(block.committed_bytes for block in decoder._memory.blocks)
    assert sizes(report) == {
        **kinds,
        "weights:padding": in_weights - sum(kinds.values()),
        "kv": history.nbytes,
        "scratch": scratch.nbytes - sum(vectors.values()),
        **vectors,
        **beside,
    }
    if repacked is None:
        assert all(row.resident_bytes == row.nbytes for row in report.rows)
    rows = {row.category: row for row in report.rows}
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
    assert facts["tinyblas"]
    assert "8.0 KiB from malloc" in facts["ggml_own"]
    assert "the stacks of 0 threads;" in facts["ggml_own"]  # beside the calling thread
