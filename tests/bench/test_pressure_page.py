"""`tools/bench_pressure.sh` puts what its record says into docs/pressure.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.project.bench_records import MACHINE, VERSIONS
from support.project.checkout import ROOT
from support.project.tools import load_tool
from unimem_bench.record import CaseRecord, Record, SideRecord, SuiteRecord

pytest.importorskip("unimem_bench.plots", reason="matplotlib is not installed")

RECORDED, PAGE = ROOT / "bench/results/pressure.json", ROOT / "docs/pressure.md"


@pytest.fixture
def tool() -> Any:
    return load_tool("pressure_page")


def recorded() -> Record:
    def case(name: str, *sides: SideRecord, **facts: Any) -> CaseRecord:
        return CaseRecord("pressure", name, "What?", "ms", sides=list(sides), facts=facts)

    quiet = {"p50": 40.0, "p99": 42.0, "p99.9": 50.0, "worst": 51.0, "tokens": 10}
    pressed = {"p50": 41.0, "p99": 60.0, "p99.9": 75.0, "worst": 99.0, "tokens": 10}
    figures = {
        "llama.cpp, mapped": {
            "quiet": quiet | {"major_faults": 0},
            "pressed": pressed | {"major_faults": 25},
        }
    }
    sides = [
        SideRecord("llama.cpp, mapped, quiet", "peer", [[40.0, 51.0]]),
        SideRecord("llama.cpp, mapped, pressed", "peer", [[41.0, 99.0]]),
    ]
    token = case("token", *sides, figures_ms=figures)
    token.left_out["unimem"] = "it was killed"
    ratios = [
        case(name, SideRecord("llama.cpp, mapped", "peer", [[ratio]]))
        for name, ratio in (("p99.9", 1.5), ("mean", 1.1))
    ]
    suite = SuiteRecord("pressure", "How steady?", 1, 60.0, [token, *ratios])
    return Record("2026-01-02T03:04:05Z", False, 60.0, MACHINE, VERSIONS, [suite])


def test_the_page_shows_the_record(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, record = tmp_path / "pressure.md", tmp_path / "record.json"
    page.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nbehind\n")
    record.write_text(recorded().to_json())
    monkeypatch.setattr(tool, "PAGE", page)
    tool.main([record])
    text = page.read_text()
    assert text.startswith(f"before\n{tool.BEGIN}\n![")
    assert text.endswith(f"{tool.END}\nbehind\n")
    assert "old" not in text
    row = "| llama.cpp, mapped | 40 | 50 | 41 | 60 | 75 | 99 | 2.50 | 1.50x | 1.10x |"
    assert row in text.splitlines()
    assert "- unimem is left out: it was killed" in text
    assert "- cpu: AMD EPYC: 2 cores" in text
    assert "beside neighbours" in (tmp_path / "pressure/pressure.svg").read_text()


def test_what_is_no_record_of_it_changes_nothing(tool: Any) -> None:
    with pytest.raises(ValueError, match="no figures of the suite 'pressure'"):
        list(tool.lines(Record("", False, 0.0, {}, {}, [])))
    with pytest.raises(ValueError, match="lacks the lines"):
        tool.renew("a page", tool.BEGIN, "text", tool.END)
    with pytest.raises(SystemExit, match=r"usage: pressure_page.py"):
        tool.main([])


def test_the_page_in_the_repository_is_of_the_record_there(tool: Any) -> None:
    made = "No run is recorded yet."
    if RECORDED.exists():
        made = "\n".join(tool.lines(Record.read(RECORDED)))
    text = PAGE.read_text()
    assert tool.renew(text, tool.BEGIN, f"\n{made}\n", tool.END) == text
