"""A report as HTML, for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unimem.accounting.report_text import report_facts
from unimem.accounting.row import Row
from unimem.base.html import Html, bar, facts, fragment, heading, size, stack, stamp, table
from unimem.system.placement import Placement, sum_placements

# By kind of category; weights of several types have one hue.
_COLORS = {
    "weights": ("#3b82c4", "#5d9fd8", "#2b6498", "#86b9e4", "#4a7ba8"),
    "kv": ("#e08a2e",),
    "scratch": ("#3f9e63",),
    "logits": ("#7bb661",),
    "tokens": ("#a3c46b",),
    "staging": ("#2aa5a0",),
    "diagnostics": ("#b58ad6",),
    "other": ("#8e6bbf",),
    "placed": ("#d0559a",),
    "allocator": ("#c9544d",),
    "anonymous": ("#c27b5e",),
    "libraries": ("#9a8f3c",),
    "stacks": ("#b3a6a0",),
    "files": ("#7d97a8",),
    "shared": ("#5aa9a0",),
    "kernel": ("#777777",),
}


def report_html(rows: Sequence[Row], known: Mapping[str, Any], made: float) -> Html:
    """Write the rows and facts of a report of a time, for a notebook."""
    return fragment(stamp(made), *report_parts(rows, known))


def color_of(category: str, n_before: int = 0) -> str:
    """Choose the colour of a category that `n_before` others of its kind precede."""
    colors = _COLORS.get(category.partition(":")[0], ("#999999",))
    return "#aab4be" if category == "weights:padding" else colors[n_before % len(colors)]


def colors_of(categories: Iterable[str]) -> dict[str, str]:
    """Choose the colours of categories; those of one kind differ by their order."""
    found: dict[str, str] = {}
    n_of: dict[str, int] = {}
    for category in categories:
        if category not in found:
            kind = category.partition(":")[0]
            found[category] = color_of(category, n_of.get(kind, 0))
            n_of[kind] = n_of.get(kind, 0) + 1
    return found


# ---- what memory is for -------------------------------------------------------------------------


def report_parts(rows: Sequence[Row], known: Mapping[str, Any]) -> Iterator[Html]:
    """Write the parts of `report_html`, for a page with further parts."""
    first, *others = report_facts(rows, known)
    colors = colors_of(row.category for row in rows)
    host = [row for row in rows if row.device is None]
    yield facts(first)
    yield stack((row.category, row.resident_bytes or 0, colors[row.category]) for row in host)
    yield _memory(rows, colors)
    for pairs in others:
        yield facts(pairs)
    if any(row.granted for row in host):
        yield heading("How it is placed")
        yield _placements(host)


def _memory(rows: Sequence[Row], colors: Mapping[str, str]) -> Html:
    """Write the sizes of each category, and the sums."""
    whole = sum(row.resident_bytes or 0 for row in rows if row.device is None)
    lines = [
        (
            _on(row.category, row.device),
            size(row.requested_bytes),
            size(row.nbytes),
            size(row.resident_bytes),
            size(row.active_bytes),
            size(row.high_water_bytes),
            bar((row.resident_bytes or 0) / whole if whole else 0.0, colors[row.category]),
        )
        for row in rows
    ]
    sums = []
    for device in dict.fromkeys([None, *(row.device for row in rows)]):
        nbytes = sum(row.nbytes for row in rows if row.device == device)
        held = size(whole) if device is None else ""
        sums.append((_on("total", device), "", size(nbytes), held, "", "", ""))
    return table(
        ("memory", "requested", "size", "in RAM", "active", "high water", ""),
        lines,
        foot=sums,
        align="<>>>>><",
        spare=("requested", "active", "high water"),
    )


def _on(what: str, device: str | None) -> str:
    return what if device is None else f"{what} on {device}"


# ---- how it is placed ---------------------------------------------------------------------------


def _placements(rows: Iterable[Row]) -> Html:
    """Write the granted memory of each category, and the sums."""
    granted = [(row.category, row.granted) for row in rows if row.granted is not None]
    whole = sum_placements([placement for _, placement in granted])
    nodes = sorted(whole.nodes)
    head = ("memory", "pages", "Rss", "huge pages", "locked", "swapped out")
    return table(
        (*head, *(f"node {node}" for node in nodes)),
        [(name, placement.pages, *_sizes(placement, nodes)) for name, placement in granted],
        foot=[("total", "", *_sizes(whole, nodes))],
        # A single node equals Rss.
        spare=("pages", *(f"node {node}" for node in nodes if len(nodes) == 1)),
    )


def _sizes(placement: Placement, nodes: Iterable[int]) -> Iterator[Html]:
    yield size(placement.resident_bytes)
    yield size(placement.huge_bytes)
    yield size(placement.locked_bytes)
    yield size(placement.swapped_bytes)
    for node in nodes:
        yield size(placement.nodes.get(node, 0))
