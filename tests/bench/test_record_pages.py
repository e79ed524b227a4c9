"""Commands that measure put what their records say into their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.project.bench_records import MACHINE, VERSIONS
from support.project.checkout import ROOT
from support.project.tools import load_tool
from unimem_bench.record import CaseRecord, Record, SideRecord, SuiteRecord
from unimem_bench.suites.stream import LIMIT, LLAMA, MAPPED, STREAMED

pytest.importorskip("unimem_bench.plots", reason="matplotlib is not installed")


def record_of(suite: str, question: str, cases: list[CaseRecord]) -> Record:
    own = SuiteRecord(suite, question, 1, 60.0, cases)
    return Record("2026-01-02T03:04:05Z", False, 60.0, MACHINE, VERSIONS, [own])


def pressure() -> Record:
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
    return record_of("pressure", "How steady?", [token, *ratios])


def stream() -> Record:
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
    return record_of("stream", "How fast?", cases)


class Shown(NamedTuple):
    """A tool, a record for it, and what its page and its picture then have."""

    tool: str
    record: Record
    lines: tuple[str, ...]
    in_picture: str


SHOWN = {
    "pressure": Shown(
        "pressure_page",
        pressure(),
        (
            "| llama.cpp, mapped | 40 | 50 | 41 | 60 | 75 | 99 | 2.50 | 1.50x | 1.10x |",
            "- unimem is left out: it was killed",
            "- cpu: AMD EPYC: 2 cores",
        ),
        "beside neighbours",
    ),
    "stream": Shown(
        "streaming_page",
        stream(),
        (
            "| decode | uniform | 8 MiB | 35 % | 50 | 80 | 500 | 10x | 0.800x |",
            "| decode | uniform | 128 KiB | 50 % | 40 | - | - | - | 0.800x |",
            "| dense | - | 8 MiB | 70 % | 90 | - | 180 | 2x | 0.889x |",
            "| uniform | 50 % | 50 | 51.5 |",
            f"- {LLAMA} is left out: it was killed",
            "- What is hit, room for some? unimem 61 ns",
        ),
        "uniform",
    ),
}
EACH = pytest.mark.parametrize("suite", SHOWN)


@EACH
def test_the_page_shows_the_record(
    suite: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, record, lines, in_picture = SHOWN[suite]
    tool, page, path = load_tool(name), tmp_path / "page.md", tmp_path / "record.json"
    page.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nbehind\n")
    path.write_text(record.to_json())
    monkeypatch.setattr(tool, "PAGE", page)
    tool.main([path])
    text = page.read_text()
    assert text.startswith(f"before\n{tool.BEGIN}\n![")
    assert text.endswith(f"{tool.END}\nbehind\n")
    assert "old" not in text
    for line in lines:
        assert f"\n{line}" in text
    assert in_picture in (tmp_path / f"page/{suite}.svg").read_text()


def test_the_streams_of_another_machine_have_tables_of_their_own() -> None:
    tool = load_tool("streaming_page")
    alone, both = (list(tool.lines(*[stream()] * n)) for n in (1, 2))
    assert both == [*alone, "", tool.OTHER_MACHINE, "", *alone[2:]]


@EACH
def test_what_is_no_record_of_it_changes_nothing(suite: str) -> None:
    tool = load_tool(SHOWN[suite].tool)
    with pytest.raises(ValueError, match=f"no figures of the suite '{suite}'"):
        list(tool.lines(Record("", False, 0.0, {}, {}, [])))
    with pytest.raises(ValueError, match="lacks the lines"):
        tool.renew("a page", tool.BEGIN, "text", tool.END)
    with pytest.raises(SystemExit, match=rf"usage: {SHOWN[suite].tool}\.py"):
        tool.main([])


@EACH
def test_the_page_in_the_repository_is_of_the_record_there(suite: str) -> None:
    tool, recorded = load_tool(SHOWN[suite].tool), ROOT / f"bench/results/{suite}.json"
    made = "No run is recorded yet."
    if recorded.exists():
        others = sorted(recorded.parent.glob(f"{suite}-*.json"))  # of other machines
        made = "\n".join(tool.lines(*map(Record.read, [recorded, *others])))
    text = tool.PAGE.read_text()
    assert tool.renew(text, tool.BEGIN, f"\n{made}\n", tool.END) == text


def test_the_plot_of_streams_has_a_case_for_each_routing() -> None:
    tool = load_tool("streaming_page")
    (suite,) = tool.by_room(stream()).suites
    assert [case.name for case in suite.cases] == ["decode-uniform-own", "decode-uniform-128k"]
    first = suite.cases[0]
    assert (first.x, first.question) == (tool.X, "What is decode-uniform-own-35?")
    assert {side.at for side in first.sides} == {35.0, 50.0}
    assert len(first.sides) == 8
