"""Put a run of the suite `stream` into docs/streaming.md, as tables and a picture.

    python tools/streaming_page.py RECORD.json [OTHER.json ...]

Runs of other machines follow, each with tables of its own. `make bench-stream` measures, and calls
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from recorded import renew
from unimem.base.atomic_file import write_text
from unimem_bench import plots, stats
from unimem_bench.markdown import table_lines, target_lines
from unimem_bench.record import CaseRecord, Record, SideRecord
from unimem_bench.suites.stream import LIMIT, LLAMA, MAPPED, STREAMED
from unimem_bench.tables import Table, TableRow, machine_facts
from unimem_bench.texts import factor, number

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "streaming.md"
BEGIN, END = "<!-- made by make bench-stream -->", "<!-- end -->"
SUITE, X = "stream", "room, % of the experts"
ALT = "The time of a token by the room for experts, for each routing and read-ahead"
OTHER_MACHINE = "On another machine:"
MIB_KIB = 1024


def lines(record: Record, *others: Record) -> Iterator[str]:
    """Write the text between the markers; ValueError if a record has no such figures."""
    tables = list(_tables(record))
    yield from [f"![{ALT}]({PAGE.stem}/{SUITE}.svg)", "", *tables]
    for other in others:
        yield from ["", OTHER_MACHINE, "", *_tables(other)]


def _tables(record: Record) -> Iterator[str]:
    cases = [case for case in record.cases() if case.suite == SUITE and case.sides]
    timed = [case for case in cases if case.name.startswith(("decode", "dense", "prefill"))]
    if not timed:
        raise ValueError(f"the record has no figures of the suite {SUITE!r}")
    yield from [*table_lines(_times(timed)), ""]
    counted = [case for case in cases if case.name.startswith("misses")]
    if counted:
        yield from ["Experts that had to be read, in % of those used, by policy:", ""]
        yield from [*table_lines(_counts(counted)), ""]
    left_out = {(name, why) for case in timed for name, why in case.left_out.items()}
    yield from (f"- {name} is left out: {why}" for name, why in sorted(left_out))
    for case in cases:
        if case.name.startswith(("distinct", "all-fits", "hit")):
            found = [f"{side.name} {number(_median(side))} {case.unit}" for side in case.sides]
            yield f"- {case.question} {'; '.join(found)}"
    facts = dict(machine_facts(record))
    yield from (f"- {name}: {facts[name]}" for name in ("cpu", "memory", "kernel", "run"))
    own = [suite for suite in record.suites if suite.name == SUITE]
    yield from ["", *target_lines(replace(record, suites=own))]


def _median(side: SideRecord) -> float:
    return stats.spread(side).median


def _times(cases: list[CaseRecord]) -> Table:
    names = [STREAMED, MAPPED, LLAMA]
    rows = []
    for case in cases:
        kind, *routing, _, room = case.name.split("-")
        found = {side.name: side for side in case.sides if stats.figures(side)}
        ahead = case.facts["read_ahead_kib"]
        cells = [kind, " ".join(routing) or "-", _kib(ahead), f"{room} %"]
        cells += [number(_median(found[name])) if name in found else "-" for name in names]
        for other in (LLAMA, LIMIT):
            ratio = stats.ratio(case, found[STREAMED], found[other]) if other in found else None
            cells.append("-" if ratio is None else factor(ratio.value))
        rows.append(TableRow(tuple(cells)))
    head = ("ms", "routing", "read-ahead", "room", *names, "as fast as llama.cpp", "as the limit")
    return Table(head, tuple(rows), "<<" + ">" * (len(head) - 2))


def _kib(kib: int) -> str:
    return f"{kib} KiB" if kib < MIB_KIB else f"{kib // MIB_KIB} MiB"


def _counts(cases: list[CaseRecord]) -> Table:
    names = [side.name for side in cases[0].sides]
    rows = []
    for case in cases:
        _, trace, room = case.name.split("-")
        figures = [number(_median(side)) for side in case.sides]
        rows.append(TableRow((trace, f"{room} %", *figures)))
    head = ("routing", "room", *names)
    return Table(head, tuple(rows), "<" + ">" * (len(head) - 1))


def by_room(record: Record) -> Record:
    """Return a record whose cases of decode are one for each routing and read-ahead."""
    merged: dict[str, CaseRecord] = {}
    for case in record.cases():
        name, _, room = case.name.rpartition("-")
        if case.suite == SUITE and case.name.startswith("decode") and case.sides:
            question = case.question.split(", room for")[0] + "?"
            first = replace(case, name=name, question=question, x=X, sides=[], targets=[])
            sides = [replace(side, at=float(room)) for side in case.sides]
            merged.setdefault(name, first).sides.extend(sides)
    own = next(suite for suite in record.suites if suite.name == SUITE)
    return replace(record, suites=[replace(own, cases=list(merged.values()))])


def main(arguments: list[Any]) -> None:
    """Make tables from the named records, and the picture from the first one."""
    if not arguments:
        sys.exit(f"usage: {Path(__file__).name} RECORD.json [OTHER.json ...]")
    record, *others = (Record.read(Path(name)) for name in arguments)
    made = "\n".join(["", *lines(record, *others), ""])
    text = renew(PAGE.read_text(encoding="utf-8"), BEGIN, made, END)
    plots.save(by_room(record), PAGE.with_suffix(""), {SUITE})
    write_text(PAGE, text)


if __name__ == "__main__":
    main(sys.argv[1:])
