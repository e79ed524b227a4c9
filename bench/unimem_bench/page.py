"""A record as a page of Markdown for a reader in a hurry: targets, key ratios, few pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from unimem.base.atomic_file import write_text
from unimem_bench.answers import answers
from unimem_bench.markdown import escape, table_lines, target_lines
from unimem_bench.record import Record, SuiteRecord
from unimem_bench.tables import (
    by_problem,
    case_table,
    machine_facts,
    suite_table,
    suite_targets,
    suite_title,
    targets,
)

_HEAD = """\
# Benchmarks

What unimem costs, beside its alternatives and beside what the machine can do at best. The sides of
a case are of one run, and this page is generated from the records of the runs that "The machine"
names. In brackets is where a second run would land, 95 times of 100. Losses of unimem are listed,
too."""

_DETAILS = """\
A row has the median of unimem, how it compares, and whether the target of this project is met.
All targets and suites follow. A suite has a row a case: the median of unimem (5th to 95th
percentile), and the peer and the limit beside which unimem does worst.
`unimem bench --from FILE --markdown` writes all sides and all sizes."""

_AGAIN = """\
To run it on another machine, and to make this page of that run:

```sh
pip install ./ggml '.[bench]'                        # in a checkout
unimem bench --output mine.json                      # about 30 minutes; with --quick 2
unimem bench --from mine.json --page benchmarks.md   # this page, with its pictures
unimem bench --from mine.json                        # all tables, on a terminal
unimem bench --from mine.json --plots plots          # all plots: cases, sizes, targets
unimem bench --compare a.json b.json                 # two runs beside each other
```"""

_METHOD = """\
## Method

- Claims are ratios. In each round every side runs once, the first side changes, and the ratio is
  taken inside the round: whatever slows one side slows the other as well.
- Several processes (passes) measure a suite, since the layout of memory differs between them.
- The interval of a ratio says where a second run of the same length would land, 95 times of 100: a
  bootstrap over passes and over the rounds in them. If it covers 1, the result is "no difference".
- Beside a median are the 5th and 95th percentile of all rounds.
- A round in which other processes or the hypervisor took CPU time is dropped and repeated.
- Threads are pinned. Memory and page cache are brought into a known state first; the first rounds
  are discarded.
- All sides do the same work: contents and sums are compared, outside of the measured time.
- A *peer* is an alternative to unimem, a *limit* the best that the machine can do: `memcpy`,
  reading memory, the disk.
- A target is met if the median keeps its limit; "within noise" means that the interval covers the
  limit.

`bench/README.md` in the repository describes the method and each suite."""


# The cases with pictures: a few of a suite, so that a picture stays small.
PICTURES = {
    "load": ("map-two-threads", "safetensors-two-threads", "cold", "staged"),
    "decode": ("prefill-q8_0", "decode-q8_0", "prefill-q4_k_m", "decode-q4_k_m"),
    "kv": ("append", "convert", "batch-large", "gather"),
}


def render(record: Record, pictures: Mapping[str, str], folder: str) -> str:
    """Write a record as Markdown; the same record gives the same text.

    `pictures` says which suites have a picture, and describes it; `folder` is their folder, as seen
    from the page.
    """
    return "\n".join(_lines(record, pictures, folder)) + "\n"


def _lines(record: Record, pictures: Mapping[str, str], folder: str) -> Iterator[str]:
    yield from [_HEAD, "", "## Ten questions", ""]
    for run in _runs(record):
        yield from [*_of_run(run), *table_lines(answers(record, run)), ""]
    yield _DETAILS
    yield from ["", "## Targets by suite", ""]
    yield from [f"**{targets(record).summary}.**", "", *table_lines(suite_targets(record))]
    yield from ["", "## The machine", "", "| | |", "|---|---|"]
    for name, text in machine_facts(record):
        yield f"| {name} | {escape(text)} |"
    findings = [each["what"] for each in record.machine.get("findings", ())]
    if findings:
        yield from ["", "What `unimem doctor` would change on it:", ""]
        yield from (f"- {escape(what)}" for what in findings)
    yield from ["", _AGAIN, "", _METHOD]
    for suite in record.suites:
        yield from ["", f"## {suite.name}", "", escape(suite_title(suite)), ""]
        if suite.name in pictures:
            yield f"![{escape(pictures[suite.name])}](<{folder}/{suite.name}.svg>)"
            yield ""
        yield from _suite_lines(suite)
    yield from ["", "## All targets"]
    for run in _runs(record):
        suites = [suite for suite in record.suites if suite.run == run]
        yield from ["", *_of_run(run), *target_lines(replace(record, suites=suites))]


def _runs(record: Record) -> Iterable[str | None]:
    """List the runs of a record, the first one first: rows of two machines share no table."""
    return dict.fromkeys([None, *(suite.run for suite in record.suites)])


def _of_run(run: str | None) -> list[str]:
    return [f"From the later run ({run}):", ""] if run is not None else []


def _suite_lines(suite: SuiteRecord) -> Iterator[str]:
    made = suite_table(suite)
    if made.rows:
        yield from table_lines(made)
    reasons = by_problem(map(case_table, suite.cases))
    if made.rows and reasons:
        yield ""
    for reason, names in reasons.items():
        yield f"- not measured, {escape(reason)}: {escape('; '.join(names))}"


def write(record: Record, path: Path) -> None:
    """Write the page, and its pictures into a folder beside it with the name of the page."""
    from unimem_bench import plots

    chosen = [
        replace(suite, cases=[each for each in suite.cases if each.name in PICTURES[suite.name]])
        for suite in record.suites
        if suite.name in PICTURES
    ]
    made = plots.save(replace(record, suites=chosen), path.parent / path.stem, PICTURES)
    pictures = {each.name: each.alt for each in made}
    write_text(path, render(record, pictures, path.stem))
