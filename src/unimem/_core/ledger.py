"""What unimem has in main memory now: its regions, and what each part of them is for."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from threading import RLock
from typing import Any, NamedTuple, Protocol
from weakref import ref

from unimem._core.region import holder_parts, regions
from unimem._core.status import ledger, row_name

__all__ = ["Entry", "Holder", "Part", "enter", "entries", "high_water", "resolve", "sizes_of"]


class Part(NamedTuple):
    """A range of a region with a purpose of its own.

    Attributes
    ----------
    category : str
        As in a `Row`.
    address, nbytes : int
        The range. Of a ring, and of a block with gaps, what is all of it is `nbytes` of memory from
        where it begins.
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
        Of all of it that no holder names, as in a `Row`.
    name : str
        What it is called.
    address : int
        Where it begins.
    nbytes : int
        Its memory, each byte once: what `um_ledger_read` counts of it.
    reserved_bytes : int
        Its address space from `address` on: that of a ring is twice its memory.
    requested : dict or None
        What the block was asked to be; None where it is none.
    path : str or None
        The file that it maps, all or a part of it.
    parts : tuple of Part
        All of its memory, by address, in parts that do not overlap.
    """

    category: str
    name: str
    address: int
    nbytes: int
    reserved_bytes: int
    requested: dict[str, Any] | None = None
    path: str | None = None
    parts: tuple[Part, ...] = ()


class Holder(Protocol):
    """An object that knows what parts of regions are for. Any thread may ask; no answer raises."""

    def _ledger_is_open(self) -> bool:
        """Tell whether there are parts, without making them: there may be very many."""

    def _ledger_parts(self) -> Sequence[Part]:
        """Return the parts, none when closed.

        What lies on the tape of another, or in a part of its own, takes its bytes away from there,
        and as many of those that are in use.
        """


def enter(holder: Holder, sizes: Mapping[str, int]) -> None:
    """Enter a holder, by a weak reference: it counts for as long as it lives.

    Any number of threads may enter holders. A forked child has those of its parent.

    Parameters
    ----------
    holder : Holder
        The object that names the parts.
    sizes : mapping of str to int
        Bytes of the categories that it names and that regions are not entered by, for
        `high_water`.
    """
    with _entering:
        number = next(_numbers)
        _named[number] = ref(holder, lambda _: _named.pop(number, None)), sizes
        now: Counter[str] = Counter()
        for reference, theirs in list(_named.values()):
            other = reference()
            if other is not None and other._ledger_is_open():
                now.update(theirs)
        native = ledger()
        for category in sizes:
            whole = native[category]["mapped_bytes"] if category in native else 0
            _most[category] = max(_most.get(category, 0), now[category] + whole)


def sizes_of(parts: Iterable[Part]) -> dict[str, int]:
    """Add up the bytes of each category, of parts that do not overlap."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.category] = sizes.get(part.category, 0) + part.nbytes
    return sizes


def entries() -> tuple[Entry, ...]:
    """Return what is mapped now, by address.

    Where no other thread maps or unmaps anything meanwhile, the bytes of each category are those
    of unimem's own ledger, to the byte. Any number of threads may ask. After a fork the child has
    what it shares with its parent or has copied; shared memory that can be written is not there.

    Returns
    -------
    tuple of Entry

    Examples
    --------
    >>> import unimem as um
    >>> from unimem._core.ledger import entries
    >>> with um.Tape(1 << 20, name="mine") as tape:
    ...     taken = tape.take(1000)
    ...     [(e.category, e.parts[0].active_bytes) for e in entries() if e.name == "mine"]
    [('scratch', 4000)]
    """
    parts = [Part(*fields) for fields in holder_parts()]
    for reference, _ in list(_named.values()):
        holder = reference()
        if holder is not None:
            parts += holder._ledger_parts()
        # No holder is kept alive longer than it is asked.
        del holder
    found = sorted(regions(), key=lambda region: region[2])
    addresses = [region[2] for region in found]
    inside: list[list[Part]] = [[] for _ in found]
    for part in parts:
        i = bisect_right(addresses, part.address) - 1
        if i >= 0:
            inside[i].append(part)
    return tuple(
        Entry(*region, resolve(region[0], region[2], region[3], own))
        for region, own in zip(found, inside, strict=True)
    )


def resolve(category: str, address: int, nbytes: int, parts: Iterable[Part]) -> tuple[Part, ...]:
    """Tile a range with parts that may lie in each other.

    Each byte is the smallest part's that it lies in, and of parts of one size the last one's; what
    lies in none is of `category`. A part that others take bytes from counts as many less in use,
    and what is left in use is told of its first bytes.

    Parameters
    ----------
    category : str
        Of what no part names.
    address, nbytes : int
        The range. What of a part is outside does not count.
    parts : iterable of Part
        In the order in which they came.

    Returns
    -------
    tuple of Part
        By address, without gaps: their sizes add up to `nbytes`.
    """
    end = address + nbytes
    layers = [Part(category, address, nbytes)]
    for part in parts:
        first, stop = max(part.address, address), min(part.address + part.nbytes, end)
        if first < stop:
            same = stop - first == part.nbytes
            layers.append(part if same else _clipped(part, first, stop))
    if len(layers) == 1:
        return tuple(layers) if nbytes else ()
    if len(layers) == 2 and layers[1].nbytes == nbytes:  # as most are
        return (layers[1],)
    layers[1:] = sorted(layers[1:], key=lambda part: -part.nbytes)
    pieces: list[list[tuple[int, int]]] = [[] for _ in layers]
    open_: list[tuple[int, int]] = []  # the uppermost first: minus its number, and where it ends
    at = address
    for start, i in [*sorted((part.address, i) for i, part in enumerate(layers)), (end, -1)]:
        while at < start:
            while open_[0][1] <= at:
                heappop(open_)
            above, stop = open_[0]
            stop = min(stop, start)
            own = pieces[-above]
            if own and own[-1][1] == at:
                own[-1] = (own[-1][0], stop)
            else:
                own.append((at, stop))
            at = stop
        if i >= 0:
            heappush(open_, (-i, layers[i].address + layers[i].nbytes))
    tiles = [
        tile for part, own in zip(layers, pieces, strict=True) for tile in _pieces_of(part, own)
    ]
    return tuple(sorted(tiles, key=lambda part: part.address))


def _clipped(part: Part, first: int, stop: int) -> Part:
    """Cut off what is outside: memory that was given back since the part was told."""
    active = part.active_bytes
    active = None if active is None else min(active, stop - first)
    return part._replace(address=first, nbytes=stop - first, active_bytes=active)


def _pieces_of(part: Part, pieces: list[tuple[int, int]]) -> Iterable[Part]:
    """Cut a part into what others have left of it."""
    taken = part.nbytes - sum(stop - first for first, stop in pieces)
    if not taken:
        return (part,)
    cut = []
    active, most = part.active_bytes, part.high_water_bytes
    active = None if active is None else max(0, active - taken)
    most = None if most is None else max(0, most - taken)
    for first, stop in pieces:
        nbytes = stop - first
        here = None if active is None else min(active, nbytes)
        most_here = None if most is None else min(most, nbytes)
        cut.append(Part(part.category, first, nbytes, here, most_here))
        active = None if active is None else active - (here or 0)
        most = None if most is None else most - (most_here or 0)
    return cut


# ---- high-water marks -------------------------------------------------------------------------

# Of those who name categories of their own, by the order they came in, the bytes of each; and the
# most that all had together.
_named: dict[int, tuple[ref[Any], Mapping[str, int]]] = {}
_numbers = count()
_most: dict[str, int] = {}
# Held by who enters a holder; a signal's handler may enter one meanwhile. A child of a fork, which
# does not have the thread that held it, begins with a lock of its own.
_entering = RLock()


def _begin_anew() -> None:
    global _entering  # noqa: PLW0603
    _entering = RLock()


os.register_at_fork(after_in_child=_begin_anew)


def high_water() -> dict[str, int]:
    """Return the most bytes that each category ever had at a time, of those that ever had any.

    Of the categories that regions are entered by this is noted with every byte that comes or goes,
    and counts all of their regions, with parts that are of other categories. Of the others
    (``"weights:q8_0"``, and what of a tape is logits or tokens) it is noted when a holder of such
    parts is entered.
    """
    found = {
        row_name(category): row["high_water_bytes"]
        for category, row in ledger().items()
        if row["high_water_bytes"]
    }
    for category, nbytes in list(_most.items()):
        found[category] = max(found.get(category, 0), nbytes)
    return found
