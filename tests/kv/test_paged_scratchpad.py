"""A paged scratchpad holds the rows that NumPy would hold, in blocks that come and go."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from numpy.typing import NDArray

import proc_maps
import unimem as um
from os_faults import os_faults
from pad_model import DTYPES, TAKEN, PadAgainstModel, awkward, converted, dtype_of, same_bits
from tiers import examples
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]


@pytest.fixture
def pad() -> Iterator[um.PagedScratchpad]:
    with um.PagedScratchpad(10, 4, block_tokens=4) as pad:
        yield pad


def rows(n: int, dim: int = 4, dtype: str = "float32") -> Array:
    return np.random.default_rng(n).normal(size=(n, dim)).astype(dtype_of(dtype))


# ---- what is stored ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize(("n", "dim"), [(7, 15), (50, 1000)])  # the second without the GIL
def test_rows_are_converted_as_numpy_converts(dtype: str, given: str, n: int, dim: int) -> None:
    values = awkward(given, (n, dim))
    with um.PagedScratchpad(n + 1, dim, dtype, block_tokens=3) as pad:
        if given not in TAKEN[dtype]:
            with pytest.raises(TypeError, match=rf"of {dtype}: expected.*got {given}"):
                pad.append_batch(values)
            assert pad.n_blocks_in_use == 0
            return
        pad.append(values[-1])
        pad.append_batch(values)
        expected = converted(np.concatenate([values[-1:], values]), dtype)
        assert same_bits(pad.as_array(), expected)
        assert all(same_bits(pad.get_token(i), expected[i]) for i in range(n + 1))


def test_tokens_are_seen_where_they_are(pad: um.PagedScratchpad) -> None:
    given = rows(9)
    pad.append_batch(given)
    for i in range(-9, 9):
        assert same_bits(pad.get_token(i), given[i])
        assert same_bits(pad.get_token(np.int64(i)), given[i])
    token = pad.get_token(5)
    token[:] = 3
    assert (pad.as_array()[5] == 3).all()
    copy = pad.as_array()
    copy[:] = 0
    assert (pad.get_token(5) == 3).all()
    for wrong in (9, -10, 2**70):
        with pytest.raises(IndexError, match="of 9"):
            pad.get_token(wrong)
    for wrong_type in (1.0, "1", None, slice(2)):
        with pytest.raises(TypeError):
            pad.get_token(wrong_type)  # type: ignore[arg-type]
    pad.clear()
    with pytest.raises(IndexError, match="of 0"):
        pad.get_token(0)


# ---- blocks ----


def test_blocks_are_taken_when_they_are_needed_and_given_back(pad: um.PagedScratchpad) -> None:
    assert (pad.n_blocks, pad.n_blocks_in_use, pad.block_tokens) == (3, 0, 4)
    assert pad.block_table.dtype == np.int32
    assert pad.block_table.tolist() == []
    in_use = []
    for row in rows(10):
        pad.append(row)
        in_use.append(pad.n_blocks_in_use)
    assert in_use == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    table = pad.block_table
    assert sorted(table) == [0, 1, 2]
    addresses = [proc_maps.address_of(pad.get_token(i)) for i in range(10)]
    base = proc_maps.address_of(pad.tape.block.as_array())
    stride = 64  # 4 tokens x 4 values x 4 bytes
    assert addresses == [base + int(table[i // 4]) * stride + i % 4 * 16 for i in range(10)]
    for n, blocks in ((9, 3), (8, 2), (5, 2), (4, 1), (4, 1), (1, 1), (0, 0)):
        pad.crop(n)
        assert (len(pad), pad.n_blocks_in_use) == (n, blocks)
        assert pad.block_table.tolist() == table[:blocks].tolist()
    assert table.size == 3  # the table that was given is a copy
    pad.append_batch(rows(10))
    assert pad.block_table.tolist() == table.tolist()  # the same ones, in their order
    pad.clear()
    assert pad.n_blocks_in_use == 0


@pytest.mark.parametrize("block_tokens", [1, 2, 7, 10, 11, 1000])
def test_any_size_of_blocks(block_tokens: int) -> None:
    with um.PagedScratchpad(10, 4, block_tokens=block_tokens) as pad:
        assert pad.n_blocks == -(-10 // block_tokens)
        given = rows(10)
        pad.append_batch(given[:3])
        pad.append_batch(given[3:])
        assert same_bits(pad.as_array(), given)
        with pytest.raises(um.CacheFull, match="10 of 10"):
            pad.append(given[0])  # though the last block has room


def test_a_view_of_a_token_that_was_cut_off_shows_what_comes_there(pad: um.PagedScratchpad) -> None:
    given = rows(10)
    pad.append_batch(given)
    kept, cut = pad.get_token(2), pad.get_token(9)
    pad.crop(8)
    assert same_bits(cut, given[9])  # nothing was written there yet
    pad.append_batch(given[:2])
    assert same_bits(cut, given[1])
    assert same_bits(kept, given[2])
    del kept, cut


# ---- a call that fails changes nothing ----


def wrong_calls() -> list[tuple[str, type[Exception], Callable[[um.PagedScratchpad], Any]]]:
    good = rows(2)
    return [
        ("width", ValueError, lambda p: p.append(good[0, :3])),
        ("a batch for a row", ValueError, lambda p: p.append(good)),
        ("batch width", ValueError, lambda p: p.append_batch(good[:, :3])),
        ("int", TypeError, lambda p: p.append(good[0].astype("int32"))),
        ("list", TypeError, lambda p: p.append_batch(good.tolist())),
        ("too many", um.CacheFull, lambda p: p.append_batch(rows(8))),
        ("crop above", ValueError, lambda p: p.crop(4)),
        ("crop below", ValueError, lambda p: p.crop(-1)),
        ("crop a half", TypeError, lambda p: p.crop(0.5)),
        ("no token", IndexError, lambda p: p.get_token(3)),
    ]


@pytest.mark.parametrize("case", wrong_calls(), ids=lambda case: case[0])
def test_a_call_that_fails_changes_nothing(
    pad: um.PagedScratchpad, case: tuple[str, type[Exception], Callable[[um.PagedScratchpad], Any]]
) -> None:
    pad.append_batch(rows(3))
    before, table = pad.tape.block.as_array().copy(), pad.block_table
    with pytest.raises(case[1]):
        case[2](pad)
    assert len(pad) == 3
    assert pad.block_table.tolist() == table.tolist()
    assert same_bits(pad.tape.block.as_array(), before)


def test_a_full_pad_names_the_figures(pad: um.PagedScratchpad) -> None:
    pad.append_batch(rows(6))
    with pytest.raises(um.CacheFull, match=r"'paged scratchpad'.*5 tokens.*6 of 10") as caught:
        pad.append_batch(rows(5))
    assert (caught.value.limit, caught.value.used, caught.value.asked) == (10, 6, 5)
    assert pad.n_blocks_in_use == 2
    pad.append_batch(rows(4))  # what fits, fits


# ---- making one ----


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"dim": 0}, ValueError, "dim"),
        ({"dim": 1.5}, TypeError, "integer"),
        ({"block_tokens": 0}, ValueError, "block_tokens"),
        ({"block_tokens": -1}, ValueError, "block_tokens"),
        ({"block_tokens": 2**62}, ValueError, "block_tokens"),
        ({"max_tokens": 2**32, "block_tokens": 1}, ValueError, "too many"),
        ({"max_tokens": 2**31 - 1, "block_tokens": 1, "dim": 2**32}, ValueError, "too large"),
        ({"max_tokens": 2**40, "block_tokens": 2**20, "dim": 2**7}, MemoryError, "does not fit"),
        ({"dtype": "int8"}, ValueError, "got 'int8'"),
        ({"pages": "3k"}, ValueError, "pages"),
        ({"tape": None}, TypeError, "tape"),
    ],
)
def test_a_refused_pad_leaves_nothing(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = ledger()["history"]["mapped_bytes"]
    with pytest.raises(error, match=text):
        um.PagedScratchpad(**{"max_tokens": 8, "dim": 4} | options)
    assert ledger()["history"]["mapped_bytes"] == before


def test_every_system_call_of_the_constructor_may_fail() -> None:
    before, nth = ledger()["history"]["mapped_bytes"], 0
    with os_faults() as faults:
        while True:
            nth += 1
            faults.arm(nth)
            try:
                pad = um.PagedScratchpad(1000, 10, pages="4k")
            except (MemoryError, OSError):
                assert faults.failed
                assert ledger()["history"]["mapped_bytes"] == before
                continue
            finally:
                faults.disarm()
            break
    pad.append(rows(1, 10)[0])
    pad.close()
    assert nth > 1
    assert ledger()["history"]["mapped_bytes"] == before


def test_placement_category_and_name() -> None:
    before = ledger()["history"]
    with um.PagedScratchpad(1000, 8, pages="4k", warm=True, name="mine") as pad:
        now = ledger()["history"]
        assert now["n_mappings"] == before["n_mappings"] + 1
        # 63 blocks of 512 bytes, and for each a link and an entry of the table
        assert now["mapped_bytes"] - before["mapped_bytes"] == 36864
        assert pad.tape.block.verify().resident_bytes == 36864
        assert (pad.capacity, pad.dim, pad.name) == (1000, 8, "mine")
    with pytest.raises(um.ClosedError, match="'mine' is closed"):
        pad.get_token(0)
    assert repr(pad) == "PagedScratchpad(closed)"


def test_repr(pad: um.PagedScratchpad) -> None:
    pad.append_batch(rows(5))
    assert repr(pad) == "PagedScratchpad(len=5, capacity=10, dim=4, blocks=2/3)"


def test_appending_makes_no_system_call_no_allocation_and_moves_nothing() -> None:
    with um.PagedScratchpad(100, 512, warm=True) as pad:
        row, batch = rows(1, 512)[0], rows(40, 512)
        pad.append(row)
        address, before = proc_maps.address_of(pad.get_token(0)), counters()
        for _ in range(20):
            pad.append(row)
            pad.append_batch(batch)
            pad.get_token(40)
            pad.as_array()
            pad.crop(30)
            pad.crop(1)
        assert counters() == before
        assert proc_maps.address_of(pad.get_token(0)) == address


def test_a_pad_that_is_dropped_open_warns_and_gives_the_memory_back() -> None:
    pad = um.PagedScratchpad(8, 4, name="forgotten")
    pad.append(rows(1)[0])
    address = proc_maps.address_of(pad.get_token(0))
    with pytest.warns(ResourceWarning, match="forgotten"):
        del pad
    gc.collect()
    assert not proc_maps.is_mapped(address)


class PagedScratchpadAgainstModel(PadAgainstModel):
    BLOCK = 4

    def new_pad(self, dtype: str) -> um.PagedScratchpad:
        self.paged = um.PagedScratchpad(self.CAPACITY, self.DIM, dtype, block_tokens=self.BLOCK)
        return self.paged

    def view(self, at: int) -> Array:
        return self.paged.get_token(at)[None]

    @invariant()
    def agree(self) -> None:
        super().agree()
        if not hasattr(self, "pad"):
            return
        blocks = -(-len(self.model) // self.BLOCK)
        assert self.paged.n_blocks_in_use == blocks
        assert self.paged.block_table.shape == (blocks,)
        assert len(set(self.paged.block_table.tolist())) == blocks
        for i, row in enumerate(self.model):
            assert same_bits(self.paged.get_token(i), row)
            assert same_bits(self.paged.get_token(i - len(self.model)), row)


TestPagedScratchpadAgainstModel = PagedScratchpadAgainstModel.TestCase
TestPagedScratchpadAgainstModel.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
