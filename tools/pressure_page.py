"""Put a run of the suite `pressure` into docs/pressure.md, as a table and a picture.

    python tools/pressure_page.py RECORD.json

`tools/bench_pressure.sh` measures, and calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recorded import renew
from unimem.base.atomic_file import write_text
from unimem_bench import plots
from unimem_bench.markdown import table_lines, target_lines
from unimem_bench.record import CaseRecord, Record
from unimem_bench.tables import Table, TableRow, machine_facts
from unimem_bench.texts import factor, number

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "pressure.md"
BEGIN, END = "<!-- made by tools/bench_pressure.sh -->", "<!-- end -->"
SUITE = "pressure"
ALT = "The time of a token alone and beside neighbours, by how the model was loaded"
PHASES = ("quiet", "pressed")


def lines(record: Record) -> Iterator[str]:
    """Write the text between the markers; ValueError if the record has no such figures."""
    cases = {case.name: case for case in record.cases() if case.suite == SUITE}
    token = cases.get("token")
    if token is None or "figures_ms" not in token.facts:
        raise ValueError(f"the record has no figures of the suite {SUITE!r}")
    yield from [f"![{ALT}]({PAGE.stem}/{SUITE}.svg)", ""]
    yield from table_lines(_table(token, *(_ratios(cases[name]) for name in ("p99.9", "mean"))))
    yield ""
    yield from (f"- {name} is left out: {why}" for name, why in token.left_out.items())
    facts = dict(machine_facts(record))
    yield from (f"- {name}: {facts[name]}" for name in ("cpu", "memory", "kernel", "run"))
    own = [suite for suite in record.suites if suite.name == SUITE]
    yield ""
    yield from target_lines(
        Record(record.when, record.quick, record.seconds, record.machine, record.versions, own)
    )


def _table(token: CaseRecord, slowest: dict[str, float], mean: dict[str, float]) -> Table:
    head = (
        "ms a token",
        "alone: p50",
        "p99.9",
        "beside neighbours: p50",
        "p99",
        "p99.9",
        "worst",
        "reads from the disk",
        "p99.9, of alone",
        "mean, of alone",
    )
    rows = []
    for name, both in token.facts["figures_ms"].items():
        quiet, pressed = (both[phase] for phase in PHASES)
        figures = [quiet["p50"], quiet["p99.9"], *(pressed[k] for k in ("p50", "p99", "p99.9"))]
        cells = [name, *map(number, [*figures, pressed["worst"]])]
        cells.append(number(pressed["major_faults"] / pressed["tokens"]))
        rows.append(TableRow((*cells, factor(slowest[name]), factor(mean[name]))))
    return Table(head, tuple(rows), "<" + ">" * (len(head) - 1))


def _ratios(case: CaseRecord) -> dict[str, float]:
    return {side.name: side.passes[0][0] for side in case.sides}


def main(arguments: list[Any]) -> None:
    """Make table and picture from the named record."""
    if len(arguments) != 1:
        sys.exit(f"usage: {Path(__file__).name} RECORD.json")
    record = Record.read(Path(arguments[0]))
    made = "\n".join(["", *lines(record), ""])
    text = renew(PAGE.read_text(encoding="utf-8"), BEGIN, made, END)
    plots.save(record, PAGE.with_suffix(""), {SUITE})
    write_text(PAGE, text)


if __name__ == "__main__":
    main(sys.argv[1:])
