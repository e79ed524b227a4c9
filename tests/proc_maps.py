"""What the kernel says of this process's memory: read here anew, so that unimem is not its own
witness."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")
_FIELD = re.compile(r"^(\w+):\s+(\d+) kB$")


@dataclass
class Mapping:
    """One entry of smaps; its fields in bytes."""

    start: int
    end: int
    access: str
    fields: dict[str, int] = field(default_factory=dict)


def mappings(address: int, nbytes: int = 1) -> list[Mapping]:
    """Every mapping with a byte in the range."""
    found: list[Mapping] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := _HEAD.match(line):
            start, end = int(head[1], 16), int(head[2], 16)
            inside = start < address + nbytes and end > address
            if inside:
                found.append(Mapping(start, end, head[3]))
        elif inside and (item := _FIELD.match(line)):
            found[-1].fields[item[1]] = int(item[2]) * 1024
    return found


def total(address: int, nbytes: int, name: str) -> int:
    """The sum of one field over the range, which must be whole mappings."""
    parts = mappings(address, nbytes)
    assert parts, "not mapped"
    assert parts[0].start == address, "begins inside of a mapping"
    assert parts[-1].end >= address + nbytes, "ends behind its mappings"
    return sum(part.fields[name] for part in parts)


def is_mapped(address: int) -> bool:
    """Whether the byte can be read: guard pages and holes cannot."""
    return any(part.access[0] == "r" for part in mappings(address))


def huge_page_bytes() -> int:
    """The size of a transparent huge page; 0 where the kernel gives none to those who ask."""
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    if not folder.exists() or "[never]" in (folder / "enabled").read_text():
        return 0
    return int((folder / "hpage_pmd_size").read_text())


def address_of(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """The address of an array's first byte."""
    return int(array.__array_interface__["data"][0])
