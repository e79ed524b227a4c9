"""A ring keeps the last tokens: one contiguous window for a caller, fixed rows for an engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import (
    KV_DTYPES,
    Array,
    Talk,
    memory,
    rows_of_pages,
)
from support.kernel import proc_maps
from unimem._core.status import ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = proc_maps.PAGE
DIMS = (2, 2, 64)  # layers, heads, head_dim


def ring(window: int, **options: Any) -> um.KVCache:
    return um.KVCache(*DIMS, 1 << 20, window=window, **{"pages": "4k"} | options)


def lanes_of(kv: um.KVCache) -> list[Array]:
    """K and V of each layer: the rows."""
    at = [kv.address(layer, part) for layer in range(2) for part in ("k", "v")]
    return [memory(address, kv.n_rows * kv.row_bytes) for address in at]


def test_a_ring_that_no_process_could_map_is_refused() -> None:
    said = r"KVCache: a ring of 2147483647 rows .* below 2\*\*46 bytes, .*: take a smaller window"
    with pytest.raises(ValueError, match=said):
        um.KVCache(32, 32, 128, 2**31 - 1, window=2**31 - 1)


# ---- the window ----


def test_a_window_may_be_a_small_integer_of_numpy_s(tmp_path: Path) -> None:
    window: Any = np.uint8(200)
    with ring(window) as kv:
        kv.save(tmp_path / "ring")
        assert type(kv.window) is int


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_last_tokens_are_contiguous_after_many_wraps(dtype: str, batch: int) -> None:
    with ring(5, dtype=dtype, batch=batch) as kv:
        n_rows, row_bytes = kv.n_rows, kv.row_bytes
        assert n_rows == rows_of_pages(row_bytes, 5)
        talk = Talk(kv)
        # More than all rows at once, too.
        for n in (n_rows // 3, 1, 7, n_rows // 2 + 1, n_rows, n_rows + 1, 3 * n_rows + 5, 2):
            talk.append(n)
            talk.check()
            end = kv.next_position
            first = end - min(end, 5)
            for part, view in zip(("k", "v"), kv.layer(1), strict=True):
                at = kv.address(1, part)  # type: ignore[arg-type]
                assert proc_maps.address_of(view) == at + first % n_rows * row_bytes
                assert view.strides[1:3] == (row_bytes // kv.n_kv_heads, row_bytes)
                del view
            oldest = max(0, end - n_rows)
            for position in (oldest, *range(first, end), end, end + n_rows):
                assert kv.row_of(position) == position % n_rows
            if oldest:
                with pytest.raises(ValueError, match=f"position: expected one from {oldest} on"):
                    kv.row_of(oldest - 1)
        assert kv.seq_len == 5


def test_rows_are_whole_pages() -> None:
    for dtype, window, spare in itertools.product(KV_DTYPES, (1, 16, 17, 100), (0, 1, 40)):
        with ring(window, spare_rows=spare, dtype=dtype) as kv:
            assert kv.n_rows == rows_of_pages(kv.row_bytes, window + spare)
            assert kv.capacity_bytes == 2 * 2 * kv.n_rows * kv.row_bytes
            assert (kv.window, kv.max_seq_len) == (window, 1 << 20)
    with ring(1 << 20, dtype="f32") as wide:  # costs address space only
        assert (wide.n_rows, wide.resident_bytes) == (1 << 20, 0)
        assert wide.capacity_bytes == 4 * (1 << 20) * 512
        Talk(wide).append(3)
        assert wide.resident_bytes == 4 * PAGE


def test_memory_counts_once_though_it_is_mapped_twice() -> None:
    before = ledger()["history"]["mapped_bytes"]
    with ring(16, dtype="f16") as kv:
        assert kv.block is not None
        assert kv.n_rows == 16
        assert ledger()["history"]["mapped_bytes"] - before == kv.capacity_bytes == 4 * PAGE
        Talk(kv).append(40)
        for lane in lanes_of(kv):
            second = memory(proc_maps.address_of(lane) + PAGE, PAGE)
            assert second.any()
            lane[:] = np.arange(PAGE) % 251
            assert (second == lane).all()
            second[5] = 77
            assert lane[5] == 77
        assert kv.resident_bytes == kv.capacity_bytes
        assert kv.block.verify().pss_bytes == kv.capacity_bytes
        assert kv.memory_usage_bytes == 2 * 2 * 16 * kv.row_bytes


# ---- going back ----


@pytest.mark.parametrize("spare", [0, 3, 9])
def test_so_far_back_for_sure_and_the_error_names_the_rest(spare: int) -> None:
    with ring(16, spare_rows=spare) as kv:
        talk = Talk(kv)
        talk.append(5 * kv.n_rows + 3)
        extra = kv.n_rows - 16
        assert extra >= spare
        least = max(0, 16 - extra)
        for n in range(least):
            with pytest.raises(ValueError, match=rf"overwritten.*\b{least}\b"):
                kv.crop(n)
        talk.check()
        talk.crop(least)
        talk.check()
        assert kv.seq_len == 16
        assert kv.next_position == 5 * kv.n_rows + 3 - (16 - least)


def test_trimming_moves_no_byte_and_is_not_undone() -> None:
    with ring(8, spare_rows=8) as kv:
        talk = Talk(kv)
        talk.append(3 * kv.n_rows)
        before = [lane.copy() for lane in lanes_of(kv)]
        position = kv.next_position
        for n in (2, 100):
            with pytest.raises(ValueError, match="keep_first"):
                kv.trim_to(n, keep_first=1)
        talk.trim_to(3)
        talk.check()
        assert kv.next_position == position
        assert np.array_equal(lanes_of(kv), before)
        talk.crop(1)
        talk.check()
        assert kv.seq_len == 1  # what was trimmed is not shown again
        talk.append(9)
        talk.check()
        assert kv.seq_len == 8


# ---- engines ----


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_the_spare_rows_and_one_more_can_be_reserved(spare: int) -> None:
    """What the new tokens attend to (window - 1 before each) stays."""
    with ring(16 - spare, spare_rows=spare) as kv:
        assert kv.n_rows == 16
        talk = Talk(kv)
        talk.append(100)
        with pytest.raises(um.CacheFull) as caught:
            kv.reserve(17)
        assert (caught.value.limit, caught.value.asked) == (16, 17)
        assert kv.reserve(spare + 1) == 100 % 16
        talk.model.reserve(spare + 1)
        talk.check()
        assert kv.seq_len == kv.window - 1  # type: ignore[operator]
        kv.rollback()
        talk.model.rollback()
        talk.check()


# ---- views ----


def test_a_view_of_the_mirror_is_over_the_rows_themselves() -> None:
    with ring(8, dtype="f32") as kv:
        assert kv.n_rows == 8
        talk = Talk(kv)
        talk.append(18)
        talk.trim_to(4)
        view = kv.layer(0)[0]  # rows 6 to 9, which are 6, 7, 0 and 1
        contents = view[:, :, 2:].tobytes()
        talk.append(6)  # the window begins at row 0
        with pytest.raises(BufferError, match="views"):
            kv.enforce_memory_limit(2 * 4 * kv.row_bytes)
        talk.check()
        talk.trim_to(2)
        talk.check()
        assert view[:, :, 2:].tobytes() == contents
        del view
        assert kv.enforce_memory_limit(4 * kv.row_bytes)
        talk.model.trim_to(1)
        talk.check()


# ---- making one ----


def test_a_budget_below_the_ring_is_refused_before_anything_is_taken() -> None:
    before = ledger()["history"]["mapped_bytes"]
    with pytest.raises(um.CacheFull, match="budget") as caught:
        ring(16, budget_bytes=4 * PAGE - 1)
    assert caught.value.limit == 4 * PAGE - 1
    assert ledger()["history"]["mapped_bytes"] == before
    with ring(16, budget_bytes=4 * PAGE) as kv:
        assert kv.capacity_bytes == kv.budget_bytes == 4 * PAGE
