"""`unimem doctor`: what this machine gives to inference, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unimem.cli import terminal
from unimem.cli.options import model_path, value_option
from unimem.system.doctor import doctor as look
from unimem.system.machine_text import render


def doctor(
    disk: Annotated[
        Path | None,
        value_option(
            "PATH",
            "Measure the disk of a model or a folder with direct reads, and remember its speed for "
            "`unimem plan`. [default: read and write no data]",
            parser=model_path,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead (see docs/doctor.md).")
    ] = False,
) -> None:
    """Show what this machine gives inference, and what to change."""
    machine = look(disk=disk)
    if as_json:
        terminal.show(machine.to_json() + "\n")
        return
    terminal.show(render(machine, terminal.surface()) + "\n")
