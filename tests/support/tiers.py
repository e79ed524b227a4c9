"""The two tiers of the tests: `make test` is the fast one, and `make test-all` has everything.

A test that takes long and whose behaviour another one shows is marked ``slow``. A search takes
fewer examples in the fast tier.
"""

from __future__ import annotations

everything = False
"""Whether this run has both tiers; conftest.py sets it before tests are imported."""

n_left_out = 0
"""How many tests this run leaves to the larger tier."""


def examples(n: int) -> int:
    """Return how many of `n` examples a search tries in this run."""
    return n if everything else max(10, n // 10)
