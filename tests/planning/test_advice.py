"""Advice on plans that do not fit, with invented amounts of memory."""

from __future__ import annotations

from typing import Any

import pytest

import unimem as um
from support.kernel.cgroups import SmallCgroup, cgroup_1gb, small_cgroup  # noqa: F401 - a fixture
from support.models.plans import DIMS, GIB, assert_true, validated

jsonschema = pytest.importorskip(
    "jsonschema", reason="jsonschema (extra test) checks documents: pip install '.[test]'"
)


@pytest.mark.parametrize(
    "options",
    [
        {"load": "copy", "ctx": 4000},
        {"load": "copy", "ctx": 4000, "kv_dtype": "f32", "sessions": 3, "batch": 2},
        {"load": "map", "ctx": 8000, "kv_dtype": "float32", "pages": "4k"},
        {"load": "direct", "ctx": 300, "window": 300, "threads": 1},
    ],
)
def test_advice_matches_a_plan_that_follows_it(memory: Any, options: dict[str, Any]) -> None:
    memory(64 * GIB)
    whole = um.plan(DIMS, **options)
    assert whole.advice == ()
    for part in (0.999, 0.7, 0.2, 0.001):
        memory(int(whole.total_bytes * part))
        plan = um.plan(DIMS, **options)
        assert not plan.fits or plan.spilled_bytes
        assert_true(plan, DIMS, **options)
        validated(plan)


def test_the_cheapest_advice_comes_first(room: Any) -> None:
    options: dict[str, Any] = {"ctx": 8000, "load": "copy", "sessions": 2, "pages": "4k"}
    whole = um.plan(DIMS, **options)
    room(whole.total_bytes - 4096)
    plan = um.plan(DIMS, **options)
    names = [name for advice in plan.advice for name in advice.options]
    assert names == ["load", "sessions", "kv_dtype", "ctx", "window"]
    assert plan.advice[-1].text.endswith("memory of the machine: take less")
    assert "q4_K" in plan.advice[-2].text


def test_advice_counts_conversations_and_streams_in_words(memory: Any) -> None:
    options: dict[str, Any] = {"ctx": 8000, "pages": "4k"}
    for name, one, two in (
        ("sessions", "1 conversation at a time", "2 conversations at a time"),
        ("batch", "1 stream", "2 streams"),
    ):
        for n, words in ((1, one), (2, two)):
            memory(64 * GIB)
            memory(um.plan(DIMS, **options | {name: n}).total_bytes)
            plan = um.plan(DIMS, **options | {name: 4})
            (advice,) = (advice for advice in plan.advice if list(advice.options) == [name])
            assert (advice.text, advice.options) == (f"{words} instead of 4", {name: n})


def test_changes_that_fit_together(memory: Any) -> None:
    options: dict[str, Any] = {"ctx": 8000, "kv_dtype": "f32", "sessions": 4, "pages": "4k"}
    changes: dict[str, Any] = {"sessions": 1, "kv_dtype": "q8_0"}
    # If these are not enough, the context is the longest possible with them.
    for ctx, change in ((8000, changes), (3000, changes | {"ctx": 3000})):
        memory(um.plan(DIMS, ctx=ctx, kv_dtype="q8_0", pages="4k").total_bytes)
        plan = um.plan(DIMS, **options)
        (together,) = (advice for advice in plan.advice if advice.text.startswith("together"))
        assert (together.options, together.fits) == (change, True)
        assert_true(plan, DIMS, **options)
