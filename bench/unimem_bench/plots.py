"""Plots of a record, as SVG files: cases as bars, growth as lines, all targets on a sheet.

This module imports matplotlib, so it is imported only when plots are wanted. It neither uses nor
changes matplotlib's global state: figures belong to the caller, and the same record gives the same
bytes.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from unimem.base.atomic_file import write_text
from unimem.base.install_hint import install_hint
from unimem_bench import stats, texts
from unimem_bench.record import CaseRecord, Record, Role, SideRecord
from unimem_bench.stats import Growth, Ratio, Spread, Verdict
from unimem_bench.texts import claim, grown, has_scale, measured, outcome

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator
except ImportError as error:
    raise ImportError(
        f"plots need matplotlib: {install_hint('bench')}; importing it said: {error}"
    ) from error


# Okabe and Ito's colours, distinct for the colour-blind; markers and hatches differ as well.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_PURPLE, _SKY, _BLACK, _GREY = "#CC79A7", "#56B4E9", "#000000", "#777777"
_STYLE = {
    "font.size": 8.5,
    "font.sans-serif": ["DejaVu Sans"],  # each text names all of them in its file
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a side may be called $x
    "svg.fonttype": "none",  # small files, whose words can be searched
    "svg.hashsalt": "unimem",
}

# Inches. GitHub shows a page 830 pixels wide, which is a sheet at its natural size.
_WIDTH = 8.6
_HEAD = 0.6  # a title of one line and legend of a sheet
_TITLE_LINE = 0.18
_ROW, _LINE = 0.1, 0.15  # of a bar without its name, and of a line of text
_LINES = 1.8  # the height of axes with lines
_X_AXIS = 0.6  # ticks and label below axes, and a gap

# From this ratio of largest to smallest on, bars that begin at 0 hide the smallest.
_LOG_FROM = 25.0
_TICK = "{x:,g}"
_REACH = 4.0  # of the axis of targets, in multiples of the limit


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure that is not written yet: the stem of its file, a description, and its suite."""

    name: str
    alt: str
    suite: str | None
    figure: Figure


def save(record: Record, folder: Path, names: Collection[str] | None = None) -> list[Drawing]:
    """Write the drawings of a record, or those with some names, as ``<name>.svg`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with _style():
        drawings = [each for each in _drawings(record) if names is None or each.name in names]
        for drawing in drawings:
            text = io.StringIO()
            drawing.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            write_text(folder / f"{drawing.name}.svg", _compact(text.getvalue()))
    return drawings


def _compact(svg: str) -> str:
    """Give clip paths numbers, since their names vary with the layout, and drop white space."""
    ids = {name: f"clip{i}" for i, name in enumerate(re.findall(r'<clipPath id="(\w+)"', svg))}
    svg = re.sub(r"\bp[0-9a-f]{10}\b", lambda name: ids.get(name[0], name[0]), svg)
    # White space between tags means nothing; in paths, a new line is a space.
    return re.sub(r"\s*\n\s*", " ", re.sub(r">\s+<", "><", svg)).strip() + "\n"


def draw(record: Record) -> list[Drawing]:
    """Draw ``overview``, with a case of each suite; ``targets``; and each suite by its name."""
    with _style():
        return list(_drawings(record))


def _style() -> AbstractContextManager[None]:
    """Give matplotlib our settings for a while, whatever the user's are."""
    return style.context(["default", _STYLE])


def _drawings(record: Record) -> Iterator[Drawing]:
    shown = {
        suite.name: [case for case in suite.cases if any(map(stats.figures, case.sides))]
        for suite in record.suites
    }
    telling = [_most_telling(cases) for cases in shown.values() if cases]
    if telling:
        alt = f"A panel of each suite: {', '.join(map(_full_name, telling))}."
        yield Drawing("overview", alt, None, _sheet("A case of each suite", telling, _full_name))
    verdicts = sorted(stats.verdicts(record), key=lambda each: each.target.issue)
    n_met = sum(each.met is True for each in verdicts)
    n_missed = sum(each.met is False for each in verdicts)
    if n_met + n_missed > 0:
        alt = f"What was measured over its limit: {n_met} targets met, {n_missed} missed."
        yield Drawing("targets", alt, None, _targets(verdicts))
    for suite in record.suites:
        if cases := shown[suite.name]:
            cases = [case for case in cases if _pairs(case)] or cases
            alt = f"Medians of unimem and its peers: {', '.join(case.name for case in cases)}."
            sheet = _sheet(f"{suite.name}: {suite.question}", cases, lambda case: case.name)
            yield Drawing(suite.name, alt, suite.name, sheet)


def _most_telling(cases: Sequence[CaseRecord]) -> CaseRecord:
    """Choose the first case with peers and a limit, or the nearest to that."""
    return max(cases, key=lambda case: len({side.role for side in _sides(case)}))


def _full_name(case: CaseRecord) -> str:
    return f"{case.suite}/{case.name}"


def _sides(case: CaseRecord) -> list[SideRecord]:
    return [side for side in case.sides if stats.figures(side)]


def _wrap(text: str, width: int, most: int | None = 1) -> str:
    """Break a text into lines of `width` characters, at most `most` of them if that is given."""
    return textwrap.fill(text, width, max_lines=most, placeholder="…")


def _figure(title: str, key: Sequence[Patch | Line2D], height: float) -> Figure:
    """Make a figure with a title and a legend above `height` inches."""
    text = _wrap(title, 85, None)
    more = text.count("\n") * _TITLE_LINE
    head = _HEAD + more
    height += head
    engine = ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - head / height), hspace=0, wspace=0)
    figure = Figure(figsize=(_WIDTH, height), layout=engine)
    left = 0.1 / _WIDTH
    figure.text(left, 1 - 0.1 / height, text, va="top", weight="bold", size=11)
    figure.legend(
        handles=list(key), loc="upper left", ncols=6,
        bbox_to_anchor=(left, 1 - (0.33 + more) / height),
        borderpad=0, borderaxespad=0, columnspacing=1.5, handletextpad=0.6,
    )  # fmt: skip
    return figure


def _sheet(title: str, cases: Sequence[CaseRecord], name: Callable[[CaseRecord], str]) -> Figure:
    """Draw a panel for each case, in two columns, always adding to the shorter one."""
    width = 44 if len(cases) > 1 else 90
    columns: list[list[tuple[CaseRecord, str, dict[str, str]]]] = [[] for _ in cases[:2]]
    heights: list[list[float]] = [[] for _ in columns]
    for case in cases:
        text, labels = _wrap(f"{name(case)}: {case.question}", width, None), _labels(case, width)
        n_lines = sum(each.count("\n") + 1 for each in labels.values())
        axes = _LINES if stats.sizes(case) else len(labels) * _ROW
        shorter = min(range(len(columns)), key=lambda i: sum(heights[i]))
        columns[shorter].append((case, text, labels))
        heights[shorter].append(axes + (text.count("\n") + 1 + n_lines) * _LINE + _X_AXIS)
    height = max(map(sum, heights))
    figure = _figure(title, _key(cases), height)
    parts = figure.subfigures(1, len(columns), squeeze=False)[0]
    for part, column, ratios in zip(parts, columns, heights, strict=True):
        ratios.append(max(height - sum(ratios), 1e-3))
        panels = part.subfigures(len(ratios), 1, height_ratios=ratios)
        for panel, (case, text, labels) in zip(panels, column, strict=False):
            panel.suptitle(text, x=0.02, ha="left", weight="bold", size="medium")
            draw_case = _draw_pairs if _pairs(case) else _draw_bars
            (_draw_lines if stats.sizes(case) else draw_case)(panel, case, labels)
    return figure


def _labels(case: CaseRecord, width: int) -> dict[str, str]:
    """Return the label of each side of a panel, in lines."""
    if stats.sizes(case):
        names = dict.fromkeys(side.name for side in _sides(case) if side.at is not None)
        return {name: _wrap(_line_label(case, name), width, 3) for name in names}
    return {name: _wrap(name, 21, 3) for name in _pairs(case) or [s.name for s in _sides(case)]}


def _pairs(case: CaseRecord) -> dict[str, tuple[SideRecord, SideRecord]]:
    """Find the sides that were measured quiet and pressed, as their names end; {} without any."""
    found = {side.name: side for side in _sides(case)}
    names = [name.removesuffix(_QUIET) for name in found if name.endswith(_QUIET)]
    return {
        name: (found[name + _QUIET], found[name + _PRESSED])
        for name in names
        if name + _PRESSED in found
    }


_QUIET, _PRESSED = ", quiet", ", pressed"
_COLOURS: dict[Role, str] = {"unimem": _BLUE, "peer": _ORANGE, "limit": "white"}
_EDGES: dict[Role, str] = _COLOURS | {"limit": _GREY}
_MARKERS: dict[Role, str] = {"unimem": "o", "peer": "s", "limit": "D"}
_ROLES: dict[Role, str] = {"unimem": "unimem", "peer": "its peers", "limit": "machine's limit"}


def _fill(role: Role) -> dict[str, Any]:
    """Return the look of a bar, which shows its side's role even in grey."""
    hatch = "////" if role == "limit" else None
    return {"facecolor": _COLOURS[role], "edgecolor": _EDGES[role], "hatch": hatch, "lw": 0.8}


def _key(cases: Sequence[CaseRecord]) -> list[Patch | Line2D]:
    """Make the legend that holds for all panels of a sheet."""
    lines = [case for case in cases if stats.sizes(case)]
    pairs = [case for case in cases if _pairs(case)]
    others = [case for case in cases if case not in lines and case not in pairs]
    bars = {side.role for case in others for side in _sides(case)}
    key: list[Patch | Line2D] = [
        Patch(**_fill(role), label=name) for role, name in _ROLES.items() if role in bars
    ]
    if bars:
        key.append(Line2D([], [], color=_BLACK, lw=1.2, label="5 to 95 % of rounds"))
    elif lines:
        key.append(Patch(color=_GREY, alpha=0.25, lw=0, label="5 to 95 % of rounds"))
    references: dict[str, str] = {}
    if not all(map(_is_by_threads, lines)):
        references |= {"constant": ":", "proportional": "--"}
    if any(map(_is_by_threads, lines)):
        references |= {"ideal": "-."}
    key += [Line2D([], [], color=_GREY, ls=ls, lw=1, label=name) for name, ls in references.items()]
    if pairs:
        key += [Line2D([], [], label="alone", **_PAIR_LOOKS[0])]
        roles = {side.role for case in pairs for side in _sides(case)}
        for role in (role for role in _ROLES if role in roles):
            label = f"{_ROLES[role]}, beside neighbours"
            key += [Line2D([], [], label=label, **_PAIR_LOOKS[1] | _filled(role))]
        key += [Line2D([], [], color=_BLACK, lw=1.2, label="up to the slowest")]
    return key


def _better(case: CaseRecord) -> str:
    return f"({'more' if case.higher_is_better else 'less'} is better)"


def _decimal(low: float, high: float) -> LogLocator:
    """Return the ticks of a logarithmic axis: on a short one, more than the powers of ten."""
    return LogLocator(subs=(1.0, 3.0) if high < 500 * low else (1.0,), numticks=5)


def _draw_bars(panel: SubFigure, case: CaseRecord, labels: Mapping[str, str]) -> None:
    """Draw medians with whiskers: as bars, or as points if they differ too much for bars."""
    axes = panel.subplots()
    sides = _sides(case)
    spreads = [stats.spread(side) for side in sides]
    low, high = min(each.median for each in spreads), max(each.median for each in spreads)
    is_log = low > 0 and high / low >= _LOG_FROM
    factor, unit = (1.0, case.unit) if is_log else texts.scaled(high, case.unit)
    spreads = [Spread(*(value * factor for value in each)) for each in spreads]
    axes.set_ylim(len(sides) - 0.5, -0.5)
    axes.set_yticks(range(len(sides)), [labels[side.name] for side in sides])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    _scale_bars(axes, spreads, is_log)
    axes.set_xlabel(f"{_wrap(unit, 30)} {_better(case)}")
    axes.xaxis.set_major_formatter(_TICK)
    for y, (side, (median, p5, p95)) in enumerate(zip(sides, spreads, strict=True)):
        if is_log:
            axes.axhline(y, color=_GREY, ls=":", lw=0.5, zorder=0.8)
            look: dict[str, Any] = {"mfc": _COLOURS[side.role], "mec": _EDGES[side.role]}
            axes.plot(median, y, _MARKERS[side.role], ms=7, **look)
        else:
            axes.barh(y, median, 0.6, **_fill(side.role))
        axes.plot([p5, p95], [y, y], color=_BLACK, lw=1.2, solid_capstyle="butt")
        if side.role == "limit":
            axes.axvline(median, color=_GREY, ls="--", lw=0.8, zorder=0.9)
        text = texts.amount(median, unit) if has_scale(unit) else texts.number(median)
        _write(axes, text, (max(median, p95), y), 8 if is_log else 5)


_PAIR_LOOKS: tuple[dict[str, Any], dict[str, Any]] = (
    {"marker": "o", "ms": 6, "mec": _GREY, "mfc": "white", "ls": "none"},
    {"marker": "o", "ms": 7, "mec": _BLACK, "mfc": _BLACK, "ls": "none"},
)


def _filled(role: Role) -> dict[str, Any]:
    return {"mfc": _COLOURS[role], "mec": _EDGES[role]}


def _draw_pairs(panel: SubFigure, case: CaseRecord, labels: Mapping[str, str]) -> None:
    """Draw each side twice: its median alone and pressed, each with a line to its worst figure."""
    axes = panel.subplots()
    pairs = _pairs(case)
    every = [figure for pair in pairs.values() for side in pair for figure in stats.figures(side)]
    axes.set_xscale("log")
    axes.set_xlim(min(every) / 1.3, max(every) * 1.3)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_yticks(range(len(pairs)), [labels[name] for name in pairs])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(_decimal(min(every), max(every)))
    axes.xaxis.set_major_formatter(_TICK)
    axes.minorticks_off()
    axes.set_xlabel(f"{_wrap(case.unit, 30)} {_better(case)}")
    for y, pair in enumerate(pairs.values()):
        axes.axhline(y, color=_GREY, ls=":", lw=0.5, zorder=0.8)
        looks = (_PAIR_LOOKS[0], _PAIR_LOOKS[1] | _filled(pair[1].role))
        for side, look, at in zip(pair, looks, (y - 0.16, y + 0.16), strict=True):
            median, worst = stats.spread(side).median, max(stats.figures(side))
            axes.plot([median, worst], [at, at], color=look["mec"], lw=1.2)
            axes.plot(median, at, **look)
        values = [stats.figures(side) for side in pair]
        slower = max(values[1]) / max(values[0])  # the slowest tokens
        if slower >= _MUCH_SLOWER:
            _write(axes, f"worst {slower:,.0f}x", (max(values[1]), y + 0.16), 5)


_MUCH_SLOWER = 2.0  # from here on, written beside the line


def _write(axes: Axes, text: str, place: tuple[float, float], points: float, **more: Any) -> None:
    """Write a text `points` to the right of a place; the layout makes room for it."""
    axes.annotate(
        text, place, xytext=(points, -0.5), textcoords="offset points", va="center",
        annotation_clip=False, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, **more,
    )  # fmt: skip


def _scale_bars(axes: Axes, spreads: Sequence[Spread], is_log: bool) -> None:
    farthest = max(each.p95 for each in spreads)
    if is_log:
        nearest = min(each.p5 if each.p5 > 0 else each.median for each in spreads)
        axes.set_xscale("log")
        axes.set_xlim(nearest / 1.5, farthest * 1.5)
        axes.xaxis.set_major_locator(_decimal(nearest, farthest))
        axes.minorticks_off()
    else:  # counts may all be 0
        axes.set_xlim(min(0, *(each.p5 for each in spreads)), farthest * 1.02 or 1)
        axes.locator_params(axis="x", nbins=4)


def _is_by_threads(case: CaseRecord) -> bool:
    return "threads" in (case.x or "")


def _line_label(case: CaseRecord, name: str) -> str:
    """Name a side, with the exponent of its growth as drawn."""
    if not _is_by_threads(case):
        with suppress(ValueError):  # there may be one size only, or figures of 0
            growth = stats.growth(case, name)
            if case.higher_is_better:
                growth = Growth(-growth.exponent, -growth.high, -growth.low)
            return f"{name}: {grown(growth)}"
    return name


def _draw_lines(panel: SubFigure, case: CaseRecord, labels: Mapping[str, str]) -> None:
    """Draw medians by size with bands, on logarithmic axes, or on linear ones by threads."""
    axes = panel.subplots()
    sides = [side for side in _sides(case) if side.at is not None]
    spreads = [stats.spread(side) for side in sides]
    is_plain = _is_by_threads(case) or min(stats.sizes(case)[0], *(e.p5 for e in spreads)) <= 0
    (_scale_plainly if is_plain else _scale_by_logarithms)(axes, case, spreads)
    axes.set_xlabel(_wrap(case.x or "size", 40))
    axes.set_ylabel(f"{_wrap(case.unit, 20)}\n{_better(case)}")
    axes.xaxis.set_major_formatter(_TICK)
    axes.yaxis.set_major_formatter(_TICK)
    if (case.x or "").startswith("bytes"):
        axes.xaxis.set_major_formatter(lambda value, _: texts.amount(value, "bytes"))
    axes.grid()
    looks = {role: cycle(each) for role, each in _LOOKS.items()}
    roles = {side.name: side.role for side in case.sides}
    for name, label in labels.items():
        line = sorted((s.at, *stats.spread(s)) for s in sides if s.name == name)
        x, medians, low, high = zip(*line, strict=True)
        colour, marker, kind = next(looks[roles[name]])
        axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        axes.plot(x, medians, kind, marker=marker, color=colour, lw=1.5, ms=4.5, label=label)
    panel.legend(loc="outside lower left", borderpad=0, labelspacing=0.3)


_LOOKS: dict[Role, list[tuple[str, str, str]]] = {
    "unimem": [(_BLUE, "o", "-"), (_SKY, "p", "-")],
    "peer": [(_ORANGE, "s", "-"), (_GREEN, "^", "-"), (_RED, "v", "-"), (_PURPLE, "P", "-")],
    "limit": [(_BLACK, "D", "--"), (_GREY, "d", "--")],
}


def _scale_plainly(axes: Axes, case: CaseRecord, spreads: Sequence[Spread]) -> None:
    """Scale axes from 0, and draw the ideal: n threads are n times as fast."""
    axes.set_xlim(0, stats.sizes(case)[-1] * 1.05 or 1)
    axes.set_ylim(min(0, *(each.p5 for each in spreads)), max(e.p95 for e in spreads) * 1.1 or 1)
    axes.locator_params(axis="x", integer=True, nbins=6)
    if _is_by_threads(case):
        _draw_power(axes, case, 1 if case.higher_is_better else -1, "-.")


def _scale_by_logarithms(axes: Axes, case: CaseRecord, spreads: Sequence[Spread]) -> None:
    """Scale axes logarithmically, and draw constant cost and cost proportional to size."""
    xs = stats.sizes(case)
    low, high = min(each.p5 for each in spreads), max(each.p95 for each in spreads)
    # Two decades at least, so that constant cost looks constant.
    middle, reach = math.sqrt(low * high), max(10, 1.4 * math.sqrt(high / low))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)
    axes.set_ylim(middle / reach, middle * reach)
    axes.yaxis.set_major_locator(_decimal(middle / reach, middle * reach))
    if len(xs) == 1:
        axes.set_xticks(xs)
    elif (case.x or "").startswith("bytes"):  # sizes are powers of two
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=4))
    else:
        axes.xaxis.set_major_locator(_decimal(xs[0], xs[-1]))
    axes.minorticks_off()
    _draw_power(axes, case, 0, ":")
    _draw_power(axes, case, -1 if case.higher_is_better else 1, "--")


def _draw_power(axes: Axes, case: CaseRecord, exponent: int, line: str) -> None:
    """Draw how our first figure would continue as a power of the size."""
    xs = stats.sizes(case)
    ours = stats.subject(case, xs[0])
    if ours is not None:
        first = stats.spread(ours).median
        y = [first * (x / xs[0]) ** exponent for x in xs]
        axes.plot(xs, y, line, color=_GREY, lw=1, zorder=1.5)


def _targets(verdicts: Sequence[Verdict]) -> Figure:
    """Draw each measurement over its limit, so that more is always better."""
    claims = [f"{_full_name(v.case)}: {claim(v.case, v.target, v.other)}" for v in verdicts]
    figure = _figure("All targets", _targets_key(verdicts), len(claims) * 2.2 * _LINE + _X_AXIS)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlim(1 / _REACH, _REACH)
    axes.set_ylim(len(claims) - 0.5, -0.5)
    axes.set_xticks([1 / _REACH, 0.5, 1, 2, _REACH])
    axes.minorticks_off()
    axes.set_xlabel("times as good as asked for\n(growth: at ten times the size)")
    axes.xaxis.set_major_formatter(_TICK)
    axes.set_yticks(range(len(claims)), [_wrap(each, 56, 2) for each in claims])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.axvline(1, color=_BLACK, lw=1)
    for y, verdict in enumerate(verdicts):
        axes.axhline(y, color=_GREY, ls=":", lw=0.5, zorder=0.8)
        _write(axes, _wrap(_figures(verdict), 30), (1, y), 10, xycoords=("axes fraction", "data"))
        _draw_verdict(axes, y, verdict)
    return figure


def _figures(verdict: Verdict) -> str:
    """Write what was measured, without a unit that the claim has already."""
    if isinstance(verdict.measured, Ratio) and verdict.target.kind == "figure":
        return texts.middle(verdict.measured, unit if has_scale(unit := verdict.case.unit) else "")
    return measured(verdict) or outcome(verdict)


def _draw_verdict(axes: Axes, y: float, verdict: Verdict) -> None:
    if verdict.measured is None:
        return
    kept = [stats.margin(verdict.target, value) for value in verdict.measured]
    value, low, high = (min(max(each, 1 / _REACH), _REACH) for each in kept)
    look = _mark(verdict.met is True, verdict.certain)
    if value != kept[0]:
        look |= {"marker": ">" if value > 1 else "<"}
    axes.plot([low, high], [y, y], color=look["mec"], lw=1.5, solid_capstyle="butt")
    axes.plot(value, y, clip_on=False, **look)


def _mark(met: bool, certain: bool) -> dict[str, Any]:
    colour = _BLUE if met else _RED
    marker, size = ("o", 6.5) if met else ("X", 8)
    look = {"marker": marker, "ms": size, "mec": colour, "ls": "none"}
    return look | {"mfc": colour if certain else "white"}


def _targets_key(verdicts: Sequence[Verdict]) -> list[Line2D]:
    words = {(each.met, each.certain): outcome(each) for each in verdicts if each.met is not None}
    looks = sorted(words, reverse=True)
    return [Line2D([], [], **_mark(*look), label=words[look]) for look in looks]
