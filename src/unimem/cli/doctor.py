"""`unimem doctor`: what this machine gives to inference, and what to change."""

from __future__ import annotations

from typing import Annotated

import typer

from unimem.cli import terminal
from unimem.system.doctor import doctor as look
from unimem.system.machine_text import render

__all__ = ["doctor"]


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead (see docs/doctor.md).")
    ] = False,
) -> None:
    """Show what this machine gives to inference, and what to change."""
    machine = look()
    if as_json:
        terminal.show(machine.to_json() + "\n")
        return
    terminal.show(render(machine, terminal.surface()) + "\n")
