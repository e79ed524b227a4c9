"""The work of `unimem bench`: measure, write, show."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ENOTDIR
from importlib.util import find_spec
from pathlib import Path

import typer

from unimem.base.atomic_file import NewFile, write_text
from unimem.base.install_hint import install_hint
from unimem.base.text import shorten
from unimem.cli import terminal
from unimem.cli.exits import FAILED, INTERRUPTED
from unimem_bench import markdown, page
from unimem_bench.cli.view import difference_lines, record_lines, suite_lines
from unimem_bench.compare import compare
from unimem_bench.record import Record
from unimem_bench.run import QUICK_S, Interrupted, Pass, run, schedule
from unimem_bench.run_folder import run_folder
from unimem_bench.suites import load_suite
from unimem_bench.texts import duration

# Optional packages, as all peers are.
_USEFUL = ("gguf", "pyperf", "safetensors")


def _schedule(names: Sequence[str], *, quick: bool, case: str) -> list[Pass]:
    try:
        return schedule(names, quick=quick, case=case)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_files(output: Path | None, plots: Path | None, page_file: Path | None) -> None:
    """Refuse files that cannot be written before anything is measured."""
    if (plots or page_file) and find_spec("matplotlib") is None:
        raise ImportError(f"plots need matplotlib: {install_hint('bench')}")
    for path in filter(None, (output, page_file)):
        NewFile(os.fspath(path)).close()
    if plots is not None:
        _make_folder(plots)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(ENOTDIR, "expected a folder, got a file", path) from None


@contextmanager
def _folder(path: Path | None) -> Iterator[Path]:
    """Yield the folder for files: the one given, or one that is deleted."""
    if path is not None:
        _make_folder(path)
        yield path.absolute()
        return
    with run_folder() as files:
        yield files


# ---- measuring ----------------------------------------------------------------------------------


def measure(
    names: Sequence[str], *, quick: bool, case: str, bounded: bool, folder: Path | None
) -> tuple[Record, int]:
    """Measure suites; return the record and the exit code.

    `quick`, `case` and `bounded` are as in `unimem_bench.run.run`; without a `folder`, files are
    deleted at the end. BadParameter if no case is chosen.
    """
    slow = [name for name in names if bounded and not load_suite(name).in_quick]
    if slow:
        names = [name for name in names if name not in slow]
        _tell(f"unimem: a quick run of all suites leaves out {', '.join(slow)}\n")
    passes = _schedule(names, quick=quick, case=case)
    absent = [name for name in _USEFUL if find_spec(name) is None]
    if absent:
        _tell(f"unimem: {', '.join(absent)}: not installed; {install_hint('bench')}\n")
    progress = _Progress(passes, bounded=bounded)
    try:
        with _folder(folder) as files:
            record = run(
                names,
                quick=quick,
                folder=files,
                case=case,
                bounded=bounded,
                progress=progress.update,
            )
    except Interrupted as interrupt:
        return interrupt.record, INTERRUPTED
    finally:
        progress.end()
    return record, FAILED if any(each.is_error for each in record.cases()) else 0


class _Progress:
    """The progress of a run: a line a pass, or on a terminal one line that changes.

    It changes between passes only: work beside them would take CPU time from them.
    """

    def __init__(self, passes: Sequence[Pass], *, bounded: bool) -> None:
        self._passes = passes
        self._bounded = bounded
        self._begins: list[float] = []
        self._is_terminal = sys.stderr is not None and terminal.is_terminal(sys.stderr)

    def update(self, line: str) -> None:
        """Show the pass that begins."""
        self._begins.append(time.monotonic())
        elapsed = duration(self._begins[-1] - self._begins[0])
        text = f"{line} ({len(self._begins)} of {len(self._passes)} passes), {elapsed} so far"
        left = self._left()
        text += f", about {duration(left)} to go" if left is not None else ""
        if self._is_terminal:
            _tell(f"\r\x1b[K{shorten(text, shutil.get_terminal_size().columns - 1)}")
        else:
            _tell(f"{text}\n")

    def _left(self) -> float | None:
        """Estimate the seconds to go, once each remaining suite has run before.

        A bounded run ends about when it has to; each suite needs some time in any case.
        """
        n_done = len(self._begins) - 1
        if self._bounded:
            left = QUICK_S - (self._begins[-1] - self._begins[0])
            return max(left, 3.0 * sum(each.number == 1 for each in self._passes[n_done:]))
        took: dict[str, float] = {}
        for each, begin, end in zip(self._passes, self._begins, self._begins[1:], strict=False):
            took[each.suite.name] = end - begin
        to_go = [each.suite.name for each in self._passes[n_done:]]
        return sum(took[name] for name in to_go) if took.keys() >= set(to_go) else None

    def end(self) -> None:
        """Remove the line."""
        if self._is_terminal:
            _tell("\r\x1b[K")


def _tell(text: str) -> None:
    """Write to standard error, and ignore errors: a run does not end for lack of a reader."""
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


# ---- what is written and shown ------------------------------------------------------------------


def read_records(paths: Sequence[Path]) -> Record:
    """Read records; suites of later ones replace those of the first."""
    first, *later = map(Record.read, paths)
    return functools.reduce(Record.with_suites_of, later, first)


def write_record(record: Record, path: Path) -> None:
    """Write a record."""
    write_text(path, record.to_json() + "\n")


def draw(record: Record, plots: Path | None, page_file: Path | None) -> None:
    """Write the plots and the page, if wanted."""
    if plots is not None:
        from unimem_bench.plots import save

        save(record, plots)
    if page_file is not None:
        page.write(record, page_file)


def show(record: Record, *, as_json: bool, as_markdown: bool) -> None:
    """Show a record."""
    if as_json:
        terminal.show(record.to_json() + "\n")
        return
    lines = markdown.record_lines(record) if as_markdown else record_lines(record)
    terminal.show("".join(f"{line}\n" for line in lines))


def show_differences(a: Path, b: Path, *, as_markdown: bool) -> None:
    """Show how two records differ."""
    found = compare(Record.read(a), Record.read(b))
    lines = markdown.difference_lines(found) if as_markdown else difference_lines(found)
    terminal.show("".join(f"{line}\n" for line in lines))


def show_cases(names: Sequence[str], *, quick: bool, case: str) -> None:
    """Show the questions and claims of suites."""
    _schedule(names, quick=quick, case=case)  # refuses a name without cases
    lines = suite_lines(map(load_suite, names), quick=quick, case=case)
    terminal.show("".join(f"{line}\n" for line in lines))
