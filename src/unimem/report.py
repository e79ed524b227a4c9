"""What memory is there and what it is for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unimem._core.status import device_ledger, ledger
from unimem.placement import Placement, format_bytes

__all__ = ["Mapping", "Report", "Row", "report", "table"]


@dataclass(frozen=True, slots=True)
class Row:
    """The memory of one category, in bytes. What is None is not known, or does not apply.

    Attributes
    ----------
    category : str
        ``"weights:q8_0"``, ``"kv"``, ``"scratch"``, ``"logits"``, ``"other"``, ...
    nbytes : int
        What is mapped, or planned.
    granted : Placement or None
        How the mapping that it lies in was placed, as the kernel says.
    active_bytes : int or None
        What is in use now.
    resident_bytes : int or None
        What is in RAM.
    high_water_bytes : int or None
        The most that was in use, or mapped.
    device : str or None
        Whose memory it is: None is the main memory, ``"cuda:0"`` a GPU's.
    requested_bytes : int or None
        What was asked for, before it was rounded to pages.
    """

    category: str
    nbytes: int
    granted: Placement | None = None
    active_bytes: int | None = None
    resident_bytes: int | None = None
    high_water_bytes: int | None = None
    device: str | None = None
    requested_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Mapping:
    """One range of addresses with one purpose at most a part; of unimem's, one region.

    Attributes
    ----------
    category : str
        Of what no part has.
    name : str
        What the block is called, or the kernel calls it; may be empty.
    address, nbytes : int
        Where it begins, and its backing memory, each byte once.
    granted : Placement
        How it is placed, as the kernel says.
    requested : dict or None
        What the block was asked to be; None where it is none of unimem's.
    path : str or None
        The file that is mapped.
    parts : dict of str to int
        Bytes of each category in it.
    """

    category: str
    name: str
    address: int
    nbytes: int
    granted: Placement
    requested: dict[str, Any] | None = None
    path: str | None = None
    parts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of memory, and facts about where they were measured.

    Attributes
    ----------
    rows : tuple of Row
        One a category.
    facts : mapping
        Names to numbers, texts or lists.
    mappings : tuple of Mapping
        What the rows of main memory are the sums of, by address.
    """

    rows: tuple[Row, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    mappings: tuple[Mapping, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of main memory."""
        return sum(row.nbytes for row in self.rows if row.device is None)

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes of all rows of each device, by its name."""
        found: dict[str, int] = {}
        for row in self.rows:
            if row.device is not None:
                found[row.device] = found.get(row.device, 0) + row.nbytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as in JSON: a node's key is a text."""
        return {
            "total_bytes": self.total_bytes,
            "device_bytes": self.device_bytes,
            "rows": [_plain(row) for row in self.rows],
            "facts": dict(self.facts),
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        def size(nbytes: int | None) -> str:
            return "-" if nbytes is None else format_bytes(nbytes)

        lines: list[tuple[str, ...]] = [
            (
                row.category if row.device is None else f"{row.category} on {row.device}",
                size(row.nbytes),
                row.granted.pages if row.granted else "-",
                size(row.active_bytes),
                size(row.resident_bytes),
                size(row.high_water_bytes),
            )
            for row in self.rows
        ]
        lines.append(("total", size(self.total_bytes), "", "", "", ""))
        for device, nbytes in self.device_bytes.items():
            lines.append((f"total on {device}", size(nbytes), "", "", "", ""))
        head = ("category", "size", "pages", "active", "resident", "high water")
        facts = [f"{name}: {_fact(value)}" for name, value in self.facts.items()]
        return "\n".join([table(head, lines), *facts])


def _plain(row: Row) -> dict[str, Any]:
    plain = asdict(row)
    if row.granted is not None:
        nodes = row.granted.nodes.items()
        plain["granted"]["nodes"] = {str(node): nbytes for node, nbytes in nodes}
    return plain


def _fact(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay out texts in columns: the first to the left, the others to the right.

    Examples
    --------
    >>> print(table(("category", "size"), [("kv", "1 B"), ("scratch", "20 B")]))
    category  size
    kv         1 B
    scratch   20 B
    """
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *lines)
    )


def report() -> Report:
    """Report what unimem has mapped in this process, from its ledger.

    Returns
    -------
    Report
        A row for each category that has, or had, a mapping, and for each of a GPU; `nbytes` counts
        whole pages in main memory.

    Examples
    --------
    >>> import unimem as um
    >>> with um.Block(1 << 20, category="staging"):
    ...     host = [row for row in um.report().rows if row.device is None]
    ...     [row.nbytes for row in host if row.category == "staging"]
    [1048576]
    """
    host = [
        Row(name, row["mapped_bytes"], high_water_bytes=row["high_water_bytes"])
        for name, row in ledger().items()
        if row["high_water_bytes"]
    ]
    devices = [
        Row(name, row["nbytes"], high_water_bytes=row["high_water_bytes"], device=device)
        for (device, name), row in device_ledger().items()
    ]
    return Report((*host, *devices))
