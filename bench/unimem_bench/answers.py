"""Ten questions of a user, each with the target of a record that answers it."""

from __future__ import annotations

from typing import NamedTuple

from unimem_bench import stats, texts
from unimem_bench.record import BEST, Record
from unimem_bench.stats import Growth, Ratio, Verdict
from unimem_bench.tables import Table, TableRow, Tone, size_text


class Question(NamedTuple):
    """A question, and the target that answers it."""

    text: str
    case: str  # the target's, as ``suite/name``
    other: str | None = None  # the side that the target compares with, where it does


QUESTIONS = (
    Question("How much of a token's time is bookkeeping in Python?", "decode/python-q8_0"),
    Question("Is decode as fast as llama.cpp's?", "decode/decode-q8_0", "llama.cpp"),
    Question("And with Q4_K_M weights?", "decode/decode-q4_k_m", "llama.cpp"),
    Question(
        "Is a prompt computed as fast, with such weights?", "decode/prefill-q4_k_m", "llama.cpp"
    ),
    Question("What does it cost to append a token to the KV cache?", "kv/append", "NumPy"),
    Question("Does a token cost more late in a conversation?", "scaling/append-after"),
    Question("How long until a model on the disk is in memory?", "load/cold", BEST),
    Question(
        "How soon does llama.cpp start from a staged model?",
        "load/staged",
        "the file, as it was written",
    ),
    Question("How fast is a snapshot saved?", "snapshot/save", "write, fsync"),
    Question("How soon does a saved conversation go on?", "snapshot/first-token", "prefill"),
)


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
