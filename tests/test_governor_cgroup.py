"""A cgroup that shrinks while a process in it decodes: governed, it lives, and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from support.kernel.lowered_limit import run_once

N_RUNS = 3


def check(run: dict[str, Any]) -> None:
    assert run["status"] == 0, run
    assert run["lowered"], run
    assert run["changed"] == 0, run
    assert run["stories"] > 0, run
    assert run["given_back_bytes"] > 20 << 20, run


@pytest.mark.slow
def test_a_limit_that_is_lowered() -> None:
    for _ in range(N_RUNS):
        check(run_once(governed=True))


@pytest.mark.slow
def test_ungoverned_it_cannot_be_lowered_or_kills() -> None:
    run = run_once(governed=False, seconds=2)
    assert run["given_back_bytes"] == 0
    assert not run["lowered"] or run["status"] != 0
