"""The ledger of unimem's main memory: its regions, and the purpose of their parts."""

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


class Part(NamedTuple):
    """A range of a region with a purpose of its own; its `category` is that of a `Row`.

    A whole ring, or a whole block with gaps, is `nbytes` of memory from its start.
    `high_water_bytes` are the most that ever were in use.
    """

    category: str
    address: int
    nbytes: int
    active_bytes: int | None = None
    high_water_bytes: int | None = None


class Entry(NamedTuple):
    """One region: a mapping that unimem has made.

    Its `category` is for memory that no holder names. `nbytes` counts each byte once, as
    `um_ledger_read` does, and `reserved_bytes` the address space, which is twice that for a ring.
    `parts` have all of its memory by address, and do not overlap.
    """

    category: str
    name: str
    address: int
    nbytes: int
    reserved_bytes: int
    requested: dict[str, Any] | None = None
    path: str | None = None
    parts: tuple[Part, ...] = ()


class PartsHolder(Protocol):
    """An object that names parts of regions. Any thread may call it, and it never raises."""

    def _ledger_is_open(self) -> bool:
        """Return whether there are parts, without making them: there may be many."""

    def _ledger_parts(self) -> Sequence[Part]:
        """Return the parts, or none if closed.

        A part on another holder's tape, or inside another part, takes its bytes and as many bytes
        in use from there.
        """


def enter(holder: PartsHolder, sizes: Mapping[str, int]) -> None:
    """Enter a holder by a weak reference.

    Any number of threads may enter holders. A forked child has those of its parent. `sizes` are,
    for `high_water`, the bytes of its categories that no region has.
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
    """Add up the bytes of each category in parts that do not overlap."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.category] = sizes.get(part.category, 0) + part.nbytes
    return sizes


def entries() -> tuple[Entry, ...]:
    """Return all mapped regions by address.

    If no other thread maps or unmaps meanwhile, the bytes of each category equal the C library's
    ledger. Any number of threads may call it. A forked child has no writable shared memory.

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
        # No holder is kept alive longer than its call.
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
    """Tile a range with parts that may be nested; return tiles by address, without gaps.

    A byte belongs to the smallest part around it, among equals to the last, and else to `category`.
    Bytes of a part outside the range do not count. A part that loses bytes to others has as many
    less in use, and its first bytes count as those in use.
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
    """Cut off bytes outside, which were given back since the part was named."""
    active = part.active_bytes
    active = None if active is None else min(active, stop - first)
    return part._replace(address=first, nbytes=stop - first, active_bytes=active)


def _pieces_of(part: Part, pieces: list[tuple[int, int]]) -> Iterable[Part]:
    """Cut a part into the pieces that other parts leave of it."""
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

# Holders with categories of their own, in their order, with the bytes of each; and the most that
# all had together.
_named: dict[int, tuple[ref[Any], Mapping[str, int]]] = {}
_numbers = count()
_most: dict[str, int] = {}
# Held while a holder is entered; a signal's handler may enter one meanwhile. A forked child gets a
# new one, since the thread that held it is not there.
_entering = RLock()


def _begin_anew() -> None:
    global _entering  # noqa: PLW0603
    _entering = RLock()


os.register_at_fork(after_in_child=_begin_anew)


def high_water() -> dict[str, int]:
    """Return the most bytes that each category ever had at a time, if any.

    A region's category counts whole regions, at every change. Other categories (``"weights:q8_0"``,
    logits or tokens on a tape) are counted when a holder of such parts is entered.
    """
    found = {
        row_name(category): row["high_water_bytes"]
        for category, row in ledger().items()
        if row["high_water_bytes"]
    }
    for category, nbytes in list(_most.items()):
        found[category] = max(found.get(category, 0), nbytes)
    return found
