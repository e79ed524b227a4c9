"""`make bench-stream` puts what its record says into docs/streaming.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.project.bench_records import MACHINE, VERSIONS
from support.project.checkout import ROOT
from support.project.tools import load_tool
from unimem_bench.record import CaseRecord, Record, SideRecord, SuiteRecord
from unimem_bench.suites.stream import LIMIT, LLAMA, MAPPED, STREAMED

pytest.importorskip("unimem_bench.plots", reason="matplotlib is not installed")

RECORDED, PAGE = ROOT / "bench/results/stream.json", ROOT / "docs/streaming.md"


@pytest.fixture
def tool() -> Any:
    return load_tool("streaming_page")


def recorded() -> Record:
    def case(name: str, unit: str = "ms", **figures: float) -> CaseRecord:
        sides = [
            SideRecord(known.get(side, side), roles.get(side, "unimem"), [[figure] * 3])
            for side, figure in figures.items()
        ]
        question = f"What is {name}, room for some?"
        facts = {"read_ahead_kib": 8192 if "own" in name else 128}
        return CaseRecord("stream", name, question, unit, sides=sides, facts=facts)

    known = {"streamed": STREAMED, "mapped": MAPPED, "llama": LLAMA, "limit": LIMIT}
    roles: Any = {"llama": "peer", "limit": "limit", "LRU": "peer"}
    cases = [
        case("decode-uniform-own-35", streamed=50, mapped=80, llama=500, limit=40),
        case("decode-uniform-own-50", streamed=40, mapped=70, llama=400, limit=32),
        case("decode-uniform-128k-50", streamed=40, limit=32),
        case("dense-own-70", streamed=90, llama=180, limit=80),
        case("misses-uniform-50", "% of the uses", unimem=50, LRU=51.5),
        case("hit", "ns", unimem=61),
    ]
    cases[2].left_out[LLAMA] = "it was killed"
    suite = SuiteRecord("stream", "How fast?", 1, 60.0, cases)
    return Record("2026-11-28", False, 60.0, MACHINE, VERSIONS, [suite])


def test_the_page_shows_the_record(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, record = tmp_path / "streaming.md", tmp_path / "record.json"
    page.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nbehind\n")
    record.write_text(recorded().to_json())
    monkeypatch.setattr(tool, "PAGE", page)
    tool.main([record])
    text = page.read_text()
    assert text.startswith(f"before\n{tool.BEGIN}\n![")
    assert text.endswith(f"{tool.END}\nbehind\n")
    assert "old" not in text
    for row in (
        "| decode | uniform | 8 MiB | 35 % | 50 | 80 | 500 | 10x | 0.800x |",
        "| decode | uniform | 128 KiB | 50 % | 40 | - | - | - | 0.800x |",
        "| dense | - | 8 MiB | 70 % | 90 | - | 180 | 2x | 0.889x |",
        "| uniform | 50 % | 50 | 51.5 |",
        f"- {LLAMA} is left out: it was killed",
        "- What is hit, room for some? unimem 61 ns",
    ):
        assert row in text.splitlines(), row
    assert "uniform" in (tmp_path / "streaming/stream.svg").read_text()


def test_the_plot_has_a_case_for_each_routing(tool: Any) -> None:
    (suite,) = tool.by_room(recorded()).suites
    assert [case.name for case in suite.cases] == ["decode-uniform-own", "decode-uniform-128k"]
    first = suite.cases[0]
    assert (first.x, first.question) == (tool.X, "What is decode-uniform-own-35?")
    assert {side.at for side in first.sides} == {35.0, 50.0}
    assert len(first.sides) == 8


def test_what_is_no_record_of_it_changes_nothing(tool: Any) -> None:
    with pytest.raises(ValueError, match="no figures of the suite 'stream'"):
        list(tool.lines(Record("", False, 0.0, {}, {}, [])))
    with pytest.raises(ValueError, match="lacks the lines"):
        tool.renew("a page", tool.BEGIN, "text", tool.END)
    with pytest.raises(SystemExit, match=r"usage: streaming_page.py"):
        tool.main([])


def test_the_page_in_the_repository_is_of_the_record_there(tool: Any) -> None:
    made = "No run is recorded yet."
    if RECORDED.exists():
        made = "\n".join(tool.lines(Record.read(RECORDED)))
    text = PAGE.read_text()
    assert tool.renew(text, tool.BEGIN, f"\n{made}\n", tool.END) == text
