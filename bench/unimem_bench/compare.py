"""Two records compared: which ratios agree, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from unimem_bench.record import CaseRecord, Record
from unimem_bench.stats import Ratio, Spread, comparisons, figures, sizes, spread, subject
from unimem_bench.suite import OURS
from unimem_bench.tables import Table, TableRow, size_text
from unimem_bench.texts import amount, factor, times

# The share of the ratios that must agree for two runs to agree.
ENOUGH = 0.9

# What two machines must have in common, by its place in the document of `unimem doctor`.
_MACHINE = tuple(
    """
    cpu.model cpu.allowed_cores cpu.allowed_threads cpu.usable_cores cpu.governors
    memory.total_bytes kernel.release kernel.architecture thp.enabled thp.defrag
    thp.shmem_enabled thp.shm_mount numa.balancing
""".split()
)

_AGREES, _DIFFERS = "agree", "differ"


class Pair(NamedTuple):
    """The same ratio in two records."""

    name: str  # the case, with the size if it scales
    unit: str
    side: str  # the ratio says how many times as fast this side is
    other: str  # as this one
    a: Ratio
    b: Ratio

    @property
    def agrees(self) -> bool:
        """Whether the second run landed in the interval of the first."""
        return self.a.low <= self.b.value <= self.a.high

    @property
    def distance(self) -> float:
        """How far apart they are; 0 if equal."""
        return abs(math.log(self.a.value / self.b.value))


class Change(NamedTuple):
    """The figure of one of unimem's sides in two records; `name` and `unit` are as in `Pair`."""

    name: str
    unit: str
    side: str
    a: Spread
    b: Spread

    @property
    def agrees(self) -> bool:
        """Whether each median lies between the other's percentiles."""
        return self.b.p5 <= self.a.median <= self.b.p95 and self.a.p5 <= self.b.median <= self.a.p95


class Differences(NamedTuple):
    """The result of `compare`."""

    pairs: list[Pair]  # ratios that disagree first, then by distance
    changes: list[Change]  # in the order of the cases
    only_a: list[str]  # cases with figures in the first only
    only_b: list[str]  # in the second only
    warnings: list[str]  # reasons why the records are hard to compare

    @property
    def share(self) -> float:
        """The share of the ratios that agree; 1 if there are no ratios."""
        return sum(pair.agrees for pair in self.pairs) / len(self.pairs) if self.pairs else 1.0


def compare(a: Record, b: Record) -> Differences:
    """Compare two records, for the cases that have figures in both.

    Usually they are of one machine, before and after a change; ratios of two machines still
    compare.
    """
    cases_a, cases_b = _measured(a), _measured(b)
    both = [name for name in cases_a if name in cases_b]
    pairs = [pair for name in both for pair in _pairs(cases_a[name], cases_b[name])]
    return Differences(
        sorted(pairs, key=lambda pair: (pair.agrees, -pair.distance)),
        [change for name in both for change in _changes(cases_a[name], cases_b[name])],
        [name for name in cases_a if name not in cases_b],
        [name for name in cases_b if name not in cases_a],
        list(_warnings(a, b)),
    )


def _measured(record: Record) -> dict[str, CaseRecord]:
    return {
        f"{case.suite}/{case.name}": case
        for case in record.cases()
        if any(figures(side) for side in case.sides)
    }


def _pairs(a: CaseRecord, b: CaseRecord) -> Iterator[Pair]:
    for at in (None, *sizes(a)):
        ours_a, ours_b = subject(a, at), subject(b, at)
        if ours_a is None or ours_b is None or ours_a.name != ours_b.name:
            continue
        of_b = {each.other.name: each.ratio for each in comparisons(b, at)}
        for each in comparisons(a, at):
            if each.other.name in of_b:
                other = each.other.name
                yield Pair(_name(a, at), a.unit, ours_a.name, other, each.ratio, of_b[other])


def _changes(a: CaseRecord, b: CaseRecord) -> Iterator[Change]:
    for side in a.sides:
        same = b.side(side.name, side.at)
        if side.role == "unimem" and same is not None and figures(side) and figures(same):
            yield Change(_name(a, side.at), a.unit, side.name, spread(side), spread(same))


def _name(case: CaseRecord, at: float | None) -> str:
    name = f"{case.suite}/{case.name}"
    return name if at is None else f"{name} {size_text(case, at)}"


def _warnings(a: Record, b: Record) -> Iterator[str]:
    if a.quick != b.quick:
        kinds = ["quick" if each.quick else "whole" for each in (a, b)]
        yield f"a {kinds[0]} run and a {kinds[1]} one: sizes and rounds differ"
    for place in _MACHINE:
        old, new = _at(a.machine, place), _at(b.machine, place)
        if old != new:
            yield f"{place} differs: {old} and {new}"
    for name in dict.fromkeys([*a.versions, *b.versions]):
        old, new = a.versions.get(name, "none"), b.versions.get(name, "none")
        if old != new and name != "kernel":  # that is of the machine
            yield f"{name} differs: {old} and {new}"


def _at(document: Any, place: str) -> Any:
    for name in place.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document


# ---- tables -------------------------------------------------------------------------------------


def pair_table(differences: Differences) -> Table:
    """Tabulate how many times as fast unimem is, differences first."""
    rows = []
    for each in differences.pairs:
        against = f"{each.side} / {each.other}" if each.side != OURS else each.other
        verdict = _AGREES if each.agrees else _DIFFERS
        cells = (each.name, against, times(each.a), times(each.b), verdict)
        rows.append(TableRow(cells, "plain" if each.agrees else "bad"))
    return Table(("case", "against", "A", "B", ""), tuple(rows), "<<<<<")


def change_table(differences: Differences) -> Table:
    """Tabulate the medians of unimem's sides."""
    rows = []
    for each in differences.changes:
        a, b = each.a.median, each.b.median
        quotient = factor(b / a) if a else ""
        cells = (each.name, each.side, amount(a, each.unit), amount(b, each.unit), quotient)
        rows.append(TableRow(cells))
    return Table(("case", "side", "A", "B", "B / A"), tuple(rows), "<<>>>")


def suite_table(differences: Differences) -> Table:
    """Tabulate how many ratios and medians of each suite agree."""
    found: dict[str, tuple[list[bool], list[bool]]] = {}
    # Changes first: these are in the order of the suites.
    for i, kind in ((1, differences.changes), (0, differences.pairs)):
        for each in kind:
            suite = each.name.partition("/")[0]
            found.setdefault(suite, ([], []))[i].append(each.agrees)
    rows = [
        TableRow((suite, *(f"{sum(each)} of {len(each)}" if each else "" for each in agreeing)))
        for suite, agreeing in found.items()
    ]
    return Table(("suite", "ratios that agree", "medians that agree"), tuple(rows), "<>>")


def summary(differences: Differences) -> str:
    """Say how many ratios agree."""
    n = len(differences.pairs)
    agreeing = sum(pair.agrees for pair in differences.pairs)
    if not n:
        return "The two have no ratio in common"
    return f"{agreeing} of {n} ratios of B ({differences.share:.0%}) are in the intervals of A"
