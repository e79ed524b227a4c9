"""Figures, ratios and claims in words, the same in every table."""

from __future__ import annotations

import math
from typing import Any

from unimem_bench.record import BEST, CaseRecord, Target
from unimem_bench.stats import Growth, Ratio, Spread, Verdict, is_noisy
from unimem_bench.suite import OURS

# Scales of units, from the smallest; a figure is written in the one that suits it.
_SCALES: tuple[dict[str, float], ...] = (
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
    {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40},
)
_TIMES = _SCALES[0]
_SIZES = _SCALES[2:]

# Exponents between which a cost is called constant or linear.
_CONSTANT, _LINEAR = (-0.05, 0.05), (0.9, 1.1)


def number(value: float) -> str:
    """Write a number with three significant digits.

    >>> number(0.0461), number(46.13), number(7082.0), number(4)
    ('0.0461', '46.1', '7,082', '4')
    """
    return numbers(value)[0]


def numbers(first: float, *others: float) -> list[str]:
    """Write numbers with as many decimals as the first needs for three significant digits.

    >>> numbers(46.13, 3.9), numbers(2.0, 1.234, 3.0), numbers(2.0, 1.0)
    (['46.1', '3.9'], ['2.00', '1.23', '3.00'], ['2', '1'])
    """
    values = (first, *others)
    if not all(map(math.isfinite, values)):
        return list(map(str, values))
    if all(value == int(value) for value in values):
        decimals = 0
    else:
        decimals = 2 - math.floor(math.log10(abs(first))) if first else 2
    return [f"{value:,.{min(max(decimals, 0), 9)}f}" for value in values]


def has_scale(unit: str) -> bool:
    """Say whether figures of a unit are written in the scale that suits them.

    >>> has_scale("ns"), has_scale("tokens/s")
    (True, False)
    """
    return any(unit in scale for scale in _SCALES)


def scaled(value: float, unit: str) -> tuple[float, str]:
    """Return the factor that converts a figure into the unit that suits it, and that unit.

    >>> scaled(46132.0, "ns"), scaled(7.0, "tokens/s")
    ((0.001, 'us'), (1.0, 'tokens/s'))
    """
    for scale in _SCALES:
        if unit in scale:
            in_base = abs(value) * scale[unit]
            fitting = [name for name, size in scale.items() if in_base >= size]
            name = fitting[-1] if fitting else next(iter(scale)) if value else unit
            return scale[unit] / scale[name], name
    return 1.0, unit


def amount(value: float, unit: str) -> str:
    """Write a figure with its unit.

    >>> amount(46132.0, "ns"), amount(0.25, "GB/s"), amount(65536, "bytes")
    ('46.1 us', '250 MB/s', '64 KiB')
    """
    factor, name = scaled(value, unit)
    return f"{number(value * factor)} {name}"


def middle(spread: Spread | Ratio, unit: str = "") -> str:
    """Write a median with its range, unless that has no width.

    >>> middle(Spread(46.1, 44.2, 48.0), "ns"), middle(Spread(1, 1, 1))
    ('46.1 ns (44.2 to 48.0)', '1')
    """
    median, low, high = spread
    factor, name = scaled(median, unit)
    return _with_interval(median * factor, low * factor, high * factor, f" {name}" if name else "")


def _with_interval(value: float, low: float, high: float, unit: str) -> str:
    """Write a value with its interval, unless that has no width."""
    if low == value == high:
        return f"{number(value)}{unit}"
    texts = numbers(value, low, high)
    return f"{texts[0]}{unit} ({texts[1]} to {texts[2]})"


def factor(value: float) -> str:
    """Write a factor.

    >>> factor(2.4132), factor(153.2)
    ('2.41x', '153x')
    """
    return f"{number(value)}x"


def times(ratio: Ratio) -> str:
    """Write a ratio with its interval.

    >>> times(Ratio(2.41, 2.2, 2.66))
    '2.41x (2.20 to 2.66)'
    """
    return _with_interval(*ratio, "x")


def comparison(ratio: Ratio, unit: str) -> str:
    """Say how many times as good a side is; `unit` says what better means, above 1 is better.

    >>> comparison(Ratio(3.92, 3.7, 4.04), "ns")
    '3.92x faster (3.70 to 4.04)'
    >>> comparison(Ratio(0.5, 0.4, 0.8), "bytes")
    '2.00x larger (1.25 to 2.50)'
    >>> comparison(Ratio(1.01, 0.97, 1.05), "GB/s")
    'no difference (0.97 to 1.05)'
    """
    value, low, high = ratio
    if not ratio.is_difference:
        return "no difference" + (f" ({low:.2f} to {high:.2f})" if low < high else "")
    better, worse = _words(unit)
    if value > 1:
        return _with_interval(value, low, high, f"x {better}")
    return _with_interval(1 / value, 1 / high, 1 / low, f"x {worse}")


def _words(unit: str) -> tuple[str, str]:
    if unit in _TIMES or unit.endswith("/s"):
        return "faster", "slower"
    if any(unit in scale for scale in _SIZES):
        return "smaller", "larger"
    return "better", "worse"


def grown(growth: Growth) -> str:
    """Write a fitted power of the size.

    >>> grown(Growth(0.021, -0.004, 0.05))
    'n^0.02 (0.00 to 0.05)'
    """
    exponent, low, high = (f"{value + 0.0:.2f}".replace("-0.00", "0.00") for value in growth)
    return f"n^{exponent} ({low} to {high})"


def law(growth: Growth) -> str:
    """Name the power of a growth.

    >>> law(Growth(0.02, 0, 0.05)), law(Growth(1.0, 0.98, 1.02)), law(Growth(0.5, 0.4, 0.6))
    ('constant', 'linear', 'less than linear')
    """
    if _CONSTANT[0] <= growth.exponent <= _CONSTANT[1]:
        return "constant"
    if growth.exponent < 0:
        return "falling"
    if growth.exponent < _LINEAR[0]:
        return "less than linear"
    return "linear" if growth.exponent <= _LINEAR[1] else "more than linear"


def claim(case: CaseRecord, target: Target, other: str | None = None) -> str:
    """Write the claim of a target; `other` is the best peer, if known.

    >>> case = CaseRecord("calls", "take", "What does take cost?", "ns")
    >>> claim(case, Target("speed", "unimem", "np.empty", True, 2.0, 2))
    'at least 2x as fast as np.empty'
    >>> claim(case, Target("cost", "unimem, mapped", "memcpy", False, 1.05, 2))
    'unimem, mapped: costs at most 1.05x as much as memcpy'
    """
    limit = f"{target.limit:g}"
    bound = "at least" if target.at_least else "at most"
    than = BEST if target.other == BEST else target.other
    than = f"{than}, {other}" if target.other == BEST and other not in (None, BEST) else than
    text = {
        "speed": f"{bound} {'' if target.limit == 1 else f'{limit}x '}as fast as {than}",
        "cost": f"costs {bound} {'' if target.limit == 1 else f'{limit}x '}as much as {than}",
        "figure": f"{bound} {_limit(target.limit, case.unit)}",
        "exponent": f"grows {'at least as' if target.at_least else 'no faster than'} n^{limit}",
    }[target.kind]
    return text if target.side == OURS else f"{target.side}: {text}"


def _limit(value: float, unit: str) -> str:
    """Write a limit exactly."""
    factor, name = scaled(value, unit)
    return f"{value * factor:g} {name}"


def measured(verdict: Verdict) -> str:
    """Write the measurement of a target; "" without one."""
    found = verdict.measured
    if found is None:
        return ""
    if isinstance(found, Growth):
        return grown(found)
    if verdict.target.kind == "figure":
        return middle(found, verdict.case.unit)
    return times(found)


def outcome(verdict: Verdict) -> str:
    """Say whether a target is met, and whether the interval covers the limit."""
    if verdict.met is None:
        return "not measured"
    text = "met" if verdict.met else "missed"
    text = text if verdict.certain else f"{text}, within noise"
    return f"{text}, noisy" if is_noisy(verdict.case) else text


def fact(value: Any) -> str:
    """Write a fact of a case.

    >>> fact(4096), fact(0.98765), fact(True), fact(["avx2", "fma"]), fact({"a": 1, "b": None})
    ('4,096', '0.988', 'yes', 'avx2, fma', 'a 1, b none')
    """
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, dict):
        return _listed([f"{name} {fact(each)}" for name, each in value.items()])
    if isinstance(value, list | tuple):
        return _listed(list(map(fact, value)))
    return str(value)


def _listed(texts: list[str]) -> str:
    return ("; " if any("," in text for text in texts) else ", ").join(texts)


def size(nbytes: float) -> str:
    """Write a number of bytes in the unit, of powers of 2 or of 10, that makes it short.

    >>> size(65536), size(64000), size(640), size(20 * 2**20)
    ('64 KiB', '64 kB', '640 B', '20 MiB')
    """
    texts = [f"{nbytes:g} B"]
    for step, units in ((1024, ("KiB", "MiB", "GiB", "TiB")), (1000, ("kB", "MB", "GB", "TB"))):
        for power, unit in enumerate(units, 1):
            if nbytes >= step**power:
                texts.append(f"{nbytes / step**power:.4g} {unit}")
    # Of equally short texts, the last one of the first kind.
    return min(reversed(texts), key=len)


def duration(seconds: float) -> str:
    """Write a time as a clock shows it.

    >>> duration(7.2), duration(75), duration(3725)
    ('0:07', '1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
