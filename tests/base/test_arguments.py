"""Argument checks: valid values are converted, invalid ones are refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unimem.base.arguments import check_callable, file_path, flag, instance, integer, one_of, string


@pytest.mark.parametrize(("check", "value", "expected"), [
    (integer, np.int64(64), 64),
    (lambda v: integer(v, "n", 1, 3), 3, 3),
    (lambda v: flag(v, "lock"), np.bool_(True), True),
    (lambda v: one_of(v, "load", ("map", "copy")), "map", "map"),
    (lambda v: string(v, "name", "usual"), None, "usual"),
    (lambda v: instance(v, "n", int), True, True),
    (lambda v: string(v, "name"), os.fsdecode(b"\xff"), "\udcff"),
    (file_path, Path("a"), "a"),
    (file_path, b"a\xff", "a\udcff"),
    (check_callable, None, None),
])  # fmt: skip
def test_good_values_are_converted(check: Callable[[Any], Any], value: Any, expected: Any) -> None:
    assert check(value) == expected


@pytest.mark.parametrize(("check", "value", "kind", "says"), [
    (lambda v: integer(v, "n"), True, TypeError, "n: expected an integer, got True"),
    (lambda v: integer(v, "n", 1), 0, ValueError, "n: expected an integer from 1 on, got 0"),
    (lambda v: integer(v, "n", 1, 3), 1.0, TypeError, "n: expected an integer from 1 to 3, got"),
    (lambda v: flag(v, "lock"), "no", ValueError, "lock: expected False or True, got 'no'"),
    (lambda v: one_of(v, "load", ("map",)), ["map"], ValueError, "load: expected one of map"),
    (lambda v: instance(v, "n", str), 3, TypeError, "n: expected a str, got 3"),
    (lambda v: string(v, "name"), 3, TypeError, "name: expected a string, got 3"),
    (lambda v: string(v, "name"), "a\ud800", ValueError, "surrogates at index 1"),
    (file_path, 3.5, TypeError, "path: expected the path of a file, got 3.5"),
    (file_path, "a\0b", ValueError, "with a NUL byte"),
    (file_path, "a\ud800", ValueError, "a lone half of a character"),
    (check_callable, 3, TypeError, "progress: expected a function of two integers, got 3"),
])  # fmt: skip
def test_bad_values_are_refused_by_name(
    check: Callable[[Any], Any], value: Any, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind) as refused:
        check(value)
    assert says in str(refused.value)
