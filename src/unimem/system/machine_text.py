"""A machine as text of 80 columns; a terminal gives its own styles."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unimem.system.limits import Limit
from unimem.system.machine import Finding, MachineFacts
from unimem.system.text import format_bytes, table

__all__ = ["Style", "ranges", "render"]

_WIDTH = 80
_NAME = 10  # columns of the names of facts
_INDENT = 3
_LABEL = 9  # columns of "run" and "changes"
_LONGEST_CPUS = 16  # a list where the CPUs of nodes alternate has no end

_LASTS = (
    "Most of these need root. What is written to /sys, and what sysctl sets, lasts until the next "
    "boot; docs/doctor.md tells how to keep it. In a container, set them on the host."
)


def _as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class Style:
    """How kinds of text look; by default all the same.

    Attributes
    ----------
    name, heading, good, bad : callable
        Each takes a text that fits in its line and gives what is written for it.
    """

    name: Callable[[str], str] = _as_it_is
    heading: Callable[[str], str] = _as_it_is
    good: Callable[[str], str] = _as_it_is
    bad: Callable[[str], str] = _as_it_is


def render(machine: MachineFacts, style: Style | None = None) -> str:
    """Write a machine for people.

    Parameters
    ----------
    machine : MachineFacts
        What was found.
    style : Style, optional
        By default plain text.

    Returns
    -------
    str
        Lines of at most 80 columns, but for names that are longer; no line end at the end. A
        command in several lines can be copied as it is.
    """
    style = style or Style()
    lines: list[str] = []
    for name, values in _facts(machine):
        wrapped = [line for value in values for line in _wrap(value, _WIDTH - _NAME)]
        names = [style.name(name.ljust(_NAME)), *[" " * _NAME] * (len(wrapped) - 1)]
        lines += [start + line for start, line in zip(names, wrapped, strict=True)]
    if len(machine.numa.nodes) > 1:
        for rows in _node_tables(machine):
            head, rest = rows.split("\n", 1)
            lines += ["", style.heading(head), rest]
    needed = [finding for finding in machine.findings if not finding.is_optional]
    optional = [finding for finding in machine.findings if finding.is_optional]
    lines.append("")
    if needed:
        lines.append(style.heading("To change, the greatest effect first:"))
        lines += _numbered(needed, style, style.bad, 1)
    else:
        lines.append(style.good("Nothing to change."))
    if optional:
        lines += ["", style.heading("Optional:")]
        lines += _numbered(optional, style, _as_it_is, len(needed) + 1)
    if machine.findings:
        lines += ["", *(_wrap(_LASTS, _WIDTH))]
    return "\n".join(lines)


def _numbered(
    findings: Sequence[Finding], style: Style, what: Callable[[str], str], first: int
) -> Iterator[str]:
    margin = " " * _INDENT
    for number, finding in enumerate(findings, first):
        yield ""
        title, *more = _wrap(finding.what, _WIDTH - _INDENT)
        yield f"{number}.".ljust(_INDENT) + what(title)
        yield from (margin + what(line) for line in more)
        yield from (margin + line for line in _wrap(finding.why, _WIDTH - _INDENT))
        for label, lines in (
            ("run", _command(finding.run, _WIDTH - _INDENT - _LABEL)),
            ("changes", _wrap(finding.changes, _WIDTH - _INDENT - _LABEL)),
        ):
            starts = [style.name(label.ljust(_LABEL)), *[" " * _LABEL] * (len(lines) - 1)]
            yield from (margin + start + line for start, line in zip(starts, lines, strict=True))


def _facts(machine: MachineFacts) -> Iterator[tuple[str, list[str]]]:
    kernel, memory, numa = machine.kernel, machine.memory, machine.numa
    yield "kernel", [f"Linux {kernel.release}, {kernel.architecture}"]
    yield "cpu", [text for text in _cpu(machine) if text]
    swap = (
        f"swap {format_bytes(memory.swap_total_bytes)} (vm.swappiness {memory.swappiness})"
        if memory.swap_total_bytes
        else "no swap"
    )
    yield (
        "memory",
        [
            f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available "
            "to this process",
            f"{swap}; vm.overcommit_memory {memory.overcommit_mode}; "
            f"vm.max_map_count {_or_none(memory.max_map_count)}",
        ],
    )
    narrower = [limit for limit in memory.limits if limit.name != "memory of the machine"]
    yield "limits", [*map(_limit, narrower), _locked(memory.memlock)]
    yield "pages", [text for text in _pages(machine) if text]
    pools = [
        f"{name}: {pool.total} {'page' if pool.total == 1 else 'pages'}, {pool.free} free"
        + (f", {pool.surplus_most} more on demand" if pool.surplus_most else "")
        for name, pool in machine.pools.items()
    ]
    yield "hugetlb", ["; ".join(pools) or "none in this kernel"]
    n = len(numa.nodes)
    balancing = {None: "not there", 0: "off"}.get(numa.balancing, f"{numa.balancing}")
    yield (
        "numa",
        [
            f"{n} node{'' if n == 1 else 's'}; automatic balancing {balancing}; "
            f"vm.zone_reclaim_mode {_or_none(numa.zone_reclaim_mode)}"
        ],
    )


def _cpu(machine: MachineFacts) -> Iterator[str]:
    cpu = machine.cpu
    counts = (
        f"{_count(cpu.sockets, 'socket')}, {_count(cpu.cores, 'core')}, "
        f"{_count(cpu.threads, 'thread')}"
    )
    yield f"{cpu.model}: {counts}; {_count(cpu.usable_cores, 'core')} for this process"
    yield " ".join(cpu.features)
    if cpu.governors:
        yield "governor " + ", ".join(cpu.governors)


def _pages(machine: MachineFacts) -> Iterator[str]:
    thp = machine.thp
    base = f"{format_bytes(machine.memory.page_bytes)} base"
    if thp.enabled is None or thp.page_bytes is None:
        yield f"{base}; no transparent huge pages"
        return
    khugepaged = {None: "not there", True: "on", False: "off"}[thp.khugepaged_defrag]
    yield (
        f"{base}; THP {format_bytes(thp.page_bytes)} {thp.mode}, defrag {thp.defrag} (khugepaged "
        f"{khugepaged}), memfd {_or_none(thp.shmem_mode)}, /dev/shm {_or_none(thp.shm_mount)}"
    )
    smaller = [size for size in thp.sizes if size.page_bytes != thp.page_bytes]
    used = [
        f"{format_bytes(size.page_bytes)} {thp.enabled if size.enabled == 'inherit' else mode}"
        for size in smaller
        if (mode := size.enabled) not in (None, "never")
    ]
    if smaller:
        sizes = f"{format_bytes(smaller[0].page_bytes)} to {format_bytes(smaller[-1].page_bytes)}"
        yield f"mTHP {', '.join(used) if used else f'{sizes}: never'}"


def _limit(limit: Limit) -> str:
    return f"{limit.name}: {format_bytes(limit.limit_bytes)}, room {format_bytes(limit.room_bytes)}"


def _locked(limit: Limit | None) -> str:
    return "locking without limit" if limit is None else _limit(limit)


def _node_tables(machine: MachineFacts) -> Iterator[str]:
    pools, weights, nodes = machine.pools, machine.numa.weights, machine.numa.nodes.values()
    head = ["node", "CPUs", "memory", "available", *(f"{name} free" for name in pools)]
    head += ["weight"] if weights else []
    rows = []
    for node in nodes:
        cpus = ranges(node.cpus) or "none"
        row = [
            f"{node.id}" + ("" if node.allowed else " (forbidden)"),
            cpus if len(cpus) <= _LONGEST_CPUS else f"{len(node.cpus)} of them",
            format_bytes(node.total_bytes),
            format_bytes(node.available_bytes),
        ]
        row += [str(pool.nodes.get(node.id, (0, 0))[1]) for pool in pools.values()]
        row += [str(weights.get(node.id, "-"))] if weights else []
        rows.append(row)
    yield table(head, rows)
    distances = [(str(node.id), *map(str, node.distances)) for node in nodes]
    if len({len(row) for row in distances} | {len(nodes) + 1}) == 1:
        yield table(("distance", *(str(node.id) for node in nodes)), distances)


def ranges(ids: Sequence[int]) -> str:
    """Write ascending ids as the kernel does.

    Examples
    --------
    >>> ranges((0, 1, 2, 5))
    '0-2,5'
    """
    parts: list[list[int]] = []
    for i in ids:
        if parts and i == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], i]
        else:
            parts.append([i])
    return ",".join("-".join(map(str, part)) for part in parts)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _or_none(value: object) -> str:
    return "not there" if value is None else str(value)


def _wrap(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(_clean(text), width, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _command(text: str, width: int) -> list[str]:
    if len(_clean(text)) <= width:
        return [_clean(text)]
    lines = _wrap(text, width - 2)
    # A shell reads a line that ends so as one with the next.
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _clean(text: str) -> str:
    """Write out what a terminal would obey: names of cgroups may have any characters."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
