"""A record as a page of Markdown: the machine, the method, all targets, tables and plots."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unimem.system.atomic_file import write_text
from unimem_bench.markdown import case_lines, escape, target_lines
from unimem_bench.record import Record
from unimem_bench.tables import machine_facts, suite_title

if TYPE_CHECKING:
    from unimem_bench.plots import Plot

__all__ = ["render", "write"]

_HEAD = """\
# Benchmarks

What unimem costs, beside what one would use instead and beside what the machine can do at best,
measured in the same run. All of this page is generated from the record of one run; nothing in it is
typed by hand."""

_AGAIN = """\
To run it on another machine, and to make this page of that run:

```sh
pip install 'unimem-llm[bench]'
unimem bench --output mine.json                      # about 30 minutes; with --quick 2
unimem bench --from mine.json --page benchmarks.md   # this page, with its plots beside it
unimem bench --from mine.json                        # the same tables on a terminal
unimem bench --compare a.json b.json                 # two runs beside each other
```"""

_METHOD = """\
## Method

- What is claimed are ratios. In each round every side runs once, the one that begins changes, and
  the ratio is taken inside the round: what slows one side slows the other as well.
- A suite is measured by several processes (passes), since where memory comes to lie is another in
  each.
- The interval of a ratio says where a second run of the same length would land, 95 times of 100: a
  bootstrap over passes and over the rounds in them. Where it covers 1, it says "no difference".
- Beside a median are the 5th and 95th percentile of all rounds.
- A round in which other processes or the hypervisor took CPU time is dropped and run again.
- Threads are pinned. Memory and page cache are brought into a known state first; the first rounds
  are thrown away.
- All sides do the same work: contents and sums are compared, outside of the measured time.
- A *peer* is what one would use instead, a *limit* what the machine can do at best: `memcpy`,
  reading memory, the disk.
- A target is met if the median keeps its limit; "within noise" says that the interval covers the
  limit.

`bench/README.md` in the repository says more of this, and of each suite."""


def render(record: Record, plots: Sequence[Plot], folder: Path) -> str:
    """Write a record as a page.

    Parameters
    ----------
    record : Record
        What was measured.
    plots : sequence of Plot
        Of the same record.
    folder : Path
        Where the page will be: images are named from there.

    Returns
    -------
    str
        Markdown; the same for the same record.
    """
    return "\n".join(_lines(record, plots, folder)) + "\n"


def _lines(record: Record, plots: Sequence[Plot], folder: Path) -> Iterator[str]:
    yield from [_HEAD, "", "## The machine", "", "| | |", "|---|---|"]
    for name, text in machine_facts(record):
        yield f"| {name} | {escape(text)} |"
    findings = [each["what"] for each in record.machine.get("findings", ())]
    if findings:
        yield from ["", "What `unimem doctor` would change on it:", ""]
        yield from (f"- {escape(what)}" for what in findings)
    yield from ["", _AGAIN, "", _METHOD, "", "## All targets", ""]
    yield from _images(plots, None, folder)
    yield from target_lines(record)
    for suite in record.suites:
        yield from ["", f"## {suite.name}", "", escape(suite_title(suite)), ""]
        yield from _images(plots, suite.name, folder)
        for i, case in enumerate(suite.cases):
            yield from ([""] if i else [])
            yield from case_lines(case)


def _images(plots: Sequence[Plot], suite: str | None, folder: Path) -> Iterator[str]:
    for plot in plots:
        if plot.suite == suite:
            path = Path(os.path.relpath(plot.path, folder)).as_posix()
            yield from [f"![{escape(plot.alt)}](<{path}>)", ""]


def write(record: Record, path: Path) -> None:
    """Write the page, and its plots into a folder beside it that is called as the page is.

    Parameters
    ----------
    record : Record
        What was measured.
    path : Path
        Of the page, as ``docs/benchmarks.md``; its plots are ``docs/benchmarks/*.svg`` then.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    OSError
        If something cannot be written.
    """
    from unimem_bench import plots

    made = plots.save(record, path.parent / path.stem)
    write_text(path, render(record, made, path.parent))
