"""Processes that are killed while they use a store: budgets hold, no wrong chunk is restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Run
from support.project.checkout import ROOT


@pytest.mark.parametrize(
    ("workers", "operations", "kills", "damages", "least"),
    [(3, 400, 8, 40, 0.1), pytest.param(8, 10_000, 60, 2_000, 0.7, marks=pytest.mark.slow)],
)
def test_kills_at_random_moments(
    run_python: Run,
    tmp_path: Path,
    workers: int,
    operations: int,
    kills: int,
    damages: int,
    least: float,
) -> None:
    # In a process of its own with one thread, so that it may fork.
    options = {"workers": workers, "operations": operations, "kills": kills, "damages": damages}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tools")!r})
        import store_kills
        store_kills.main([*{arguments!r}, "--dir", {str(tmp_path)!r}])
        """,
        OPENBLAS_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["operations"] >= operations
    assert found["kills"] >= kills
    assert found["restored_tokens"] > operations, found
    assert found["damaged_meanwhile"] > 0, found
    assert found["noticed"] == damages
    # Chunks had to make room. A fifth of what a chunk counts is for the file system.
    assert all(least < found[f"most_of_{tier}"] <= 1 for tier in ("ram", "disk")), found
    assert set(found["left"]) <= {"kv", "lock", "unimem-tmp"}
