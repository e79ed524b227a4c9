"""Plots of a record, as SVG files: cases as bars, what grows as lines, all targets on a page.

This module imports matplotlib, so it is imported only where plots are asked for. Nothing of
matplotlib's global state is used or changed: the figures are the caller's own, and the same record
gives the same bytes.

Sheets are laid out in inches, not by one of matplotlib's engines: names of sides are sentences as
often as words, and this way they get the room that they need and lie over nothing.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from unimem.system.atomic_file import write_text
from unimem_bench import stats
from unimem_bench.record import CaseRecord, Record, Role, SideRecord
from unimem_bench.stats import Growth, Ratio, Spread, Verdict
from unimem_bench.texts import (
    amount,
    claim,
    grown,
    has_scale,
    measured,
    middle,
    number,
    outcome,
    scaled,
)

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.textpath import text_to_path
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
except ImportError as error:
    raise ImportError(
        "plots need matplotlib: install unimem-llm with the extra 'bench'; importing it said: "
        f"{error}"
    ) from error

__all__ = ["Drawing", "Plot", "draw", "save"]

# Okabe and Ito's colours, which the colour-blind tell apart; markers and hatches differ as well.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_PURPLE, _SKY, _BLACK, _GREY = "#CC79A7", "#56B4E9", "#000000", "#777777"
_TEXT, _TITLE = 8.5, 11.0  # points
_STYLE = {
    "font.size": _TEXT,
    "axes.labelsize": _TEXT,
    "xtick.labelsize": _TEXT,
    "ytick.labelsize": _TEXT,
    "legend.fontsize": _TEXT,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a side may be called $x
    "svg.fonttype": "path",
    "svg.hashsalt": "unimem",
}

# Inches. GitHub shows a page 830 pixels wide, which is a sheet at its natural size.
_WIDTH = 8.6
_MARGIN = 0.15
_HEAD = 0.65  # title and legend of a sheet
_GUTTER = 1.5  # names of sides, beside bars
_Y_AXIS = 0.8  # ticks and label of a y axis
_X_AXIS = 0.5  # ticks and label of an x axis
_LINES = 1.8  # axes with lines
_FIGURE = 0.85  # a figure behind its bar
_LINE = 0.15  # of text
_ROW = 0.24  # of a bar, or of a target
_GAP = 0.25  # below a panel
_CLAIM, _MEASURED = 4.1, 1.75  # beside the axis of the targets

# From this ratio of the largest to the smallest on, a bar from 0 shows nothing of the smallest.
_LOG_FROM = 25.0
_REACH = 4.0  # of the axis of targets: what is so many times as good as asked for is at its end


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure that is not written yet.

    Attributes
    ----------
    name : str
        Of the file, without what tells its format.
    title : str
        As a heading has it.
    alt : str
        What it shows, for those who cannot see it.
    suite : str or None
        The suite that it belongs to.
    figure : Figure
        Itself.
    """

    name: str
    title: str
    alt: str
    suite: str | None
    figure: Figure


class Plot(NamedTuple):
    """A file with a plot; all but its path as in `Drawing`."""

    name: str
    title: str
    alt: str
    path: Path
    suite: str | None


def save(record: Record, folder: Path) -> list[Plot]:
    """Write all plots of a record as SVG files.

    Parameters
    ----------
    record : Record
        What was measured.
    folder : Path
        Where the files go; it is made where it is not there.

    Returns
    -------
    list of Plot
        As `draw` gives them.

    Raises
    ------
    OSError
        If a file cannot be written; one that was there before stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    with _style():
        for drawing in _drawings(record):
            path = folder / f"{drawing.name}.svg"
            text = io.StringIO()
            drawing.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            write_text(path, text.getvalue())
            plots.append(Plot(drawing.name, drawing.title, drawing.alt, path, drawing.suite))
    return plots


def draw(record: Record) -> list[Drawing]:
    """Draw all plots of a record.

    Returns
    -------
    list of Drawing
        ``overview``, with a case of each suite; ``targets``; and one of each suite, named as it is.
        What has nothing to show is left out.
    """
    with _style():
        return list(_drawings(record))


def _style() -> AbstractContextManager[None]:
    """Give matplotlib our settings for a while, whatever the user's are."""
    return style.context(["default", _STYLE])


def _drawings(record: Record) -> Iterator[Drawing]:
    shown = {
        suite.name: [case for case in suite.cases if _is_shown(case)] for suite in record.suites
    }
    telling = [_most_telling(cases) for cases in shown.values() if cases]
    if telling:
        names = ", ".join(map(_full_name, telling))
        sheet = _sheet("A case of each suite", telling, _full_name)
        yield Drawing("overview", "Overview", f"A panel of each suite: {names}.", None, sheet)
    verdicts = sorted(stats.verdicts(record), key=lambda each: each.target.issue)
    n_met = sum(each.met is True for each in verdicts)
    n_missed = sum(each.met is False for each in verdicts)
    if n_met + n_missed > 0:
        alt = f"What was measured over its limit: {n_met} targets met, {n_missed} missed."
        yield Drawing("targets", "All targets", alt, None, _targets(verdicts))
    for suite in record.suites:
        cases = shown[suite.name]
        if cases:
            names = ", ".join(case.name for case in cases)
            alt = f"Medians of unimem and its peers: {names}."
            sheet = _sheet(f"{suite.name}: {suite.question}", cases, lambda case: case.name)
            yield Drawing(suite.name, suite.question, alt, suite.name, sheet)


def _is_shown(case: CaseRecord) -> bool:
    return any(map(stats.figures, case.sides))


def _most_telling(cases: Sequence[CaseRecord]) -> CaseRecord:
    """Choose the first case with peers and a limit, or what comes nearest.

    The order is that in which the suite declares them: to choose by the figures would be flattery.
    """
    return max(
        cases, key=lambda case: len({side.role for side in case.sides if stats.figures(side)})
    )


def _full_name(case: CaseRecord) -> str:
    return f"{case.suite}/{case.name}"


# ---- sheets -------------------------------------------------------------------------------------


class _Panel(NamedTuple):
    """A part of a sheet.

    Attributes
    ----------
    title : list of str
        Lines above it.
    left, height, below : float
        Inches: what labels take beside the axes, the axes, and what labels take below.
    draw : callable
        Is given the axes.
    """

    title: list[str]
    left: float
    height: float
    below: float
    draw: Callable[[Axes], None]

    @property
    def above(self) -> float:
        return len(self.title) * _LINE + 0.1


def _sheet(title: str, cases: Sequence[CaseRecord], name: Callable[[CaseRecord], str]) -> Figure:
    """Draw a panel for each case, in two columns, each below what is the shorter one by then."""
    heights = [0.0] * min(2, len(cases))
    width = (_WIDTH - 2 * _MARGIN) / len(heights)
    places = []
    for case in cases:
        panel = _panel(case, name(case), width)
        column = heights.index(min(heights))
        places.append((panel, column, heights[column]))
        heights[column] += panel.above + panel.height + panel.below + _GAP
    height = _MARGIN + _HEAD + max(heights)
    figure = _figure(title, _key(cases), height)
    for panel, column, top in places:
        left = _MARGIN + column * width
        y = height - _MARGIN - _HEAD - top
        figure.text(left / _WIDTH, y / height, "\n".join(panel.title), va="top", weight="bold")
        y -= panel.above + panel.height
        panel.draw(_axes(figure, left + panel.left, y, width - panel.left - _MARGIN, panel.height))
    return figure


def _figure(title: str, key: Sequence[Patch | Line2D], height: float) -> Figure:
    """Make a figure with a title and a legend for all of it."""
    figure = Figure(figsize=(_WIDTH, height))
    (line,) = _wrapped(title, _WIDTH - 2 * _MARGIN, most=1, size=_TITLE, weight="bold")
    left, top = _MARGIN / _WIDTH, 1 - _MARGIN / height
    figure.text(left, top, line, va="top", weight="bold", size=_TITLE)
    figure.legend(
        handles=list(key),
        loc="upper left",
        bbox_to_anchor=(left, top - 0.25 / height),
        borderpad=0,
        borderaxespad=0,
        ncols=max(1, len(key)),
        columnspacing=1.5,
        handletextpad=0.6,
    )
    return figure


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes at a place in inches."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, bottom / h, width / w, height / h))


def _inches(axes: Axes) -> tuple[float, float]:
    """Give width and height of axes."""
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    return box.width, box.height


def _wrapped(
    text: str, inches: float, *, most: int, size: float = _TEXT, weight: str = "normal"
) -> list[str]:
    """Break a text into lines of so many inches, and cut it after `most` of them."""
    font = FontProperties(size=size, weight=weight)

    def points(line: str) -> float:
        return float(text_to_path.get_text_width_height_descent(line, font, ismath=False)[0])

    n = int(len(text) * inches * 72 / max(points(text), 1)) + 1
    while n > 1:
        lines = textwrap.wrap(text, n, max_lines=most, placeholder="…") or [""]
        if max(map(points, lines)) <= inches * 72:
            return lines
        n -= 1
    return ["…"]


_COLOURS: dict[Role, str] = {"unimem": _BLUE, "peer": _ORANGE, "limit": "white"}
_MARKERS: dict[Role, str] = {"unimem": "o", "peer": "s", "limit": "D"}
_ROLES: dict[Role, str] = {
    "unimem": "unimem",
    "peer": "its peers",
    "limit": "limit of the machine",
}


def _fill(role: Role) -> dict[str, Any]:
    """Give what tells a bar's role, also in grey."""
    return {
        "facecolor": _COLOURS[role],
        "edgecolor": _edge(role),
        "hatch": "////" if role == "limit" else None,
        "linewidth": 0.8,
    }


def _edge(role: Role) -> str:
    return _GREY if role == "limit" else _COLOURS[role]


def _key(cases: Sequence[CaseRecord]) -> list[Patch | Line2D]:
    """Make the legend of a sheet: what holds for all of its panels."""
    lines = [case for case in cases if stats.sizes(case)]
    bars = {side.role for case in cases if case not in lines for side in _sides(case)}
    key: list[Patch | Line2D] = [
        Patch(**_fill(role), label=name) for role, name in _ROLES.items() if role in bars
    ]
    if bars:
        key.append(Line2D([], [], color=_BLACK, lw=1.2, label="5 to 95 % of rounds"))
    elif lines:
        key.append(Patch(color=_GREY, alpha=0.25, lw=0, label="5 to 95 % of rounds"))
    if any(not _is_by_threads(case) for case in lines):
        key += [_reference(":", "constant"), _reference("--", "proportional")]
    if any(map(_is_by_threads, lines)):
        key.append(_reference("-.", "ideal"))
    return key


def _reference(line: str, label: str) -> Line2D:
    return Line2D([], [], color=_GREY, ls=line, lw=1, label=label)


def _sides(case: CaseRecord) -> list[SideRecord]:
    return [side for side in case.sides if stats.figures(side)]


def _panel(case: CaseRecord, name: str, width: float) -> _Panel:
    title = _wrapped(f"{name}: {case.question}", width - 2 * _MARGIN, most=3, weight="bold")
    if stats.sizes(case):
        names = dict.fromkeys(side.name for side in _sides(case) if side.at is not None)
        labels = {each: _line_label(case, each, width - 0.6) for each in names}
        n_lines = "\n".join(labels.values()).count("\n") + 1

        def lines(axes: Axes) -> None:
            _draw_lines(axes, case, labels)

        return _Panel(title, _Y_AXIS, _LINES, _X_AXIS + n_lines * 0.18, lines)
    sides = _sides(case)
    wrapped = [_wrapped(side.name, _GUTTER - 0.1, most=3) for side in sides]
    rows = [_ROW + (len(each) - 1) * _LINE for each in wrapped]

    def bars(axes: Axes) -> None:
        axes.set_ylim(sum(rows), 0)
        middles = [sum(rows[:i]) + row / 2 for i, row in enumerate(rows)]
        axes.set_yticks(middles, ["\n".join(each) for each in wrapped])
        _draw_bars(axes, case, list(zip(sides, middles, strict=True)))

    return _Panel(title, _GUTTER, sum(rows), _X_AXIS, bars)


def _label(axes: Axes, unit: str, case: CaseRecord, between: str = " ") -> str:
    """Name what an axis shows, and which end of it is the better one."""
    (name,) = _wrapped(unit, _inches(axes)[0] - 1, most=1)
    return f"{name}{between}({'more' if case.higher_is_better else 'less'} is better)"


def _tick(value: float, _: object = None) -> str:
    """Write what stands at a tick; matplotlib also gives its number."""
    if abs(value) >= 1e5:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:,.10g}"


def _tick_of_bytes(value: float, _: object = None) -> str:
    return amount(value, "bytes")


def _decimal(low: float, high: float) -> LogLocator:
    """Give ticks of an axis of logarithms; where it is short, one within each decade."""
    return LogLocator(subs=(1.0, 3.0) if high < 500 * low else (1.0,), numticks=5)


def _apart(values: Sequence[float], least: float, scale: Callable[[float], float]) -> FixedLocator:
    """Give ticks at sizes, without those that are nearer than this part of the axis."""
    distance = least * (scale(values[-1]) - scale(values[0]))
    taken = [values[0]]
    for value in values[1:]:
        if scale(value) - scale(taken[-1]) >= distance:
            taken.append(value)
    return FixedLocator(taken)


# ---- bars ---------------------------------------------------------------------------------------


def _draw_bars(axes: Axes, case: CaseRecord, sides: Sequence[tuple[SideRecord, float]]) -> None:
    """Draw medians with whiskers: as bars, or where they differ too much for bars as points."""
    spreads = [stats.spread(side) for side, _ in sides]
    low, high = min(each.median for each in spreads), max(each.median for each in spreads)
    is_log = low > 0 and high / low >= _LOG_FROM
    factor, unit = (1.0, case.unit) if is_log else scaled(high, case.unit)
    spreads = [Spread(*(value * factor for value in each)) for each in spreads]
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(not is_log)
    axes.set_xlabel(_label(axes, unit, case))
    axes.grid(axis="x")
    _set_reach(axes, spreads, is_log)
    axes.xaxis.set_major_formatter(_tick)
    for (side, y), (median, p5, p95) in zip(sides, spreads, strict=True):
        if is_log:
            axes.axhline(y, color=_GREY, ls=":", lw=0.5, zorder=0.8)
            look: dict[str, Any] = {"mfc": _COLOURS[side.role], "mec": _edge(side.role)}
            axes.plot(median, y, _MARKERS[side.role], ms=7, **look)
        else:
            axes.barh(y, median, 0.15, **_fill(side.role))
        axes.plot([p5, p95], [y, y], color=_BLACK, lw=1.2, solid_capstyle="butt")
        if side.role == "limit":
            axes.axvline(median, color=_GREY, ls="--", lw=0.8, zorder=0.9)
        axes.annotate(
            _figure_text(median, unit),
            (max(median, p95), y),
            xytext=(8 if is_log else 5, -0.5),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )


def _figure_text(value: float, unit: str) -> str:
    if has_scale(unit):
        return amount(value, unit)
    return number(value) if abs(value) < 1e5 else _tick(value)


def _set_reach(axes: Axes, spreads: Sequence[Spread], is_log: bool) -> None:
    """Set where the axis of bars ends: with room for the figures behind them."""
    room = 1 - _FIGURE / _inches(axes)[0]
    farthest = max(each.p95 for each in spreads)
    if not is_log:
        # Counts may all be 0.
        axes.set_xlim(min(0, *(each.p5 for each in spreads)), farthest / room or 1)
        axes.locator_params(axis="x", nbins=5)
        return
    nearest = min(each.p5 if each.p5 > 0 else each.median for each in spreads) / 1.5
    end = nearest * (farthest / nearest) ** (1 / room)
    axes.set_xscale("log")
    axes.set_xlim(nearest, end)
    axes.xaxis.set_major_locator(_decimal(nearest, end))
    axes.xaxis.set_minor_locator(NullLocator())


# ---- lines --------------------------------------------------------------------------------------


def _is_by_threads(case: CaseRecord) -> bool:
    return "threads" in (case.x or "")


def _line_label(case: CaseRecord, name: str, width: float) -> str:
    """Name a side, with the exponent of its growth as it is drawn."""
    text = name
    if not _is_by_threads(case):
        with suppress(ValueError):  # there may be one size only, or figures of 0
            growth = stats.growth(case, name)
            if case.higher_is_better:
                growth = Growth(-growth.exponent, -growth.high, -growth.low)
            text = f"{name}: {grown(growth)}"
    return "\n".join(_wrapped(text, width, most=3))


def _draw_lines(axes: Axes, case: CaseRecord, labels: Mapping[str, str]) -> None:
    """Draw medians by size with bands: over logarithms, or by threads as they are."""
    points = {
        name: sorted(
            (side.at, stats.spread(side))
            for side in _sides(case)
            if side.name == name and side.at is not None
        )
        for name in labels
    }
    spreads = [each for line in points.values() for _, each in line]
    xs = stats.sizes(case)
    axes.set_xlabel(_wrapped(case.x or "size", _inches(axes)[0], most=1)[0])
    axes.set_ylabel(_label(axes, case.unit, case, "\n"))
    axes.grid()
    axes.xaxis.set_major_formatter(_tick)
    axes.yaxis.set_major_formatter(_tick)
    if _is_by_threads(case) or min(xs[0], *(each.p5 for each in spreads)) <= 0:
        _scale_plainly(axes, case, spreads)
    else:
        _scale_by_logarithms(axes, case, spreads)
    look = _looks()
    roles = {side.name: side.role for side in case.sides}
    for name, line in points.items():
        x = [at for at, _ in line]
        colour, marker, kind = look(roles[name])
        band = [each.p5 for _, each in line], [each.p95 for _, each in line]
        axes.fill_between(x, *band, color=colour, alpha=0.2, lw=0)
        y = [each.median for _, each in line]
        axes.plot(x, y, kind, marker=marker, color=colour, lw=1.5, ms=4.5, label=labels[name])
    width, height = _inches(axes)
    below = (-_Y_AXIS / width, -_X_AXIS / height)
    axes.legend(loc="upper left", bbox_to_anchor=below, borderpad=0, borderaxespad=0)


def _looks() -> Callable[[Role], tuple[str, str, str]]:
    """Give each line of axes a colour, a marker and a kind of line."""
    looks: dict[Role, Iterator[tuple[str, str, str]]] = {
        "unimem": cycle([(_BLUE, "o", "-"), (_SKY, "p", "-")]),
        "peer": cycle(
            [(_ORANGE, "s", "-"), (_GREEN, "^", "-"), (_RED, "v", "-"), (_PURPLE, "P", "-")]
        ),
        "limit": cycle([(_BLACK, "D", "--"), (_GREY, "d", "--")]),
    }
    return lambda role: next(looks[role])


def _scale_plainly(axes: Axes, case: CaseRecord, spreads: Sequence[Spread]) -> None:
    """Scale axes from 0, and draw the ideal: with so many threads so many times as fast."""
    xs = stats.sizes(case)
    axes.set_xlim(0, xs[-1] * 1.05 or 1)
    axes.set_ylim(min(0, *(each.p5 for each in spreads)), max(e.p95 for e in spreads) * 1.1 or 1)
    axes.xaxis.set_major_locator(_apart(xs, 0.06, float))
    if _is_by_threads(case):
        _draw_power(axes, case, 1 if case.higher_is_better else -1, "-.")


def _scale_by_logarithms(axes: Axes, case: CaseRecord, spreads: Sequence[Spread]) -> None:
    """Scale axes by logarithms, and draw what is constant and what is proportional to size."""
    xs = stats.sizes(case)
    low, high = min(each.p5 for each in spreads), max(each.p95 for each in spreads)
    # What is constant has to look so: two decades at least.
    middle, reach = math.sqrt(low * high), max(10, 1.4 * math.sqrt(high / low))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)
    axes.set_ylim(middle / reach, middle * reach)
    axes.yaxis.set_major_locator(_decimal(middle / reach, middle * reach))
    if len(xs) == 1 or (case.x or "").startswith("bytes"):  # powers of ten are no sizes of bytes
        axes.xaxis.set_major_locator(_apart(xs, 0.18, math.log))
    else:
        axes.xaxis.set_major_locator(_decimal(xs[0], xs[-1]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(_tick)
    if (case.x or "").startswith("bytes"):
        axes.xaxis.set_major_formatter(_tick_of_bytes)
    _draw_power(axes, case, 0, ":")
    _draw_power(axes, case, -1 if case.higher_is_better else 1, "--")


def _draw_power(axes: Axes, case: CaseRecord, exponent: int, line: str) -> None:
    """Draw how our first figure would go on as a power of the size."""
    xs = stats.sizes(case)
    ours = stats.subject(case, xs[0])
    if ours is not None:
        first = stats.spread(ours).median
        y = [first * (x / xs[0]) ** exponent for x in xs]
        axes.plot(xs, y, line, color=_GREY, lw=1, zorder=1.5)


# ---- targets ------------------------------------------------------------------------------------


def _targets(verdicts: Sequence[Verdict]) -> Figure:
    """Draw what was measured over its limit, so that more is better whatever is claimed."""
    claims = [_wrapped(_claim(each), _CLAIM - 0.1, most=2) for each in verdicts]
    rows = [_ROW + (len(each) - 1) * _LINE for each in claims]
    below = _X_AXIS + _LINE + _MARGIN
    figure = _figure("All targets", _targets_key(verdicts), _MARGIN + _HEAD + sum(rows) + below)
    width = _WIDTH - 2 * _MARGIN - _CLAIM - _MEASURED
    axes = _axes(figure, _MARGIN + _CLAIM, below, width, sum(rows))
    axes.set_xscale("log")
    axes.set_xlim(1 / _REACH, _REACH)
    axes.set_ylim(sum(rows), 0)
    axes.set_xlabel("times as good as asked for\n(growth: at ten times the size)")
    axes.xaxis.set_major_locator(FixedLocator([1 / _REACH, 0.5, 1, 2, _REACH]))
    axes.xaxis.set_major_formatter(_tick)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.axvline(1, color=_BLACK, lw=1)
    for i, verdict in enumerate(verdicts):
        top = sum(rows[:i])
        if i % 2:  # leads the eye from the claim to the figure
            ends = -_CLAIM / width, 1 + _MEASURED / width
            axes.axhspan(
                top, top + rows[i], *ends, color="#f3f3f3", lw=0, clip_on=False, zorder=0.1
            )
        y = top + rows[i] / 2
        _beside(axes, -_CLAIM / width, y, "\n".join(claims[i]))
        (figures,) = _wrapped(_figures(verdict), _MEASURED - 0.15, most=1)
        _beside(axes, 1 + 0.15 / width, y, figures)
        _draw_verdict(axes, y, verdict)
    return figure


def _claim(verdict: Verdict) -> str:
    case = verdict.case
    return f"{_full_name(case)}: {claim(case, verdict.target, verdict.other)}"


def _figures(verdict: Verdict) -> str:
    """Write what was measured; without a unit that the claim has said already."""
    if isinstance(verdict.measured, Ratio) and verdict.target.kind == "figure":
        return middle(verdict.measured, unit if has_scale(unit := verdict.case.unit) else "")
    return measured(verdict) or outcome(verdict)


def _beside(axes: Axes, x: float, y: float, words: str) -> None:
    place = ("axes fraction", "data")
    axes.annotate(words, (x, y), xycoords=place, va="center", annotation_clip=False)


def _draw_verdict(axes: Axes, y: float, verdict: Verdict) -> None:
    if verdict.measured is None:
        return
    kept = [_kept(verdict, value) for value in verdict.measured]
    value, low, high = (min(max(each, 1 / _REACH), _REACH) for each in kept)
    look = _mark(verdict.met is True, verdict.certain)
    if value != kept[0]:
        look["marker"] = ">" if value > 1 else "<"
    axes.plot([low, high], [y, y], color=look["mec"], lw=1.5, solid_capstyle="butt")
    axes.plot(value, y, clip_on=False, **look)


def _kept(verdict: Verdict, value: float) -> float:
    """Give how many times as good as its limit a figure is."""
    target = verdict.target
    if target.kind == "exponent":
        return float(10 ** (target.limit - value))
    if target.at_least:
        return value / target.limit
    if value > 0:
        return target.limit / value
    return math.inf if target.limit > 0 else 1.0  # nothing, where nothing is allowed


def _mark(met: bool, certain: bool) -> dict[str, Any]:
    colour = _BLUE if met else _RED
    return {
        "marker": "o" if met else "X",
        "ms": 6.5 if met else 8,
        "mec": colour,
        "mfc": colour if certain else "white",
        "ls": "none",
    }


def _targets_key(verdicts: Sequence[Verdict]) -> list[Patch | Line2D]:
    there = {
        outcome(each): (each.met is True, each.certain)
        for each in sorted(verdicts, key=lambda each: (not each.met, not each.certain))
        if each.met is not None
    }
    return [Line2D([], [], **_mark(*look), label=words) for words, look in there.items()]
