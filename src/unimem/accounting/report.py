"""The memory of a process, and its purposes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from unimem._core import ledger
from unimem._core.ledger import Entry
from unimem._core.status import device_bytes, device_ledger, row_name
from unimem.accounting.attribution import attribute, page_runs
from unimem.accounting.llama_buffers import name_buffers
from unimem.accounting.mapped_models import MappedModel, models
from unimem.accounting.published import failure, published
from unimem.accounting.row import Mapping, Row, find_row, in_order, plain
from unimem.backends import cuda_driver
from unimem.base.text import Surface, format_bytes
from unimem.system.heap import malloc_bytes
from unimem.system.process import Area, Process, counters, read_process
from unimem.weights.stream.stream import open_streams

__all__ = ["Mapping", "Report", "Row", "add_use", "report"]

_SCHEMA = "unimem.report/1"

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of memory, and facts about their process. It never changes.

    Attributes
    ----------
    rows : tuple of Row
        One per category.
    facts : mapping
        Names to numbers, texts or lists.
    mappings : tuple of Mapping
        By address; the rows of main memory are their sums.
    made : float
        When it was made, in seconds since 1970; equal reports may differ in it.
    """

    rows: tuple[Row, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    mappings: tuple[Mapping, ...] = ()
    made: float = field(default_factory=time.time, compare=False)

    def __getitem__(self, category: str) -> Row:
        """Return the row of a category: of main memory, else of the first device that has it.

        Raises
        ------
        CategoryError
            A `KeyError` that names the existing categories.
        """
        return find_row(self.rows, category)

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of main memory: all that a process has mapped."""
        return sum(row.nbytes for row in self.rows if row.device is None)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the rows of main memory in RAM, as far as known: a process's Pss."""
        return sum(row.resident_bytes or 0 for row in self.rows if row.device is None)

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of all rows of each device, by its name."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.device is not None:
                found[row.device] = found.get(row.device, 0) + row.nbytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as in JSON, with nodes as texts.

        The schema of the document, with its units, is ``docs/schemas/report-1.json``.
        """
        return {
            "schema": _SCHEMA,
            "total_bytes": self.total_bytes,
            "resident_bytes": self.resident_bytes,
            "device_bytes": self.device_bytes,
            "rows": [plain(row) for row in self.rows],
            "facts": dict(self.facts),
            "mappings": [plain(mapping) for mapping in self.mappings],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        ram = format_bytes(self.resident_bytes)
        return f"Report({len(self.rows)} rows, {format_bytes(self.total_bytes)}, {ram} in RAM)"

    def __str__(self) -> str:
        from unimem.accounting.report_text import report_lines

        return "\n".join(report_lines(Surface(), self.rows, self.facts))

    def _repr_html_(self) -> str:
        from unimem.accounting.report_html import report_html

        return report_html(self.rows, self.facts, self.made)


# ---- of a process -------------------------------------------------------------------------------


def report(pid: int | None = None) -> Report:
    """Report the memory of a process, by purpose.

    The areas are the kernel's (``/proc/PID/smaps``, ``numa_maps``, ``pagemap``). unimem's part is
    known from its ledger, in other processes from the ledger that engines publish; mapped model
    files are known by their headers. The sum of each field of the rows' placements is the kernel's
    figure for the process.

    Parameters
    ----------
    pid : int, optional
        Of any program; by default this process.

    Returns
    -------
    Report
        A row per category: of unimem's memory and of model files ``weights:TYPE``,
        ``weights:padding``, ``kv``, ``scratch``, ``logits``, ``tokens``, ``staging``,
        ``diagnostics`` and ``other``; ``placed``, the memory that `unimem exec` has placed; of the
        rest ``allocator``, ``libraries``, ``stacks``, ``files``, ``shared``, ``anonymous`` and
        ``kernel``. In this process also each category that once had memory, and GPUs.
        ``docs/accounting.md`` lists the facts.

    Raises
    ------
    ProcessLookupError
        The process does not exist, or has ended meanwhile.
    PermissionError
        This process may not read it; the message names the user that may.
    ValueError, TypeError
        No process with memory can have the number.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Block(1 << 20, category="staging"):
    ...     report = um.report()
    >>> [row.nbytes for row in report.rows if row.category == "staging" and row.device is None]
    [1048576]
    >>> report.resident_bytes == report.facts["pss_bytes"]
    True
    """
    number = counters(pid).pid
    process, entries, known = _read(number)
    mapped = models(process)
    entries = name_buffers(entries, mapped)
    mappings, rows = attribute(process, entries, mapped)
    if "exec" in known:
        known["exec"] |= _became_huge(known["exec"], entries, mappings)
    facts = {
        "pid": process.pid,
        "name": process.name,
        "command": process.command,
        **known,
        "rss_bytes": process.rss_bytes,
        "pss_bytes": process.pss_bytes,
        "swapped_bytes": process.swapped_bytes,
        "minor_faults": process.minor_faults,
        "major_faults": process.major_faults,
        "n_threads": process.n_threads,
        "models": [_describe_model(process, model) for model in mapped],
    }
    if number != os.getpid():
        return Report(add_use(rows, entries), facts, mappings)
    if streams := open_streams():
        facts["streams"] = [stream.to_dict() for stream in streams]
    malloc = malloc_bytes()
    if malloc is not None:
        facts["malloc_bytes"] = malloc._asdict()
    if devices := list(_describe_devices()):
        facts["devices"] = devices
    return Report((*_add_high_water(rows), *_device_rows()), facts, mappings)


def _read(pid: int) -> tuple[Process, list[Entry], dict[str, Any]]:
    """Read the areas of a process, its entries that were unchanged meanwhile, and facts."""
    before, _ = _read_entries(pid)
    for _ in range(_TRIES):
        process = read_process(pid)
        entries, facts = _read_entries(pid)
        were, are = ({(e.address, e.reserved_bytes) for e in those} for those in (before, entries))
        if were == are:
            break
        before = entries
    lasting = were & are
    return process, [e for e in entries if (e.address, e.reserved_bytes) in lasting], facts


def _read_entries(pid: int) -> tuple[tuple[Entry, ...], dict[str, Any]]:
    """Return unimem's entries in a process, and their source."""
    if pid == os.getpid():
        hidden = failure()
        return ledger.entries(), {"source": "ledger", **({"problem": hidden} if hidden else {})}
    problems: list[str] = []
    shown = published(pid, problems)
    problem = {"problem": problems[0]} if problems else {}
    if shown is None:
        return (), {"source": "kernel", **problem}
    facts: dict[str, Any] = {"source": "published ledger", **problem}
    if shown.counters:
        facts["counters"] = shown.counters
    if shown.placed is not None:
        facts["exec"] = shown.placed
    if shown.truncated:
        facts["n_entries_left_out"] = shown.truncated
    return shown.entries, facts


def _became_huge(
    placed: dict[str, Any], entries: Iterable[Entry], mappings: Iterable[Mapping]
) -> dict[str, int]:
    """Sum what `unimem exec` has placed, in RAM and in huge pages: what exists, and what ended."""
    addresses = {each.address for each in entries if "is_stalled" in (each.requested or {})}
    granted = [each.granted for each in mappings if each.address in addresses]
    ended = placed["ended"]
    return {
        f"became_{name}": sum(getattr(each, name) for each in granted)
        + sum(each[name] or 0 for each in ended)
        for name in ("resident_bytes", "huge_bytes")
    }


def _describe_model(process: Process, model: MappedModel) -> dict[str, Any]:
    areas = [area for area in model.areas if area.is_accessible]
    nbytes = _count_once((area.offset, area.offset + area.nbytes) for area in areas)
    copied = sum(min(area.anonymous_bytes, area.written_bytes) for area in areas)
    if nbytes == sum(area.nbytes for area in areas):
        rss_bytes = sum(area.resident_bytes for area in areas) - copied
    else:  # a page that several areas map counts once
        rss_bytes = _count_once(run for area in areas for run in _file_pages(process, area))
    known = ("path", "state", "format", "architecture", "name", "problem")
    return {name: getattr(model, name) for name in known} | {
        "staged_from": model.source,
        "nbytes": nbytes,
        "rss_bytes": rss_bytes,
        "pss_bytes": max(0, sum(area.pss_bytes + area.hugetlb_bytes for area in areas) - copied),
        "written_bytes": sum(area.written_bytes for area in areas),
    }


def _file_pages(process: Process, area: Area) -> list[tuple[int, int]]:
    """Return the ranges of a file that an area has in RAM, without private copies."""
    pages = process.pages_in_ram(area.start, area.end)
    if area.written_bytes:
        pages &= ~process.pages_written(area.start, area.end)
    return page_runs(pages, area.offset)


def _count_once(ranges: Iterable[tuple[int, int]]) -> int:
    """Count the bytes of ranges, each byte once."""
    total = reached = 0
    for low, high in sorted(ranges):
        total += max(0, high - max(low, reached))
        reached = max(reached, high)
    return total


def add_use(rows: Iterable[Row], entries: Iterable[Entry]) -> tuple[Row, ...]:
    """Add the highest use of each category whose parts of entries know it."""
    most: dict[str, int] = {}
    for part in (part for entry in entries for part in entry.parts):
        if part.high_water_bytes is not None:
            most[part.category] = most.get(part.category, 0) + part.high_water_bytes
    return tuple(replace(row, high_water_bytes=most.get(row.category)) for row in rows)


def _add_high_water(rows: Sequence[Row]) -> list[Row]:
    """Add the high water of each category, and categories without memory now."""
    marks = ledger.high_water()
    found = {row.category: row for row in rows}
    kinds = {category.partition(":")[0] for category in marks if ":" in category}
    for category, mark in marks.items():
        if category in kinds and category not in found:
            continue  # the rows of its kinds have it
        row = found.get(category) or Row(category, 0, active_bytes=0, resident_bytes=0)
        found[category] = replace(row, high_water_bytes=max(mark, row.nbytes))
    return sorted(found.values(), key=in_order)


def _describe_devices() -> Iterator[dict[str, Any]]:
    """Describe the memory of the devices that this process has used, as their driver counts it."""
    for driver in cuda_driver.in_use():
        with suppress(RuntimeError):  # the device has failed
            free, total = driver.mem_info()
            yield {
                "name": driver.name,
                "own_bytes": device_bytes(driver.name),
                "used_bytes": total - free,
                "total_bytes": total,
                "budget_bytes": driver.budget_bytes,
            }


def _device_rows() -> Iterator[Row]:
    for (device, category), row in device_ledger().items():
        name, most = row_name(category), row["high_water_bytes"]
        yield Row(name, row["nbytes"], high_water_bytes=most, device=device)
