"""Rows of memory: what plans and reports are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from unimem.errors import CategoryError
from unimem.system.placement import Placement

__all__ = ["Mapping", "Row", "find_row", "in_order", "plain"]

# What a runtime needs of it comes first, then what else there is.
_ORDER = tuple(
    """
    weights kv scratch logits tokens staging diagnostics other placed allocator anonymous
    libraries stacks files shared kernel
""".split()
)


@dataclass(frozen=True, slots=True)
class Row:
    """The memory of one category, in bytes. What is None is not known, or does not apply.

    Attributes
    ----------
    category : str
        ``"weights:q8_0"``, ``"kv"``, ``"scratch"``, ``"logits"``, ``"other"``, ...
    nbytes : int
        What is mapped, or planned: each byte of memory once, also where it is mapped twice.
    granted : Placement or None
        How it is placed, as the kernel says. Memory that is mapped twice is in `resident_bytes` of
        the placement once for each mapping, as in the kernel's Rss.
    active_bytes : int or None
        What is in use now.
    resident_bytes : int or None
        What is in RAM, where a page that n mappings share counts 1/n (Pss).
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
    """One range of addresses: a region of unimem's, or an area of the kernel's.

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


def in_order(row: Row) -> tuple[Any, ...]:
    """Return what rows are sorted by: weights, KV memory and so on; of a kind, the largest first.

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
    """Return the first row of a category.

    Parameters
    ----------
    rows : iterable of Row
        In their order, those of main memory first.
    category : str
        Such as ``"kv"``.

    Raises
    ------
    CategoryError
        There is none.
    """
    categories = []
    for row in rows:
        if row.category == category:
            return row
        categories.append(row.category)
    raise CategoryError(category, tuple(dict.fromkeys(categories)))


def plain(thing: Row | Mapping) -> dict[str, Any]:
    """Return it as plain dicts, lists, numbers and texts, as in JSON: a node's key is a text."""
    document = asdict(thing)
    if thing.granted is not None:
        nodes = thing.granted.nodes.items()
        document["granted"]["nodes"] = {str(node): nbytes for node, nbytes in nodes}
    return document
