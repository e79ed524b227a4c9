"""`unimem bench`: what unimem costs on this machine, beside what one would use instead."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from unimem.atomic_file import NewFile, write_text
from unimem.bench import markdown, page
from unimem.bench.compare import compare as find_differences
from unimem.bench.record import Record
from unimem.bench.run import Interrupted, Pass, run, schedule
from unimem.bench.suites import NAMES, load
from unimem.bench.texts import duration
from unimem.cli import FAILED, INTERRUPTED, terminal
from unimem.cli.bench_view import difference_lines, record_lines, suite_lines
from unimem.cli.options import AsJson
from unimem.cli.tables import fit

__all__ = ["bench"]

_INSTALL = "pip install 'unimem-llm[bench]'"

# What a run does without, as it does without any peer.
_USEFUL = ("gguf", "pyperf", "safetensors")

# What each way to use the command takes beside itself; without one of these, it measures.
_ALSO = {
    "--list": ("SUITE", "--quick", "--case"),
    "--from": ("--json", "--markdown", "--plots", "--page"),
    "--compare": ("--markdown",),
    "--advise": ("--quick", "--json"),
}


def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SUITE",
            help=f"What to measure: {', '.join(NAMES)}. [default: all]",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller sizes and fewer rounds: 2 minutes for all.")
    ] = False,
    case: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases with this in SUITE/CASE.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the record, as JSON.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Keep files that are measured with there. [default: a temporary folder]",
            show_default=False,
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show cases, questions and claims.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Show this record, and measure nothing."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Show how two records differ."),
    ] = None,
    advise: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", help="Measure which options of 'unimem run' suit this model best here."
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print tables as Markdown.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plots there, as SVG.")
    ] = None,
    page_file: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Write a page of Markdown, plots beside it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what unimem costs here, beside what one would use instead."""
    names = list(dict.fromkeys(suites or NAMES))
    given = {
        "SUITE": suites,
        "--quick": quick,
        "--case": case,
        "--output": output,
        "--dir": folder,
        "--list": show_list,
        "--from": source,
        "--compare": compare,
        "--advise": advise,
        "--markdown": as_markdown,
        "--plots": plots,
        "--page": page_file,
        "--json": as_json,
    }
    _check_usage([name for name, value in given.items() if value], names)
    if show_list:
        chosen = [load(name) for name in names]
        terminal.show("".join(f"{x}\n" for x in suite_lines(chosen, quick=quick, case=case)))
    elif compare is not None:
        _compare(*compare, as_markdown=as_markdown)
    elif advise is not None:
        from unimem.cli.bench_advise import show_advice

        show_advice(advise, quick=quick, as_json=as_json)
    else:
        _check_files(output, plots, page_file)
        if source is not None:
            record, code = Record.read(source), 0
        else:
            passes = _schedule(names, quick=quick, case=case)
            with _folder(folder) as files:
                record, code = _measure(names, passes, quick=quick, case=case, folder=files)
        if output is not None:
            write_text(output, record.to_json() + "\n")
        if code != INTERRUPTED:  # of half a run nobody wants them
            _draw(record, plots, page_file)
        _show(record, as_json=as_json, as_markdown=as_markdown)
        if code:
            raise typer.Exit(code)


# ---- usage --------------------------------------------------------------------------------------


def _check_usage(given: Sequence[str], names: Sequence[str]) -> None:
    ways = [name for name in _ALSO if name in given]
    if len(ways) > 1:
        raise typer.BadParameter(f"expected one of {', '.join(_ALSO)}, got {' and '.join(ways)}")
    for way in ways:
        for name in given:
            if name != way and name not in _ALSO[way]:
                raise typer.BadParameter(f"{name} is not for {way}")
    if "--json" in given and "--markdown" in given:
        raise typer.BadParameter("expected one of --json and --markdown, got both")
    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(f"no suite {name!r}: there are {', '.join(NAMES)}")


def _schedule(names: Sequence[str], *, quick: bool, case: str) -> list[Pass]:
    try:
        return schedule(names, quick=quick, case=case)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _check_files(output: Path | None, plots: Path | None, page_file: Path | None) -> None:
    """Refuse what cannot be written now, and not after everything was measured."""
    if (plots or page_file) and find_spec("matplotlib") is None:
        raise ImportError(f"plots need matplotlib, which comes with: {_INSTALL}")
    for path in filter(None, (output, page_file)):
        NewFile(os.fspath(path)).close()
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    """Give the folder for files: one that stays, or one that is deleted."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.absolute()
        return
    # On many systems /tmp is memory, and what is measured are files on disks.
    has_disk = "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK)
    parent = "/var/tmp" if has_disk else None
    with tempfile.TemporaryDirectory(prefix="unimem-bench-", dir=parent) as name:
        yield Path(name)


# ---- measuring ----------------------------------------------------------------------------------


def _measure(
    names: Sequence[str], passes: Sequence[Pass], *, quick: bool, case: str, folder: Path
) -> tuple[Record, int]:
    """Measure, and give the exit code with what was measured."""
    absent = [name for name in _USEFUL if find_spec(name) is None]
    if absent:
        _tell(f"unimem: {', '.join(absent)}: not installed, but would come with {_INSTALL}\n")
    progress = _Progress(passes)
    try:
        record = run(names, quick=quick, folder=folder, case=case, progress=progress.update)
    except Interrupted as interrupt:
        return interrupt.record, INTERRUPTED
    finally:
        progress.end()
    return record, FAILED if any(each.is_error for each in record.cases()) else 0


class _Progress:
    """How far a run is: a line a pass, or on a terminal one line that changes.

    It changes between the passes only: whatever runs beside them would take CPU time from them.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes
        self._begins: list[float] = []
        self._is_terminal = sys.stderr is not None and terminal.is_terminal(sys.stderr)

    def update(self, line: str) -> None:
        """Show what begins."""
        self._begins.append(time.monotonic())
        elapsed = duration(self._begins[-1] - self._begins[0])
        text = f"{line} ({len(self._begins)} of {len(self._passes)} passes), {elapsed} so far"
        left = self._left()
        text += f", about {duration(left)} to go" if left is not None else ""
        if self._is_terminal:
            _tell(f"\r\x1b[K{fit(text, shutil.get_terminal_size().columns - 1)}")
        else:
            _tell(f"{text}\n")

    def _left(self) -> float | None:
        """Guess the seconds to go, once each suite that is still to run has run before."""
        n_done = len(self._begins) - 1
        took: dict[str, float] = {}
        for each, begin, end in zip(self._passes, self._begins, self._begins[1:], strict=False):
            took[each.suite.name] = end - begin
        to_go = [each.suite.name for each in self._passes[n_done:]]
        return sum(took[name] for name in to_go) if took.keys() >= set(to_go) else None

    def end(self) -> None:
        """Take the line away."""
        if self._is_terminal:
            _tell("\r\x1b[K")


def _tell(text: str) -> None:
    """Write to standard error, if anybody reads it: a run does not end for that."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


# ---- what is shown ------------------------------------------------------------------------------


def _draw(record: Record, plots: Path | None, page_file: Path | None) -> None:
    if plots is not None:
        from unimem.bench.plots import save

        save(record, plots)
    if page_file is not None:
        page.write(record, page_file)


def _show(record: Record, *, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        terminal.show(record.to_json() + "\n")
        return
    lines = markdown.record_lines(record) if as_markdown else record_lines(record)
    terminal.show("".join(f"{line}\n" for line in lines))


def _compare(a: Path, b: Path, *, as_markdown: bool) -> None:
    found = find_differences(Record.read(a), Record.read(b))
    lines = markdown.difference_lines(found) if as_markdown else difference_lines(found)
    terminal.show("".join(f"{line}\n" for line in lines))
