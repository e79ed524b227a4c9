"""How far plans of buffers are above the lower bound, and what they cost.

The bound is the most bytes that live at one step. It cannot always be reached, and the best
possible plan is known only for the family ``cut``. Totals are exact, and do not vary from run to
run; only times are measured, in CPU time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

import unimem as um
from unimem_bench.buffer_instances import (
    FAMILIES,
    GREEDY,
    Uses,
    engine_graphs,
    greedy_by_size,
    instances,
    large_instance,
)
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, NotMeasured, Suite, at_most

SUITE = Suite("buffers", "How tight are plans of buffers, and what do they cost?")

# Instances, and the most buffers of one.
SIZE, SIZE_QUICK = (1000, 1000), (100, 200)
N_BUFFERS, N_BUFFERS_QUICK = 1000, 100
OURS, WORST = "unimem", "unimem, worst"
OF_BOUND = "of the lower bound"

Parts = dict[str, list[float]]  # of the lower bound, by planner


@SUITE.case(
    "graphs",
    "How far are plans of the engine's graphs above the lower bound?",
    unit=OF_BOUND,
    targets=[at_most(1.02, issue=5, side=WORST)],
)
def graphs(measure: Measure) -> None:
    """Plan the graphs of 14 shapes of models, for one token and for 128."""
    found = graphs_of_engine()
    measure.fact("graphs", list(found))
    keep_parts(measure, parts(found.values()))


def random_instances(measure: Measure, family: str) -> None:
    """Plan random instances of one family, or of all."""
    found = parts_of_random(*size(measure))[family]
    measure.fact("instances", len(found[OURS]))
    keep_parts(measure, found)


for kind in ("random", *FAMILIES):
    SUITE.case(
        kind if kind == "random" else f"random, {kind}",
        "How far are plans of random buffers above the lower bound?"
        if kind == "random"
        else f"How far are those of the family {kind!r}?",
        unit=OF_BOUND,
        targets=[at_most(1.03, issue=5)] if kind in ("random", "cut") else [],
    )(partial(random_instances, family=kind))


@SUITE.case(
    "greedy",
    "Is a plan ever larger than the best greedy one?",
    unit="of the best greedy plan",
    targets=[at_most(1.0, issue=5, side=WORST)],
)
def greedy(measure: Measure) -> None:
    """Compare each plan of the random instances with the best greedy one."""
    found = parts_of_random(*size(measure))["random"]
    ours, *others = found.values()
    ratios = [our / min(their) for our, *their in zip(ours, *others, strict=True)]
    measure.count(OURS, ratios)
    measure.count(WORST, [max(ratios)])


@SUITE.case(
    "time, largest graph",
    "What does a plan of the values of Llama 3 70B take?",
    unit="ms",
    targets=[at_most(25.0, issue=5)],
)
def largest_graph(measure: Measure) -> None:
    """Plan the graph with the most values."""
    found = graphs_of_engine()
    compare_times(measure, max(found.values(), key=len))


def large(measure: Measure, family: str) -> None:
    """Plan an instance of about 1000 buffers, 100 in a quick run."""
    n = N_BUFFERS_QUICK if measure.quick else N_BUFFERS
    compare_times(measure, large_instance(family, n))


for kind in FAMILIES:
    SUITE.case(
        f"time, {kind}",
        f"What does a plan of a large instance of the family {kind!r} take?",
        unit="ms",
        targets=[at_most(500.0, issue=5)],
    )(partial(large, family=kind))


def keep_parts(measure: Measure, found: Parts) -> None:
    """Record the totals of all planners, our worst, and how often each reaches the bound."""
    ours = found[OURS]
    for name, values in found.items():
        measure.count(name, values, "unimem" if name == OURS else "peer")
    measure.count(WORST, [max(ours)])
    measure.count("lower bound", [1.0] * len(ours), "limit")
    at_bound = {name: values.count(1.0) / len(values) for name, values in found.items()}
    measure.fact("share at the bound", at_bound)


def parts(many: Iterable[Uses]) -> Parts:
    """Plan instances with all planners."""
    found: Parts = defaultdict(list)
    for uses in many:
        plan = um.BufferPlan(uses)
        totals = {OURS: plan.total_bytes, **{name: total(uses) for name, total in GREEDY.items()}}
        for name, total in totals.items():
            found[name].append(total / plan.lower_bound_bytes)
    return found


def size(measure: Measure) -> tuple[int, int]:
    """Return the number of random instances, and the most buffers of one."""
    n, most = SIZE_QUICK if measure.quick else SIZE
    measure.fact("buffers of an instance, at most", most)
    return n, most


@cache
def parts_of_random(n: int, most: int) -> Mapping[str, Parts]:
    """Plan random instances, and sort them by family; "random" has all."""
    families: dict[str, list[Uses]] = defaultdict(list)
    for family, uses in instances(n, most):
        families[family].append(uses)
    by_family = {family: parts(many) for family, many in families.items()}
    everything = {
        name: [part for found in by_family.values() for part in found[name]]
        for name in (OURS, *GREEDY)
    }
    return {"random": everything, **by_family}


@cache
def graphs_of_engine() -> Mapping[str, Uses]:
    """Collect the engine's graphs once."""
    try:
        return engine_graphs()
    except ImportError as error:
        raise NotMeasured(f"wants the engine (the extra `run`): {error}") from None


def compare_times(measure: Measure, uses: Uses) -> None:
    """Compare the time of a plan with that of the plainest one."""
    measure.fact("buffers", len(uses))
    ours = {OURS: milliseconds_of_cpu(lambda: um.BufferPlan(uses))}
    peers = {"greedy by size": milliseconds_of_cpu(lambda: greedy_by_size(uses, 64))}
    measure.compare(ours, peers, rounds=9, quick_rounds=5, warmup=1)


def milliseconds_of_cpu(plan: Callable[[], object]) -> Side:
    """Measure a plan."""

    def run() -> float:
        start = time.thread_time()
        plan()
        return (time.thread_time() - start) * 1e3

    return run
