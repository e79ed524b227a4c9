"""What every test of the benchmarks leaves as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def cpus_of_the_process() -> Iterator[None]:
    """Benchmarks pin their thread; the tests behind them run on all CPUs again."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)
