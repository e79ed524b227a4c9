"""Attribution of kernel areas to rows, whose sums equal the kernel's to the byte."""

from __future__ import annotations

import itertools
import mmap
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.processes.running import running
from support.project.checkout import ROOT
from support.project.tiers import examples
from unimem._core.ledger import Entry, Part
from unimem.accounting import attribution
from unimem.accounting.attribution import apportion, attribute, kind_of
from unimem.accounting.mapped_models import models
from unimem.accounting.row import Mapping, Row
from unimem.system.placement import Placement
from unimem.system.process import Area, Process, read_process

Patch = pytest.MonkeyPatch
PAGE = mmap.PAGESIZE
BASE = 0x7F00_0000_0000


@dataclass(frozen=True)
class Invented(Process):
    """A process whose page tables list the pages in RAM as `present`."""

    present: frozenset[int] = frozenset()

    def pages_in_ram(self, start: int, end: int) -> NDArray[np.bool_]:
        pages = range(start // PAGE, -(-end // PAGE))
        return np.array([page in self.present for page in pages], np.bool_)


def invented(areas: Iterable[Area], present: Iterable[int] = ()) -> Invented:
    return Invented(1, "invented", "", 0, tuple(areas), 0, 0, 1, present=frozenset(present))


def vars_of(process: Invented) -> dict[str, Any]:
    return {name: getattr(process, name) for name in process.__dataclass_fields__}


def area(start: int, n_pages: int, in_ram: int = 0, path: str = "", **fields: Any) -> Area:
    """Make an area at a page of `BASE`, with some of its pages in RAM."""
    address = BASE + start * PAGE
    known: dict[str, Any] = {
        "access": "rw-p", "offset": 0, "page_bytes": PAGE,
        "device": (8, 1) if path.startswith("/") else (0, 0),
        "inode": zlib.crc32(path.encode()) if path.startswith("/") else 0,
        "rss_bytes": in_ram * PAGE, "pss_bytes": in_ram * PAGE, "hugetlb_bytes": 0,
        "huge_bytes": 0, "locked_bytes": 0, "swapped_bytes": 0,
        "nodes": {0: in_ram * PAGE} if in_ram else {},
    }  # fmt: skip
    return Area(address, address + n_pages * PAGE, path=path, **(known | fields))


def figures(placements: Iterable[Placement]) -> Counter[Any]:
    """Sum up every field, including each node's."""
    sums: Counter[Any] = Counter()
    for placement in placements:
        for name in ("resident", "pss", "huge", "locked", "swapped"):
            sums[name] += getattr(placement, f"{name}_bytes")
        sums.update(placement.nodes)
    return sums


def of_areas(areas: Iterable[Area]) -> Counter[Any]:
    """Return the same sums from the kernel's areas."""
    sums: Counter[Any] = Counter()
    for each in areas:
        sums["resident"] += each.rss_bytes + each.hugetlb_bytes
        sums["pss"] += each.pss_bytes + each.hugetlb_bytes
        sums["huge"] += each.huge_bytes + each.hugetlb_bytes
        sums["locked"] += each.locked_bytes
        sums["swapped"] += each.swapped_bytes
        sums.update(each.nodes)
    return sums


def placed(things: Iterable[Row | Mapping]) -> list[Placement]:
    return [thing.granted for thing in things if thing.granted is not None]


def assert_adds_up(process: Process, mappings: Sequence[Mapping], rows: Sequence[Row]) -> None:
    assert figures(placed(rows)) == figures(placed(mappings)) == of_areas(process.areas)
    assert sum(row.resident_bytes or 0 for row in rows) == process.pss_bytes
    by_category: Counter[str] = Counter()
    for mapping in mappings:
        assert sum(mapping.parts.values()) == mapping.nbytes
        by_category.update(mapping.parts)
    assert by_category == sizes(rows)
    assert list(mappings) == sorted(mappings, key=lambda mapping: mapping.address)


@st.composite
def processes(draw: st.DrawFn) -> tuple[Invented, list[Entry]]:
    """Draw areas with gaps, and entries that begin and end anywhere in them."""
    areas, present = [], []
    page = 0
    for _ in range(draw(st.integers(1, 8))):
        page += draw(st.integers(0, 3))
        n = draw(st.integers(1, 6))
        there = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        first = BASE // PAGE + page
        present += [first + i for i, is_there in enumerate(there) if is_there]
        rss = sum(there) * PAGE
        on_node = draw(st.integers(0, sum(there))) * PAGE
        areas.append(area(
            page, n, sum(there), offset=page * PAGE,
            path=draw(st.sampled_from(["", "[heap]", "/data/a.bin", "/memfd:x (deleted)"])),
            access=draw(st.sampled_from(["rw-p", "r--s", "---p"])),
            pss_bytes=draw(st.integers(0, rss)),
            huge_bytes=draw(st.integers(0, rss)),
            locked_bytes=draw(st.sampled_from([0, rss])),
            swapped_bytes=draw(st.integers(0, n - sum(there))) * PAGE,
            nodes={0: on_node, 2: rss - on_node},
        ))  # fmt: skip
        page += n
    entries = []
    edges = sorted(draw(st.sets(st.integers(0, page * PAGE), max_size=6)))
    for first, last in zip(edges[::2], edges[1::2], strict=False):
        nbytes = draw(st.sampled_from([last - first, (last - first + 1) // 2, 0]))
        cuts = sorted({0, nbytes, *draw(st.lists(st.integers(0, nbytes), max_size=5))})
        parts = tuple(
            Part(draw(st.sampled_from("abc")), BASE + first + low, high - low)
            for low, high in itertools.pairwise(cuts)
        )
        name = draw(st.sampled_from(["a", "kv"]))
        entries.append(Entry(name, name, BASE + first, nbytes, last - first, parts=parts))
    return invented(areas, present), entries


@settings(max_examples=examples(150), deadline=None)
@given(processes())
def test_sums_are_the_kernel_s(known: tuple[Invented, list[Entry]]) -> None:
    assert_sums_are_the_kernel_s(*known)


def test_a_swapped_out_area_without_access_counts() -> None:
    """A search found this case: an inaccessible, swapped-out page and an entry of one byte."""
    process = invented([area(0, 1, 0, access="---p", swapped_bytes=PAGE)], [])
    one = Entry("kv", "kv", BASE, 1, 1, parts=(Part("a", BASE, 1),))
    assert_sums_are_the_kernel_s(process, [one])


def assert_sums_are_the_kernel_s(process: Invented, entries: list[Entry]) -> None:
    mappings, rows = attribute(process, entries)
    assert_adds_up(process, mappings, rows)
    known_at = {entry.address: entry for entry in entries}
    # Written memory is in RAM or swap, whatever its access now.
    there = [
        each for each in process.areas if each.is_accessible or each.rss_bytes or each.swapped_bytes
    ]
    for mapping in mappings:
        if mapping.category in ("a", "kv"):
            one = known_at[mapping.address]
            end = one.address + one.reserved_bytes
            n_there = sum(max(0, min(end, a.end) - max(one.address, a.start)) for a in there)
            assert mapping.nbytes <= min(one.nbytes, n_there)
            if n_there == one.reserved_bytes:
                assert mapping.nbytes == one.nbytes


def sizes(rows: Iterable[Row]) -> dict[str, int]:
    return {row.category: row.nbytes for row in rows}


def in_ram(rows: Iterable[Row]) -> dict[str, int]:
    return {row.category: row.granted.resident_bytes for row in rows if row.granted is not None}


def entry(*parts: tuple[str, int], **fields: Any) -> Entry:
    """Make an entry at `BASE` of consecutive parts."""
    known: dict[str, Any] = {"category": "kv", "name": "", "address": BASE, "path": None}
    nbytes = sum(size for _, size in parts)
    start = fields.get("address", BASE)
    starts = itertools.accumulate((size for _, size in parts), initial=start)
    made = tuple(Part(of, start, n) for (of, n), start in zip(parts, starts, strict=False))
    known |= {"nbytes": nbytes, "reserved_bytes": nbytes, "parts": made}
    return Entry(**(known | fields))


def test_parts_count_their_own_pages_in_ram() -> None:
    # The first and third of four pages are in RAM.
    process = invented([area(0, 4, 2)], [BASE // PAGE, BASE // PAGE + 2])
    # The first page has all but 100 bytes of f32; the third has 100 bytes of q8_0.
    known = entry(
        ("weights:padding", 100),
        ("weights:f32", PAGE),
        ("weights:padding", PAGE - 150),
        ("weights:q8_0", 150),
        ("weights:padding", 2 * PAGE - 100),
        **{"category": "weights:padding", "name": "w", "path": "/m.gguf"},
    )
    (mapping,), rows = attribute(process, [known])
    assert in_ram(rows) == {"weights:f32": PAGE - 100, "weights:q8_0": 100, "weights:padding": PAGE}
    expected = {"weights:f32": PAGE, "weights:q8_0": 150, "weights:padding": 3 * PAGE - 150}
    assert sizes(rows) == mapping.parts == expected
    assert (mapping.name, mapping.path, mapping.category) == ("w", "/m.gguf", "weights:padding")


def test_swapped_memory_belongs_to_parts_outside_ram() -> None:
    process = invented([area(0, 4, 1, swapped_bytes=3 * PAGE)], [BASE // PAGE])
    _, rows = attribute(process, [entry(("scratch", PAGE), ("kv", 3 * PAGE))])
    swapped = {row.category: row.granted.swapped_bytes for row in rows if row.granted}
    assert swapped == {"kv": 3 * PAGE, "scratch": 0}


def test_pagemap_is_read_only_when_needed() -> None:
    class Silent(Invented):
        def pages_in_ram(self, start: int, end: int) -> NDArray[np.bool_]:
            raise AssertionError

    known = invented([area(0, 2, 2), area(4, 2), area(8, 2, 1)])
    process = Silent(**vars_of(known))
    entries = [
        entry(("a", 9), ("kv", 2 * PAGE - 9)),
        entry(("a", 9), ("kv", 2 * PAGE - 9), address=BASE + 4 * PAGE),
    ]
    _, rows = attribute(process, entries)
    assert in_ram(rows) == {"kv": 2 * PAGE - 9, "a": 9, "anonymous": PAGE}


def test_active_and_requested_bytes() -> None:
    parts = (
        Part("scratch", BASE, 1000, active_bytes=600),
        Part("logits", BASE + 1000, 400, active_bytes=400),
        Part("scratch", BASE + 1400, PAGE - 1400),
    )
    tape = entry(
        category="scratch", nbytes=PAGE, reserved_bytes=PAGE, parts=parts,
        requested={"nbytes": 3000},
    )  # fmt: skip
    mapped = entry(("weights:f32", PAGE), address=BASE + PAGE)
    _, rows = attribute(invented([area(0, 2)]), [tape, mapped])
    found = {row.category: (row.nbytes, row.active_bytes, row.requested_bytes) for row in rows}
    assert found == {
        "scratch": (PAGE - 400, 600, 2600),
        "logits": (400, 400, 400),
        "weights:f32": (PAGE, None, None),
    }


def test_a_ring_s_memory_counts_once_and_its_pages_by_share() -> None:
    images = [area(i, 4, 4, "/memfd:kv (deleted)", pss_bytes=2 * PAGE) for i in (0, 4)]
    ring = entry(("kv", 4 * PAGE), reserved_bytes=8 * PAGE)
    (mapping,), (row,) = attribute(invented(images), [ring])
    assert row.nbytes == mapping.nbytes == row.resident_bytes == 4 * PAGE
    assert row.granted is not None
    assert row.granted.resident_bytes == 8 * PAGE  # as in the Rss of the process


def test_what_several_areas_map_of_a_file_counts_once() -> None:
    file, lib = "/data/a.bin", "/lib/libm.so.6"
    areas = [
        area(0, 4, 4, file, offset=2 * PAGE),
        area(10, 3, 1, file),  # the third of its pages is mapped above, too
        area(20, 9, 0, file, offset=PAGE),
        area(40, 2, 1, file, offset=PAGE, access="---p"),
        area(50, 2, 2, file, anonymous_bytes=PAGE),  # nobody asks which of them is a copy
        area(60, 2, 1, lib, access="r-xp"),
        area(70, 2, 1, lib),
    ]
    mappings, rows = attribute(invented(areas))
    assert [each.nbytes // PAGE for each in mappings] == [0, 3, 7, 0, 2, 2, 2]
    assert sizes(rows) == {"files": 12 * PAGE, "libraries": 4 * PAGE}
    assert_adds_up(invented(areas), mappings, rows)


def test_copies_of_weights_are_apart_and_hide_nothing_of_another_mapping() -> None:
    class Written(Invented):
        def pages_written(self, start: int, end: int) -> NDArray[np.bool_]:
            return self.pages_in_ram(start, end)

    file = {"path": "/m.gguf", "access": "rw-p"}
    areas = [area(0, 4, 2, **file, anonymous_bytes=2 * PAGE), area(8, 4, 4, "/m.gguf")]
    process = Written(**vars_of(invented(areas, [BASE // PAGE + 1, BASE // PAGE + 2])))
    both = [
        entry(
            ("weights:f32", 2 * PAGE - 9),
            ("weights:q8_0", 2 * PAGE + 9),
            address=each.start,
            path="/m.gguf",
        )
        for each in areas
    ]
    mappings, rows = attribute(process, both)
    # The copies are the second and the third page, which the other area has, too.
    assert sizes(rows) == {
        "weights:written": 2 * PAGE, "weights:f32": 2 * PAGE - 9, "weights:q8_0": 2 * PAGE + 9,
    }  # fmt: skip
    assert [each.nbytes for each in mappings] == [3 * PAGE, 3 * PAGE]
    assert_adds_up(process, mappings, rows)


def test_pieces_of_a_growing_block_are_one_mapping() -> None:
    areas = [area(0, 2, 1), area(2, 4, access="---p"), area(6, 1, 1), area(7, 9, access="---p")]
    grown = entry(("kv", 3 * PAGE), reserved_bytes=16 * PAGE, category="other")
    (mapping,), (row,) = attribute(invented(areas), [grown])
    assert row.category == "kv"
    assert mapping.nbytes == row.nbytes == 3 * PAGE
    assert mapping.granted.resident_bytes == 2 * PAGE


def test_unmapped_entries_are_left_out() -> None:
    gone = entry(("kv", PAGE))
    empty = Entry("scratch", "only reserved", BASE + 64 * PAGE, 0, 64 * PAGE)
    mappings, rows = attribute(invented([area(8, 1, 1)]), [gone, empty])
    assert [mapping.name for mapping in mappings] == ["", "only reserved"]
    assert sizes(rows) == {"anonymous": PAGE, "scratch": 0}


def test_an_entry_counts_only_mapped_memory() -> None:
    huge = 1 << 50
    parts = (Part("kv", BASE, huge, active_bytes=huge), Part("logits", BASE + huge, PAGE, PAGE))
    known = entry(nbytes=huge + PAGE, reserved_bytes=huge + PAGE, parts=parts)
    (mapping,), (row, gone) = attribute(invented([area(0, 3, 1)]), [known])
    assert (row.category, row.nbytes, row.active_bytes) == ("kv", 3 * PAGE, 3 * PAGE)
    assert (gone.category, gone.nbytes, gone.active_bytes) == ("logits", 0, 0)
    assert mapping.nbytes == 3 * PAGE


def test_work_grows_linearly(monkeypatch: Patch) -> None:
    class Counted(list[Any]):
        n_read = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            Counted.n_read += len(found) if isinstance(index, slice) else 1
            return found

    cut = attribution._cut_range
    monkeypatch.setattr(
        attribution, "_cut_range", lambda claims, *rest: cut(Counted(claims), *rest)
    )
    n = 300
    entries = [entry(("kv", 100), ("a", PAGE - 100), address=BASE + 2 * i * PAGE) for i in range(n)]
    mappings, _ = attribute(invented([area(2 * i, 1) for i in range(n)]), entries)
    assert len(mappings) == n
    assert Counted.n_read < 10 * n


@pytest.mark.parametrize(("fields", "pages"), [
    ({}, ("4k", PAGE)),
    ({"flags": frozenset({"hg"})}, ("thp", 512 * PAGE)),
    ({"flags": frozenset({"hg"}), "rss_bytes": PAGE}, ("4k", PAGE)),
    ({"rss_bytes": 512 * PAGE, "huge_bytes": 512 * PAGE}, ("thp", 512 * PAGE)),
    ({"hugetlb_bytes": 2 << 20, "page_bytes": 2 << 20}, ("2m", 2 << 20)),
    ({"page_bytes": 1 << 30}, ("1g", 1 << 30)),
])  # fmt: skip
def test_page_sizes_are_the_kernel_s(fields: Any, pages: tuple[str, int]) -> None:
    process = invented([area(0, 1024, **fields)])
    (mapping,), (row,) = attribute(process, [entry(("kv", 1 << 22))])
    for thing in (mapping, row):
        assert thing.granted is not None
        assert (thing.granted.pages, thing.granted.page_bytes) == pages


# Access and category, and paths.
KINDS = {
    ("rw-p", "allocator"): ["[heap]", "[anon: glibc: malloc arena]"],
    ("rw-p", "stacks"): ["[stack]", "[anon: glibc: pthread stack: 7]"],
    ("r-xp", "kernel"): ["[vdso]", "[vvar]", "[vsyscall]"],
    ("rw-p", "anonymous"): ["", "[anon:a name]", "/dev/zero", "/anon_hugepage (deleted)"],
    ("r--p", "files"): ["/usr/lib/locale/C.utf8/LC_CTYPE", "/usr/lib/libm.so.6 (deleted)"],
    ("rw-s", "shared"): [
        "[anon_shmem:a name]",
        "/memfd:a name (deleted)",
        "/dev/shm/psm_1",
        "/SYSV00000000 (deleted)",
        "/dev/zero (deleted)",
        "/anon_hugepage (deleted)",
    ],
}


@pytest.mark.parametrize(("access", "category"), KINDS)
def test_kinds(access: str, category: str) -> None:
    paths = KINDS[access, category]
    assert [kind_of(area(0, 1, path=path, access=access)) for path in paths] == [category] * len(
        paths
    )


def test_every_area_of_a_file_with_code_is_a_library() -> None:
    areas = [
        area(0, 1, 1, "/usr/lib/libm.so.6", access="r--p"),
        area(1, 1, 1, "/usr/lib/libm.so.6", access="r-xp"),
        area(2, 3, 0, "/usr/lib/libm.so.6", access="---p"),
        area(5, 1, 1, "/usr/lib/libm.so.6"),
        area(6, 1, 1, "/usr/share/icu.dat", access="r--p"),
        area(7, 5, 0, access="---p"),
        area(12, 5, 2, access="---p"),  # was written before it was closed to everybody
    ]
    mappings, rows = attribute(invented(areas))
    assert sizes(rows) == {"libraries": 3 * PAGE, "files": PAGE, "anonymous": 2 * PAGE}
    assert in_ram(rows) == sizes(rows)
    assert [mapping.name for mapping in mappings[-2:]] == ["icu.dat", ""]
    assert [mapping.path for mapping in mappings[-2:]] == ["/usr/share/icu.dat", None]


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1).filter(any))
def test_shares_add_up_and_are_off_by_at_most_one(total: int, weights: list[int]) -> None:
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * sum(weights) - total * weight) < sum(weights)


CHILD = """
import mmap, sys
import numpy as np

kept = [np.memmap(sys.argv[1], np.uint8, "r"), mmap.mmap(-1, 1 << 20), np.ones(1 << 20)]
kept[1][: 1 << 19] = bytes(1 << 19)
sum(kept[0][::4096].tolist())
"""


@pytest.fixture(scope="module")
def child() -> Iterator[int]:
    """Start a waiting process with a model file, shared memory and anonymous memory."""
    model = ROOT / "src/unimem/engine/models/tiny.gguf"
    with running(CHILD, model) as pid:
        yield pid


def kernel_sum(pid: int, *names: str) -> int:
    """Sum up lines of a fresh reading of smaps."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    fields = (line.split() for line in text.splitlines())
    return sum(int(words[1]) * 1024 for words in fields if words[0].rstrip(":") in names)


def test_another_process_adds_up_to_the_kernel_s_sums(child: int) -> None:
    process = read_process(child)
    mappings, rows = attribute(process, (), models(process))
    assert_adds_up(process, mappings, rows)
    placements = placed(rows)
    rss = kernel_sum(child, "Rss", "Private_Hugetlb", "Shared_Hugetlb")
    assert sum(p.resident_bytes for p in placements) == rss
    assert sum(p.swapped_bytes for p in placements) == kernel_sum(child, "Swap")
    assert sum(p.locked_bytes for p in placements) == kernel_sum(child, "Locked")
    found = sizes(rows)
    assert found["weights:q8_0"] > 1_000_000
    assert found["shared"] == 1 << 20
    assert found["anonymous"] > 8 << 20
    assert {"allocator", "libraries", "stacks", "kernel"} < set(found)
