"""A sample of a process, as one page of HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unimem.accounting.report_html import colors_of, report_parts
from unimem.accounting.report_text import kind_of_mapping
from unimem.accounting.row import Mapping as MappedRange
from unimem.accounting.samples import GrowthPoint, Sample
from unimem.base.html import (
    Html,
    bar,
    chart,
    facts,
    fragment,
    heading,
    join,
    markup,
    page,
    size,
    stamp,
    table,
)
from unimem.base.text import format_bytes, format_change, format_count
from unimem.system.limits import Limit
from unimem.system.placement import Placement
from unimem.system.pressure import Pressure

_USED, _TIGHT = "#3b82c4", "#c9544d"
_TIGHT_SHARE = 0.9
_MAPPINGS_BYTES = 150_000  # of the rows of mappings
_ROW_BYTES = 130  # of a row, beside its texts
_LAYERS = 8  # of a chart


def report_page(sample: Sample, growth: Sequence[GrowthPoint] = (), note: str = "") -> str:
    """Write a sample of a process, as a page of less than 300 KiB that needs no network.

    Very many mappings are cut to those with most in RAM, and the sums of the rest.

    Parameters
    ----------
    sample : Sample
        The last sample.
    growth : sequence of GrowthPoint
        Memory in RAM over time.
    note : str
        The end of the page: which version wrote it.
    """
    report = sample.report
    known = report.facts
    title = f"{known.get('name') or 'process'} {known.get('pid', '')}: memory"
    parts = [
        Html(f"<h1>{join([title])}</h1>"),
        stamp(sample.clock),
        *report_parts(report.rows, known),
        *_growth(growth),
        *_limits(sample.limits, sample.pressure),
        *_mappings(report.mappings),
        Html(f'<p class="note">{join([note])}</p>'),
    ]
    return page(title, fragment(*parts))


# ---- limits and growth --------------------------------------------------------------------------


def _limits(limits: Sequence[Limit], pressure: Sequence[Pressure]) -> Iterator[Html]:
    """Write the room of each limit, and the pressure."""
    if not limits:
        return
    yield heading("Limits")
    shares = [min(1.0, limit.used_bytes / max(1, limit.limit_bytes)) for limit in limits]
    yield table(
        ("limit", "of", "used", "room", ""),
        [
            (
                limit.name,
                size(limit.limit_bytes),
                size(limit.used_bytes),
                size(limit.room_bytes),
                bar(share, _TIGHT if share > _TIGHT_SHARE else _USED),
            )
            for limit, share in zip(limits, shares, strict=True)
        ],
        align="p>>><",
        spare=("",),
    )
    yield facts(
        (
            f"pressure, {each.source}",
            f"some {each.some_percent:.2f}%, full {each.full_percent:.2f}% of the last 10 s",
        )
        for each in pressure
    )


def _growth(points: Sequence[GrowthPoint]) -> Iterator[Html]:
    """Draw memory in RAM over time, and write its changes."""
    if len(points) < 2:
        return
    first, last = points[0].resident_bytes, points[-1].resident_bytes
    most = {
        name: max(point.resident_bytes.get(name, 0) for point in points)
        for name in dict.fromkeys(name for point in points for name in point.resident_bytes)
    }
    names = sorted(filter(most.get, most), key=lambda name: -most[name])
    drawn, rest = names[:_LAYERS], names[_LAYERS:]
    colors = colors_of(drawn)
    series = [
        (name, [point.resident_bytes.get(name, 0) for point in points], colors[name])
        for name in drawn
    ]
    if rest:
        others = [sum(point.resident_bytes.get(name, 0) for name in rest) for point in points]
        series.append((format_count(len(rest), "other"), others, "#999999"))
    highest = max(sum(point.resident_bytes.values()) for point in points)
    yield heading("In RAM while it was watched")
    yield chart([point.seconds for point in points], series, max(1, highest))
    changed = [name for name in names if first.get(name, 0) != last.get(name, 0)]
    yield table(
        ("memory", "at first", "at last", "growth"),
        [_change(name, first.get(name, 0), last.get(name, 0)) for name in changed],
        foot=[_change("total", sum(first.values()), sum(last.values()))],
    )


def _change(name: str, first: int, last: int) -> tuple[str, ...]:
    return name, size(first), size(last), format_change(last - first)


# ---- mappings -----------------------------------------------------------------------------------


def _mappings(mappings: Sequence[MappedRange]) -> Iterator[Html]:
    """Write the mappings with most in RAM that fit, and the sums of the rest."""
    if not mappings:
        return
    ordered = sorted(mappings, key=lambda each: (-each.granted.pss_bytes, -each.nbytes))
    shown, room = [], _MAPPINGS_BYTES
    for each in ordered:
        cells = [*map(markup, _mapping(each))]
        room -= _ROW_BYTES + sum(len(cell.encode()) for cell in cells)
        if room < 0:
            break
        shown.append(cells)
    yield heading(format_count(len(mappings), "mapping"))
    head = ("address", "size", "in RAM", "requested", "granted", "memory", "name")
    yield table(head, shown, align="<>><<<p", spare=("address", "size", "requested", "granted"))
    if left := ordered[len(shown) :]:
        nbytes, held = (
            size(sum(sizes))
            for sizes in ([m.nbytes for m in left], [m.granted.pss_bytes for m in left])
        )
        text = f"and {format_count(len(left), 'more mapping')}: "
        yield Html(f"<p>{join([text, nbytes])}, {held} in RAM.</p>")


def _mapping(each: MappedRange) -> tuple[str, ...]:
    return (
        f"{each.address:x}",
        size(each.nbytes),
        size(each.granted.pss_bytes),
        ", ".join(_requested(each.requested or {})) or "-",
        ", ".join(_granted(each.granted)),
        kind_of_mapping(each),
        each.path or each.name,
    )


def _requested(requested: Mapping[str, Any]) -> Iterator[str]:
    """Write the request of a block."""
    if pages := requested.get("pages"):
        yield str(pages)
    if numa := requested.get("numa"):
        yield str(numa)
    if lock := requested.get("lock"):
        yield "locked" if lock is True else f"locked {lock}"


def _granted(placement: Placement) -> Iterator[str]:
    yield placement.pages
    if 0 < placement.huge_bytes < placement.resident_bytes:
        yield f"{placement.huge_bytes / placement.resident_bytes:.0%} huge"
    if placement.locked_bytes:
        yield f"{format_bytes(placement.locked_bytes)} locked"
    if placement.swapped_bytes:
        yield f"{format_bytes(placement.swapped_bytes)} swapped out"
    if len(placement.nodes) > 1 or any(placement.nodes):
        yield "node " + ",".join(map(str, sorted(placement.nodes)))
