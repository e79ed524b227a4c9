"""The two tiers of the tests: `make test` runs the fast one, `make test-all` both.

A long test is marked ``slow`` if another test shows its behaviour. A search tries fewer examples in
the fast tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

everything = False
"""Whether this run has both tiers; conftest.py sets it before tests are imported."""

n_left_out = 0
"""How many tests this run leaves to the larger tier."""


def slow_after(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a table, with all after the first `n` marked slow."""
    found = list(cases)
    for i, case in enumerate(found[n:], n):
        if isinstance(case, type(pytest.param())):
            found[i] = pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
        else:
            values = case if isinstance(case, tuple) else (case,)
            found[i] = pytest.param(*values, marks=pytest.mark.slow)
    return found


def examples(n: int) -> int:
    """Return how many of `n` examples a search tries in this run."""
    return n if everything else max(10, n // 10)
