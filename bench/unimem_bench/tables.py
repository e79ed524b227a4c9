"""A record as tables: heads, rows and lines, for a terminal or a page to lay out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from unimem.base.text import format_bytes, format_count
from unimem_bench import stats, texts
from unimem_bench.record import BEST, CaseRecord, Record, SideRecord, SuiteRecord
from unimem_bench.stats import Growth, Verdict

# How a row looks in colour: the subject, a bad result, a missing one.
Tone = Literal["plain", "subject", "bad", "missing"]

_NOT_THERE = "-"


class TableRow(NamedTuple):
    """A row of a table: its cells, and its look."""

    cells: tuple[str, ...]
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """A table."""

    head: tuple[str, ...]
    rows: tuple[TableRow, ...]
    align: str  # ``<`` for a column to the left and ``>`` for one to the right


@dataclass(frozen=True, slots=True)
class CaseTable:
    """A case."""

    name: str  # as `unimem bench --case` takes it
    question: str
    table: Table | None  # None if nothing was measured
    notes: tuple[str, ...]  # needed to read the table, a line each
    problem: str | None  # why something was not measured
    is_error: bool  # whether the problem is an error


@dataclass(frozen=True, slots=True)
class Targets:
    """All targets of a record."""

    table: Table  # a row each: case, claim, what was measured, verdict
    notes: tuple[str, ...]  # why some were not measured
    summary: str  # how many were met, in a sentence
    is_good: bool  # whether no target was missed


# ---- cases --------------------------------------------------------------------------------------


def case_table(case: CaseRecord) -> CaseTable:
    """Tabulate a case: a row a side, or if it scales, a row a size."""
    if not any(map(stats.figures, case.sides)):
        table = None
    elif case.x is not None:
        table = _scaling(case)
    else:
        table = _sides(case)
    problem = case.failed
    if problem is None and table is None:
        problem = "the run was interrupted before"
    notes = tuple(_notes(case)) if table is not None else ()
    return CaseTable(
        f"{case.suite}/{case.name}", case.question, table, notes, problem, case.is_error
    )


def by_problem(cases: Iterable[CaseTable]) -> dict[str, list[str]]:
    """Name the cases that have a problem, by its text."""
    found: dict[str, list[str]] = {}
    for case in cases:
        if case.problem is not None:
            found.setdefault(case.problem, []).append(case.name.partition("/")[2])
    return found


def _sides(case: CaseRecord) -> Table:
    ours = stats.subject(case)
    against = {each.other.name: each.ratio for each in stats.comparisons(case)}
    unit = case.unit if texts.has_scale(case.unit) else ""
    rows = []
    for side in case.sides:
        if not stats.figures(side):
            continue
        ratio = against.get(side.name)
        is_beaten = ratio is not None and ratio.is_difference and ratio.value < 1
        tone: Tone = "bad" if is_beaten and side.role == "peer" else "plain"
        role = "" if side.role == "unimem" else side.role
        than = "" if ratio is None else texts.comparison(ratio, case.unit)
        cells = (side.name, role, texts.middle(stats.spread(side), unit), than)
        rows.append(TableRow(cells, "subject" if side is ours else tone))
    head = ("", "", f"{'median' if unit else case.unit} (5 to 95 %)")
    return Table((*head, f"{ours.name} against it" if ours else ""), tuple(rows), "<<><")


def _scaling(case: CaseRecord) -> Table:
    names = list(dict.fromkeys(side.name for side in case.sides if stats.figures(side)))
    unit = case.unit if texts.has_scale(case.unit) else ""
    rows = [
        TableRow((size_text(case, at), *_row(case, at, names, unit))) for at in stats.sizes(case)
    ]
    head = (case.x or "", *(name if unit else f"{name}, {case.unit}" for name in names))
    return Table(head, tuple(rows), ">" + "<" * len(names))


def _row(case: CaseRecord, at: float, names: Iterable[str], unit: str) -> Iterator[str]:
    ours = stats.subject(case, at)
    against = {each.other.name: each.ratio for each in stats.comparisons(case, at)}
    for name in names:
        side = case.side(name, at)
        if side is None or not stats.figures(side):
            yield _NOT_THERE
        elif side is ours:
            yield texts.middle(stats.spread(side), unit)
        else:
            median = stats.spread(side).median
            text = texts.amount(median, unit) if unit else texts.number(median)
            ratio = against.get(name)
            if ratio is not None:
                text += f" ({texts.factor(ratio.value) if ratio.is_difference else 'same'})"
            yield text


def size_text(case: CaseRecord, at: float) -> str:
    """Write a size of a case that scales."""
    return texts.size(at) if (case.x or "").startswith("bytes") else texts.number(at)


def _notes(case: CaseRecord) -> Iterator[str]:
    yield from _growths(case)
    for name, reason in case.left_out.items():
        yield f"{name} is left out: {reason}"
    for name, value in case.facts.items():
        yield f"{name}: {texts.fact(value)}"
    yield _rounds(case)


def _growths(case: CaseRecord) -> Iterator[str]:
    if case.x is None:
        return
    names = list(dict.fromkeys(side.name for side in case.sides if stats.figures(side)))
    ours = stats.subject(case, stats.sizes(case)[0])
    if ours is not None and len(names) > 1:
        yield f"In brackets: how many times as fast {ours.name} is; same: no difference."
    for name in names:
        if sum(side.name == name and any(stats.figures(side)) for side in case.sides) < 2:
            continue
        found = _shown_growth(case, name)
        yield f"{name} grows as {texts.grown(found)}: {texts.law(found)}"


def _shown_growth(case: CaseRecord, name: str) -> Growth:
    """Return the growth of a side's figure; for a speed, the opposite of its cost's."""
    found = stats.growth(case, name)
    if case.higher_is_better:
        return Growth(-found.exponent, -found.high, -found.low)
    return found


def _rounds(case: CaseRecord) -> str:
    ours = next(
        (each for at in [None, *stats.sizes(case)] if (each := stats.subject(case, at))), None
    )
    side = ours or next(filter(stats.figures, case.sides))
    n_passes = sum(map(bool, side.passes))
    n_rounds = len(stats.figures(side))
    text = "noisy: " if stats.is_noisy(case) else ""
    text += f"{format_count(n_rounds, 'round')} in {format_count(n_passes, 'pass', 'es')}"
    text += f" ({case.rounds_disturbed} of them disturbed)" if case.rounds_disturbed else ""
    text += f", {case.rounds_dropped} more dropped" if case.rounds_dropped else ""
    if case.rounds_dropped or case.rounds_disturbed:
        text += ": other processes took CPU time"
    return text


def suite_title(suite: SuiteRecord) -> str:
    """Write the question of a suite, and the time it took."""
    passes = format_count(suite.n_passes, "pass", "es")
    return f"{suite.question} ({passes}, {texts.duration(suite.seconds)})"


def suite_table(suite: SuiteRecord) -> Table:
    """Tabulate a suite, a row a case: our figure, and the nearest peer and limit.

    If a case scales, they are those of the largest size.
    """
    rows = []
    for case in suite.cases:
        at = max(stats.sizes(case), default=None)
        ours = stats.subject(case, at)
        if ours is not None:
            rows.append(
                TableRow((case.name, case.question, _figure(case, ours), *_nearest(case, at)))
            )
    return Table(("case", "question", "unimem", "peer", "limit"), tuple(rows), "<<<<<")


def _figure(case: CaseRecord, side: SideRecord) -> str:
    text = texts.middle(stats.spread(side), case.unit)
    if side.at is None:
        return text
    name = "" if (case.x or "").startswith("bytes") else f" {case.x}"
    text = f"{text} at {size_text(case, side.at)}{name}"
    if any(each.kind == "exponent" for each in case.targets):
        with suppress(ValueError):  # an interrupted run may lack sizes
            text += f", {texts.grown(_shown_growth(case, side.name))}"
    return text


def _nearest(case: CaseRecord, at: float | None) -> Iterator[str]:
    """Compare our figure with the peer and the limit beside which it does worst."""
    for role in ("peer", "limit"):
        found = [each for each in stats.comparisons(case, at) if each.other.role == role]
        worst = min(found, key=lambda each: each.ratio.value, default=None)
        text = f"{worst.other.name}: {texts.comparison(worst.ratio, case.unit)}" if worst else ""
        yield text


# ---- targets ------------------------------------------------------------------------------------


def targets(record: Record) -> Targets:
    """Tabulate all targets, in the order in which they were set."""
    found = sorted(stats.verdicts(record), key=lambda each: each.target.issue)
    rows = []
    for each in found:
        tone: Tone = "missing" if each.met is None else "plain" if each.met else "bad"
        cells = (
            f"{each.case.suite}/{each.case.name}",
            texts.claim(each.case, each.target, each.other),
            texts.measured(each) or _NOT_THERE,
            texts.outcome(each),
        )
        rows.append(TableRow(cells, tone))
    head = ("case", "claim", "measured", "verdict")
    n_met = sum(each.met is True for each in found)
    n_missed = sum(each.met is False for each in found)
    summary = f"{n_met} of {format_count(len(found), 'target')} met"
    summary += f", {n_missed} missed" if n_missed else ""
    if n_met + n_missed < len(found):
        summary += f", {len(found) - n_met - n_missed} not measured"
    return Targets(Table(head, tuple(rows), "<<<<"), tuple(_why(found)), summary, not n_missed)


def suite_targets(record: Record) -> Table:
    """Tabulate how many targets were met, a row a suite."""
    rows = []
    for suite in record.suites:
        found = [each.met for each in stats.verdicts(record) if each.case.suite == suite.name]
        if found:
            counts = [str(found.count(met) or "") for met in (True, None, False)]
            tone: Tone = "bad" if False in found else "plain"
            rows.append(TableRow((suite.name, suite.question, *counts), tone))
    head = ("suite", "question", "met", "not measured", "missed")
    return Table(head, tuple(rows), "<<>>>")


def _why(found: Iterable[Verdict]) -> Iterator[str]:
    """Say why targets were not measured, once for each reason."""
    reasons: dict[str, list[str]] = {}
    for each in found:
        if each.met is None:
            reasons.setdefault(_reason(each), []).append(f"{each.case.suite}/{each.case.name}")
    for reason, names in reasons.items():
        counted = [(name, len(list(group))) for name, group in groupby(sorted(names))]
        where = ", ".join(name if n == 1 else f"{name} ({n})" for name, n in counted)
        yield f"not measured, {reason}: {where}"


def _reason(verdict: Verdict) -> str:
    case, target = verdict.case, verdict.target
    if case.failed is not None:
        return case.failed
    if not any(map(stats.figures, case.sides)):
        return "the run was interrupted before"
    left_out = case.left_out
    if target.other == BEST and left_out:
        return "; ".join(dict.fromkeys(left_out.values()))
    wanted = target.other or target.side
    return left_out.get(wanted, f"there are no figures of {wanted}")


# ---- the run ------------------------------------------------------------------------------------


def machine_facts(record: Record) -> Iterator[tuple[str, str]]:
    """Yield on what machine, when and with what a record was made, as names and texts."""
    machine = record.machine
    kernel, cpu, memory, thp = (machine.get(k) or {} for k in ("kernel", "cpu", "memory", "thp"))
    quota = f", {cpu['usable_cores']} of them ours by quota" if cpu.get("quota") is not None else ""
    yield (
        "cpu",
        f"{cpu.get('model', 'unknown')}: {cpu.get('allowed_cores')} cores, "
        f"{cpu.get('allowed_threads')} threads{quota}",
    )
    yield "features", " ".join(cpu.get("features", ()))
    nodes = len(machine.get("numa", {}).get("nodes", ()))
    yield (
        "memory",
        f"{format_bytes(memory.get('total_bytes', 0))}, {format_count(nodes, 'NUMA node')}",
    )
    pools = [
        f"{pool['total_pages']:,} hugetlb pages of {name}"
        for name, pool in machine.get("pools", {}).items()
        if pool["total_pages"]
    ]
    modes = [f"THP {thp.get('enabled')}", f"memfds {thp.get('shmem_enabled')}"]
    yield "pages", ", ".join([*modes, *(pools or ["no hugetlb pages"])])
    yield "kernel", f"Linux {kernel.get('release')}, {kernel.get('architecture')}"
    yield "versions", ", ".join(f"{k} {v}" for k, v in record.versions.items() if k != "kernel")
    kind = "quick, with smaller sizes and fewer rounds" if record.quick else "whole"
    yield "run", f"{record.when}, {kind}, {texts.duration(record.seconds)}{_load(record)}"
    for run, names in _later_runs(record).items():
        yield "later run", f"{run}: {', '.join(names)}"


def _later_runs(record: Record) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for suite in record.suites:
        if suite.run is not None:
            found.setdefault(suite.run, []).append(suite.name)
    return found


def _load(record: Record) -> str:
    loads = [
        each["load_avg_1min"]
        for suite in record.suites
        for each in suite.conditions
        if "load_avg_1min" in each
    ]
    return f"; load average {min(loads):.2g} to {max(loads):.2g}" if loads else ""
