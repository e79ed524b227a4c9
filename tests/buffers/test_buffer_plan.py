"""Offsets of buffers: apart where they live at once, tight, and everywhere the same."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unimem as um
from tiers import examples
from unimem_bench.buffer_instances import FAMILIES, greedy_by_order, greedy_by_size, instances


def use(name: str, nbytes: int, first: int = 0, last: int = 0) -> um.BufferUse:
    return um.BufferUse(name, nbytes, first, last)


def assert_sound(plan: um.BufferPlan) -> None:
    """Compare every pair of buffers, and every step's bytes, by brute force."""
    assert list(plan.offsets) == [use.name for use in plan.uses]
    spans = [
        (plan.offsets[u.name], plan.offsets[u.name] + u.nbytes, u.first, u.last) for u in plan.uses
    ]
    for i, (begin, end, first, last) in enumerate(spans):
        assert begin % plan.align == 0
        assert 0 <= begin <= end <= plan.total_bytes
        for other_begin, other_end, other_first, other_last in spans[:i]:
            together = first <= other_last and other_first <= last
            assert not (together and begin < other_end and other_begin < end)
    rounded = {u.name: -(-u.nbytes // plan.align) * plan.align for u in plan.uses}
    most = max(
        (
            sum(rounded[u.name] for u in plan.uses if u.first <= step <= u.last)
            for step in {u.first for u in plan.uses}
        ),
        default=0,
    )
    assert plan.lower_bound_bytes == most
    ends = [plan.offsets[u.name] + rounded[u.name] for u in plan.uses]
    assert most <= plan.total_bytes == max(ends, default=0)


def assert_as_tight_as_greedy(plan: um.BufferPlan) -> None:
    for greedy in (greedy_by_size, greedy_by_order):
        for tightest in (False, True):
            assert plan.total_bytes <= greedy(plan.uses, plan.align, tightest)


sizes = st.one_of(
    st.integers(0, 5000), st.sampled_from([0, 1, 64, 128, 192]), st.integers(0, 1 << 70)
)
some_uses = st.lists(st.tuples(sizes, st.integers(0, 20), st.integers(0, 9)), max_size=30).map(
    lambda drawn: [use(str(i), n, t, t + life) for i, (n, t, life) in enumerate(drawn)]
)


@settings(deadline=None)
@given(some_uses, st.sampled_from([1, 2, 64, 4096]))
def test_any_plan(uses: list[um.BufferUse], align: int) -> None:
    plan = um.BufferPlan(uses, align)
    assert_sound(plan)
    assert_as_tight_as_greedy(plan)
    assert plan.uses == tuple(uses)
    assert plan.align == align


@settings(deadline=None, max_examples=examples(20))
@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 2**32), st.sampled_from([64, 256]))
@example("cut", 0, 64)
def test_plans_of_the_kinds_that_are_measured(family: str, seed: int, align: int) -> None:
    uses = FAMILIES[family](random.Random(seed), 60)
    plan = um.BufferPlan(uses, align)
    assert_sound(plan)
    assert_as_tight_as_greedy(plan)


def test_random_plans_are_tight() -> None:
    above = []
    for _, uses in instances(40, most=100):
        plan = um.BufferPlan(uses)
        assert_sound(plan)
        above.append(plan.total_bytes / plan.lower_bound_bytes)
    assert sorted(above)[len(above) // 2] <= 1.03
    assert max(above) < 1.5


def test_what_a_greedy_planner_wastes_is_found() -> None:
    uses = [
        use("a", 192, 2, 4),
        use("b", 192, 1, 1),
        use("c", 256, 3, 4),
        use("d", 64, 0, 2),
        use("e", 128, 1, 2),
    ]
    assert greedy_by_size(uses, 64) == greedy_by_size(uses, 64, True) == 576
    assert greedy_by_order(uses, 64) == greedy_by_order(uses, 64, True) == 512
    plan = um.BufferPlan(uses)
    assert_sound(plan)
    assert plan.total_bytes == plan.lower_bound_bytes == 448


def test_nothing_and_little() -> None:
    empty = um.BufferPlan([])
    assert (dict(empty.offsets), empty.total_bytes, empty.lower_bound_bytes) == ({}, 0, 0)
    one = um.BufferPlan([use("a", 100, 3, 9)])
    assert (dict(one.offsets), one.total_bytes, one.lower_bound_bytes) == ({"a": 0}, 128, 128)
    none = um.BufferPlan([use("a", 0), use("b", 64), use("c", 0), use("d", 64)])
    assert dict(none.offsets) == {"a": 0, "b": 0, "c": 0, "d": 64}
    assert none.total_bytes == none.lower_bound_bytes == 128


def test_a_use_reaches_to_the_end_of_its_last_step() -> None:
    meet = um.BufferPlan([use("a", 64, 0, 1), use("b", 64, 1, 2)])
    assert meet.total_bytes == 128
    follow = um.BufferPlan([use("a", 64, 0, 1), use("b", 64, 2, 2)])
    assert (follow.total_bytes, dict(follow.offsets)) == (64, {"a": 0, "b": 0})
    far = um.BufferPlan([use("a", 64, 10**15, 10**18), use("b", 64, 0, 10**15)])
    assert far.total_bytes == 128


def test_who_comes_first_lies_lowest() -> None:
    uses = [use(name, 64, 0, 5) for name in "dacb"]
    assert dict(um.BufferPlan(uses).offsets) == {"d": 0, "a": 64, "c": 128, "b": 192}


def test_equal_input_gives_equal_output_in_any_process() -> None:
    """Also where the hashes of names differ."""
    source = (
        "import json, sys\n"
        "import unimem as um\n"
        "from unimem_bench.buffer_instances import instances\n"
        "plans = [um.BufferPlan(uses) for _, uses in instances(12, most=60)]\n"
        "json.dump([dict(plan.offsets) for plan in plans], sys.stdout)\n"
    )
    here = [dict(um.BufferPlan(uses).offsets) for _, uses in instances(12, most=60)]
    for seed in "12":
        run = subprocess.run(
            [sys.executable, "-c", source],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(run.stdout) == here


@pytest.mark.parametrize("longest", [1, 30, 500, 2000])
def test_a_thousand_buffers_take_well_under_a_second(longest: int) -> None:
    rng = random.Random(longest)
    uses = []
    for i in range(1000):
        first = rng.randrange(1000)
        uses.append(use(str(i), rng.randrange(1, 1 << 20), first, first + rng.randrange(longest)))
    start = time.thread_time()
    plan = um.BufferPlan(uses)
    # A fifth of it on an idle machine.
    assert time.thread_time() - start < 2
    assert_sound(plan)
    assert_as_tight_as_greedy(plan)


def test_plans_are_immutable_and_can_be_sent() -> None:
    a = use("a", 100)
    plan = um.BufferPlan(iter([a]))
    with pytest.raises(FrozenInstanceError):
        a.nbytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.offsets["a"] = 1  # type: ignore[index]
    for name in ("uses", "align", "offsets", "total_bytes", "lower_bound_bytes"):
        with pytest.raises(AttributeError):
            setattr(plan, name, 0)
    sent = pickle.loads(pickle.dumps(plan))
    assert (sent.offsets, sent.uses, repr(sent)) == (plan.offsets, plan.uses, repr(plan))
    assert repr(plan) == "<BufferPlan: 1 buffers in 128 bytes, lower bound 128>"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": 3}, "name: expected a string, got 3"),
        ({"nbytes": -1}, "nbytes of 'a': expected at least 0, got -1"),
        ({"nbytes": 1.0}, "nbytes of 'a': expected an integer, got 1.0"),
        ({"nbytes": True}, "nbytes of 'a': expected an integer, got True"),
        ({"first": -1}, "first of 'a': expected at least 0, got -1"),
        ({"first": None}, "first of 'a': expected an integer, got None"),
        ({"last": "2"}, "last of 'a': expected an integer, got '2'"),
        ({"first": 3}, r"last of 'a': expected at least 3 \(its first use\), got 2"),
    ],
)
def test_wrong_uses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(use("a", 1, 1, 2), **changed)


@pytest.mark.parametrize("align", [0, -64, 3, 63, 1.0, "64", True, None])
def test_wrong_alignment(align: Any) -> None:
    with pytest.raises(ValueError, match=f"align: expected a power of two, got {align!r}"):
        um.BufferPlan([use("a", 1)], align)


def test_wrong_lists() -> None:
    with pytest.raises(ValueError, match=r"uses\[2\]: expected a name of its own, got 'a'"):
        um.BufferPlan([use("a", 1), use("b", 1), use("a", 2)])
    with pytest.raises(TypeError, match=r"uses\[1\]: expected a BufferUse, got \('b', 1, 0, 0\)"):
        um.BufferPlan([use("a", 1), ("b", 1, 0, 0)])  # type: ignore[list-item]


def test_numpys_integers_are_integers() -> None:
    use = um.BufferUse("a", np.int64(100), np.int32(0), np.uint8(2))  # type: ignore[arg-type]
    assert use == um.BufferUse("a", 100, 0, 2)
    assert {type(n) for n in (use.nbytes, use.first, use.last)} == {int}
    plan = um.BufferPlan([use], align=np.int64(64))  # type: ignore[arg-type]
    assert (plan.total_bytes, type(plan.align)) == (128, int)
    for wrong in (True, np.True_):
        with pytest.raises(ValueError, match="nbytes of 'a': expected an integer, got"):
            um.BufferUse("a", wrong, 0, 2)  # type: ignore[arg-type]
