"""From what the kernel says of areas, and unimem of its regions, to rows: every byte once."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from unimem._core.ledger import Entry
from unimem._core.tmpfs import huge_page_bytes
from unimem.accounting.model_maps import MappedModel, library_files
from unimem.accounting.rows import Mapping, Row, in_order
from unimem.system.placement import Placement, sum_placements
from unimem.system.process import Area, Process

__all__ = ["apportion", "attribute", "kind_of"]

_PAGE = mmap.PAGESIZE
# Where the kernel does not tell it: what one page of page table entries, 8 bytes each, covers.
_THP = huge_page_bytes() or _PAGE * (_PAGE // 8)
_NAMED = {
    "[heap]": "allocator",
    "[stack": "stacks",
    # glibc names its memory where it is told to (glibc.mem.decorate_maps).
    "[anon: glibc: malloc": "allocator",
    "[anon: glibc: loader malloc": "allocator",
    "[anon: glibc: pthread": "stacks",
    "[anon:": "anonymous",
    "[anon_shmem:": "shared",
    "[": "kernel",
}
# Shared memory without a file of anybody's: the kernel has files for it, too.
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage")


def attribute(
    process: Process, entries: Sequence[Entry] = (), models: Iterable[MappedModel] = ()
) -> tuple[tuple[Mapping, ...], tuple[Row, ...]]:
    """Attribute the memory of a process to categories.

    Each area in which something is, or can be, belongs to the entry in whose addresses it lies, or
    is a mapping of its own. What it holds goes to the parts that lie in it: by their sizes where
    all of it is in RAM, or nothing; else by what of each is there, as pagemap says. So the sum of
    each field of a `Placement` over the rows, or over the mappings, is the sum over the areas, to
    the byte.

    Parameters
    ----------
    process : Process
        The areas.
    entries : sequence of Entry, optional
        What unimem has in that process.
    models : iterable of MappedModel, optional
        Model files that it maps. What lies in an entry is the entry's.

    Returns
    -------
    mappings : tuple of Mapping
        By address. An entry of which the process has no area is left out: it is unmapped by now.
    rows : tuple of Row
        Of each category that has something, in the order that tables show them in. What of it is
        in use is known of parts that say it.

    Raises
    ------
    ProcessLookupError, PermissionError
        As in `Process.in_ram`, which is asked only where an area has parts and holes.

    Notes
    -----
    A ring is mapped twice. Its `nbytes` are its memory once. In Pss a page of it counts half for
    each image where both were touched, so that the sum is what is in RAM; in Rss it counts for each
    image, as it does in the Rss of the process.
    """
    entries = sorted(entries, key=lambda entry: entry.address)
    books = [_Book.of_entry(entry) for entry in entries]
    books += [
        _Book.of_entry(each)
        for model in models
        for each in _as_entries(model)
        if not _meets(each, entries)
    ]
    claims = sorted((claim for book in books for claim in book.claims), key=lambda c: c.start)
    starts = [claim.start for claim in claims]
    programs = library_files(process.areas)
    for area in process.areas:
        if not (area.is_accessible or area.resident_bytes or area.swapped_bytes):
            continue
        is_program = (area.device, area.inode) in programs
        own = _Book.of_area(area, kind_of(area, is_program=is_program))
        pieces = [
            claim._replace(start=start, end=end) if claim else _Claim(start, end, own.category, own)
            for start, end, claim in _cut(claims, starts, area.start, area.end)
        ]
        if free := sum(piece.end - piece.start for piece in pieces if piece.book is own):
            # Where nobody has access, nothing can come to be.
            there = free if area.is_accessible else area.resident_bytes + area.swapped_bytes
            own.nbytes[own.category] = there
            books.append(own)
        _share_out(process, area, pieces)
    books = [book for book in books if book.held or not any(book.nbytes.values())]
    for book in books:
        book.leave_out_unmapped()
    books.sort(key=lambda book: book.address)
    return tuple(book.as_mapping() for book in books), _rows(books)


def kind_of(area: Area, *, is_program: bool = False) -> str:
    """Return the category of an area that is none of unimem's, nor of a model file.

    Parameters
    ----------
    area : Area
        Of which only what the kernel says is looked at: the stacks of threads, and what malloc
        maps, are anonymous unless they have names.
    is_program : bool, optional
        Whether some area of the same file can be executed.

    Returns
    -------
    str
        ``"allocator"``, ``"libraries"``, ``"stacks"``, ``"files"``, ``"shared"``, ``"anonymous"``
        or ``"kernel"``.
    """
    for name, category in _NAMED.items():
        if area.path.startswith(name):
            return category
    if area.path.startswith(_SHARED):
        is_own = area.path.startswith(("/dev/zero", "/anon_hugepage")) and area.access[3:] == "p"
        return "anonymous" if is_own else "shared"
    if not area.path:
        return "anonymous"
    return "libraries" if is_program else "files"


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Share a total out by weights, in whole numbers whose sum it is (largest remainders).

    Parameters
    ----------
    total : int
        From 0 on.
    weights : sequence of int
        From 0 on, and not all of them 0.

    Examples
    --------
    >>> apportion(10, [1, 1, 1]), apportion(7, [4, 3])
    ([4, 3, 3], [4, 3])
    """
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    rest = total - sum(shares)
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[:rest]:
        shares[i] += 1
    return shares


# ---- mappings that are being filled -------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """What one category has in one mapping, as the kernel says: the fields of a `Placement`."""

    resident_bytes: int = 0
    pss_bytes: int = 0
    huge_bytes: int = 0
    locked_bytes: int = 0
    swapped_bytes: int = 0
    nodes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Book:
    """A mapping, and what is known of its categories so far."""

    category: str
    name: str
    address: int
    path: str | None
    nbytes: dict[str, int]
    requested: dict[str, object] | None = None
    active: dict[str, int] = field(default_factory=dict)
    claims: list[_Claim] = field(default_factory=list)
    held: dict[str, _Held] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    page_bytes: int = _PAGE
    is_huge: bool = False
    may_be_huge: bool = False

    @classmethod
    def of_area(cls, area: Area, category: str) -> _Book:
        name = area.path.rpartition("/")[2]
        path = area.path if area.path.startswith("/") else None
        return cls(category, name, area.start, path, {})

    @classmethod
    def of_entry(cls, entry: Entry) -> _Book:
        book = cls(entry.category, entry.name, entry.address, entry.path, {}, entry.requested)
        at = entry.address
        for part in entry.parts:
            at = part.address + part.nbytes
            book.claims.append(_Claim(part.address, at, part.category, book))
            book.nbytes[part.category] = book.nbytes.get(part.category, 0) + part.nbytes
            if part.active_bytes is not None:
                active = book.active.get(part.category, 0) + part.active_bytes
                book.active[part.category] = active
        # Behind its memory is the other image of a ring, or what a block with gaps has there.
        category = next(iter(book.nbytes)) if len(book.nbytes) == 1 else entry.category
        end = entry.address + entry.reserved_bytes
        if end > at or not book.nbytes:
            book.claims.append(_Claim(at, max(at, end), category, book))
            book.nbytes.setdefault(category, 0)
        return book

    def leave_out_unmapped(self) -> None:
        """Count nothing that has no area: an entry may be older than the areas, or a stranger's."""
        for category, nbytes in self.nbytes.items():
            self.nbytes[category] = min(nbytes, self.mapped.get(category, 0))
        for category, active in self.active.items():
            self.active[category] = min(active, self.nbytes[category])

    @property
    def asked(self) -> dict[str, int]:
        """What was asked for, by category: of parts, what they have."""
        if self.requested is None:
            return {}
        asked = dict(self.nbytes)
        rest = sum(nbytes for category, nbytes in asked.items() if category != self.category)
        whole = self.requested.get("nbytes")
        if isinstance(whole, int) and self.category in asked:
            asked[self.category] = max(0, whole - rest)
        return asked

    def placement(self, category: str) -> Placement:
        held = self.held.get(category, _Held())
        # Pages that are there say what they are; before the first one, what was asked for does.
        is_there = any(held.resident_bytes for held in self.held.values())
        is_huge = self.is_huge or (self.may_be_huge and not is_there)
        pages: Literal["4k", "thp", "2m", "1g"] = "thp" if is_huge else "4k"
        page_bytes = _THP if is_huge else self.page_bytes
        if self.page_bytes > _PAGE:
            pages, page_bytes = "2m" if self.page_bytes < 1 << 30 else "1g", self.page_bytes
        return Placement(
            pages=pages,
            page_bytes=page_bytes,
            resident_bytes=held.resident_bytes,
            huge_bytes=held.huge_bytes,
            locked_bytes=held.locked_bytes,
            swapped_bytes=held.swapped_bytes,
            pss_bytes=held.pss_bytes,
            nodes=held.nodes,
        )

    def as_mapping(self) -> Mapping:
        return Mapping(
            category=self.category,
            name=self.name,
            address=self.address,
            nbytes=sum(self.nbytes.values()),
            granted=sum_placements([self.placement(category) for category in self.nbytes]),
            requested=self.requested,
            path=self.path,
            parts=self.nbytes,
        )


class _Claim(NamedTuple):
    """Addresses of one category in one mapping."""

    start: int
    end: int
    category: str
    book: _Book


def _as_entries(model: MappedModel) -> Iterator[Entry]:
    category = "weights" if model.format is None else "weights:padding"
    for area in model.areas:
        yield Entry(
            category,
            model.path.rpartition("/")[2],
            area.start,
            area.nbytes,
            area.nbytes,
            path=model.path,
            parts=tuple(model.parts(area)),
        )


def _meets(entry: Entry, others: Sequence[Entry]) -> bool:
    """Whether an entry has an address of others, which are sorted and have none of each other's."""
    end = entry.address + entry.reserved_bytes
    i = bisect_left(others, end, key=lambda other: other.address) - 1
    return i >= 0 and others[i].address + others[i].reserved_bytes > entry.address


def _cut(
    claims: Sequence[_Claim], starts: Sequence[int], start: int, end: int
) -> Iterator[tuple[int, int, _Claim | None]]:
    """Cut a range of addresses into pieces that are claimed, and those that nobody claims."""
    # Those before it are not walked through: there may be many, in each of many areas.
    for i in range(max(0, bisect_right(starts, start) - 1), len(claims)):
        if start >= end:
            return
        claim = claims[i]
        if start < claim.start:
            yield start, min(claim.start, end), None
            start = claim.start
        if start < min(claim.end, end):
            yield start, min(claim.end, end), claim
            start = claim.end
    if start < end:
        yield start, end, None


def _share_out(process: Process, area: Area, pieces: Sequence[_Claim]) -> None:
    """Add what an area holds to the books of its pieces."""
    shares: dict[tuple[int, str], _Held] = {}
    groups: dict[tuple[int, str], list[_Claim]] = {}
    may_be_huge = "hg" in area.flags and not area.inode and area.nbytes >= _THP
    for piece in pieces:
        key = id(piece.book), piece.category
        groups.setdefault(key, []).append(piece)
        shares[key] = piece.book.held.setdefault(piece.category, _Held())
        mapped = piece.book.mapped.get(piece.category, 0)
        piece.book.mapped[piece.category] = mapped + piece.end - piece.start
        piece.book.page_bytes = max(piece.book.page_bytes, area.page_bytes)
        piece.book.is_huge |= area.huge_bytes > 0
        piece.book.may_be_huge |= may_be_huge
    sizes = [sum(piece.end - piece.start for piece in group) for group in groups.values()]
    in_ram = _in_ram(process, area, list(groups.values()), sizes)
    out = [size - nbytes for size, nbytes in zip(sizes, in_ram, strict=True)]

    def share(total: int, weights: Sequence[int]) -> Iterator[tuple[_Held, int]]:
        by = weights if any(weights) else sizes
        return zip(shares.values(), apportion(total, by), strict=True)

    for held, nbytes in share(area.resident_bytes, in_ram):
        held.resident_bytes += nbytes
    for held, nbytes in share(area.pss_bytes + area.hugetlb_bytes, in_ram):
        held.pss_bytes += nbytes
    for held, nbytes in share(area.huge_bytes + area.hugetlb_bytes, in_ram):
        held.huge_bytes += nbytes
    for held, nbytes in share(area.locked_bytes, in_ram):
        held.locked_bytes += nbytes
    for held, nbytes in share(area.swapped_bytes, out):
        held.swapped_bytes += nbytes
    for node, total in area.nodes.items():
        for held, nbytes in share(total, in_ram):
            if nbytes:
                held.nodes[node] = held.nodes.get(node, 0) + nbytes


def _in_ram(
    process: Process, area: Area, groups: Sequence[Sequence[_Claim]], sizes: list[int]
) -> list[int]:
    """Count what of each group of pieces of an area is in RAM."""
    if len(groups) == 1 or area.resident_bytes >= area.nbytes:
        return sizes
    if area.resident_bytes == 0:
        return [0] * len(groups)
    pages = process.pages_in_ram(area.start, area.end)
    before = np.concatenate(([0], np.cumsum(pages)))

    def until(address: int) -> int:
        page, rest = divmod(address - area.start, _PAGE)
        return int(before[page]) * _PAGE + (rest if rest and pages[page] else 0)

    return [sum(until(piece.end) - until(piece.start) for piece in group) for group in groups]


def _rows(books: Iterable[_Book]) -> tuple[Row, ...]:
    by_category: dict[str, list[_Book]] = {}
    for book in books:
        for category in book.nbytes:
            by_category.setdefault(category, []).append(book)
    rows = []
    for category, those in by_category.items():
        placed = [book.placement(category) for book in those]
        # What nothing lies in says nothing of the pages that something lies in.
        least = min(
            [each for each in placed if each.resident_bytes] or placed,
            key=lambda each: each.page_bytes,
        )
        granted = replace(sum_placements(placed), pages=least.pages, page_bytes=least.page_bytes)
        active = [book.active[category] for book in those if category in book.active]
        asked = [book.asked[category] for book in those if category in book.asked]
        rows.append(
            Row(
                category,
                sum(book.nbytes[category] for book in those),
                granted,
                active_bytes=sum(active) if active else None,
                resident_bytes=granted.pss_bytes,
                requested_bytes=sum(asked) if asked else None,
            )
        )
    return tuple(sorted(rows, key=in_order))
