"""Tables of a record as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unimem_bench.compare import Differences, change_table, pair_table, summary
from unimem_bench.record import CaseRecord, Record
from unimem_bench.tables import Table, case_table, suite_title, targets


def escape(text: str) -> str:
    r"""Escape a text so that Markdown shows it as it is, in one line.

    >>> print(escape("keys[i] = k | <none>"))
    keys[i] = k \| \<none\>
    """
    return re.sub(r"([\\|<>*`]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def table_lines(table: Table) -> Iterator[str]:
    """Write a table; the subject and bad results stand out."""
    yield f"| {' | '.join(map(escape, table.head))} |"
    yield f"|{'|'.join('--:' if side == '>' else '---' for side in table.align)}|"
    for row in table.rows:
        first, *rest, last = map(escape, row.cells)
        first = f"**{first}**" if row.tone == "subject" else first
        last = f"**{last}**" if row.tone == "bad" and last else last
        yield f"| {' | '.join([first, *rest, last])} |"


def case_lines(case: CaseRecord) -> Iterator[str]:
    """Write a case: its question, table and notes."""
    made = case_table(case)
    yield f"**{escape(made.question)}** `{made.name}`"
    if made.problem is not None:
        yield from ["", f"{'Failed' if made.is_error else 'Not measured'}: {escape(made.problem)}"]
    if made.table is not None:
        yield from ["", *table_lines(made.table)]
    if made.notes:
        yield from ["", *("- " + escape(note) for note in made.notes)]


def target_lines(record: Record) -> Iterator[str]:
    """Write the table of all targets."""
    made = targets(record)
    yield from table_lines(made.table)
    if made.notes:
        yield from ["", *("- " + escape(note) for note in made.notes)]
    yield from ["", f"**{made.summary}.**"]


def record_lines(record: Record) -> Iterator[str]:
    """Write all tables of a record, the table of all targets last."""
    for suite in record.suites:
        yield from [f"## {suite.name}", "", escape(suite_title(suite)), ""]
        for case in suite.cases:
            yield from case_lines(case)
            yield ""
    yield from ["## Targets", ""]
    yield from target_lines(record)


def difference_lines(differences: Differences) -> Iterator[str]:
    """Write how two records differ."""
    for text in differences.warnings:
        yield f"- warning: {escape(text)}"
    for name, cases in (("A", differences.only_a), ("B", differences.only_b)):
        if cases:
            yield f"- only in {name}: {escape(', '.join(cases))}"
    if differences.changes:
        yield from ["", "Medians of unimem", "", *table_lines(change_table(differences))]
    if differences.pairs:
        yield from ["", "How many times as fast unimem is, what differs most first", ""]
        yield from table_lines(pair_table(differences))
    yield from ["", f"**{summary(differences)}.**"]
