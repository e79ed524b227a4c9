"""Medians, ratios, exponents and verdicts of invented figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unimem_bench import stats
from unimem_bench.record import CaseRecord, Record, Role, SideRecord, SuiteRecord, Target
from unimem_bench.suite import at_most, costs, faster, faster_than_best, grows


def side(
    name: str, *passes: list[float], role: Role = "peer", at: float | None = None
) -> SideRecord:
    return SideRecord(name, role, list(passes), at)


def case(*sides: SideRecord, unit: str = "ns", targets: tuple[Target, ...] = ()) -> CaseRecord:
    return CaseRecord("invented", "case", "What?", unit, sides=list(sides), targets=list(targets))


def ours(*passes: list[float], at: float | None = None) -> SideRecord:
    return side("unimem", *passes, role="unimem", at=at)


def verdict(of: CaseRecord) -> stats.Verdict:
    record = Record("now", True, 1.0, {}, {}, [])
    record.suites.append(stats_suite(of))
    (found,) = stats.verdicts(record)
    return found


def stats_suite(of: CaseRecord) -> SuiteRecord:
    return SuiteRecord("invented", "What?", 1, 1.0, [of])


# ---- spread ----


def test_a_spread_is_over_all_passes() -> None:
    found = stats.spread(ours([1.0, 2.0], [3.0, 4.0, 5.0]))
    assert found.median == 3
    assert found.p5 == pytest.approx(1.2)
    assert found.p95 == pytest.approx(4.8)


def test_one_figure_is_its_own_spread() -> None:
    assert stats.spread(ours([7.0])) == (7, 7, 7)


def test_no_figures_have_no_spread() -> None:
    with pytest.raises(ValueError, match=r"'unimem' has no figures"):
        stats.spread(ours([], []))


# ---- ratios ----


def test_a_ratio_is_taken_inside_the_rounds() -> None:
    """Of medians it would be 1: the rounds of one pass go up, those of the other go down."""
    a, b = ours([1.0, 10.0, 100.0]), side("peer", [2.0, 20.0, 200.0])
    assert stats.ratio(case(a, b), a, b) == (2, 2, 2)
    assert stats.ratio(case(a, b), a, b, "cost") == (0.5, 0.5, 0.5)


def test_of_speeds_more_is_better() -> None:
    a, b = ours([10.0, 20.0]), side("peer", [5.0, 10.0])
    assert stats.ratio(case(a, b, unit="GB/s"), a, b).value == 2
    assert stats.ratio(case(a, b, unit="GB/s"), a, b, "cost").value == 0.5


def test_a_pass_that_one_side_lacks_is_left_out() -> None:
    a, b = ours([1.0, 1.0], [1.0, 1.0]), side("peer", [], [3.0, 3.0])
    assert stats.ratio(case(a, b), a, b) == (3, 3, 3)


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


def test_figures_that_are_nearly_all_the_same_have_an_interval() -> None:
    """No draw of the bootstrap differs from another one then."""
    a, b = ours(*[[1.0] * 6] * 3), side("peer", [1.0] * 5 + [2.0], *[[1.0] * 6] * 2)
    assert stats.ratio(case(a, b), a, b) == (1, 1, 1)


def test_equal_sides_are_no_difference() -> None:
    rng = np.random.default_rng(0)
    a, b = (side("x", list(rng.lognormal(0, 0.1, 50)), role="unimem") for _ in range(2))
    assert not stats.ratio(case(a, b), a, b).is_difference


def test_passes_that_differ_make_the_interval_wider() -> None:
    """A hundred rounds of five processes are not five hundred: each process has its own level."""
    levels = [1.0, 1.1, 1.2, 1.3, 1.4]
    noise = np.random.default_rng(0).normal(0, 0.01, (5, 100))
    passes = [list(level + each) for level, each in zip(levels, noise, strict=True)]
    ones = [[1.0] * 100] * 5
    a, b = ours(*ones), side("peer", *passes)
    apart = stats.ratio(case(a, b), a, b)
    a, b = ours([1.0] * 500), side("peer", [figure for each in passes for figure in each])
    pooled = stats.ratio(case(a, b), a, b)
    assert apart.value == pooled.value
    assert apart.high / apart.low > (pooled.high / pooled.low) ** 2


@pytest.mark.parametrize(
    ("n_passes", "n_rounds", "between"), [(1, 20, 0.0), (3, 10, 0.03), (5, 15, 0.03)]
)
def test_a_second_run_lies_in_the_interval(n_passes: int, n_rounds: int, between: float) -> None:
    """What the intervals are for, on 100 invented pairs of runs with heavy tails."""
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
    """Beside any table of t at 97.5 %: an expansion is short by 3 % for two passes or three."""
    assert stats.student_t(freedom) == pytest.approx(expected, rel=0.04)


# ---- growth ----


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


def test_of_speeds_the_exponent_is_that_of_the_cost() -> None:
    sides = [ours([100.0 / n, 100.0 / n], at=n) for n in (1.0, 10.0)]
    assert stats.growth(case(*sides, unit="tokens/s"), "unimem").exponent == pytest.approx(1)


def test_one_size_has_no_exponent() -> None:
    with pytest.raises(ValueError, match="1 sizes, not of two"):
        stats.growth(case(ours([1.0], at=10.0)), "unimem")


def test_a_pass_without_a_size_does_not_count() -> None:
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


# ---- verdicts ----


def test_a_target_that_is_met_for_certain() -> None:
    found = verdict(
        case(
            ours([1.0, 1.0]),
            side("np.empty", [3.0, 3.1]),
            targets=(faster("np.empty", 2.0, issue=2),),
        )
    )
    assert (found.met, found.certain, found.other) == (True, True, "np.empty")
    assert isinstance(found.measured, stats.Ratio)
    assert found.measured.value == pytest.approx(3.05)


@pytest.mark.parametrize(("limit", "met"), [(0.99, True), (1.01, False)])
def test_noise_that_covers_the_limit_is_not_certain(limit: float, met: bool) -> None:
    rng = np.random.default_rng(1)
    theirs = list(np.exp(rng.permuted(np.linspace(-0.3, 0.3, 31))))
    of = case(ours([1.0] * 31), side("C", theirs), targets=(faster("C", limit, issue=3),))
    found = verdict(of)
    assert (found.met, found.certain) == (met, False)


def test_a_cost_that_is_too_high_is_missed_for_certain() -> None:
    of = case(ours([5.0, 5.1]), side("C", [1.0, 1.0]), targets=(costs("C", 2.5, issue=2),))
    found = verdict(of)
    assert (found.met, found.certain) == (False, True)


def test_a_figure_of_zero_is_exact() -> None:
    found = verdict(case(ours([0.0, 0.0]), unit="bytes", targets=(at_most(0, issue=4),)))
    assert found.measured == (0, 0, 0)
    assert (found.met, found.certain) == (True, True)


def test_an_exponent_is_judged_by_its_interval() -> None:
    rng = np.random.default_rng(0)
    sides = [ours(list(rng.lognormal(0, 0.01, 9)), at=n) for n in (10.0, 1000.0)]
    found = verdict(case(*sides, targets=(grows(0.1, issue=8),)))
    assert isinstance(found.measured, stats.Growth)
    assert (found.met, found.certain) == (True, True)


def test_the_best_peer_is_chosen_by_rounds_that_do_not_judge_it() -> None:
    """By the even rounds A is best; in the odd ones it takes twice as long as unimem."""
    of = case(
        ours([1.0] * 6),
        side("A", [2.0, 0.5, 2.0, 0.5, 2.0, 0.5]),
        side("B", [1.5] * 6),
        side("memcpy", [0.1] * 6, role="limit"),
        targets=(faster_than_best(0.9, issue=6),),
    )
    found = verdict(of)
    assert found.other == "A"
    assert found.measured == (2, 2, 2)


def test_of_three_rounds_two_judge_the_best_peer() -> None:
    """One round has no interval, and would say for certain whatever it says."""
    of = case(
        ours([1.0] * 3), side("A", [0.97, 1.0, 0.87]), targets=(faster_than_best(0.9, issue=6),)
    )
    found = verdict(of)
    assert found.measured is not None
    value, low, high = found.measured
    assert low < 0.9 <= value < high
    assert (found.met, found.certain) == (True, False)


def test_of_speeds_the_best_peer_is_the_one_with_most() -> None:
    of = case(
        ours([4.0] * 4),
        side("A", [1.0] * 4),
        side("B", [2.0] * 4),
        unit="GB/s",
        targets=(faster_than_best(0.9, issue=6),),
    )
    found = verdict(of)
    assert found.other == "B"
    assert found.measured == (2, 2, 2)


@pytest.mark.parametrize(
    "target",
    [
        faster("torch", 20, issue=4),
        faster_than_best(0.9, issue=6),
        at_most(1, issue=4),
        grows(1, issue=8),
    ],
    ids=["peer", "best", "figure", "exponent"],
)
def test_what_was_not_measured_has_no_verdict(target: Target) -> None:
    sides = [] if target.other is None else [ours([1.0])]
    found = verdict(case(*sides, targets=(target,)))
    assert (found.measured, found.met, found.certain) == (None, None, False)
