"""Calls with each of their arguments given wrongly, and whether the errors are clear."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

import unimem as um
from support.contracts.things import Things

# Wrong for most arguments; what an argument takes of them anyway is its own affair.
WRONG: tuple[Any, ...] = (
    None,
    "wrong",
    "wr\0ng",
    b"wrong",
    -1,
    2**40,
    2**70,
    1.5,
    float("nan"),
    object(),
    [],
    ["x"],
    {"a": 1},
    np.zeros((2, 3)),
    np.array(1.5),
)
TYPED = (
    um.CapacityError,
    um.PlacementError,
    um.FormatError,
    um.ClosedError,
    um.FrozenError,
    BufferError,
    MemoryError,
    NotImplementedError,
)
Call = tuple[Callable[..., Any], dict[str, Any]]


def calls_of(table: str, known: Mapping[str, Any]) -> dict[str, Callable[[Things], Call]]:
    """Return the calls of a table: functions that make the callable and its arguments.

    A row is a name, and the call with `t` for the things and other `known` names; lines that are
    indented continue it.
    """

    def call_of(source: str) -> Callable[[Things], Call]:
        parsed = ast.parse(source.replace("\n    ", " "), mode="eval").body
        assert isinstance(parsed, ast.Call)
        made = ast.Call(ast.Name("dict", ast.Load()), [], parsed.keywords)
        function, arguments = ast.unparse(parsed.func), ast.unparse(made)

        def make(t: Things) -> Call:
            names = {**known, "t": t}
            return eval(function, names), eval(arguments, names)

        return make

    rows = re.findall(r"^(\S[^:]*): (.*(?:\n    .*)*)$", table, re.M)
    return {name: call_of(source) for name, source in rows}


def is_clear(error: Exception, argument: str) -> bool:
    """Whether an error is one of ours, or says which argument was wrong and what was expected."""
    words = str(error)
    if isinstance(error, TYPED) or (isinstance(error, OSError) and error.strerror):
        return bool(words)
    # Of several things, one that is wrong may be named.
    names = "|".join([argument, argument.removesuffix("s"), *argument.split("_or_")])
    return (
        type(error) in {TypeError, ValueError, IndexError}  # the last where a sequence is meant
        and re.search(rf"\b({names})\b", words) is not None
        and re.search("expected|must be|cannot|accepted|needs", words) is not None
    )


def unclear(things: Things, make: Callable[[Things], Call]) -> list[str]:
    """The wrong calls whose errors leave their caller in the dark."""
    found = []
    _, right = make(things)
    for argument in right:
        for wrong in WRONG:
            with ExitStack() as undo:
                call, arguments = make(type(things)(things.folder, undo, things.kept))
                try:
                    made = call(**arguments | {argument: wrong})
                except Exception as error:
                    if not is_clear(error, argument):
                        found.append(f"{argument}={wrong!r:.30}: {type(error).__name__}: {error}")
                else:
                    with suppress(AttributeError, BufferError):
                        made.close()
    return found
