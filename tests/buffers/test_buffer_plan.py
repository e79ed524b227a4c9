"""Offsets of buffers: apart where they live at once, tight, and everywhere the same."""

from __future__ import annotations

import json
import pickle
import random
import time
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unimem as um
from conftest import Run
from support.project.tiers import examples
from unimem_bench.buffer_instances import FAMILIES, greedy_by_order, greedy_by_size, instances


def use(name: str, nbytes: int, first: int = 0, last: int = 0) -> um.BufferUse:
    return um.BufferUse(name, nbytes, first, last)


def assert_sound(plan: um.BufferPlan) -> None:
    """Compare every pair of buffers, and every step's bytes, by brute force."""
    uses, offsets = plan.uses, plan.offsets
    assert list(offsets) == [use.name for use in uses]
    spans = [(offsets[u.name], offsets[u.name] + u.nbytes, u.first, u.last) for u in uses]
    for i, (begin, end, first, last) in enumerate(spans):
        assert begin % plan.align == 0
        assert 0 <= begin <= end <= plan.total_bytes
        for other_begin, other_end, other_first, other_last in spans[:i]:
            together = first <= other_last and other_first <= last
            assert not (together and begin < other_end and other_begin < end)
    rounded = {u.name: -(-u.nbytes // plan.align) * plan.align for u in uses}
    of_step = [
        sum(rounded[u.name] for u in uses if u.first <= step <= u.last)
        for step in {u.first for u in uses}
    ]
    assert plan.lower_bound_bytes == max(of_step, default=0) <= plan.total_bytes
    assert plan.total_bytes == max((offsets[u.name] + rounded[u.name] for u in uses), default=0)


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


# By case: the size and steps of each buffer, their offsets, and the bytes of all.
BY_HAND: dict[str, tuple[list[tuple[int, ...]], list[int], int]] = {
    "nothing": ([], [], 0),
    "one is rounded up": ([(100, 3, 9)], [0], 128),
    "some of no bytes": ([(0,), (64,), (0,), (64,)], [0, 0, 0, 64], 128),
    "one ends in the step where another begins": ([(64, 0, 1), (64, 1, 2)], [0, 64], 128),
    "one ends before another begins": ([(64, 0, 1), (64, 2, 2)], [0, 0], 64),
    "steps far away": ([(64, 10**15, 10**18), (64, 0, 10**15)], [0, 64], 128),
    "who comes first lies lowest": ([(64, 0, 5)] * 4, [0, 64, 128, 192], 256),
    # Planners that are greedy need 512 and more.
    "tight": ([(192, 2, 4), (192, 1, 1), (256, 3, 4), (64, 0, 2), (128, 1, 2)], [], 448),
}


@pytest.mark.parametrize(("numbers", "offsets", "nbytes"), BY_HAND.values(), ids=BY_HAND)
def test_plans_by_hand(numbers: list[tuple[int, ...]], offsets: list[int], nbytes: int) -> None:
    plan = um.BufferPlan(use(str(i), *three) for i, three in enumerate(numbers))
    assert_sound(plan)
    assert plan.total_bytes == plan.lower_bound_bytes == nbytes
    assert list(plan.offsets.values()) == offsets or not offsets


def test_equal_input_gives_equal_output_in_any_process(run_python: Run) -> None:
    """Also where the hashes of names differ: here they are random."""
    run = run_python(
        """
        import json, sys
        import unimem as um
        from unimem_bench.buffer_instances import instances

        plans = [um.BufferPlan(uses) for _, uses in instances(12, most=60)]
        json.dump([dict(plan.offsets) for plan in plans], sys.stdout)
        """,
        PYTHONHASHSEED="1",
    )
    here = [dict(um.BufferPlan(uses).offsets) for _, uses in instances(12, most=60)]
    assert json.loads(run.stdout) == here, run.stderr


@pytest.mark.parametrize(
    "longest",
    [1, pytest.param(30, marks=pytest.mark.slow), 500, pytest.param(2000, marks=pytest.mark.slow)],
)
def test_a_thousand_buffers_take_well_under_a_second(longest: int) -> None:
    rng = random.Random(longest)
    uses = []
    for i in range(1000):
        first = rng.randrange(1000)
        uses.append(use(str(i), rng.randrange(1, 1 << 20), first, first + rng.randrange(longest)))
    # The clock of this thread, and in units that take longer on a slower machine, too.
    began = time.thread_time()
    assert sum(i * i for i in range(1_000_000)) > 0
    planned = time.thread_time()
    plan = um.BufferPlan(uses)
    assert time.thread_time() - planned < 60 * (planned - began)  # a quarter of it at most
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
        ({"nbytes": -1}, "nbytes of 'a': expected at least 0, got -1"),
        ({"nbytes": True}, "nbytes of 'a': expected an integer, got True"),
        ({"nbytes": np.True_}, "nbytes of 'a': expected an integer, got"),
        ({"first": 3}, r"last of 'a': expected at least 3 \(its first use\), got 2"),
    ],
)
def test_wrong_uses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(use("a", 1, 1, 2), **changed)


@pytest.mark.parametrize("align", [0, 3, 63, True])
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
