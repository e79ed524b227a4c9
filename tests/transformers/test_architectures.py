"""Architectures of transformers are served as without a cache, or refused by a sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

from support.models import architecture_table
from support.project.checkout import ROOT

RECORD: dict[str, Any] = json.loads((ROOT / "bench/results/architectures.json").read_text())
SAMPLE = "gpt_oss gemma2 gemma3n_text deepseek_v3 hy_v4 qwen3_next falcon_h1 lfm2 mpt t5 rwkv"


@pytest.mark.parametrize("name", SAMPLE.split())
def test_a_cell_is_what_the_record_says(name: str) -> None:
    """The whole table is a command: tools/architectures.py."""
    attention = "eager" if name == "t5" else "unimem"
    found = architecture_table.cells(name, [attention])
    recorded = RECORD["architectures"][name]
    assert {key: cell.result for key, cell in found.items()} == {
        key: recorded[key][0] for key in found
    }


def test_the_record_has_what_is_promised() -> None:
    found = RECORD["architectures"]
    assert list(found) == architecture_table.NAMES
    results = {name: [result for result, _, _ in cells.values()] for name, cells in found.items()}
    assert {one for cells in results.values() for one in cells} == {"equal", "refused"}
    assert len(results) >= 60
    assert sum("equal" in cells for cells in results.values()) >= 90
    assert sum(set(cells) == {"equal"} for cells in results.values()) >= 45
