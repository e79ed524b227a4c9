"""A report as text and as JSON that follows its schema."""

from __future__ import annotations

import json

import unimem as um
from support.project.documents import check_json
from unimem.accounting.report import Report, Row
from unimem.accounting.report_text import report_lines
from unimem.base.text import Surface


def test_a_table_and_json() -> None:
    with um.Block(1 << 20, pages="4k", warm=True) as block:
        report = Report(
            (Row("kv", 2048, block.granted, 10, 1024, 20), Row("weights:q8_0", 5_000_000)),
            {"cpu_features": ["avx2", "fma"], "threads": 2},
        )
    assert report.total_bytes == 5_002_048
    assert str(report).splitlines() == [
        "memory           size   in RAM  active  pages",
        f"kv            2.0 KiB  1.0 KiB    10 B     4k  {'#' * 33}",
        "weights:q8_0  4.8 MiB        -       -      -",
        "total         4.8 MiB  1.0 KiB",
        "",
        "in RAM    1.0 MiB (Pss), 1.0 MiB with all that is shared (Rss)",
        "of Rss    0 B in huge pages (0%), 0 B locked, 1.0 MiB on node 0",
        "",
        "cpu_features  avx2, fma",
        "threads       2",
    ]
    wide = list(report_lines(Surface(120), report.rows, report.facts))
    assert wide[0].split() == ["memory", "size", "in", "RAM", "active", "high", "water", "pages"]
    assert wide[1].split()[:8] == ["kv", "2.0", "KiB", "1.0", "KiB", "10", "B", "20"]
    document = check_json(report)
    assert document["schema"] == "unimem.report/1"
    assert document["total_bytes"] == 5_002_048
    assert document["rows"][0]["granted"]["pages"] == "4k"
    assert sum(document["rows"][0]["granted"]["nodes"].values()) == 1 << 20
    assert document["rows"][1]["granted"] is None
    assert document["facts"] == {"cpu_features": ["avx2", "fma"], "threads": 2}


def test_unknown_columns_are_left_out_and_lines_are_short() -> None:
    model = {
        "path": "/" + "very/" * 30 + "long-name-of-a-model.gguf", "nbytes": 4096,
        "rss_bytes": 1536, "staged_from": None, "state": "file", "problem": None,
        "written_bytes": 0,
    }  # fmt: skip
    report = Report(
        (Row("files", 2048, resident_bytes=1024), Row("anonymous", 4096, resident_bytes=512)),
        {
            **{"pid": 7, "command": "python " + "x" * 100 + " end", "problem": "p" * 100},
            "models": [
                model,
                model | {"nbytes": 2048, "problem": "unknown header", "path": "/a.gguf"},
                model | {"nbytes": 1536, "problem": "x" * 500, "path": "/b.gguf"},
            ],
            **{"cpu_features": ["feature"] * 20, "cached_bytes": 1536},
            "sizes_bytes": {"a": 1024, "b": 0},
        },
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) == 80
    heading, table, facts = [part.splitlines() for part in str(report).split("\n\n")]
    assert heading == [
        "process   7 python",
        "          " + "x" * 33 + "..." + "x" * 34,
        "          end",
        "model     /very/very/very/very/very/very/ve...ery/very/long-name-of-a-model.gguf",
        "          (1.5 KiB of 4.0 KiB in RAM)",
        "model     /a.gguf (1.5 KiB of 2.0 KiB in RAM; unknown header)",
        "model     /b.gguf (1.5 KiB, all in RAM;",
        "          " + "x" * 33 + "..." + "x" * 33 + ")",
        "problem   " + "p" * 33 + "..." + "p" * 34,
    ]
    assert [line.split("#")[0].rstrip() for line in table] == [
        "memory        size   in RAM  pages",
        "files      2.0 KiB  1.0 KiB      -",
        "anonymous  4.0 KiB    512 B      -",
        "total      6.0 KiB  1.5 KiB",
    ]
    assert facts == [
        "cpu_features  " + ", ".join(["feature"] * 7) + ",",
        "              " + ", ".join(["feature"] * 7) + ",",
        "              " + ", ".join(["feature"] * 6),
        "cached        1.5 KiB",
        "sizes         a 1.0 KiB, b 0 B",
    ]


def test_foreign_names_cannot_control_a_terminal() -> None:
    report = Report((), {"name": "a\x1b[2J", "command": "b\nc\udcff"})
    assert str(report).splitlines()[-2:] == ["name      a\\x1b[2J", "command   b\\nc?"]
    assert json.loads(report.to_json())["facts"] == report.facts


def test_a_whole_report_fits_80_columns() -> None:
    with um.Block(1 << 20, category="staging"):
        assert max(map(len, str(um.report()).splitlines())) <= 80
