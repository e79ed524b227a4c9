"""Medians, ratios, exponents and verdicts of invented figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unimem_bench import stats
from unimem_bench.record import CaseRecord, Record, Role, SideRecord, SuiteRecord, Target
from unimem_bench.suite import at_least, at_most, costs, faster, faster_than_best, grows


def side(
    name: str, *passes: list[float], role: Role = "peer", at: float | None = None
) -> SideRecord:
    return SideRecord(name, role, list(passes), at)


def ours(*passes: list[float], at: float | None = None) -> SideRecord:
    return side("unimem", *passes, role="unimem", at=at)


def case(*sides: SideRecord, unit: str = "ns", targets: tuple[Target, ...] = ()) -> CaseRecord:
    return CaseRecord("invented", "case", "What?", unit, sides=list(sides), targets=list(targets))


def verdict(target: Target, *sides: SideRecord, unit: str = "ns") -> stats.Verdict:
    of = case(*sides, unit=unit, targets=(target,))
    suite = SuiteRecord("invented", "What?", 1, 1.0, [of])
    (found,) = stats.verdicts(Record("now", True, 1.0, {}, {}, [suite]))
    return found


def test_a_spread_is_over_all_passes() -> None:
    assert stats.spread(ours([1.0, 2.0], [3.0, 4.0, 5.0])) == pytest.approx((3, 1.2, 4.8))
    assert stats.spread(ours([7.0])) == (7, 7, 7)
    with pytest.raises(ValueError, match=r"'unimem' has no figures"):
        stats.spread(ours([], []))


@pytest.mark.parametrize(
    ("a", "b", "unit", "speed"),
    [
        # The ratio of medians would be 1.
        (ours([1.0, 10.0, 100.0]), side("peer", [2.0, 20.0, 200.0]), "ns", 2),
        (ours([10.0, 20.0]), side("peer", [5.0, 10.0]), "GB/s", 2),
        (ours([1.0, 1.0], [1.0, 1.0]), side("peer", [], [4.0, 4.0]), "ns", 4),
        # No draw of the bootstrap differs from another one.
        (ours(*[[1.0] * 6] * 3), side("peer", [1.0] * 5 + [2.0], *[[1.0] * 6] * 2), "ns", 1),
    ],
    ids=["inside the rounds", "of speeds more is better", "without a pass", "nearly all the same"],
)
def test_a_ratio(a: SideRecord, b: SideRecord, unit: str, speed: float) -> None:
    assert stats.ratio(case(a, b, unit=unit), a, b) == (speed, speed, speed)
    assert stats.ratio(case(a, b, unit=unit), a, b, "cost") == (1 / speed, 1 / speed, 1 / speed)


@pytest.mark.parametrize("other", [[1.0], [0.0, 1.0], [-1.0, 1.0], [math.inf, 1.0], []], ids=str)
def test_what_is_not_paired_has_no_ratio(other: list[float]) -> None:
    a, b = ours([1.0, 2.0]), side("peer", other)
    with pytest.raises(ValueError, match="no rounds in common"):
        stats.ratio(case(a, b), a, b)
    assert stats.comparisons(case(a, b)) == []


def test_the_interval_is_around_the_median_and_the_same_each_time() -> None:
    rng = np.random.default_rng(0)
    a = ours(*(list(rng.lognormal(0, 0.1, 20)) for _ in range(5)))
    b = side("peer", *(list(rng.lognormal(0.5, 0.1, 20)) for _ in range(5)))
    found = stats.ratio(case(a, b), a, b)
    assert 1 < found.low < found.value < found.high
    assert found.is_difference
    assert stats.ratio(case(a, b), a, b) == found
    a, b = (ours(list(rng.lognormal(0, 0.1, 50))) for _ in range(2))
    assert not stats.ratio(case(a, b), a, b).is_difference


def test_passes_that_differ_make_the_interval_wider() -> None:
    """A hundred rounds of five processes are not five hundred: each process has its own level."""
    levels = [1.0, 1.1, 1.2, 1.3, 1.4]
    noise = np.random.default_rng(0).normal(0, 0.01, (5, 100))
    passes = [list(level + each) for level, each in zip(levels, noise, strict=True)]
    a, b = ours(*[[1.0] * 100] * 5), side("peer", *passes)
    apart = stats.ratio(case(a, b), a, b)
    a, b = ours([1.0] * 500), side("peer", [figure for each in passes for figure in each])
    pooled = stats.ratio(case(a, b), a, b)
    assert apart.value == pooled.value
    assert apart.high / apart.low > (pooled.high / pooled.low) ** 2


@pytest.mark.parametrize(("n_passes", "n_rounds", "between"), [
    (1, 20, 0.0), (3, 10, 0.03), pytest.param(5, 15, 0.03, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_second_run_lies_in_the_interval(n_passes: int, n_rounds: int, between: float) -> None:
    """This is the purpose of intervals; 100 invented pairs of runs have heavy tails."""
    rng = np.random.default_rng(3)

    def run() -> stats.Ratio:
        levels = rng.normal(0, between, n_passes)
        noise = rng.standard_t(3, (n_passes, n_rounds)) * 0.05
        b = side("peer", *(list(np.exp(at + each)) for at, each in zip(levels, noise, strict=True)))
        a = ours(*[[1.0] * n_rounds] * n_passes)
        return stats.ratio(case(a, b), a, b)

    agree = 0
    for _ in range(100):
        one, two = run(), run()
        agree += one.low <= two.value <= one.high and two.low <= one.value <= two.high
    assert 90 <= agree < 100  # neither too narrow, nor so wide that nothing can disagree


@pytest.mark.parametrize(("freedom", "expected"), [(2, 4.303), (4, 2.776), (30, 2.042)])
def test_student(freedom: float, expected: float) -> None:
    """Compare with any table of t at 97.5 %: an expansion is 3 % short for two or three passes."""
    assert stats.student_t(freedom) == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_an_exponent_is_found(exponent: float) -> None:
    rng = np.random.default_rng(0)
    sides = [
        ours(*(list(3 * n**exponent * rng.lognormal(0, 0.02, 10)) for _ in range(3)), at=n)
        for n in (10.0, 100.0, 1000.0, 10000.0)
    ]
    found = stats.growth(case(*sides), "unimem")
    assert found.low <= found.exponent <= found.high
    assert found.exponent == pytest.approx(exponent, abs=0.01)
    assert found.high - found.low < 0.02


def test_exponents_of_speeds_of_one_size_and_of_a_pass_without_a_size() -> None:
    sides = [ours([100.0 / n, 100.0 / n], at=n) for n in (1.0, 10.0)]
    assert stats.growth(case(*sides, unit="tokens/s"), "unimem").exponent == pytest.approx(1)
    with pytest.raises(ValueError, match="1 sizes, not of two"):
        stats.growth(case(ours([1.0], at=10.0)), "unimem")
    sides = [ours([1.0], [1.0], at=1.0), ours([10.0], [], at=10.0), ours([100.0], [2.0], at=100.0)]
    assert stats.growth(case(*sides), "unimem") == pytest.approx((1, 1, 1))
    with pytest.raises(ValueError, match="no pass has the same rounds"):
        stats.growth(case(ours([1.0], [], at=1.0), ours([], [2.0], at=2.0)), "unimem")


def test_sizes_are_those_that_were_measured() -> None:
    of = case(ours([1.0], at=100.0), ours([1.0], at=10.0), ours([], at=1.0))
    assert stats.sizes(of) == [10, 100]
    found = stats.subject(of, 100.0)
    assert found is not None
    assert found.at == 100
    assert stats.subject(of, 1.0) is None


NOISE = list(np.exp(np.random.default_rng(1).permuted(np.linspace(-0.3, 0.3, 31))))


@pytest.mark.parametrize(("target", "sides", "met", "certain"), [
    (faster("np.empty", 2.0, issue=2), [ours([1.0, 1.0]), side("np.empty", [3.0] * 2)], True, True),
    (costs("C", 2.5, issue=2), [ours([5.0, 5.1]), side("C", [1.0, 1.0])], False, True),
    (faster("C", 0.99, issue=3), [ours([1.0] * 31), side("C", NOISE)], True, False),
    (faster("C", 1.01, issue=3), [ours([1.0] * 31), side("C", NOISE)], False, False),
    (at_most(0, issue=4), [ours([0.0, 0.0])], True, True),
    (at_least(1, issue=4), [ours([0.0, 0.0])], False, True),
    # One round has no interval and would always be certain, so two judge.
    (faster_than_best(0.9, issue=6), [ours([1.0] * 3), side("A", [0.97, 1.0, 0.87])], True, False),
])  # fmt: skip
def test_a_target_is_met_or_missed_for_certain_or_within_noise(
    target: Target, sides: list[SideRecord], met: bool, certain: bool
) -> None:
    found = verdict(target, *sides)
    assert (found.met, found.certain) == (met, certain)
    assert found.measured is not None
    value, low, high = found.measured
    assert low <= value <= high
    assert target.kind == "figure" or (low <= target.limit <= high) == (not certain)


def test_an_exponent_is_judged_by_its_interval() -> None:
    rng = np.random.default_rng(0)
    sides = [ours(list(rng.lognormal(0, 0.01, 9)), at=n) for n in (10.0, 1000.0)]
    found = verdict(grows(0.1, issue=8), *sides)
    assert isinstance(found.measured, stats.Growth)
    assert (found.met, found.certain) == (True, True)


def test_the_best_peer_is_chosen_by_rounds_that_do_not_judge_it() -> None:
    """A is best in the even rounds; in the odd ones it takes twice as long as unimem."""
    a, b = side("A", [2.0, 0.5] * 3), side("B", [1.5] * 6)
    limit = side("memcpy", [0.1] * 6, role="limit")
    found = verdict(faster_than_best(0.9, issue=6), ours([1.0] * 6), a, b, limit)
    assert (found.other, found.measured) == ("A", (2, 2, 2))


def test_of_speeds_the_best_peer_is_the_one_with_most() -> None:
    peers = side("A", [1.0] * 4), side("B", [2.0] * 4)
    found = verdict(faster_than_best(0.9, issue=6), ours([4.0] * 4), *peers, unit="GB/s")
    assert (found.other, found.measured) == ("B", (2, 2, 2))


@pytest.mark.parametrize("target", [
    faster("torch", 20, issue=4), faster_than_best(0.9, issue=6),
    at_most(1, issue=4),          grows(1, issue=8),
], ids=["peer", "best", "figure", "exponent"])  # fmt: skip
def test_what_was_not_measured_has_no_verdict(target: Target) -> None:
    sides = [] if target.other is None else [ours([1.0])]
    found = verdict(target, *sides)
    assert (found.measured, found.met, found.certain) == (None, None, False)
