"""A paged scratchpad holds the rows that NumPy would hold, in blocks that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from numpy.typing import NDArray

import unimem as um
from support.contracts.pad_model import PadAgainstModel, same_bits
from support.kernel import proc_maps
from support.project.tiers import examples

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]


@pytest.fixture
def pad() -> Iterator[um.PagedScratchpad]:
    with um.PagedScratchpad(10, 4, block_tokens=4) as pad:
        yield pad


def rows(n: int) -> Array:
    return np.random.default_rng(n).normal(size=(n, 4)).astype("float32")


def test_tokens_are_seen_where_they_are(pad: um.PagedScratchpad) -> None:
    given = rows(9)
    pad.append_batch(given)
    for i in range(-9, 9):
        assert same_bits(pad.get_token(i), given[i])
        assert same_bits(pad.get_token(np.int64(i)), given[i])
    pad.get_token(5)[:] = 3
    copy = pad.as_array()
    assert (copy[5] == 3).all()
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
    pad.close()
    with pytest.raises(um.ClosedError, match="'paged scratchpad' is closed"):
        pad.get_token(0)


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
        with pytest.raises(um.CacheFull, match="3 of 10"):
            pad.append_batch(given[:8])
        assert pad.n_blocks_in_use == -(-3 // block_tokens)
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
