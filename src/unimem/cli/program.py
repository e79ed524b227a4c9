"""`unimem` itself: the options before a command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from unimem.cli import terminal


def _show_version(is_asked: bool) -> None:
    if is_asked:
        terminal.show(f"unimem {version('unimem-llm')}\n")
        raise typer.Exit


def program(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """RAM, huge pages and KV caches for LLM inference, with every byte accounted for."""
