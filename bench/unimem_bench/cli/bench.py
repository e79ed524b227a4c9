"""`unimem bench`: what unimem costs on this machine, beside its alternatives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from unimem.cli.exits import INTERRUPTED
from unimem.cli.options import AsJson
from unimem_bench.suites import NAMES

# The options that each way of using the command allows; without one of these ways, it measures.
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
            help=f"What to measure: {', '.join(NAMES)}. [default: all; as root without pressure]",
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
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Show this record, and measure nothing. Given again: suites of a later run.",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Show how two records differ.")
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
    """Measure what unimem costs here, beside its alternatives."""
    names = list(dict.fromkeys(suites or NAMES))
    if not (suites or "pressure" in case or show_list or os.geteuid()):
        names.remove("pressure")  # it takes the machine's memory: root asks for it by its name
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
    if advise is not None:
        from unimem_bench.cli.advise import show_advice

        show_advice(advise, quick=quick, as_json=as_json)
        return
    # Imported here, since it would make every command start later.
    from unimem_bench.cli import run as bench_run

    if show_list:
        bench_run.show_cases(names, quick=quick, case=case)
    elif compare is not None:
        bench_run.show_differences(*compare, as_markdown=as_markdown)
    else:
        bench_run.check_files(output, plots, page_file)
        if source:
            record, code = bench_run.read_records(source), 0
        else:
            # All suites have two minutes together; what is named takes its time.
            bounded = quick and not (suites or case)
            record, code = bench_run.measure(
                names, quick=quick, case=case, bounded=bounded, folder=folder
            )
        try:
            if output is not None:
                bench_run.write_record(record, output)
            if code != INTERRUPTED:  # half a run gets no plots
                bench_run.draw(record, plots, page_file)
        finally:  # a full disk does not lose what was measured
            bench_run.show(record, as_json=as_json, as_markdown=as_markdown)
        if code:
            raise typer.Exit(code)


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
