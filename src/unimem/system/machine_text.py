"""A machine as lines of 80 columns, for a terminal and for ``str()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from unimem.base.text import (
    Surface,
    escape,
    fact_lines,
    format_bytes,
    format_count,
    format_ranges,
    text_width,
    wide_lines,
    wrap,
)
from unimem.system.disks import Disk
from unimem.system.limits import Limit
from unimem.system.machine import Finding, MachineFacts

_WIDTH = 80
_INDENT = 3
_LABEL = 9  # columns of "run" and "changes"
_LONGEST_CPUS = 16  # lists of alternating CPUs are endless

_LASTS = (
    "Most of these need root. Settings in /sys and by sysctl last until the next boot; "
    "docs/doctor.md shows how to keep them. In a container, set them on the host."
)


def render(machine: MachineFacts, surface: Surface | None = None) -> str:
    """Write a machine for people, in lines of 80 columns on any surface.

    Longer names make longer lines. A command in several lines can be copied as it is.
    """
    surface = replace(surface or Surface(), width=_WIDTH)
    lines = list(fact_lines(surface, _facts(machine), cuts=False))
    if len(machine.numa.nodes) > 1:
        for head, rows in _node_tables(machine):
            lines += ["", *wide_lines(surface, head, rows)]
    needed = [finding for finding in machine.findings if not finding.is_optional]
    optional = [finding for finding in machine.findings if finding.is_optional]
    lines.append("")
    if needed:
        lines.append(surface.heading("To change, the greatest effect first:"))
        lines += _numbered(surface, needed, surface.bad, 1)
    else:
        lines.append(surface.good("Nothing to change."))
    if optional:
        lines += ["", surface.heading("Optional:")]
        lines += _numbered(surface, optional, str, len(needed) + 1)
    if machine.findings:
        lines += ["", *wrap(_LASTS, _WIDTH)]
    return "\n".join(lines)


def _numbered(
    surface: Surface, findings: Sequence[Finding], style: Callable[[str], str], first: int
) -> Iterator[str]:
    margin, width = " " * _INDENT, surface.width - _INDENT
    for number, finding in enumerate(findings, first):
        yield ""
        title, *more = wrap(escape(finding.what), width, cuts=False)
        yield f"{number}.".ljust(_INDENT) + style(title)
        yield from (margin + style(line) for line in more)
        yield from (margin + line for line in wrap(escape(finding.why), width, cuts=False))
        for label, lines in (
            ("run", _command(finding.run, width - _LABEL)),
            ("changes", wrap(escape(finding.changes), width - _LABEL, cuts=False)),
        ):
            starts = [surface.dim(label.ljust(_LABEL)), *[" " * _LABEL] * (len(lines) - 1)]
            yield from (margin + start + line for start, line in zip(starts, lines, strict=True))


def _facts(machine: MachineFacts) -> Iterator[tuple[str, str]]:
    """Yield names and texts; further texts of a name have an empty name."""
    kernel, memory, numa = machine.kernel, machine.memory, machine.numa
    narrower = [limit for limit in memory.limits if limit.name != "memory of the machine"]
    balancing = {None: "not there", 0: "off"}.get(numa.balancing, f"{numa.balancing}")
    facts = {
        "kernel": [f"Linux {kernel.release}, {kernel.architecture}"],
        "cpu": list(filter(None, _cpu(machine))),
        "memory": list(_memory(machine)),
        "limits": [*map(_limit, narrower), _locked(memory.memlock)],
        "pages": list(_pages(machine)),
        "hugetlb": ["; ".join(_pools(machine)) or "none in this kernel"],
        "numa": [
            f"{format_count(len(numa.nodes), 'node')}; automatic balancing {balancing}; "
            f"vm.zone_reclaim_mode {_or_none(numa.zone_reclaim_mode)}"
        ],
        **({"disks": list(map(_disk, machine.disks))} if machine.disks else {}),
    }
    for name, texts in facts.items():
        yield from zip((name, *[""] * (len(texts) - 1)), texts, strict=True)


def _memory(machine: MachineFacts) -> Iterator[str]:
    memory = machine.memory
    yield (
        f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available "
        "to this process"
    )
    swap = (
        f"swap {format_bytes(memory.swap_total_bytes)} (vm.swappiness {memory.swappiness})"
        if memory.swap_total_bytes
        else "no swap"
    )
    yield (
        f"{swap}; vm.overcommit_memory {memory.overcommit_mode}; "
        f"vm.max_map_count {_or_none(memory.max_map_count)}"
    )


def _pools(machine: MachineFacts) -> Iterator[str]:
    for name, pool in machine.pools.items():
        more = f", {pool.surplus_most} more on demand" if pool.surplus_most else ""
        yield f"{name}: {format_count(pool.total, 'page')}, {pool.free} free{more}"


def _disk(disk: Disk) -> str:
    facts = []
    if disk.read_ahead_bytes is not None:
        facts.append(f"read-ahead {format_bytes(disk.read_ahead_bytes)}")
    if disk.speed is not None:
        rate = format_bytes(disk.speed.bytes_per_second)
        facts.append(f"direct reads {rate}/s ({disk.speed.measured})")
    return f"{disk.name}: {', '.join(facts)}"


def _cpu(machine: MachineFacts) -> Iterator[str]:
    cpu = machine.cpu
    counts = (
        f"{format_count(cpu.sockets, 'socket')}, {format_count(cpu.cores, 'core')}, "
        f"{format_count(cpu.threads, 'thread')}"
    )
    yield f"{cpu.model}: {counts}; {format_count(cpu.usable_cores, 'core')} for this process"
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


def _node_tables(machine: MachineFacts) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    pools, weights, nodes = machine.pools, machine.numa.weights, machine.numa.nodes.values()
    head = ["node", "CPUs", "memory", "available", *(f"{name} free" for name in pools)]
    head += ["weight"] if weights else []
    rows = []
    for node in nodes:
        cpus = format_ranges(node.cpus) or "none"
        row = [
            f"{node.id}" + ("" if node.allowed else " (forbidden)"),
            cpus if len(cpus) <= _LONGEST_CPUS else f"{len(node.cpus)} of them",
            format_bytes(node.total_bytes),
            format_bytes(node.available_bytes),
        ]
        row += [str(pool.nodes.get(node.id, (0, 0))[1]) for pool in pools.values()]
        row += [str(weights.get(node.id, "-"))] if weights else []
        rows.append(row)
    yield head, rows
    distances = [(str(node.id), *map(str, node.distances)) for node in nodes]
    if len({len(row) for row in distances} | {len(nodes) + 1}) == 1:
        yield ("distance", *(str(node.id) for node in nodes)), distances


def _or_none(value: object) -> str:
    return "not there" if value is None else str(value)


def _command(text: str, width: int) -> list[str]:
    if text_width(escape(text)) <= width:
        return [escape(text)]
    lines = wrap(escape(text), width - 2, cuts=False)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
