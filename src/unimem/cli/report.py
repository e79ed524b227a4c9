"""`unimem report`: the memory of a process, of any program."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Annotated

import typer

from unimem.accounting.report import report as make_report
from unimem.accounting.report_text import report_lines
from unimem.accounting.samples import Sampler
from unimem.base.text import Surface, format_bytes, format_count, shorten_path, table_lines, wrap
from unimem.cli import terminal
from unimem.cli.html_page import write_page
from unimem.cli.options import AsJson, value_option
from unimem.cli.processes import ModelProcess, Processes, find


def report(
    pid: Annotated[
        str | None,
        typer.Argument(
            metavar="PID",
            help="The number of a process; without one, list all that have a model.",
            show_default=False,
        ),
    ] = None,
    mappings: Annotated[
        bool,
        typer.Option("--mappings", help="Add one line for each mapping, the largest in RAM first."),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh it until Ctrl-C, with rates and growth.")
    ] = False,
    interval: Annotated[
        float | None,
        value_option(
            "SECONDS", "Time from one to the next, with --watch. [default: 1]", min=0.1, max=86400
        ),
    ] = None,
    count: Annotated[
        int | None,
        value_option("N", "Show it N times, with --watch. [default: until Ctrl-C]", min=1),
    ] = None,
    html: Annotated[
        str | None,
        value_option(
            "FILE",
            "Write it as one page that needs no network, with all mappings; with --watch at "
            "the end, and how the memory has grown.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of any process is."""
    number = None if pid is None else process_number(pid)
    _check_html(html, mappings=mappings, as_json=as_json and not watch)
    if watch:
        if mappings:
            raise typer.BadParameter("--mappings is not for --watch: leave one out")
        from unimem.cli.watch import watch as keep_showing

        keep_showing(_only() if number is None else number, interval or 1.0, count, as_json, html)
        return
    for option, value in (("--interval", interval), ("--count", count)):
        if value is not None:
            raise typer.BadParameter(f"{option} is for --watch")
    if html is not None:
        if number is None:
            raise typer.BadParameter("--html needs PID: 'unimem report' lists processes")
        write_page(html, Sampler(number).sample())
        return
    if number is None:
        if mappings:
            raise typer.BadParameter("--mappings needs PID: 'unimem report' lists processes")
        seen = find()
        text = json.dumps(seen.to_dict()) if as_json else "\n".join(_list(terminal.surface(), seen))
    else:
        made = make_report(number)
        lines = report_lines(
            terminal.surface(), made.rows, made.facts, made.mappings if mappings else ()
        )
        text = made.to_json() if as_json else "\n".join(lines)
    terminal.show(text + "\n")


def _check_html(html: str | None, *, mappings: bool, as_json: bool) -> None:
    if html is None:
        return
    if not html:
        raise typer.BadParameter("--html: expected the path of a file, got ''")
    if mappings:
        raise typer.BadParameter("--mappings is not for --html: the page has them")
    if as_json:
        raise typer.BadParameter("--json is not for --html: write one, then the other")


def process_number(text: str) -> int:
    """Read the number of a process; refuse other texts as wrong usage."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,9}", text):
        raise typer.BadParameter(
            f"expected PID, the number of a process, got {text!r:.40}: 'unimem report' lists those "
            "that have a model, 'ps -e' all"
        )
    return int(text)


def _only() -> int:
    """Return the process that is meant if none is named."""
    # A process that only keeps a model for others counts only if it is named.
    seen = [each for each in find().found if each.has_ledger or not each.keeps_staged]
    if len(seen) != 1:
        raise ValueError(
            f"{len(seen)} processes have a model: name one, which 'unimem report' or 'ps -e' lists"
        )
    return seen[0].pid


# ---- which process ------------------------------------------------------------------------------


def _list(surface: Surface, seen: Processes) -> Iterator[str]:
    rows = [
        (
            str(each.pid),
            format_bytes(each.pss_bytes),
            format_bytes(each.rss_bytes),
            _short_command(each),
            _names(surface, each) or "none mapped",
        )
        for each in seen.found
    ]
    if rows:
        head = ("pid", "in RAM", "Rss", "command", "model")
        yield from table_lines(surface, head, rows, align=">>><<", spare=("Rss",))
        text = "unimem report PID shows the memory of one, with --watch as it changes."
    else:
        text = (
            "No process has a model file mapped. A process that has read a model into memory of "
            "its own is not listed: unimem report PID takes any, and ps -e lists all."
        )
    if seen.n_hidden:
        n = format_count(seen.n_hidden, "process", "es")
        text += f" {n} {'is' if seen.n_hidden == 1 else 'are'} not ours to look at."
    yield from ["", *wrap(text, surface.width)]


def _short_command(process: ModelProcess) -> str:
    program, _, arguments = process.command.partition(" ")
    return f"{os.path.basename(program) or process.name} {arguments}".rstrip()


def _names(surface: Surface, process: ModelProcess) -> str:
    """Name the models of a process; a staged one by the file that it was staged from."""
    if not process.models:
        return ""
    source = next(iter(process.staged_from), None)
    more = f" and {len(process.models) - 1} more" if len(process.models) > 1 else ""
    how = ", staged" if source is not None else ""
    if process.keeps_staged:
        how = ", kept for others"
    return f"{shorten_path(surface, source or process.models[0])}{more}{how}"
