"""Rows of memory, for plans and reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from unimem.errors import CategoryError
from unimem.system.placement import Placement

# The memory of a runtime first, then the rest.
_ORDER = tuple(
    """
    weights kv prompts scratch compute logits tokens staging diagnostics other placed allocator
    anonymous libraries stacks files shared kernel
""".split()
)
# Categories whose names do not say what they are.
_MEANINGS = {
    "diagnostics": "the figures that the process publishes, for unimem report",
    "other": "copies of the model files' headers, and blocks without a category",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The memory of one category, in bytes. None is unknown, or does not apply.

    Attributes
    ----------
    category : str
        ``"weights:q8_0"``, ``"kv"``, ``"scratch"``, ``"logits"``, ``"other"``, ...
    nbytes : int
        Its size: mapped or planned memory; memory that is mapped twice counts once.
    granted : Placement or None
        The kernel's placement. Its `resident_bytes` count each mapping, as the kernel's Rss.
    active_bytes : int or None
        Memory that is used now.
    resident_bytes : int or None
        Memory in RAM, where a page that n mappings share counts 1/n (Pss).
    high_water_bytes : int or None
        The highest use so far, or the highest size.
    device : str or None
        None for main memory, ``"cuda:0"`` for a GPU's.
    requested_bytes : int or None
        The request, before it was rounded to pages.
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
    """One range of addresses: a region of unimem, or an area of the kernel.

    Attributes
    ----------
    category : str
        The category of bytes outside of parts.
    name : str
        The name of the block, or the kernel's; may be empty.
    address, nbytes : int
        Its begin, and its backing memory, each byte once.
    granted : Placement
        The kernel's placement.
    requested : dict or None
        The request of a block; None for other memory.
    path : str or None
        The mapped file.
    parts : dict of str to int
        Its bytes by category.
    """

    category: str
    name: str
    address: int
    nbytes: int
    granted: Placement
    requested: dict[str, Any] | None = None
    path: str | None = None
    parts: dict[str, int] = field(default_factory=dict)


def in_order(row: Row) -> tuple[Any, ...]:
    """Return the sort key of a row: weights, KV memory and so on; in a kind, the largest first.

    Examples
    --------
    >>> rows = [Row("anonymous", 9), Row("kv", 1), Row("weights:f32", 2), Row("weights:q8_0", 8)]
    >>> [row.category for row in sorted(rows, key=in_order)]
    ['weights:q8_0', 'weights:f32', 'kv', 'anonymous']
    """
    kind = row.category.partition(":")[0]
    place = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
    return row.device or "", place, row.category == "weights:padding", -row.nbytes, row.category


def find_row(rows: Iterable[Row], category: str) -> Row:
    """Return the first row of a category; raise CategoryError without one."""
    categories = []
    for row in rows:
        if row.category == category:
            return row
        categories.append(row.category)
    raise CategoryError(category, tuple(dict.fromkeys(categories)))


def explain(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return the categories of rows whose names do not say what they are, and their meanings."""
    found = {row.category for row in rows if row.nbytes}
    return [(name, meaning) for name, meaning in _MEANINGS.items() if name in found]


def plain(thing: Row | Mapping) -> dict[str, Any]:
    """Return plain dicts, lists, numbers and texts, as in JSON, with nodes as texts."""
    document = asdict(thing)
    if thing.granted is not None:
        nodes = thing.granted.nodes.items()
        document["granted"]["nodes"] = {str(node): nbytes for node, nbytes in nodes}
    return document
