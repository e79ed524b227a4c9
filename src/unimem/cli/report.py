"""`unimem report`: where the memory of a process is, of any program."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from unimem.accounting.report import Mapping, Report
from unimem.accounting.report import report as make_report
from unimem.cli import terminal
from unimem.cli.options import AsJson
from unimem.cli.processes import ModelProcess, Processes, find
from unimem.cli.tables import Bar, fact_lines, room, table_lines, wrap
from unimem.system.placement import Placement, sum_placements
from unimem.system.text import format_bytes

__all__ = ["memory_lines", "report"]

_MODELS = 4  # named in the page
_STATES = {
    "unnamed": "memory without a path",
    "replaced": "another file is at this path now",
    "deleted": "no file is at this path any more",
}
_COUNTERS = {
    "n_prompt_tokens": "tokens read",
    "n_generated_tokens": "made",
    "kv_tokens": "in the KV cache",
}
_WIDE = 110  # columns, from which on there is room for paths


def report(
    pid: Annotated[
        str | None,
        typer.Argument(
            metavar="PID",
            help="The number of a process; without one, all that have a model are listed.",
            show_default=False,
        ),
    ] = None,
    mappings: Annotated[
        bool, typer.Option("--mappings", help="Add a line a mapping, what is in RAM first.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until q is pressed.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=86400,
            metavar="SECONDS",
            help="Time between two, with --watch. [default: 1]",
            show_default=False,
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Show it so many times, with --watch. [default: without end]",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of any process is."""
    number = None if pid is None else _number(pid)
    if watch:
        if mappings:
            raise typer.BadParameter("--mappings is not for --watch: press m there")
        from unimem.cli.watch import watch as keep_showing

        keep_showing(_only() if number is None else number, interval or 1.0, count, as_json)
        return
    for option, value in (("--interval", interval), ("--count", count)):
        if value is not None:
            raise typer.BadParameter(f"{option} is for --watch")
    if number is None:
        if mappings:
            raise typer.BadParameter("--mappings needs PID: 'unimem report' lists processes")
        seen = find()
        text = json.dumps(seen.to_dict()) if as_json else "\n".join(_list(seen))
    else:
        made = make_report(number)
        text = made.to_json() if as_json else "\n".join(_page(made, mappings=mappings))
    terminal.show(text + "\n")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise typer.BadParameter(
            f"expected PID, the number of a process, got {text!r}: 'unimem report' lists those "
            "that have a model, 'ps -e' all"
        )
    return int(text)


def _only() -> int:
    """Return the process that is meant where none is named."""
    seen = find().found
    if len(seen) != 1:
        raise ValueError(
            f"{len(seen)} processes have a model: name one, which 'unimem report' or 'ps -e' lists"
        )
    return seen[0].pid


# ---- which process ------------------------------------------------------------------------------


def _list(seen: Processes) -> Iterator[str]:
    rows = [
        (
            str(each.pid),
            format_bytes(each.pss_bytes),
            format_bytes(each.rss_bytes),
            _short_command(each),
            _names(each.models) or "none mapped",
        )
        for each in seen.found
    ]
    if rows:
        head = ("pid", "in RAM", "Rss", "command", "model")
        yield from table_lines(head, rows, align=">>><<", spare=("Rss",))
        text = "unimem report PID shows where the memory of one is, with --watch as it changes."
    else:
        text = (
            "No process has a model file mapped. One that has read a model into memory of its own "
            "is not found so: unimem report PID takes any, and ps -e lists all."
        )
    if seen.n_hidden:
        n = "1 process is" if seen.n_hidden == 1 else f"{seen.n_hidden} processes are"
        text += f" {n} not ours to look at."
    yield from ["", *wrap(text, room())]


def _short_command(process: ModelProcess) -> str:
    program, _, arguments = process.command.partition(" ")
    return f"{os.path.basename(program) or process.name} {arguments}".rstrip()


def _names(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{_named(paths[0])}{more}" if paths else ""


def _named(path: str) -> str:
    """Give a path, or where lines are short the name of the file."""
    return path if room() >= _WIDE else os.path.basename(path)


# ---- one process --------------------------------------------------------------------------------


def _page(report: Report, *, mappings: bool) -> Iterator[str]:
    yield from fact_lines(_heading(report))
    yield ""
    yield from memory_lines(report)
    yield ""
    yield from fact_lines(_sums(report))
    if mappings:
        yield ""
        yield from _mappings(report.mappings)


def _heading(report: Report) -> Iterator[tuple[str, str]]:
    known = report.facts
    yield "process", f"{known['pid']} {known['command'] or known['name']}"
    models = sorted(known["models"], key=lambda model: -model["nbytes"])
    for model in models[:_MODELS]:
        yield "model", f"{model['path']} ({'; '.join(_about(model))})"
    if len(models) > _MODELS:
        yield "", f"and {len(models) - _MODELS} more files, which --json names"
    if counters := known.get("counters"):
        yield "engine", ", ".join(_counted(counters))
    if problem := known.get("problem"):
        yield "problem", problem


def _about(model: dict[str, Any]) -> Iterator[str]:
    size, in_ram = format_bytes(model["nbytes"]), format_bytes(model["rss_bytes"])
    is_all = model["rss_bytes"] >= model["nbytes"]
    yield f"{size}, all in RAM" if is_all else f"{in_ram} of {size} in RAM"
    if model["staged_from"] is not None:
        yield f"staged from {model['staged_from']}"
    if (state := _STATES.get(model["state"])) is not None:
        yield state
    if model["problem"] is not None:
        yield model["problem"]


def _counted(counters: dict[str, int]) -> Iterator[str]:
    # Of another version of unimem there may be others.
    for name, text in _COUNTERS.items():
        if name in counters:
            yield f"{counters[name]:,} {text}"


def memory_lines(report: Report) -> Iterator[str]:
    """Write the rows of a report and their sums as a table, with a bar of what is in RAM."""
    total = report.resident_bytes
    columns: dict[str, list[int | None]] = {
        "size": [row.nbytes for row in report.rows],
        "in RAM": [row.resident_bytes for row in report.rows],
        "active": [row.active_bytes for row in report.rows],
    }
    if room() >= _WIDE:
        columns["most"] = [row.high_water_bytes for row in report.rows]
    # What is known of none is not shown.
    columns = {name: sizes for name, sizes in columns.items() if any(sizes)}
    known = columns.values()
    sums = {"size": report.total_bytes, "in RAM": total}
    rows = [
        [
            row.category if row.device is None else f"{row.category} on {row.device}",
            *("-" if sizes[i] is None else format_bytes(sizes[i] or 0) for sizes in known),
            _pages(row.granted),
        ]
        for i, row in enumerate(report.rows)
    ]
    rows.append(["total", *(format_bytes(sums[c]) if c in sums else "" for c in columns), ""])
    for device, nbytes in report.device_bytes.items():
        rows.append([f"total on {device}", format_bytes(nbytes), *[""] * len(columns)])
    shares = [(row.resident_bytes or 0) / total if total else 0.0 for row in report.rows]
    bars = [Bar(share) for share in shares] + [None] * (len(rows) - len(shares))
    spare = ("pages", *(name for name in ("most", "active") if name in columns))
    yield from table_lines(("memory", *columns, "pages"), rows, bars=bars, spare=spare)


def _pages(granted: Placement | None) -> str:
    if granted is None:
        return "-"
    # What is of several mappings has the pages of that with the smallest.
    if granted.pages == "4k" and granted.huge_bytes:
        return f"{granted.huge_bytes / granted.resident_bytes:.0%} huge"
    return granted.pages


def _sums(report: Report) -> Iterator[tuple[str, str]]:
    placed = [row.granted for row in report.rows if row.granted and row.device is None]
    known, size = report.facts, format_bytes
    faults = f"{known['minor_faults']:,} minor, {known['major_faults']:,} major"
    if placed:
        all_ = sum_placements(placed)
        rss, huge = all_.resident_bytes, all_.huge_bytes
        nodes = [f"{size(nbytes)} on node {node}" for node, nbytes in sorted(all_.nodes.items())]
        of_it = [f"{size(huge)} in huge pages ({huge / rss if rss else 0:.0%})"]
        of_it += [f"{size(all_.locked_bytes)} locked", *nodes]
        yield "in RAM", f"{size(all_.pss_bytes)} (Pss), {size(rss)} with all that is shared (Rss)"
        yield "of Rss", ", ".join(of_it)
        faults += f"; {size(all_.swapped_bytes)} swapped out"
    yield "faults", faults


def _mappings(mappings: Sequence[Mapping]) -> Iterator[str]:
    rows = [
        (
            f"{each.address:x}",
            format_bytes(each.nbytes),
            format_bytes(each.granted.pss_bytes),
            each.granted.pages,
            _kind(each),
            _named(each.path) if each.path else each.name,
        )
        for each in sorted(mappings, key=lambda each: (-each.granted.pss_bytes, -each.nbytes))
    ]
    head = ("address", "size", "in RAM", "pages", "memory", "name")
    yield from table_lines(head, rows, align=">>>><<", spare=("address", "pages", "memory"))


def _kind(mapping: Mapping) -> str:
    """Name the category that most of a mapping is, and how many others there are."""
    parts = sorted(mapping.parts, key=lambda category: -mapping.parts[category])
    first, *others = parts or [mapping.category]
    return f"{first} +{len(others)}" if others else first
