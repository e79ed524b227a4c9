"""The kernel's figures of this process's memory, read without unimem."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import unimem as um

PAGE = mmap.PAGESIZE

_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$")
_NODE = re.compile(r" N(\d+)=(\d+)")
_KERNEL_PAGE = re.compile(r" kernelpagesize_kB=(\d+)")


@dataclass
class Mapping:
    """One entry of smaps: its fields in bytes, and the two-letter words of VmFlags."""

    start: int
    end: int
    access: str
    fields: dict[str, int] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)


def mappings(address: int, nbytes: int = 1, pid: int | str = "self") -> list[Mapping]:
    """Return every mapping with a byte in the range, of this process or another."""
    found: list[Mapping] = []
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := _HEAD.match(line):
            start, end = int(head[1], 16), int(head[2], 16)
            inside = start < address + nbytes and end > address
            if inside:
                found.append(Mapping(start, end, head[3]))
        elif inside and (item := _FIELD.match(line)):
            found[-1].fields[item[1]] = int(item[2]) * 1024
        elif inside and line.startswith("VmFlags:"):
            found[-1].flags = set(line.split()[1:])
    return found


def numa_lines(address: int, nbytes: int) -> list[str]:
    """Return the lines of numa_maps for mappings that begin in the range."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line for line in lines if address <= int(line.split(" ", 1)[0], 16) < address + nbytes]


def nodes(address: int, nbytes: int) -> dict[int, int]:
    """Return the bytes on each node, for mappings that begin in the range."""
    found: dict[int, int] = {}
    for line in numa_lines(address, nbytes):
        size = _KERNEL_PAGE.search(line)
        for node, n in _NODE.findall(line):
            page = int(size[1]) * 1024 if size else 4096
            found[int(node)] = found.get(int(node), 0) + int(n) * page
    return found


def policies(address: int, nbytes: int) -> set[str]:
    """Return the NUMA policies of the mappings that begin in the range, in the kernel's words."""
    return {line.split()[1] for line in numa_lines(address, nbytes)}


def hugetlb_bytes(part: Mapping) -> int:
    """Return a mapping's hugetlb pages, which no other field counts."""
    return part.fields.get("Private_Hugetlb", 0) + part.fields.get("Shared_Hugetlb", 0)


def assert_granted(block: um.Block, granted: um.Placement | None = None) -> None:
    """Check a placement against smaps and numa_maps for the whole reserved range of a block."""
    granted = granted or block.granted
    parts = [
        part
        for part in mappings(block.address, block.reserved_bytes)
        if part.access[0] == "r"  # without the gaps
    ]
    hugetlb = sum(map(hugetlb_bytes, parts))
    assert granted.resident_bytes == sum(part.fields["Rss"] for part in parts) + hugetlb
    assert granted.pss_bytes == sum(part.fields["Pss"] for part in parts) + hugetlb
    thp = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
    assert granted.huge_bytes == hugetlb + sum(part.fields[n] for part in parts for n in thp)
    locked = sum(part.fields["Rss"] for part in parts if "lo" in part.flags)
    assert granted.locked_bytes == locked + hugetlb
    assert granted.swapped_bytes == sum(part.fields["Swap"] for part in parts)
    assert granted.nodes == nodes(block.address, block.reserved_bytes)
    if granted.pages in ("2m", "1g"):
        assert {part.fields["KernelPageSize"] for part in parts} == {granted.page_bytes}
        assert granted.page_bytes == {"2m": 2 << 20, "1g": 1 << 30}[granted.pages]
    else:
        assert hugetlb == 0
        assert granted.page_bytes == (huge_page_bytes() if granted.pages == "thp" else PAGE)
        if granted.resident_bytes:
            assert (granted.pages == "thp") == (granted.huge_bytes > 0)


def total(address: int, nbytes: int, name: str) -> int:
    """Return the sum of one field over the range, which must be whole mappings."""
    parts = mappings(address, nbytes)
    assert parts, "not mapped"
    assert parts[0].start == address, "begins inside of a mapping"
    assert parts[-1].end >= address + nbytes, "ends behind its mappings"
    return sum(part.fields[name] for part in parts)


def is_mapped(address: int) -> bool:
    """Tell whether a byte can be read and belongs to a block.

    A block lies between inaccessible pages. Other mappings, such as those of AddressSanitizer, may
    take a closed block's place.
    """
    entries = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if head := _HEAD.match(line):
            entries.append(Mapping(int(head[1], 16), int(head[2], 16), head[3]))
    (inside,) = [i for i, part in enumerate(entries) if part.start <= address < part.end] or (-1,)
    if inside < 0 or entries[inside].access[0] != "r":
        return False
    for step in (-1, 1):
        i = inside
        while entries[i].access[0] == "r":
            edge = entries[i].start if step < 0 else entries[i].end
            i += step
            if not 0 <= i < len(entries):
                return False
            if edge != (entries[i].end if step < 0 else entries[i].start):
                return False
    return True


def huge_page_bytes() -> int:
    """Return the size of a transparent huge page; 0 if the kernel gives none."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    if not folder.exists() or "[never]" in (folder / "enabled").read_text():
        return 0
    return int((folder / "hpage_pmd_size").read_text())


def address_of(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Return the address of an array's first byte."""
    return int(array.__array_interface__["data"][0])
