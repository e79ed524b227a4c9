"""A command of typer, with the help that we want."""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperCommand


class Command(TyperCommand):
    """A command whose help names an argument in words, without the type that Python has for it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for each in self.params:
            if isinstance(each, TyperArgument):
                vars(each)["display_type_rich"] = lambda ctx: None
