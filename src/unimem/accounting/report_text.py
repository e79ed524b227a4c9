"""A report as lines, for a terminal and for ``str()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unimem.accounting.row import Mapping as MappedRange
from unimem.accounting.row import Row, explain
from unimem.base.text import (
    Bar,
    Surface,
    fact_lines,
    format_bytes,
    format_change,
    format_count,
    shorten_path,
    table_lines,
)
from unimem.system.placement import Placement, sum_placements

_MODELS = 4  # named in the page
_STATES = {
    "unnamed": "memory without a path",
    "replaced": "another file is at this path now",
    "deleted": "no file is at this path any more",
}
_COUNTERS = {
    "n_prompt_tokens": "tokens read",
    "n_generated_tokens": "made",
    "kv_tokens": "in the KV cache",
}
# Counts of unmet requests of `unimem exec`.
_SHORTFALLS = {
    "n_fallback": "found no room in the pool of huge pages",
    "n_stalled": "got small pages, since the kernel was slow to find huge ones",
    "n_unbound": "are not on the requested nodes: the kernel refused",
    "n_unlocked": "are not locked: the limit on locked memory was reached",
    "n_passed_on": "had no room or met a fork, and went to the program's own allocator",
}
_WIDE = 110  # columns, enough for the high water

# Facts that the page writes in other words, or as sums.
_IN_WORDS = {"models", "counters", "problem", "minor_faults", "major_faults", "exec", "streams"}
_IN_WORDS |= {"devices"}
_OF_PROCESS = {"pid", "name", "command", "source", "n_threads", "n_entries_left_out"}
_OF_PROCESS |= {"rss_bytes", "pss_bytes", "swapped_bytes"}


def report_lines(
    surface: Surface,
    rows: Sequence[Row],
    facts: Mapping[str, Any],
    mappings: Sequence[MappedRange] = (),
) -> Iterator[str]:
    """Write a report, with a line for each of `mappings`."""
    first, *others = report_facts(rows, facts)
    parts = (
        fact_lines(surface, first),
        memory_lines(surface, rows),
        *(fact_lines(surface, pairs) for pairs in others),
        _mapping_lines(surface, mappings),
    )
    is_first = True
    for lines in map(list, parts):
        if lines:
            yield from lines if is_first else ["", *lines]
            is_first = False


# ---- facts --------------------------------------------------------------------------------------


def report_facts(rows: Sequence[Row], facts: Mapping[str, Any]) -> Iterator[list[tuple[str, str]]]:
    """Write a report in words, beside its rows.

    Yields
    ------
    list of (str, str)
        Names and texts, where an empty name continues the text before: first the facts above the
        rows, then groups below them.
    """
    yield list(_heading(facts))
    yield [*_sums(rows), *_faults(rows, facts)]
    yield list(_of_exec(facts))
    yield list(_more(facts))
    yield explain(rows)


def _heading(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if placed := facts.get("exec"):
        huge, rss = placed["became_huge_bytes"], placed["became_resident_bytes"]
        yield (
            "huge pages",
            f"{format_bytes(huge)} of {format_bytes(rss)} that unimem exec placed and the program "
            f"touched ({huge / rss if rss else 0:.0%})",
        )
    if "pid" in facts:
        yield "process", f"{facts['pid']} {facts['command'] or facts['name']}"
    models = sorted(facts.get("models", ()), key=lambda model: -model["nbytes"])
    for model in models[:_MODELS]:
        yield "model", f"{model['path']} ({'; '.join(_about(model))})"
    if len(models) > _MODELS:
        yield "", f"and {format_count(len(models) - _MODELS, 'more file')}, which --json names"
    if counters := facts.get("counters"):
        # Another version of unimem may have other counters.
        counted = [
            f"{counters[name]:,} {text}" for name, text in _COUNTERS.items() if name in counters
        ]
        yield "engine", ", ".join(counted)
        if counters.get("piece_hits", 0) + counters.get("piece_misses", 0):
            names = ("hits", "misses", "read_bytes", "waited_ns")
            yield "streams", pieces_text({name: counters[f"piece_{name}"] for name in names})
    for stream in facts.get("streams", ()):
        of, budget = format_bytes(stream["resident_bytes"]), format_bytes(stream["budget_bytes"])
        where = f"{of} in RAM of a budget of {budget}"
        yield "streams", f"{stream['path']} ({where}; {pieces_text(stream)})"
    for device in facts.get("devices", ()):
        own, used, total = (
            format_bytes(device[f"{key}_bytes"]) for key in ("own", "used", "total")
        )
        budget = device["budget_bytes"]
        limit = "" if budget is None else f" of a budget of {format_bytes(budget)}"
        yield (
            device["name"],
            f"{used} of {total} used by all programs; {own} by unimem here{limit}",
        )
    if problem := facts.get("problem"):
        yield "problem", problem


def pieces_text(counts: Mapping[str, int]) -> str:
    """Write what streamed weights have read."""
    hits, all_ = counts["hits"], counts["hits"] + counts["misses"]
    share = f", {hits / all_:.1%}" if all_ else ""
    return (
        f"{hits:,} of {all_:,} pieces were in RAM{share}; {format_bytes(counts['read_bytes'])} "
        f"read, {counts['waited_ns'] / 1e9:.1f} s waited"
    )


def _about(model: Mapping[str, Any]) -> Iterator[str]:
    size, in_ram = format_bytes(model["nbytes"]), format_bytes(model["rss_bytes"])
    is_all = model["rss_bytes"] >= model["nbytes"]
    yield f"{size}, all in RAM" if is_all else f"{in_ram} of {size} in RAM"
    if model["written_bytes"]:
        yield f"{format_bytes(model['written_bytes'])} written, in private copies"
    if model["staged_from"] is not None:
        yield f"staged from {model['staged_from']}"
    if (state := _STATES.get(model["state"])) is not None:
        yield state
    if model["problem"] is not None:
        yield model["problem"]


def _placements(rows: Iterable[Row]) -> list[Placement]:
    return [row.granted for row in rows if row.granted and row.device is None]


def _sums(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    if not (placed := _placements(rows)):
        return
    all_, size = sum_placements(placed), format_bytes
    rss, huge = all_.resident_bytes, all_.huge_bytes
    nodes = [f"{size(nbytes)} on node {node}" for node, nbytes in sorted(all_.nodes.items())]
    of_it = [f"{size(huge)} in huge pages ({huge / rss if rss else 0:.0%})"]
    of_it += [f"{size(all_.locked_bytes)} locked", *nodes]
    yield "in RAM", f"{size(all_.pss_bytes)} (Pss), {size(rss)} with all that is shared (Rss)"
    yield "of Rss", ", ".join(of_it)


def _faults(rows: Sequence[Row], facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "minor_faults" in facts:
        faults = f"{facts['minor_faults']:,} minor, {facts['major_faults']:,} major"
        if placed := _placements(rows):
            faults += f"; {format_bytes(sum_placements(placed).swapped_bytes)} swapped out"
        yield "faults", faults


def _of_exec(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Write the memory that `unimem exec` has placed in the process, and its shortfalls."""
    placed = facts.get("exec")
    if placed is None:
        return
    asked = [f"pages {placed['pages']}", f"from {format_bytes(placed['min_bytes'] or 0)} on"]
    asked += [f"numa {placed['numa']}"] if placed["numa"] else []
    asked += [name for name in ("lock", "prefault", "strict") if placed[name]]
    most = format_bytes(placed["most_bytes"])
    yield "exec", f"{', '.join(asked)}: {placed['n_placed']:,} placed, high water {most}"
    for name, text in _SHORTFALLS.items():
        if placed[name]:
            yield "", f"{placed[name]:,} {text}"
    if not placed["malloc_is_placed"]:
        yield "", "the program has a malloc of its own: only its mmap is seen"
    for each in placed["ended"]:
        yield "ended", ", ".join(_about_ended(each))


def _about_ended(ended: Mapping[str, Any]) -> Iterator[str]:
    yield f"{ended['via']}: {ended['n']:,} of {format_bytes(ended['requested_bytes'])} in all"
    resident, huge = ended["resident_bytes"], ended["huge_bytes"]
    if resident:
        yield f"{format_bytes(resident)} in RAM, {huge / resident:.0%} in huge pages"


def _more(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Write further facts, such as a decoder's."""
    known = _IN_WORDS | (_OF_PROCESS if "pid" in facts else set())
    for name, value in facts.items():
        if name in known or value is None:
            continue
        is_size = name.endswith("_bytes")
        if isinstance(value, dict):
            text = ", ".join(f"{key} {_figure(each, is_size)}" for key, each in value.items())
        elif isinstance(value, (list, tuple)):
            text = ", ".join(map(str, value))
        else:
            text = _figure(value, is_size)
        yield name.removesuffix("_bytes"), text


def _figure(value: Any, is_size: bool) -> str:
    return format_bytes(value) if is_size and isinstance(value, int) else str(value)


# ---- tables -------------------------------------------------------------------------------------


def memory_lines(
    surface: Surface, rows: Sequence[Row], first: Sequence[Row] | None = None
) -> Iterator[str]:
    """Write rows of memory and their sums as a table, with bars, and how much they have grown.

    Parameters
    ----------
    surface : Surface
        The medium.
    rows : sequence of Row
        Of a report.
    first : sequence of Row, optional
        Of an earlier report: adds a column for the growth of each row since then.
    """
    devices = dict.fromkeys(row.device for row in rows if row.device is not None)
    total = _resident(rows)
    columns: dict[str, list[int | None]] = {
        "size": [row.nbytes for row in rows],
        "in RAM": [row.resident_bytes for row in rows],
        "active": [row.active_bytes for row in rows],
    }
    if surface.width >= _WIDE:
        columns["high water"] = [row.high_water_bytes for row in rows]
    # A column without a single value is left out.
    columns = {name: sizes for name, sizes in columns.items() if name == "size" or any(sizes)}
    cells = [
        [
            row.category if row.device is None else f"{row.category} on {row.device}",
            *(
                "-" if sizes[i] is None else format_bytes(sizes[i] or 0)
                for sizes in columns.values()
            ),
            _pages(row.granted),
        ]
        for i, row in enumerate(rows)
    ]
    sums = {"size": _total(rows, None), "in RAM": total}
    cells.append(["total", *(format_bytes(sums[c]) if c in sums else "" for c in columns), ""])
    for device in devices:
        cells.append(
            [f"total on {device}", format_bytes(_total(rows, device)), *[""] * len(columns)]
        )
    head = ["memory", *columns, "pages"]
    if first is not None:
        head.append("growth")
        grown = [*_growth(first, rows), total - _resident(first), *[0] * len(devices)]
        for row_cells, nbytes in zip(cells, grown, strict=True):
            row_cells.append(format_change(nbytes) if nbytes else "0")
    shares = [(row.resident_bytes or 0) / total if total else 0.0 for row in rows]
    bars = [Bar(share) for share in shares] + [None] * (len(cells) - len(shares))
    spare = ("pages", *(name for name in ("high water", "active") if name in columns))
    yield from table_lines(surface, head, cells, bars=bars, spare=spare)


def _growth(first: Sequence[Row], rows: Sequence[Row]) -> Iterator[int]:
    """Compute how much of each row has come into RAM. Memory of a GPU is there as a whole."""
    before = {(row.category, row.device): _held(row) for row in first}
    yield from (_held(row) - before.get((row.category, row.device), 0) for row in rows)


def _held(row: Row) -> int:
    return row.nbytes if row.resident_bytes is None else row.resident_bytes


def _resident(rows: Iterable[Row]) -> int:
    return sum(row.resident_bytes or 0 for row in rows if row.device is None)


def _total(rows: Iterable[Row], device: str | None) -> int:
    return sum(row.nbytes for row in rows if row.device == device)


def _pages(granted: Placement | None) -> str:
    if granted is None:
        return "-"
    # Several mappings count as the one with the smallest pages.
    if granted.pages == "4k" and granted.huge_bytes:
        return f"{granted.huge_bytes / granted.resident_bytes:.0%} huge"
    return granted.pages


def _mapping_lines(surface: Surface, mappings: Sequence[MappedRange]) -> Iterator[str]:
    """Write a line for each mapping, those with most in RAM first."""
    if not mappings:
        return
    rows = [
        (
            f"{each.address:x}",
            format_bytes(each.nbytes),
            format_bytes(each.granted.pss_bytes),
            each.granted.pages,
            kind_of_mapping(each),
            shorten_path(surface, each.path) if each.path else each.name,
        )
        for each in sorted(mappings, key=lambda each: (-each.granted.pss_bytes, -each.nbytes))
    ]
    head = ("address", "size", "in RAM", "pages", "memory", "name")
    spare = ("address", "pages", "memory")
    yield from table_lines(surface, head, rows, align=">>>><<", spare=spare)


def kind_of_mapping(mapping: MappedRange) -> str:
    """Return the category of most of a mapping, and the number of other categories."""
    parts = sorted(mapping.parts, key=lambda category: -mapping.parts[category])
    first, *others = parts or [mapping.category]
    return f"{first} +{len(others)}" if others else first
