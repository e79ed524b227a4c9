"""A plan as text."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

import pytest

import unimem as um
from support.models.plans import validated
from unimem.planning.result import Check
from unimem.planning.streaming import Reading

FULL = (Check("memory of the machine", 2, 1, 3, "take less"),)
GIB = 1 << 30
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


VERDICTS: list[tuple[dict[str, Any], str, bool | None, str]] = [
    ({}, "fits", True, "Fits: 2.1 of 64.0 GiB. "),
    ({"engine": "llama.cpp"}, "fits", True, "Fits: 2.1 of 64.0 GiB, compute buffers not counted. "),
    (
        {"spilled_bytes": 4096},
        "reads from disk",
        True,
        "Reads from disk: 4.0 KiB with every token.",
    ),
    (
        {"is_counted": False},
        "at least",
        None,
        "At least 2.1 of 64.0 GiB: the cache of this file is ",
    ),
    (
        {"load": "stream", "reading": Reading(9 * GIB, GIB, 9 * GIB)},
        "streams",
        True,
        "Streams: 2.0 of 9.0 GiB in RAM. Largest context 8k.",
    ),
    ({"load": "stream", "reading": Reading(GIB, 0, GIB)}, "fits", True, "Fits: "),
    (
        {
            "load": "stream",
            "reading": Reading(9 * GIB, GIB, 1000 * GIB, "vda", None, GIB, 9 * GIB, "2026-11-28"),
        },
        "streams",
        True,
        "Streams: 2.0 of 1000.0 GiB in RAM, 0.5 tokens/s. Largest context 8k.",
    ),
    (
        {
            "spilled_bytes": 4096,
            "reading": Reading(GIB, GIB, GIB, "vda", None, 10 * GIB, 10 * GIB, "2026-11-28"),
        },
        "reads from disk",
        True,
        "Reads from disk: 4.0 KiB with every token.",
    ),
    ({"is_counted": False, "spilled_bytes": 4096}, "at least", None, "At least "),
    ({"is_counted": False, "checks": FULL}, "does not fit", False, "Does not fit: "),
    ({"spilled_bytes": 4096, "checks": FULL}, "does not fit", False, "Does not fit: "),
]


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(("changes", "verdict", "fits", "start"), VERDICTS)
def test_the_first_that_applies_is_the_verdict(
    changes: dict[str, Any], verdict: str, fits: bool | None, start: str
) -> None:
    plan = replace(um.plan(DIMS, ctx=100), **changes)
    assert (plan.verdict, plan.fits) == (verdict, fits)
    document = validated(plan)
    assert (document["verdict"], document["fits"]) == (verdict, fits)
    lines = str(plan).split("\n")
    assert lines[0].startswith(start)
    assert len(lines[0]) <= 80
    assert escape(lines[0].partition(":")[0]) in plan._repr_html_()
