"""Policies of a cache of pieces, and the traces that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from unimem_bench import policies
from unimem_bench.policies import POLICIES, Arc, Belady, Lfu, Lru, Policy, Trace, miss_share

ALL = {**POLICIES, "Belady": Belady}


@pytest.mark.parametrize(
    ("make", "calls", "missing"),
    [
        (Lru, [[1], [2], [1], [3], [2], [1]], [1, 1, 0, 1, 1, 1]),
        (Lfu, [[1], [1], [2], [3], [1], [2], [2], [3]], [1, 0, 1, 1, 0, 1, 0, 1]),
        (Belady, [[1], [2], [3], [1], [2], [3]], [1, 1, 1, 0, 1, 0]),
        # Used twice, 1 and 2 stay while others pass.
        (Arc, [[1], [2], [1], [2], [3], [4], [2]], [1, 1, 0, 0, 1, 1, 0]),
        # 3 does not evict the piece that its own call asks for.
        (Lru, [[1], [2], [1, 3], [1], [3]], [1, 1, 1, 0, 0]),
    ],
)
def test_what_a_policy_reads(
    make: Callable[[int, Trace], Policy], calls: Trace, missing: list[int]
) -> None:
    policy = make(2, calls)
    assert [policy.call(ids) for ids in calls] == missing


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("draw", [policies.uniform_trace, policies.skewed_trace])
def test_pieces_are_read_once_if_all_fit(name: str, draw: Callable[[int], Trace]) -> None:
    trace = draw(12)
    n_pieces = policies.N_LAYERS * policies.N_EXPERTS
    policy = ALL[name](n_pieces, trace)
    assert sum(map(policy.call, trace)) == len({piece for ids in trace for piece in ids})


def test_no_policy_is_better_than_one_that_knows_the_future() -> None:
    for trace in (policies.uniform_trace(60), policies.skewed_trace(60)):
        shares = {name: miss_share(make(600, trace), trace) for name, make in ALL.items()}
        assert 0 < shares.pop("Belady") < min(shares.values())


def test_uniform_routing_misses_what_has_no_room() -> None:
    trace, n_slots = policies.uniform_trace(120), 768
    assert miss_share(Lfu(n_slots, trace), trace) == pytest.approx(0.5, abs=0.03)


def test_what_traces_ask_for() -> None:
    for trace in (policies.uniform_trace(40), policies.skewed_trace(40)):
        assert len(trace) == 40 * policies.N_LAYERS
        for number, ids in enumerate(trace):
            layer = number % policies.N_LAYERS
            assert len(set(ids)) == policies.N_USED
            assert {each // policies.N_EXPERTS for each in ids} == {layer}
    skewed = policies.skewed_trace(200)[:: policies.N_LAYERS]
    counts = np.sort(np.bincount([each for ids in skewed for each in ids]))[::-1]
    assert counts[:8].sum() > 2 * counts[-32:].sum()
    stayed = [len(set(a) & set(b)) / policies.N_USED for a, b in pairwise(skewed)]
    assert policies.STAY < float(np.mean(stayed)) < 0.6


def test_experts_as_a_trace() -> None:
    experts = np.array([[[1, 0], [3, 2]], [[2, 3], [0, 1]]])
    assert policies.as_trace(experts, 4) == [[1, 0], [7, 6], [2, 3], [4, 5]]
