"""Blocks that grow and give memory back: what moves (nothing), what falls, and what refuses."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import unimem as um
from support.kernel import proc_maps
from support.kernel.huge_pages import count
from unimem._core.status import ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE
HUGE = proc_maps.huge_page_bytes()
# Of this process: other runs of the tests may go on beside it.
NAME = f"unimem-test-grow-{os.getpid()}"

of_every_sharing = pytest.mark.parametrize(
    "shared", [False, True, NAME], ids=["private", "unnamed", "named"]
)


def charged(block: um.Block) -> int:
    """Bytes of the block that count against the commit limit: accounted and accessible."""
    parts = proc_maps.mappings(block.address, block.reserved_bytes)
    return sum(part.fields["Size"] for part in parts if "ac" in part.flags)


# ---- growing ----


@of_every_sharing
def test_growing_moves_nothing(shared: Any) -> None:
    with um.Block(PAGE, pages="4k", reserve=100 * PAGE, shared=shared) as block:
        assert block.requested["reserve"] == block.reserved_bytes == 100 * PAGE
        assert (block.nbytes, block.committed_bytes, block.step_bytes) == (PAGE, PAGE, PAGE)
        address, first = block.address, block.as_array()
        first[:] = 7
        for n in (2, 3, 50, 100):
            block.commit(n * PAGE - 1)
            assert (block.nbytes, block.address) == (n * PAGE, address)
            last = block.as_array(offset=(n - 1) * PAGE)
            assert not last.any()
            last[:] = n
        assert (first == 7).all()
        block.commit(PAGE)  # there already
        block.commit(0)
        assert block.nbytes == 100 * PAGE
        with pytest.raises(ValueError, match="larger reserve="):
            block.commit(100 * PAGE + 1)
        with pytest.raises(ValueError, match="nbytes"):
            block.commit(-1)
        del first, last


def test_only_what_is_committed_is_charged() -> None:
    before = ledger()["history"]["mapped_bytes"]

    def check(nbytes: int) -> None:
        assert charged(block) == ledger()["history"]["mapped_bytes"] - before == nbytes

    with um.Block(PAGE, pages="4k", reserve=2**40, category="history") as block:
        check(PAGE)
        block.commit(64 * MIB)
        check(64 * MIB)
        block.warm()
        assert block.granted.resident_bytes == 64 * MIB
        proc_maps.assert_granted(block)
        assert block.release(MIB) == 63 * MIB
        check(MIB)
        assert block.verify().resident_bytes == MIB
        proc_maps.assert_granted(block)
        block.release(0, 2 * PAGE)
        check(MIB - 2 * PAGE)
    assert ledger()["history"]["mapped_bytes"] == before


@pytest.mark.skipif(HUGE == 0, reason="this kernel gives no transparent huge pages")
def test_huge_pages_stay_huge() -> None:
    with um.Block(4 * HUGE, pages="thp", reserve=8 * HUGE, warm=True) as block:
        assert block.step_bytes == HUGE
        block.commit(5 * HUGE + 1)
        assert block.nbytes == 6 * HUGE
        block.warm()
        if block.granted.huge_bytes < block.nbytes:
            pytest.skip("this machine has too few free huge pages just now")
        # Inwards to whole huge pages: none is split.
        assert block.release(HUGE + 1, 3 * HUGE) == 2 * HUGE
        granted = block.verify()
        assert granted.huge_bytes == granted.resident_bytes == 4 * HUGE
        proc_maps.assert_granted(block)


@pytest.mark.usefixtures("eight_huge_pages")
@pytest.mark.parametrize("shared", [False, True])
def test_hugetlb_grows_from_the_pool(shared: bool) -> None:
    page = 2 * MIB
    free = count("free_hugepages")
    with um.Block(page, pages="2m", reserve=64 * page, shared=shared, strict=True) as block:
        block.commit(3 * page)
        block.warm()
        assert block.granted.huge_bytes == 3 * page
        assert count("free_hugepages") == free - 3
        proc_maps.assert_granted(block)
        with pytest.raises(um.PlacementError, match="nr_hugepages"):
            block.commit(64 * page)
        assert (block.nbytes, block.verify().huge_bytes) == (3 * page, 3 * page)
        assert block.release(page) == 2 * page
        assert count("free_hugepages") == free - 1
    assert count("free_hugepages") == free


@pytest.mark.usefixtures("eight_huge_pages")
def test_locked_hugetlb_pages_are_there_when_they_are_committed() -> None:
    with um.Block(2 * MIB, pages="2m", reserve=16 * MIB, lock=True, strict=True) as block:
        assert block.granted.locked_bytes == 2 * MIB
        block.commit(6 * MIB)
        assert block.verify().locked_bytes == block.granted.resident_bytes == 6 * MIB


# ---- giving back ----


@of_every_sharing
def test_what_is_given_back_is_gone(shared: Any) -> None:
    with um.Block(10 * PAGE, pages="4k", shared=shared, warm=True) as block:
        block.as_array()[:] = 9
        assert block.release(3 * PAGE - 1, 4 * PAGE + 2) == 4 * PAGE
        assert (block.nbytes, block.committed_bytes) == (3 * PAGE, 6 * PAGE)
        assert block.verify().resident_bytes == 6 * PAGE
        proc_maps.assert_granted(block)
        for at in range(10):
            assert proc_maps.is_mapped(block.address + at * PAGE) == (at not in range(3, 7))
        assert block.release(3 * PAGE, 4 * PAGE) == 0  # gone already
        assert block.release(0, PAGE - 1) == 0  # no whole page
        assert (block.as_array("uint8", 3 * PAGE, 7 * PAGE) == 9).all()
        for first, end in ((2 * PAGE, 3 * PAGE + 1), (3 * PAGE, 4 * PAGE), (6 * PAGE, 8 * PAGE)):
            with pytest.raises(ValueError, match=r"commit\(\) them"):
                block.as_array("uint8", end - first, first)
        assert memoryview(block).nbytes == 3 * PAGE
        gc.collect()
        block.commit(10 * PAGE)
        assert block.nbytes == 10 * PAGE
        assert block.as_array("uint8", (10, PAGE)).tolist() == [
            [0 if 3 <= page < 7 else 9] * PAGE for page in range(10)
        ]
        assert block.release() == 10 * PAGE
        assert (block.nbytes, block.verify().resident_bytes) == (0, 0)


Views = Callable[[um.Block], Any]
PARTS: dict[str, Views] = {
    "array": lambda b: b.as_array("uint8", PAGE, 4 * PAGE),
    "slice": lambda b: b.as_array("uint8", PAGE, 4 * PAGE)[10:20][::2],
    "view of another type": lambda b: b.as_array("uint8", PAGE, 4 * PAGE).view("float16")[5:],
    "memoryview of an array": lambda b: b.as_array("uint8", PAGE, 4 * PAGE).data,
    "dlpack": lambda b: np.from_dlpack(b.as_array("float32", PAGE // 4, 4 * PAGE)),
    "one byte at its end": lambda b: b.as_array("uint8", 1, 5 * PAGE - 1),
}
WHOLE: dict[str, Views] = {
    "array of all": lambda b: b.as_array(),
    "memoryview": memoryview,
    "asarray": np.asarray,
    "tape": um.Tape,
    "frombuffer": lambda b: np.frombuffer(cast(Any, b), "float32"),
}


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS.keys())
def test_a_live_view_over_the_range_refuses(make: Views) -> None:
    with um.Block(10 * PAGE, pages="4k", name="kv") as block:
        view = make(block)
        for offset, nbytes in ((4 * PAGE, PAGE), (0, 5 * PAGE), (4 * PAGE, None), (0, None)):
            with pytest.raises(BufferError, match=r"'kv'.* arrays over bytes .*: 1"):
                block.release(offset, nbytes)
        assert block.committed_bytes == 10 * PAGE
        # Beside it there is nothing in the way.
        assert block.release(0, 4 * PAGE) == 4 * PAGE
        assert block.release(5 * PAGE) == 5 * PAGE
        assert bytes(memoryview(view).tobytes()).strip(b"\0") == b""
        with pytest.raises(BufferError):
            block.close()
        del view
        gc.collect()
        assert block.release() == PAGE


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE.keys())
def test_users_of_all_of_it_refuse(make: Views) -> None:
    with um.Block(10 * PAGE, pages="4k") as block:
        view = make(block)
        with pytest.raises(BufferError, match="drop them first"):
            block.release(9 * PAGE)
        assert block.release(PAGE, 0) == 0
        if isinstance(view, um.Tape):
            view.close()
        del view
        gc.collect()
        assert block.release(9 * PAGE) == PAGE


def test_wrong_ranges_and_reserves(tmp_path: Path) -> None:
    with um.Block(10 * PAGE, pages="4k") as block:
        outside = [(10 * PAGE, PAGE), (0, 10 * PAGE + 1), (11 * PAGE, None)]
        for offset, nbytes in [(-1, 1), (0, -1), (2**63 - 1, 1), *outside]:
            with pytest.raises(ValueError, match=r"offset|nbytes|range|outside"):
                block.release(offset, nbytes)
        assert block.nbytes == 10 * PAGE
    reserves: list[Any] = [0, PAGE - 1, -1, 2**70, 1.5]
    for reserve in reserves:
        with pytest.raises((ValueError, TypeError)):
            um.Block(PAGE, reserve=reserve)
    # Files and memory that can only be read neither grow nor shrink.
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE))
    with um.Block.map(path) as block:
        with pytest.raises(ValueError, match="releasing"):
            block.release()
        block.commit(PAGE)
        assert block.nbytes == 3 * PAGE
    with um.Block(PAGE) as block, block.sealed_copy() as copy:
        with pytest.raises(ValueError, match="only be read"):
            copy.release()
        assert copy.as_array().nbytes == PAGE


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shared", [False, True])
def test_any_order_of_growing_and_giving_back(seed: int, shared: bool) -> None:
    """Against a model: a list of pages, each None or the byte it is filled with."""
    n, rng = 150, random.Random(seed)
    with um.Block(PAGE, pages="4k", reserve=n * PAGE, shared=shared) as block:
        pages: list[int | None] = [0] + [None] * (n - 1)
        for step in range(60):
            if rng.random() < 0.4:
                top = rng.randrange(n + 1)
                block.commit(top * PAGE)
                pages[:top] = [0 if p is None else p for p in pages[:top]]
            else:
                first = rng.randrange(n)
                end = rng.randrange(first, n + 1)
                freed = sum(p is not None for p in pages[first:end])
                assert block.release(first * PAGE, (end - first) * PAGE) == freed * PAGE
                pages[first:end] = [None] * (end - first)
            for at in rng.sample(range(n), 10):
                if pages[at] is not None:
                    pages[at] = step % 250 + 1
                    block.as_array("uint8", PAGE, at * PAGE)[:] = step % 250 + 1
            gap = next((i for i, p in enumerate(pages) if p is None), n)
            assert block.nbytes == gap * PAGE
            assert block.committed_bytes == sum(p is not None for p in pages) * PAGE
        there: set[int] = set()
        for part in proc_maps.mappings(block.address, n * PAGE):
            if part.access[0] == "r":
                there.update(range(part.start - block.address, part.end - block.address, PAGE))
        assert there == {at * PAGE for at, value in enumerate(pages) if value is not None}
        for at in there:
            assert (block.as_array("uint8", PAGE, at) == pages[at // PAGE]).all()
        block.warm()
        assert block.verify().resident_bytes == block.committed_bytes
        proc_maps.assert_granted(block)
