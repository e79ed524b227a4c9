"""What unimem has in main memory now: its regions, and what each part of them is for."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Entry", "Part"]


class Part(NamedTuple):
    """A range of a region with a purpose of its own.

    Attributes
    ----------
    category : str
        As in a `Row`.
    address, nbytes : int
        The range. One that lies inside of another takes its bytes away from it.
    active_bytes, high_water_bytes : int or None
        What of it is in use now, and the most that ever was.
    """

    category: str
    address: int
    nbytes: int
    active_bytes: int | None = None
    high_water_bytes: int | None = None


class Entry(NamedTuple):
    """One region: a mapping that unimem has made.

    Attributes
    ----------
    category : str
        Of all of it that no part names, as in a `Row`.
    name : str
        What it is called.
    address : int
        Where it begins.
    nbytes : int
        Its memory, each byte once.
    reserved_bytes : int
        Its address space from `address` on: that of a ring is twice its memory.
    requested : dict or None
        What the block was asked to be; None where it is none.
    path : str or None
        The file that it maps.
    parts : tuple of Part
        By address.
    """

    category: str
    name: str
    address: int
    nbytes: int
    reserved_bytes: int
    requested: dict[str, Any] | None = None
    path: str | None = None
    parts: tuple[Part, ...] = ()
