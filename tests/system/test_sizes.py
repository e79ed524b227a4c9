"""Sizes as people give them."""

from __future__ import annotations

from typing import Any

import pytest

from unimem.system.limits import Limit
from unimem.system.sizes import parse_size


class Limits:
    """A machine of 1000 bytes, and a cgroup of 400, half used."""

    def memory_limits(self) -> tuple[Limit, ...]:
        return Limit("memory of the machine", 1000, 0, ""), Limit("cgroup /a", 400, 200, "")


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        ("8G", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("7", 7),
        ("50%", 200),
        ("12.5 %", 50),
        (" 100% ", 400),
    ],
)
def test_sizes_and_shares_of_the_least_limit(value: Any, nbytes: int) -> None:
    assert parse_size(value, "budget", Limits()) == nbytes


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (0, ValueError, "from 1 on, got 0"),
        (-5, ValueError, "got -5"),
        (1.5, TypeError, "a share such as '50%', got 1.5"),
        (True, TypeError, "got True"),
        (None, TypeError, "got None"),
        ("", ValueError, "a size such as '8G'"),
        ("0", ValueError, "above 0, got '0'"),
        ("0%", ValueError, "above 0, got '0%'"),
        ("101%", ValueError, "got '101%'"),
        ("-5%", ValueError, "got '-5%'"),
        ("half", ValueError, "got 'half'"),
    ],
)
def test_other_values_are_refused(value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^budget: .*{match}"):
        parse_size(value, "budget", Limits())
