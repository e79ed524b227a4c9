"""The table of the ten questions, each answered by a target of a record."""

from __future__ import annotations

from unimem_bench import stats, texts
from unimem_bench.questions import QUESTIONS
from unimem_bench.record import Record
from unimem_bench.stats import Growth, Ratio, Verdict
from unimem_bench.tables import Table, TableRow, Tone, size_text


def answers(record: Record, run: str | None = None) -> Table:
    """Tabulate the ten questions: question, answer, case, and whether the target was met.

    If suites are of a later `run`, its questions are apart: two machines share no table.
    """
    runs = {suite.name: suite.run for suite in record.suites}
    found = {
        (f"{each.case.suite}/{each.case.name}", each.target.other): each
        for each in stats.verdicts(record)
    }
    rows = []
    for question in QUESTIONS:
        if runs.get(question.case.partition("/")[0]) != run:
            continue
        verdict = found.get((question.case, question.other))
        if verdict is None or verdict.measured is None:
            rows.append(TableRow((question.text, "", question.case, "not measured"), "missing"))
        else:
            tone: Tone = "plain" if verdict.met else "bad"
            cells = (question.text, _answer(verdict), question.case, texts.outcome(verdict))
            rows.append(TableRow(cells, tone))
    return Table(("question", "answer", "case", "target"), tuple(rows), "<<<<")


def _answer(verdict: Verdict) -> str:
    """Write what a target measured: a growth, a figure, or our median and how it compares."""
    case, target, found = verdict.case, verdict.target, verdict.measured
    if isinstance(found, Growth):
        most = f"{size_text(case, max(stats.sizes(case)))} {case.x}"
        return f"{texts.law(found)}, {texts.grown(found)}, up to {most}"
    if found is None or target.kind == "figure":
        return texts.measured(verdict)
    speed = found
    if target.kind == "cost":
        speed = Ratio(1 / found.value, 1 / found.high, 1 / found.low)
    ours = next(side for side in case.sides if side.name == target.side and stats.figures(side))
    median = texts.amount(stats.spread(ours).median, case.unit)
    if "file_bytes" in case.facts:  # of a quick run they are smaller
        median += f" for {texts.amount(case.facts['file_bytes'], 'bytes')}"
    than = "than" if speed.is_difference else "from"
    return f"{median}: {texts.comparison(speed, case.unit)} {than} {verdict.other}"
