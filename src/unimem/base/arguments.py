"""Checks of arguments, whose messages name the argument, what was expected, and what was given."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")


def integer(
    value: object, name: str = "", least: int | None = None, most: int | None = None
) -> int:
    """Return an integer from `least` to `most`, or an object with ``__index__``, as an `int`.

    Raise TypeError for anything else, also a bool, and ValueError outside the range.
    """
    start = f"{name}: " if name else ""
    exact = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            exact = operator.index(value)  # type: ignore[arg-type]
    low = "" if least is None else f" from {least}" + (" on" if most is None else f" to {most}")
    if exact is None:
        raise TypeError(f"{start}expected an integer{low}, got {value!r:.60}")
    if (least is not None and exact < least) or (most is not None and exact > most):
        raise ValueError(f"{start}expected an integer{low}, got {exact}")
    return exact


def flag(value: object, name: str) -> bool:
    """Return a bool, or NumPy's, as a `bool`; raise ValueError for others, as ``"no"`` is True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}: expected False or True, got {value!r:.60}")
    return bool(value)


def one_of(value: object, name: str, choices: Collection[str]) -> str:
    """Return one of some words; raise ValueError for any other value."""
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r:.60}")


def instance(value: object, name: str, kind: type[_T]) -> _T:
    """Return a value of a class; raise TypeError for anything else."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r:.60}")
    return value


def string(value: object, name: str, default: str = "") -> str:
    """Return a string, or the default, if there is one, for None and an empty string.

    Raise TypeError for anything else, and ValueError for half of a surrogate pair, unless that is a
    byte of a file's name.
    """
    if default and (value is None or (isinstance(value, str) and not value)):
        return default
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, got {value!r:.60}")
    try:
        os.fsencode(value)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected text that UTF-8 can write, got one of the surrogates at index "
            f"{error.start}"
        ) from None
    return value


def file_path(value: object, name: str = "path") -> str:
    """Return the path of a file as a string.

    Raise TypeError for other things, such as a descriptor or an open file, and ValueError if no
    file can have this path.
    """
    try:
        path = os.fsdecode(value)  # type: ignore[arg-type]
        os.fsencode(path)
    except TypeError:
        raise TypeError(f"{name}: expected the path of a file, got {value!r:.60}") from None
    except UnicodeEncodeError:
        raise ValueError(
            f"{name}: expected the path of a file, got {value!r:.60}, which has a lone half of a "
            "character"
        ) from None
    if "\0" in path:
        raise ValueError(f"{name}: expected the path of a file, got {value!r:.60} with a NUL byte")
    return path


def check_callable(value: Callable[..., Any] | None, name: str = "progress") -> None:
    """Raise TypeError for a callback that cannot be called; None is no callback."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}: expected a function of two integers, got {value!r:.60}")
