"""Attribute areas of the kernel and regions of unimem to rows, each byte once."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem._core.ledger import Entry
from unimem._core.tmpfs import huge_page_bytes
from unimem.accounting.mapped_models import FileKey, MappedModel, library_files
from unimem.accounting.row import Mapping, Row, in_order
from unimem.system.placement import Placement, sum_placements
from unimem.system.process import Area, Process

_PAGE = mmap.PAGESIZE
_PageName = Literal["4k", "thp", "2m", "1g"]
_Range = tuple[int, int]  # of addresses
_WRITTEN = "weights:written"
# If unknown: the memory covered by one page of page table entries of 8 bytes.
_THP = huge_page_bytes() or _PAGE * (_PAGE // 8)
_NAMED = {
    "[heap]": "allocator",
    "[stack": "stacks",
    # Names of glibc, with glibc.mem.decorate_maps.
    "[anon: glibc: malloc": "allocator",
    "[anon: glibc: loader malloc": "allocator",
    "[anon: glibc: pthread": "stacks",
    "[anon:": "anonymous",
    "[anon_shmem:": "shared",
    "[": "kernel",
}
# Files of the kernel for shared memory.
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage")


def attribute(
    process: Process, entries: Sequence[Entry] = (), models: Iterable[MappedModel] = ()
) -> tuple[tuple[Mapping, ...], tuple[Row, ...]]:
    """Attribute the memory of a process to categories.

    Each area that holds or can hold something belongs to the entry at its addresses, or is a
    mapping of its own. Its memory goes to the parts in it: by their sizes if all or none of it is
    in RAM, or else by the pages of each, from pagemap. Hence the sum of each field of a `Placement`
    over the rows, or over the mappings, is the sum over the areas, to the byte. Memory of a model
    in an entry belongs to the entry.

    Returns
    -------
    mappings : tuple of Mapping
        By address, without entries that were unmapped meanwhile.
    rows : tuple of Row
        One per category with memory, in the order of tables. Active bytes are those that parts
        report.

    Raises
    ------
    ProcessLookupError, PermissionError
        As `Process.in_ram`, which is needed only for areas with parts and holes.

    Notes
    -----
    Memory that is mapped twice, as a ring is, counts once in `nbytes`. Bytes of a file count in the
    area that begins first in the file; only libraries count as often as they are mapped. In Pss, a
    page counts half for each of two mappings if both were touched, so that the sum is its memory in
    RAM; in Rss it counts for each mapping, as in the Rss of the process.

    A private mapping may be written to: its pages become copies, which are no longer the file's.
    Those of weights have the category ``weights:written``.
    """
    entries = sorted(entries, key=lambda entry: entry.address)
    builders = [_MappingBuilder.from_entry(entry) for entry in entries]
    builders += [
        _MappingBuilder.from_entry(each)
        for model in models
        for each in _as_entries(model)
        if not _overlaps(each, entries)
    ]
    spans = [span for builder in builders for span in builder.spans if span.end > span.start]
    spans.sort(key=lambda span: span.start)
    starts = [span.start for span in spans]
    programs = library_files(process.areas)
    copies = _find_copies(process, spans, starts)
    repeats = _find_repeats(process.areas, programs, copies)
    alone: list[Mapping] = []
    for area in process.areas:
        if not (area.is_accessible or area.resident_bytes or area.swapped_bytes):
            continue
        category = kind_of(area, is_program=(area.device, area.inode) in programs)
        before = bisect_left(starts, area.end)
        if not before or spans[before - 1].end <= area.start:
            alone.append(_as_mapping(area, category, repeats.get(area.start, ())))
            continue
        own = _MappingBuilder.from_area(area, category)
        pieces = [
            span._replace(start=start, end=end) if span else _Span(start, end, category, own, True)
            for start, end, span in _cut_range(spans, starts, area.start, area.end)
        ]
        if free := sum(piece.end - piece.start for piece in pieces if piece.builder is own):
            # Without access, no page is ever added.
            there = free if area.is_accessible else area.resident_bytes + area.swapped_bytes
            own.nbytes[category] = there
            builders.append(own)
        pieces = [cut for piece in pieces for cut in _cut_copies(piece, copies.get(area.start, ()))]
        for piece in pieces:
            again = _overlap(piece.start, piece.end, repeats.get(area.start, ()))
            if again and piece.is_files:
                piece.builder.repeated[piece.category] += again
        _share_out(process, area, pieces)
    builders = [builder for builder in builders if builder.held or not any(builder.nbytes.values())]
    for builder in builders:
        builder.finish()
    mappings = [*alone, *(builder.as_mapping() for builder in builders)]
    mappings.sort(key=lambda mapping: mapping.address)
    return tuple(mappings), _rows(builders, alone)


def kind_of(area: Area, *, is_program: bool = False) -> str:
    """Return the category of an area that belongs neither to unimem nor to a model file.

    These are ``"allocator"``, ``"libraries"``, ``"stacks"``, ``"files"``, ``"shared"``,
    ``"anonymous"`` and ``"kernel"``. Stacks of threads, and malloc's mappings, are anonymous unless
    they have names. `is_program` says whether any area of the same file is executable.
    """
    if not area.path:
        return "anonymous"
    if area.path.startswith("["):
        return next(kind for name, kind in _NAMED.items() if area.path.startswith(name))
    if area.path.startswith(_SHARED):
        is_own = area.path.startswith(("/dev/zero", "/anon_hugepage")) and area.access[3:] == "p"
        return "anonymous" if is_own else "shared"
    return "libraries" if is_program else "files"


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Apportion a total by weights, in whole numbers that sum up to it (largest remainders).

    Not all weights may be 0.

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


def page_runs(pages: NDArray[np.bool_], start: int) -> list[tuple[int, int]]:
    """Return where the runs of set pages begin and end, from the first page's start on."""
    edges = np.flatnonzero(np.diff(pages, prepend=False, append=False)) * _PAGE + start
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# ---- mappings that are being filled -------------------------------------------------------------


@dataclass(slots=True)
class _Usage:
    """The memory of one category in one mapping: the fields of a `Placement`."""

    resident_bytes: int = 0
    pss_bytes: int = 0
    huge_bytes: int = 0
    locked_bytes: int = 0
    swapped_bytes: int = 0
    nodes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _MappingBuilder:
    """A mapping, with its categories so far."""

    category: str
    name: str
    address: int
    path: str | None
    nbytes: dict[str, int]
    requested: dict[str, object] | None = None
    active: dict[str, int] = field(default_factory=dict)
    spans: list[_Span] = field(default_factory=list)
    held: dict[str, _Usage] = field(default_factory=dict)
    mapped: dict[str, int] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)  # bytes that another mapping counts
    page_bytes: int = _PAGE
    is_huge: bool = False
    may_be_huge: bool = False
    placements: dict[str, Placement] = field(default_factory=dict)

    @classmethod
    def from_area(cls, area: Area, category: str) -> _MappingBuilder:
        name = area.path.rpartition("/")[2]
        path = area.path if area.path.startswith("/") else None
        return cls(category, name, area.start, path, {})

    @classmethod
    def from_entry(cls, entry: Entry) -> _MappingBuilder:
        builder = cls(entry.category, entry.name, entry.address, entry.path, {}, entry.requested)
        at = entry.address
        for part in entry.parts:
            at = part.address + part.nbytes
            is_files = entry.path is not None
            builder.spans.append(_Span(part.address, at, part.category, builder, is_files))
            builder.nbytes[part.category] = builder.nbytes.get(part.category, 0) + part.nbytes
            if part.active_bytes is not None:
                active = builder.active.get(part.category, 0) + part.active_bytes
                builder.active[part.category] = active
        # The other image of a ring is behind its memory, or the gaps of a block.
        category = next(iter(builder.nbytes)) if len(builder.nbytes) == 1 else entry.category
        end = entry.address + entry.reserved_bytes
        if end > at or not builder.nbytes:
            builder.spans.append(_Span(at, max(at, end), category, builder))
            builder.nbytes.setdefault(category, 0)
        return builder

    def add_piece(self, piece: _Span, area: Area) -> _Usage:
        """Add a piece of an area, and return the usage of its category."""
        mapped = self.mapped.get(piece.category, 0)
        self.mapped[piece.category] = mapped + piece.end - piece.start
        self.page_bytes = max(self.page_bytes, area.page_bytes)
        self.is_huge |= area.huge_bytes > 0
        self.may_be_huge |= _may_be_huge(area)
        if piece.category not in self.held:
            self.held[piece.category] = _Usage()
        return self.held[piece.category]

    def finish(self) -> None:
        """Drop bytes without an area, and compute the placements of the rest.

        An entry may be older, or come from another process.
        """
        for category, nbytes in self.nbytes.items():
            there = min(nbytes, self.mapped.get(category, 0))
            self.nbytes[category] = there - min(self.repeated[category], there)
        for category, active in self.active.items():
            self.active[category] = min(active, self.nbytes[category])
        self.placements = {category: self._placement(category) for category in self.nbytes}

    @property
    def asked(self) -> dict[str, int]:
        """The requested bytes by category."""
        if self.requested is None:
            return {}
        asked = dict(self.nbytes)
        rest = sum(nbytes for category, nbytes in asked.items() if category != self.category)
        whole = self.requested.get("nbytes")
        if isinstance(whole, int) and self.category in asked:
            asked[self.category] = max(0, whole - rest)
        return asked

    def _placement(self, category: str) -> Placement:
        held = self.held.get(category, _Usage())
        # Resident pages show their kind; without any, the request does.
        is_there = any(held.resident_bytes for held in self.held.values())
        is_huge = self.is_huge or (self.may_be_huge and not is_there)
        pages, page_bytes = _pages_of(self.page_bytes, is_huge=is_huge)
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
            granted=sum_placements(list(self.placements.values())),
            requested=self.requested,
            path=self.path,
            parts=self.nbytes,
        )


def _as_mapping(area: Area, category: str, repeats: Sequence[_Range]) -> Mapping:
    """Make the mapping of an area that belongs to no entry; another one counts its `repeats`."""
    held, hugetlb = area.resident_bytes, area.hugetlb_bytes
    is_huge = area.huge_bytes > 0 or (not held and _may_be_huge(area))
    pages, page_bytes = _pages_of(area.page_bytes, is_huge=is_huge)
    # Without access, no page is ever added.
    nbytes = area.nbytes if area.is_accessible else held + area.swapped_bytes
    nbytes -= min(_overlap(area.start, area.end, repeats), nbytes)
    granted = Placement(
        pages=pages,
        page_bytes=page_bytes,
        resident_bytes=held,
        huge_bytes=area.huge_bytes + hugetlb,
        locked_bytes=area.locked_bytes,
        swapped_bytes=area.swapped_bytes,
        pss_bytes=area.pss_bytes + hugetlb,
        nodes=area.nodes,
    )
    return Mapping(
        category=category,
        name=area.path.rpartition("/")[2],
        address=area.start,
        nbytes=nbytes,
        granted=granted,
        path=area.path if area.path.startswith("/") else None,
        parts={category: nbytes},
    )


def _may_be_huge(area: Area) -> bool:
    return "hg" in area.flags and not area.inode and area.nbytes >= _THP


def _pages_of(page_bytes: int, *, is_huge: bool) -> tuple[_PageName, int]:
    """Return the name and the size of a mapping's pages."""
    if page_bytes > _PAGE:
        return "2m" if page_bytes < 1 << 30 else "1g", page_bytes
    return ("thp", _THP) if is_huge else ("4k", page_bytes)


class _Span(NamedTuple):
    """Addresses of one category in one mapping, of a file's bytes or of unimem's own."""

    start: int
    end: int
    category: str
    builder: _MappingBuilder
    is_files: bool = False


def _as_entries(model: MappedModel) -> Iterator[Entry]:
    category = "weights" if model.format is None else "weights:padding"
    if model.is_kept:
        category = "staging"
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


def _overlaps(entry: Entry, others: Sequence[Entry]) -> bool:
    """Whether an entry overlaps one of the others, which are sorted and disjoint."""
    end = entry.address + entry.reserved_bytes
    i = bisect_left(others, end, key=lambda other: other.address) - 1
    return i >= 0 and others[i].address + others[i].reserved_bytes > entry.address


def _cut_range(
    spans: Sequence[_Span], starts: Sequence[int], start: int, end: int
) -> Iterator[tuple[int, int, _Span | None]]:
    """Cut a range of addresses into the pieces inside and outside of spans."""
    # A binary search, since many areas may have many spans.
    for i in range(max(0, bisect_right(starts, start) - 1), len(spans)):
        if start >= end:
            return
        span = spans[i]
        if start < span.start:
            yield start, min(span.start, end), None
            start = span.start
        if start < min(span.end, end):
            yield start, min(span.end, end), span
            start = span.end
    if start < end:
        yield start, end, None


def _find_copies(
    process: Process, spans: Sequence[_Span], starts: Sequence[int]
) -> dict[int, list[_Range]]:
    """Find the pages of weights that are private copies, by the starts of their areas."""
    found = {}
    for area in process.areas:
        if area.written_bytes and any(
            span is not None and span.category.startswith("weights")
            for _, _, span in _cut_range(spans, starts, area.start, area.end)
        ):
            found[area.start] = page_runs(process.pages_written(area.start, area.end), area.start)
    return found


def _cut_copies(piece: _Span, copies: Sequence[_Range]) -> Iterator[_Span]:
    """Cut the private copies out of a piece of weights, and count them as written."""
    at = piece.start
    for first, last in copies if piece.category.startswith("weights") else ():
        low, high = max(first, at), min(last, piece.end)
        if low < high:
            if at < low:
                yield piece._replace(start=at, end=low)
            yield piece._replace(start=low, end=high, category=_WRITTEN)
            if piece.is_files:
                sizes = piece.builder.nbytes
                sizes[piece.category] -= high - low
                sizes[_WRITTEN] = sizes.get(_WRITTEN, 0) + high - low
            at = high
    if at < piece.end:
        yield piece._replace(start=at)


def _find_repeats(
    areas: Iterable[Area], programs: Collection[FileKey], copies: AnyMapping[int, Sequence[_Range]]
) -> dict[int, list[_Range]]:
    """Find the addresses whose bytes of a file another area maps, too, by the starts of areas."""
    files: dict[FileKey, list[tuple[int, int, int, int]]] = {}
    for area in areas:
        key = area.device, area.inode
        is_there = area.is_accessible or area.resident_bytes
        # Nobody knows which pages of other areas are copies.
        is_known = not area.written_bytes or area.start in copies
        if not (area.inode and is_there and is_known) or key in programs:
            continue
        at = area.start
        for low, high in (*copies.get(area.start, ()), (area.end, area.end)):
            if at < low:
                offset = area.offset + at - area.start
                files.setdefault(key, []).append((offset, at, low - at, area.start))
            at = high
    found: dict[int, list[_Range]] = {}
    for ranges in files.values():
        reached = 0  # all from a range's offset up to here is mapped
        for offset, at, nbytes, start in sorted(ranges):
            if (again := min(reached - offset, nbytes)) > 0:
                found.setdefault(start, []).append((at, at + again))
            reached = max(reached, offset + nbytes)
    return found


def _overlap(start: int, end: int, ranges: Iterable[_Range]) -> int:
    return sum(max(0, min(end, high) - max(start, low)) for low, high in ranges)


def _share_out(process: Process, area: Area, pieces: Sequence[_Span]) -> None:
    """Add the memory of an area to the builders of its pieces."""
    shares: dict[tuple[int, str], _Usage] = {}
    groups: dict[tuple[int, str], list[_Span]] = {}
    for piece in pieces:
        key = id(piece.builder), piece.category
        groups.setdefault(key, []).append(piece)
        shares[key] = piece.builder.add_piece(piece, area)
    sizes = [sum(piece.end - piece.start for piece in group) for group in groups.values()]
    in_ram = _count_in_ram(process, area, list(groups.values()), sizes)
    out = [size - nbytes for size, nbytes in zip(sizes, in_ram, strict=True)]
    pss_bytes, by_share = area.pss_bytes + area.hugetlb_bytes, in_ram
    is_copy = [category == _WRITTEN for _, category in groups]
    if any(is_copy):  # all of a copy is the process's own, and only copies are swapped out
        out = [n if is_own else 0 for n, is_own in zip(out, is_copy, strict=True)]
        copied = sum(n for n, is_own in zip(in_ram, is_copy, strict=True) if is_own)
        rest, rest_share = sum(in_ram) - copied, pss_bytes - copied
        if rest and rest_share >= 0:
            both = zip(in_ram, is_copy, strict=True)
            by_share = [n * (rest if is_own else rest_share) for n, is_own in both]

    def share(total: int, weights: Sequence[int]) -> Iterator[tuple[_Usage, int]]:
        by = weights if any(weights) else sizes
        return zip(shares.values(), apportion(total, by), strict=True)

    for name, total, weights in (
        ("resident_bytes", area.resident_bytes, in_ram),
        ("pss_bytes", pss_bytes, by_share),
        ("huge_bytes", area.huge_bytes + area.hugetlb_bytes, in_ram),
        ("locked_bytes", area.locked_bytes, in_ram),
        ("swapped_bytes", area.swapped_bytes, out),
    ):
        for held, nbytes in share(total, weights):
            setattr(held, name, getattr(held, name) + nbytes)
    for node, total in area.nodes.items():
        for held, nbytes in share(total, in_ram):
            if nbytes:
                held.nodes[node] = held.nodes.get(node, 0) + nbytes


def _count_in_ram(
    process: Process, area: Area, groups: Sequence[Sequence[_Span]], sizes: list[int]
) -> list[int]:
    """Count the bytes in RAM of each group of pieces of an area."""
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


class _Part(NamedTuple):
    """The part of a mapping in one category."""

    nbytes: int
    granted: Placement
    active: int | None = None
    asked: int | None = None


def _rows(builders: Iterable[_MappingBuilder], alone: Iterable[Mapping]) -> tuple[Row, ...]:
    by_category: dict[str, list[_Part]] = {}
    for mapping in alone:
        part = _Part(mapping.nbytes, mapping.granted)
        by_category.setdefault(mapping.category, []).append(part)
    for builder in builders:
        asked = builder.asked
        for category, nbytes in builder.nbytes.items():
            placed = builder.placements[category]
            part = _Part(nbytes, placed, builder.active.get(category), asked.get(category))
            by_category.setdefault(category, []).append(part)
    rows = []
    for category, parts in by_category.items():
        everywhere = [part.granted for part in parts]
        # A mapping without a resident page says nothing about the other pages.
        least = min(
            [each for each in everywhere if each.resident_bytes] or everywhere,
            key=lambda each: each.page_bytes,
        )
        granted = replace(
            sum_placements(everywhere), pages=least.pages, page_bytes=least.page_bytes
        )
        rows.append(
            Row(
                category,
                sum(part.nbytes for part in parts),
                granted,
                active_bytes=_sum_known(part.active for part in parts),
                resident_bytes=granted.pss_bytes,
                requested_bytes=_sum_known(part.asked for part in parts),
            )
        )
    return tuple(sorted(rows, key=in_order))


def _sum_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
