"""What the figures of a record say: medians, ratios with intervals, exponents, and verdicts.

A ratio is taken inside each round, and its median over all rounds of all passes is reported. Its
interval says where a second run of the same length would land, 95 times of 100: a doubtful reader
can check that. It comes from a bootstrap of two levels [1]_: passes are drawn with replacement,
then rounds within each, since processes differ more than their rounds; and from the difference of
two such draws, since a second run is as uncertain as the first. It is widened by Student's t for
the small number of passes, or of rounds if there is one pass.

.. [1] T. Kalibera and R. Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013. Their
   sections 6 and 9 treat levels of repetition and intervals of ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem_bench.record import BEST, CaseRecord, Record, SideRecord, Target

_N_DRAWS = 2000
_TAIL = 0.025  # on each side of an interval
_SEED = 8  # the same record has the same intervals


class Spread(NamedTuple):
    """The median of figures, with their 5th and 95th percentile."""

    median: float
    p5: float
    p95: float


class Ratio(NamedTuple):
    """A median, with the interval in which a second run's median would lie."""

    value: float
    low: float
    high: float

    @property
    def is_difference(self) -> bool:
        """Whether the interval does not cover 1."""
        return not self.low <= 1 <= self.high


class Growth(NamedTuple):
    """How a cost grows: as size to the power of `exponent`, with its interval."""

    exponent: float
    low: float
    high: float


class Comparison(NamedTuple):
    """How many times as fast the subject of a case is as another side."""

    other: SideRecord
    ratio: Ratio


class Verdict(NamedTuple):
    """The result of a target."""

    case: CaseRecord
    target: Target
    other: str | None  # the side that it was compared with; for `BEST`, the one chosen
    measured: Ratio | Growth | None  # None if it was not measured
    met: bool | None  # whether the median keeps the limit; None if it was not measured
    certain: bool  # whether the whole interval is on that side of the limit


def figures(side: SideRecord) -> list[float]:
    """Collect the figures of all passes."""
    return [figure for each in side.passes for figure in each]


def spread(side: SideRecord) -> Spread:
    """Return the median, 5th and 95th percentile of all rounds; ValueError without figures."""
    values = figures(side)
    if not values:
        raise ValueError(f"the side {side.name!r} has no figures")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return Spread(statistics.median(values), cuts[0], cuts[-1])


def subject(case: CaseRecord, at: float | None = None) -> SideRecord | None:
    """Find the side that the rest is compared with: the first of ours that was measured."""
    return next(
        (side for side in case.sides if side.role == "unimem" and side.at == at and figures(side)),
        None,
    )


def sizes(case: CaseRecord) -> list[float]:
    """Return the sizes of a case that scales, in order; [] for other cases."""
    return sorted({side.at for side in case.sides if side.at is not None and figures(side)})


def is_noisy(case: CaseRecord) -> bool:
    """Say whether most rounds of a case were disturbed, and no quieter ones were found in time."""
    n = sum(len(figures(side)) for at in (None, *sizes(case)) if (side := subject(case, at)))
    return 2 * case.rounds_disturbed > n


def ratio(
    case: CaseRecord, side: SideRecord, other: SideRecord, kind: Literal["speed", "cost"] = "speed"
) -> Ratio:
    """Compare two sides, measured in the same rounds, by the ratios of their rounds.

    The ratio is how many times as fast `side` is as `other`, or how many times as much it costs.
    ValueError if they have no rounds in common, or a figure that is not positive.
    """
    if case.higher_is_better == (kind == "speed"):
        side, other = other, side
    # Now other / side, for costs, is how many times as fast `side` is.
    return _interval(_quotients(other, side))


def comparisons(case: CaseRecord, at: float | None = None) -> list[Comparison]:
    """Compare the subject with every other side of the same rounds, as speeds."""
    ours = subject(case, at)
    if ours is None:
        return []
    return [
        Comparison(side, ratio(case, ours, side))
        for side in case.sides
        if side is not ours and side.at == at and _are_paired(ours, side)
    ]


def growth(case: CaseRecord, side_name: str) -> Growth:
    """Fit the exponent of a side's growth: the slope of the logarithms of cost and size.

    Each round has a slope, by least squares over all sizes. Passes that lack a size are left out.
    ValueError if there are fewer than two sizes, or no pass has the same rounds of all.
    """
    found = {
        each.at: each
        for each in case.sides
        if each.name == side_name and each.at is not None and figures(each)
    }
    if len(found) < 2:
        raise ValueError(f"the side {side_name!r} has figures of {len(found)} sizes, not of two")
    x = np.log(list(found))
    x -= x.mean()
    weights = x / (x**2).sum()
    passes = []
    for each in zip(*(side.passes for side in found.values()), strict=True):
        if all(each) and len(set(map(len, each))) == 1 and min(map(min, each)) > 0:
            logs = np.log(np.array(each))  # of sizes and rounds
            passes.append(weights @ (-logs if case.higher_is_better else logs))
    if not passes:
        raise ValueError(f"no pass has the same rounds of the side {side_name!r} for all sizes")
    return Growth(*(math.log(value) for value in _interval([np.exp(each) for each in passes])))


def verdicts(record: Record) -> list[Verdict]:
    """Judge every target of a record, in the order of its cases."""
    return [_verdict(case, target) for case in record.cases() for target in case.targets]


def _verdict(case: CaseRecord, target: Target) -> Verdict:
    other = target.other
    measured: Ratio | Growth | None = None
    ours = next((each for each in case.sides if each.name == target.side and figures(each)), None)
    if ours is not None and target.kind == "exponent":
        with suppress(ValueError):  # an interrupted run may lack sizes
            measured = growth(case, target.side)
    elif ours is not None and target.kind == "figure":
        measured = _interval([np.array(each) for each in ours.passes if each])
    elif ours is not None and other == BEST:
        best = _best(case, ours)
        if best is not None:
            other = best.name
            measured = ratio(case, _odd(ours), _odd(best), _kind(target))
    elif ours is not None:
        theirs = case.side(other or "", ours.at)
        if theirs is not None and _are_paired(ours, theirs):
            measured = ratio(case, ours, theirs, _kind(target))
    if measured is None:
        return Verdict(case, target, other, None, None, False)
    value, low, high = measured
    sign = 1 if target.at_least else -1
    met = sign * (value - target.limit) >= 0
    worst = min(sign * low, sign * high) if met else max(sign * low, sign * high)
    certain = (worst - sign * target.limit >= 0) == met
    return Verdict(case, target, other, measured, met, certain)


def margin(target: Target, value: float) -> float:
    """Return how many times as good as its limit a figure is; a growth, at ten times the size."""
    if target.kind == "exponent":
        return float(10 ** (target.limit - value))
    if target.at_least:
        return value / target.limit
    if value > 0:
        return target.limit / value
    return math.inf if target.limit > 0 else 1.0  # 0, which is allowed


def _kind(target: Target) -> Literal["speed", "cost"]:
    return "speed" if target.kind == "speed" else "cost"


def _best(case: CaseRecord, ours: SideRecord) -> SideRecord | None:
    """Find the fastest peer by the even rounds; the odd ones say how it compares."""
    peers = [side for side in case.sides if side.role == "peer" and _are_paired(ours, side)]
    sign = -1 if case.higher_is_better else 1
    return min(peers, key=lambda side: sign * spread(_even(side)).median, default=None)


def _even(side: SideRecord) -> SideRecord:
    """Return the second round, the fourth and so on; for a pass of one round, that one."""
    passes = [each[1::2] or each for each in side.passes]
    return SideRecord(side.name, side.role, passes, side.at)


def _odd(side: SideRecord) -> SideRecord:
    """Return the first round, the third and so on: of three, two, which have an interval."""
    return SideRecord(side.name, side.role, [each[::2] for each in side.passes], side.at)


def _are_paired(side: SideRecord, other: SideRecord) -> bool:
    """Say whether both have the same rounds, with figures that can be divided."""
    pairs = list(_pairs(side, other))
    return bool(pairs) and all(
        len(a) == len(b) and min(a) > 0 and min(b) > 0 and max(a + b) < math.inf for a, b in pairs
    )


def _pairs(side: SideRecord, other: SideRecord) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the passes in which both were measured."""
    for a, b in zip(side.passes, other.passes, strict=False):
        if a and b:
            yield a, b


def _quotients(side: SideRecord, other: SideRecord) -> list[NDArray[np.float64]]:
    if not _are_paired(side, other):
        raise ValueError(
            f"{side.name!r} and {other.name!r} have no rounds in common whose ratios can be taken: "
            "those of a case run alternately, and give positive figures"
        )
    return [np.array(a) / np.array(b) for a, b in _pairs(side, other)]


def _interval(passes: Sequence[NDArray[np.float64]]) -> Ratio:
    """Return the median of positive figures or zeros, with its interval."""
    n_passes = len(passes)
    lengths = np.array([len(each) for each in passes])
    values = np.full((n_passes, lengths.max()), np.nan)
    for row, each in zip(values, passes, strict=True):
        row[: len(each)] = each
    median = float(np.nanmedian(values))
    if np.nanmin(values) == np.nanmax(values):
        return Ratio(median, median, median)
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(0, n_passes, (_N_DRAWS, n_passes))
    rounds = rng.random((_N_DRAWS, *values.shape))
    medians = _drawn_medians(values, lengths, drawn, rounds)
    if (medians <= 0).any():
        low, high = np.quantile(medians, [_TAIL, 1 - _TAIL])
        return Ratio(median, float(low), float(high))
    logs = np.log(medians)
    if n_passes == 1:
        n, freedom = int(lengths[0]), float(lengths[0] - 1)
    else:
        every = np.broadcast_to(np.arange(n_passes), drawn.shape)
        within = float(np.log(_drawn_medians(values, lengths, every, rounds)).var())
        every_pass = float(logs.var())  # 0 if nearly all rounds have the same figure
        between = max(0.0, 1 - within / every_pass) if every_pass else 0.0
        n, n_rounds = n_passes, int(lengths.sum())
        # Welch and Satterthwaite's degrees of freedom of a sum of two variances.
        rest = (1 - between) ** 2 / max(1, n_rounds - n_passes)
        freedom = 1 / (between**2 / (n_passes - 1) + rest)
    # A draw of n from n has a variance that is too small by (n - 1) / n, and few passes say little
    # about theirs.
    wider = math.sqrt(n / (n - 1)) * student_t(freedom) / student_t(math.inf)
    apart = np.abs(logs[: _N_DRAWS // 2] - logs[_N_DRAWS // 2 :])
    factor = math.exp(float(np.quantile(apart, 1 - 2 * _TAIL)) * wider)
    return Ratio(median, median / factor, median * factor)


def _drawn_medians(
    values: NDArray[np.float64],
    lengths: NDArray[np.intp],
    passes: NDArray[np.intp],
    rounds: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the median of each draw: of some passes, as many rounds of each as it has."""
    n = lengths[passes][..., None]
    taken = values[passes[..., None], (rounds * n).astype(np.intp)]
    taken[np.arange(values.shape[1]) >= n] = np.nan
    return np.asarray(np.nanmedian(taken.reshape(len(taken), -1), axis=1))


def student_t(freedom: float) -> float:
    """Return the 97.5th percentile of Student's t, by Abramowitz and Stegun 26.7.5."""
    x = 1.959964
    return (
        x
        + (x**3 + x) / (4 * freedom)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * freedom**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * freedom**3)
    )
