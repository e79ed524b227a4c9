"""Memory that is mapped twice, back to back; memory that is forgotten; files laid over memory."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.kernel import proc_maps
from support.kernel.huge_pages import count
from support.kernel.os_faults import os_faults
from support.processes.forks import in_child, refuses
from unimem._core.status import ledger
from unimem.system import limits

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20
PAGE = proc_maps.PAGE
HUGE = proc_maps.huge_page_bytes()


def mirrored(n_pieces: int, piece: int, **options: Any) -> um.Block:
    return um.Block._mirrored(n_pieces * piece, piece, **options)


def images(block: um.Block, piece: int) -> list[np.ndarray[Any, Any]]:
    """Both images of each piece, one after the other."""
    return list(block.as_array().reshape(-1, piece))


def assert_mirrored(block: um.Block, piece: int, granted: um.Placement) -> None:
    """A placement is what smaps says of the larger image of each piece."""
    parts = proc_maps.mappings(block.address, block.nbytes)
    assert [part.end - part.start for part in parts] == [piece] * (block.nbytes // piece)
    pairs = list(zip(parts[::2], parts[1::2], strict=True))

    def larger(*names: str) -> int:
        return sum(max(sum(part.fields[name] for name in names) for part in pair) for pair in pairs)

    assert granted.resident_bytes == larger("Rss")
    assert granted.pss_bytes == sum(part.fields["Pss"] for part in parts)
    assert granted.huge_bytes == larger("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
    assert sum(granted.nodes.values()) == granted.resident_bytes


# ---- mirrors ----


def test_each_piece_is_there_twice() -> None:
    piece = 3 * PAGE
    with mirrored(4, piece) as block:
        assert block.nbytes == block.reserved_bytes == block.committed_bytes == 8 * piece
        assert (block.category, block.requested["nbytes"]) == ("kv", 4 * piece)
        assert ledger()["history"]["mapped_bytes"] == 4 * piece
        for i, image in enumerate(images(block, piece)):
            assert (image == (i if i % 2 else 0)).all()
            image[:] = i + 1
        # What begins in a piece and goes on behind its end is one contiguous array.
        wrapped = block.as_array("int32", piece // 4, offset=2 * piece + piece // 2)
        wrapped[:] = np.arange(piece // 4)
        both = block.as_array("int32", (2, piece // 4), offset=2 * piece)
        assert (both[0] == both[1]).all()
        assert (np.roll(both[0], piece // 8) == np.arange(piece // 4)).all()
        del image, wrapped, both


def test_memory_in_use_is_counted_as_it_is() -> None:
    piece = 8 * PAGE
    with mirrored(3, piece) as block:
        for image, at in ((1, slice(3 * PAGE)), (4, 0), (5, PAGE)):
            images(block, piece)[image][at] = 1
        granted = block.verify()
        assert granted.resident_bytes == granted.pss_bytes == 5 * PAGE
    for pages in ("auto", "4k"):
        with mirrored(4, MIB, pages=pages, warm=2, strict=True) as block:
            granted = block.granted
            assert (granted.pages, granted.huge_bytes) == ("4k", 0)
            assert granted.resident_bytes == granted.pss_bytes == 4 * MIB
            assert_mirrored(block, MIB, granted)
            for part in proc_maps.mappings(block.address, block.nbytes):
                assert part.fields["Rss"] == MIB  # no fault is left, through either image


@pytest.mark.parametrize(("piece", "huge"), [(2, 8), (4, 16), (3, 8), (1, 0)])
def test_huge_pages(piece: int, huge: int) -> None:
    if HUGE != 2 * MIB:
        pytest.skip("this kernel gives no transparent huge pages of 2 MiB")
    piece *= MIB
    if piece % HUGE == 0:
        try:
            block = mirrored(4, piece, pages="thp", warm=True, strict=True)
        except um.PlacementError as error:
            pytest.skip(str(error))
    else:
        with pytest.warns(um.PlacementWarning, match=r"mapped twice are no multiple"):
            block = mirrored(4, piece, pages="thp", warm=True)
    with block:
        assert block.granted.resident_bytes == 4 * piece
        if piece % HUGE == 0:
            assert block.granted.huge_bytes == huge * MIB
        else:  # as many as there are just now, of those that lie in a piece
            assert block.granted.huge_bytes <= huge * MIB
        assert_mirrored(block, piece, block.granted)
        first, mirror = images(block, piece)[:2]
        first[:] = np.arange(piece) % 251
        assert (mirror == first).all()
        del first, mirror


def test_reserved_huge_pages(eight_huge_pages: None) -> None:
    piece = 2 * MIB
    free = count("free_hugepages")
    with mirrored(2, piece, pages="2m", lock=True, warm=True, strict=True) as block:
        assert block.granted.pages == "2m"
        assert block.granted.resident_bytes == block.granted.locked_bytes == 2 * piece
        assert count("free_hugepages") == free - 2
        first, mirror = images(block, piece)[:2]
        mirror[5] = 55
        assert first[5] == 55
        del first, mirror
        # The pool would go on keeping the pages for it.
        with pytest.raises(ValueError, match="hugetlb"):
            block._discard(0, block.nbytes)
    assert count("free_hugepages") == free


def test_what_cannot_be_had_is_told() -> None:
    wanted: dict[str, Any] = {"pages": "1g", "warm": True}
    with pytest.raises(um.PlacementError, match="1g"):
        mirrored(1, 1 << 30, strict=True, **wanted)
    with pytest.warns(um.PlacementWarning, match="pages='2m' needs"):
        block = mirrored(2, 1000 * MIB, pages="2m")
    with block:
        assert block.requested["pages"] == "2m"


@pytest.mark.parametrize(
    ("nbytes", "piece", "pages"),
    [
        (4 * PAGE, PAGE + 1, "auto"),
        (4 * PAGE, 3 * PAGE, "4k"),
        (4 * MIB, MIB, "2m"),
        (4 * MIB, 2 * MIB, "1g"),
        (0, PAGE, "auto"),
        (PAGE, 0, "auto"),
    ],
)
def test_pieces_are_whole(nbytes: int, piece: int, pages: Any) -> None:
    with pytest.raises(ValueError, match=r"expected|at least 1"):
        um.Block._mirrored(nbytes, piece, pages=pages)


def test_room_is_asked_for_once_and_not_for_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, room = [], 2 * MIB

    def require(nbytes: int, what: str) -> None:
        asked.append(nbytes)
        if nbytes > room:
            raise um.CapacityError(f"{what}: {nbytes}")

    monkeypatch.setattr(limits, "require", require)
    with mirrored(2, MIB) as block:
        block.warm()
        assert asked == [2 * MIB, 2 * MIB]
    with mirrored(2, MIB) as block:
        images(block, MIB)[0][:] = 1
        room = MIB
        block.warm()
        assert block.verify().resident_bytes == 2 * MIB


@pytest.mark.locks
def test_it_does_not_grow_or_shrink() -> None:
    with mirrored(2, PAGE) as block:
        block.commit(4 * PAGE)  # which it has
        with pytest.raises(ValueError, match="reserved"):
            block.commit(5 * PAGE)
        with pytest.raises(ValueError, match="mirrored"):
            block.release()
        with pytest.raises(ValueError, match="shared"):
            block._overlay(0, block.fileno(), 0, PAGE)
    with mirrored(2, 16 * PAGE, lock=True, strict=True) as block:
        assert block.granted.locked_bytes == block.granted.resident_bytes == 32 * PAGE
        with pytest.raises(ValueError, match="locked"):
            block._discard(0, PAGE)


def test_others_have_it_once() -> None:
    with mirrored(3, PAGE) as block:
        for i, image in enumerate(images(block, PAGE)):
            image[:] = i // 2
        with um.Block.attach(block.fileno(), writable=True) as other:
            assert other.nbytes == 3 * PAGE
            there = other.as_array().reshape(3, PAGE)
            assert there[:, 0].tolist() == [2, 1, 0]  # in the file the last piece comes first
            there[0] = 9
            assert (block.as_array(offset=4 * PAGE) == 9).all()
            del there
        del image


def test_a_forked_child_has_it_not() -> None:
    with mirrored(2, PAGE, name="ring") as block:
        assert in_child(partial(refuses, block.as_array, "left out"))
        block.as_array()[:] = 1


def test_each_system_call_may_fail() -> None:
    files = len(os.listdir("/proc/self/fd"))
    with os_faults() as faults:
        for nth in range(1, 100):
            faults.arm(nth)
            try:
                block = mirrored(3, PAGE, pages="4k", warm=True)
            except (MemoryError, OSError):
                assert faults.failed is not None
            else:
                faults.disarm()
                block.close()
                if faults.failed is None:
                    break
            assert len(os.listdir("/proc/self/fd")) == files
            assert ledger()["history"]["mapped_bytes"] == 0
        assert nth > 10


# ---- what is forgotten ----


def test_discarded_memory_is_zero_and_stays() -> None:
    piece = 8 * PAGE
    with mirrored(4, piece, warm=True) as block:
        block.as_array()[:] = 7
        # From the middle of the first mirror on, to the middle of the second piece.
        assert block._discard(piece + 4 * PAGE, piece) == piece
        assert block.granted.resident_bytes == 3 * piece
        halves = block.as_array("uint8", (16, 4 * PAGE))
        gone = [i for i, half in enumerate(halves) if (half == 0).all()]
        assert gone == [1, 3, 4, 6]  # in each image
        assert (np.delete(halves, gone, axis=0) == 7).all()
        assert block.committed_bytes == 8 * piece
        halves[:] = 8
        assert block.verify().resident_bytes == 4 * piece
        del halves


def test_nothing_is_forgotten_under_an_array() -> None:
    piece = 4 * PAGE
    with mirrored(3, piece) as block:
        view = block.as_array(offset=3 * piece, shape=PAGE)  # in the mirror of the second piece
        view[:] = 1
        with pytest.raises(BufferError, match="live arrays"):
            block._discard(2 * piece, PAGE)
        assert view.all()
        assert block._discard(0, 2 * piece) == piece
        del view
        assert block._discard(2 * piece, PAGE) == PAGE


@pytest.mark.parametrize("pages", ["4k", "thp"])
def test_private_memory_is_forgotten(pages: Any) -> None:
    if pages == "thp" and HUGE == 0:
        pytest.skip("this kernel gives no transparent huge pages")
    with um.Block(8 * MIB, pages=pages, warm=True) as block:
        block.as_array()[:] = 1
        step = block.step_bytes
        assert block._discard(step - 1, 2 * step + 1) == 2 * step
        assert block.granted.resident_bytes == 8 * MIB - 2 * step
        array = block.as_array()
        assert not array[step : 3 * step].any()
        assert array[:step].all()
        assert array[3 * step :].all()
        del array
        with pytest.raises(ValueError, match="outside"):
            block._discard(step, 8 * MIB)


# ---- files ----


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of eight pages; page i is full of i + 1."""
    path = tmp_path / "rows"
    path.write_bytes(b"".join(bytes([i + 1]) * PAGE for i in range(8)))
    return path


def test_a_file_over_reserved_memory(path: Path) -> None:
    before = path.read_bytes()
    with um.Block(PAGE, pages="4k", reserve=16 * PAGE) as block, path.open("rb") as file:
        block._overlay(4 * PAGE, file.fileno(), 2 * PAGE, 3 * PAGE)
        file.close()
        assert (block.nbytes, block.committed_bytes) == (PAGE, 4 * PAGE)
        rows = block.as_array(shape=(3, PAGE), offset=4 * PAGE)
        assert rows[:, 5].tolist() == [3, 4, 5]
        block.warm()
        (part,) = proc_maps.mappings(block.address + 4 * PAGE)
        assert (part.fields["Rss"], part.fields["Anonymous"]) == (3 * PAGE, 0)
        rows[1] = 99
        assert path.read_bytes() == before
        with pytest.raises(BufferError):
            block._discard(4 * PAGE, PAGE)
        del rows
        assert block._discard(4 * PAGE, 2 * PAGE) == 2 * PAGE
        assert not block.as_array(shape=2 * PAGE, offset=4 * PAGE).any()
        assert (block.as_array(shape=PAGE, offset=6 * PAGE) == 5).all()
        assert block.release(4 * PAGE, 3 * PAGE) == 3 * PAGE
        assert not proc_maps.is_mapped(block.address + 6 * PAGE)


def test_files_that_do_not_fit_or_shrink(path: Path) -> None:
    with um.Block(PAGE, pages="4k", reserve=16 * PAGE) as block, path.open("r+b") as file:
        fd = file.fileno()
        for offset, start, nbytes, match in (
            (0, 0, PAGE, "committed"),
            (PAGE, 0, 9 * PAGE, "end of the file"),
            (PAGE, 0, 100, "step"),
            (PAGE, 100, PAGE, "page size"),
            (1 << 16, 0, PAGE, "reserved"),
        ):
            with pytest.raises(ValueError, match=match):
                block._overlay(offset, fd, start, nbytes)
        assert block.committed_bytes == PAGE
        block._overlay(PAGE, fd, 0, 8 * PAGE)
        file.truncate(PAGE)
        with pytest.raises(OSError, match="shorter"):
            block.warm()
        assert block.verify().resident_bytes == 2 * PAGE
        assert block._discard(PAGE, 8 * PAGE) == 8 * PAGE
        assert not block.as_array().any()
