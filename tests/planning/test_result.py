"""A plan as text."""

from __future__ import annotations

import pytest

import unimem as um

DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)


@pytest.mark.usefixtures("available")
def test_str() -> None:
    plan = um.plan(DIMS, ctx=100)
    verdict, facts, memory, checks, unknown = str(plan).split("\n\n")
    assert [line.split()[0] for line in facts.splitlines()] == ["model", "context", "load"]
    assert facts.startswith("model     architecture unknown, dimensions\n")
    assert "100 tokens (model's own: 8,192, fits: 8,192), KV f16" in facts
    first = [line.split()[0] for line in memory.splitlines()]
    assert first == ["memory", *(row.category for row in plan.rows), "total", "must"]
    head, *rows = checks.splitlines()
    assert head.split() == ["limit", "needed", "available", "fits"]
    assert [row.partition("  ")[0] for row in rows] == [check.name for check in plan.checks]
    assert unknown.startswith("Not known:\n-  ")
    assert verdict == "Fits: 2.1 of 64.0 GiB. Largest context 8k."
