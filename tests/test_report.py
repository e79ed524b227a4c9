"""Reports: rows that add up, as a table and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

import unimem as um
from unimem.report import Report, Row


def mapped(category: str) -> int:
    return sum(row.nbytes for row in um.report().rows if row.category == category)


@pytest.mark.parametrize("category", ["scratch", "history", "staging"])
def test_the_process_s_report_is_the_ledger(category: str) -> None:
    before = mapped(category)
    with um.Block(1 << 20, pages="4k", category=category) as block:
        assert mapped(category) == before + block.nbytes
        row = next(row for row in um.report().rows if row.category == category)
        assert row.high_water_bytes is not None
        assert row.high_water_bytes >= row.nbytes
    assert mapped(category) == before


def test_memory_of_a_gpu_has_rows_and_a_total_of_its_own(cuda: Any) -> None:
    before = um.report()
    with cuda.Block(3 << 20, category="history"), um.Block(1 << 20, category="history"):
        report = um.report()
        rows = [row for row in report.rows if row.device == "cuda:0" and row.category == "history"]
        assert [row.nbytes for row in rows] == [3 << 20]
        assert report.device_bytes["cuda:0"] == before.device_bytes.get("cuda:0", 0) + (3 << 20)
        assert report.total_bytes == before.total_bytes + (1 << 20)
        lines = str(report).splitlines()
        assert any(line.startswith("history on cuda:0 ") for line in lines)
        assert any(line.startswith("total on cuda:0 ") for line in lines)
        assert json.loads(report.to_json())["device_bytes"] == report.device_bytes
    row = next(row for row in um.report().rows if row.device and row.category == "history")
    assert row.nbytes == 0
    assert row.high_water_bytes is not None
    assert row.high_water_bytes >= 3 << 20


def test_a_table_and_json() -> None:
    with um.Block(1 << 20, pages="4k", warm=True) as block:
        report = Report(
            (
                Row("kv", 2048, block.granted, 10, 1024, 20),
                Row("weights:q8_0", 5_000_000),
            ),
            {"cpu_features": ["avx2", "fma"], "threads": 2},
        )
    assert report.total_bytes == 5_002_048
    assert str(report).splitlines() == [
        "category         size  pages  active  resident  high water",
        "kv            2.0 KiB     4k    10 B   1.0 KiB        20 B",
        "weights:q8_0  4.8 MiB      -       -         -           -",
        "total         4.8 MiB",
        "cpu_features: avx2, fma",
        "threads: 2",
    ]
    document = json.loads(report.to_json())
    assert document == report.to_dict()
    assert document["total_bytes"] == 5_002_048
    assert document["rows"][0]["granted"]["pages"] == "4k"
    assert sum(document["rows"][0]["granted"]["nodes"].values()) == 1 << 20
    assert document["rows"][1]["granted"] is None
    assert document["facts"] == {"cpu_features": ["avx2", "fma"], "threads": 2}
