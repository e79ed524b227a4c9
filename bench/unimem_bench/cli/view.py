"""Records of `unimem bench` as lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from unimem.base.text import Surface, escape, fact_lines, table_lines, wrap
from unimem.cli import terminal
from unimem_bench import tables
from unimem_bench.compare import ENOUGH, Differences, change_table, pair_table, suite_table, summary
from unimem_bench.record import Record
from unimem_bench.suite import Suite
from unimem_bench.tables import Table, TableRow, Tone
from unimem_bench.texts import claim

_STYLES: dict[Tone, Callable[[Surface, str], str]] = {
    "plain": lambda _, text: text,
    "subject": Surface.heading,
    "bad": Surface.bad,
    "missing": Surface.dim,
}


def record_lines(record: Record) -> Iterator[str]:
    """Write a record; the table of all targets comes last."""
    surface = terminal.surface()
    yield from fact_lines(surface, tables.machine_facts(record))
    for suite in record.suites:
        yield from [
            "",
            *_wrapped(f"{suite.name}: {tables.suite_title(suite)}", terminal.surface().heading),
        ]
        cases = [tables.case_table(case) for case in suite.cases]
        # Those without a figure or an error share a line for each reason.
        left_out = [each for each in cases if each.table is None and not each.is_error]
        for each in cases:
            if each not in left_out:
                yield from ["", *_case(each)]
        for reason, names in tables.by_problem(left_out).items():
            yield from ["", *_wrapped(f"not measured, {reason}: {'; '.join(names)}")]
    yield ""
    yield from _targets(record)


def _case(made: tables.CaseTable) -> Iterator[str]:
    yield from _wrapped(f"{made.name}: {made.question}", terminal.surface().tint)
    if made.problem is not None:
        text = f"{'failed' if made.is_error else 'not measured'}: {made.problem}"
        yield from _wrapped(text, terminal.surface().bad if made.is_error else str)
    if made.table is not None:
        yield from _table(made.table)
    for note in made.notes:
        yield from _wrapped(note, terminal.surface().dim)


def _targets(record: Record) -> Iterator[str]:
    made = tables.targets(record)
    yield terminal.surface().heading("All targets")
    # As two columns, case and claim would leave no room. The notes name what was not measured.
    rows = [
        TableRow((f"{case}: {text}", *rest), tone)
        for (case, text, *rest), tone in made.table.rows
        if tone != "missing"
    ]
    if rows:
        yield from _table(Table(made.table.head[1:], tuple(rows), "<<<"))
    for note in made.notes:
        yield from _wrapped(note, terminal.surface().dim)
    yield (terminal.surface().good if made.is_good else terminal.surface().bad)(f"{made.summary}.")


def difference_lines(differences: Differences) -> Iterator[str]:
    """Write how two records differ, and how much of each suite agrees."""
    surface = terminal.surface()
    for text in differences.warnings:
        yield from _wrapped(f"warning: {text}", surface.bad)
    for name, cases in (("A", differences.only_a), ("B", differences.only_b)):
        if cases:
            yield from _wrapped(f"only in {name}: {', '.join(cases)}")
    differing = differences._replace(
        pairs=[each for each in differences.pairs if not each.agrees],
        changes=[each for each in differences.changes if not each.agrees],
    )
    if differing.changes:
        yield surface.heading("Medians of unimem that lie outside the other's 5 to 95 %")
        yield from [*_table(_joined(change_table(differing), 5)), ""]
    if differing.pairs:
        yield terminal.surface().heading(
            "How many times as fast unimem is, where that differs, most first"
        )
        yield from [*_table(_joined(pair_table(differing), 4)), ""]
    if differences.pairs or differences.changes:
        yield from [*_table(suite_table(differences)), ""]
    style = surface.good if differences.share >= ENOUGH else surface.bad
    yield from _wrapped(f"{summary(differences)}.", style)


def _joined(table: Table, n_columns: int) -> Table:
    """Keep the first columns, with the first two joined to save width."""
    rows = [
        TableRow((": ".join(row.cells[:2]), *row.cells[2:n_columns]), row.tone)
        for row in table.rows
    ]
    head = (": ".join(table.head[:2]), *table.head[2:n_columns])
    return Table(head, tuple(rows), table.align[1:n_columns])


def suite_lines(suites: Iterable[Suite], *, quick: bool, case: str) -> Iterator[str]:
    """Write the questions and claims of suites."""
    for suite in suites:
        chosen = suite.chosen(quick=quick, case=case)
        if not chosen:
            continue
        yield from _wrapped(f"{suite.name}: {suite.question}", terminal.surface().heading)
        rows = []
        for each in chosen:
            claims = "; ".join(claim(each.empty(), target) for target in each.targets)
            rows.append(TableRow((each.name, each.question, f"{claims}." if claims else "-")))
        yield from [*_table(Table(("case", "question", "claims"), tuple(rows), "<<<")), ""]


def _table(table: Table) -> Iterator[str]:
    cells, tones = zip(*table.rows, strict=True)
    surface = terminal.surface()
    styles = [partial(_STYLES[tone], surface) for tone in tones]
    yield from table_lines(surface, table.head, cells, align=table.align, styles=styles, wraps=True)


def _wrapped(text: str, style: Callable[[str], str] = str) -> Iterator[str]:
    yield from map(style, wrap(escape(text), terminal.surface().width))
