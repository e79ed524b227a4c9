"""Forgetting: the last tokens, the first ones, all; what moves, what positions do, what refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import proc_maps
import unimem as um
from kv_model import KV_DTYPES, Talk, first_row, memory
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = proc_maps.PAGE
DIMS = (2, 2, 64)  # layers, heads, head_dim
PLAIN = ["fixed", "tape", "grow"]
KINDS = [*PLAIN, "ring"]


@contextmanager
def cache(kind: str, max_seq_len: int = 40, **options: Any) -> Iterator[um.KVCache]:
    if kind == "tape":
        with um.Tape(1 << 20, pages="4k") as tape:
            tape.take_bytes(1000)
            yield um.KVCache(*DIMS, max_seq_len, tape=tape, **options)
        return
    if kind == "grow":
        options["grow"] = True
    elif kind == "ring":
        options["window"] = max_seq_len
    with um.KVCache(*DIMS, max_seq_len=max_seq_len, pages="4k", **options) as kv:
        yield kv


# ---- trim_to ----


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_go_on(kind: str, dtype: str, batch: int) -> None:
    with cache(kind, dtype=dtype, batch=batch) as kv:
        talk = Talk(kv)
        talk.append(30)
        talk.trim_to(12)
        talk.check()
        assert (kv.seq_len, kv.next_position) == (12, 30)
        talk.append(3)
        talk.crop(13)
        talk.check()
        assert (kv.seq_len, kv.next_position) == (13, 31)
        talk.trim_to(100)
        talk.trim_to(13)
        assert (kv.seq_len, kv.next_position) == (13, 31)
        talk.trim_to(0)
        talk.check()
        assert kv.is_empty
        assert kv.next_position == 31
        talk.append(40)
        talk.check()
        assert (kv.seq_len, kv.next_position) == (40, 71)
        kv.clear()
        assert kv.next_position == 0


@pytest.mark.parametrize("kind", KINDS)
def test_trimming_moves_nothing(kind: str) -> None:
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(40)
        last = [proc_maps.address_of(part[:, :, -10:]) for part in kv.layer(1)]
        before = counters()["os_calls"]
        talk.trim_to(38)  # less than a page
        assert counters()["os_calls"] == before
        talk.trim_to(10)
        talk.check()
        assert [proc_maps.address_of(part) for part in kv.layer(1)] == last
        if kind != "ring":
            assert kv.row_of(30) == first_row(kv, 0) == 30


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("kind", PLAIN)
def test_the_first_tokens_are_kept(kind: str, dtype: str) -> None:
    with cache(kind, dtype=dtype) as kv:
        talk = Talk(kv)
        talk.append(30)
        sink = [part[:, :, :4].copy() for part in kv.layer(0)]
        talk.trim_to(10, keep_first=4)
        talk.check()
        assert (kv.seq_len, kv.next_position) == (14, 30)
        for _ in range(8):
            talk.append(9)
            talk.trim_to(10, keep_first=4)
            talk.check()
            for part, first in zip(kv.layer(0), sink, strict=True):
                assert part[:, :, :4].tobytes() == first.tobytes()
                del part
        assert (kv.seq_len, kv.next_position) == (14, 102)
        talk.trim_to(10, keep_first=4)
        talk.trim_to(9, keep_first=100)
        assert kv.seq_len == 14
        # The kept ones may overlap with where they go.
        talk.trim_to(1, keep_first=12)
        talk.check()
        talk.trim_to(0, keep_first=2)
        talk.check()
        assert kv.seq_len == 2


@pytest.mark.parametrize("kind", PLAIN)
def test_kept_tokens_are_not_written_over_a_view(kind: str) -> None:
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(30)
        view = kv.layer(1)[1][:, :, 18:20]
        contents = view.tobytes()
        with pytest.raises(BufferError, match="views"):
            kv.trim_to(10, keep_first=4)
        talk.check()
        talk.trim_to(25)  # changes lengths only
        talk.check()
        assert view.tobytes() == contents
        del view
        gc.collect()
        talk.trim_to(10, keep_first=4)
        talk.check()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_whole_is_not_trimmed(kind: str) -> None:
    uses: list[Callable[[um.KVCache], Any]] = [
        lambda kv: kv.trim_to(3),
        lambda kv: kv.trim_to(100),
        lambda kv: kv.crop(2),
        lambda kv: kv.enforce_memory_limit(0),
        lambda kv: kv.copy(),
        lambda kv: kv.save("/nowhere/at/all"),
    ]
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(6)
        talk.append(1, layers=[1])
        for use in uses:
            with pytest.raises(RuntimeError, match="layers differ"):
                use(kv)
            talk.check()
        assert kv.seq_len == 6
        kv.rollback()
        talk.model.rollback()
        talk.check()
        kv.reserve(2)
        for use in uses:
            with pytest.raises(RuntimeError, match="reserved"):
                use(kv)
        kv.rollback()
        talk.trim_to(3)
        talk.check()


# ---- moving ----


@pytest.mark.parametrize("kind", PLAIN)
def test_tokens_move_to_the_first_rows_when_the_last_is_used(kind: str) -> None:
    with cache(kind) as kv:
        talk, n_moves, row = Talk(kv), 0, 0
        talk.append(40)
        while kv.next_position < 400:
            talk.trim_to(25)
            talk.append(7)
            talk.check()
            n_moves += first_row(kv, 0) < row
            row = first_row(kv, 0)
            for position in range(kv.next_position - kv.seq_len, kv.next_position):
                assert kv.row_of(position) - row == position - (kv.next_position - kv.seq_len)
        assert n_moves > 2


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("use", ["append", "append_all", "reserve"])
def test_tokens_do_not_move_over_a_view(kind: str, use: str) -> None:
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(40)
        view = kv.layer(1)[0][:, :, :3]
        contents = view.tobytes()
        while kv.n_rows - kv.row_of(kv.next_position) > 0:  # up to the last row
            talk.trim_to(20)
            talk.append(min(20, kv.n_rows - kv.row_of(kv.next_position)))
        talk.trim_to(20)
        token = np.zeros((2, 2, 64), "float16")
        calls: dict[str, Callable[[], Any]] = {
            "append": lambda: kv.append(0, token, token),
            "append_all": lambda: kv.append_all(token, token),
            "reserve": lambda: kv.reserve(1),
        }
        with pytest.raises(BufferError, match="views"):
            calls[use]()
        talk.check()
        assert view.tobytes() == contents
        del view
        gc.collect()
        calls[use]()
        kv.rollback()
        kv.crop(20)
        talk.append(1)
        talk.check()
        assert first_row(kv, 0) == 0


@pytest.mark.parametrize("kind", ["fixed", "tape"])
def test_a_layer_that_lags_behind_finds_room(kind: str) -> None:
    """By moving, though the rows behind the longest layer would not be enough."""
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(30)
        talk.trim_to(25)
        talk.append(10, layers=[0])  # up to the last row
        talk.append(12, layers=[1])
        talk.check()
        talk.append(3, layers=[1])
        talk.append(5, layers=[0])
        talk.check()
        assert kv.seq_len == 40
        for layer in range(2):
            with pytest.raises(um.CacheFull) as caught:
                kv.append(layer, *[np.zeros((1, 2, 64), "f4")] * 2)
            assert (caught.value.limit, caught.value.used, caught.value.asked) == (40, 40, 1)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_position_that_was_dropped_has_no_row(kind: str) -> None:
    with cache(kind, 10) as kv:
        talk = Talk(kv)
        for n in (10, 8, 8):
            talk.append(n)
            talk.trim_to(2)
        assert kv.row_of(25) - kv.row_of(24) == 1
        for position in (0, 23, -1, 2**64):
            with pytest.raises(ValueError, match="position"):
                kv.row_of(position)


# ---- views ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forget", ["trim", "crop", "clear"])
def test_with_a_view_lengths_change_and_nothing_else(kind: str, forget: str) -> None:
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(40)
        views = kv.layer(1)
        contents, resident = [view.tobytes() for view in views], kv.resident_bytes
        if forget == "trim":
            talk.trim_to(5)
        elif forget == "crop":
            talk.crop(5)
        else:
            kv.clear()
            talk.model.clear()
        talk.check()
        assert [view.tobytes() for view in views] == contents
        assert kv.resident_bytes == resident
        del views
        gc.collect()
        talk.check()
        assert kv.resident_bytes <= resident
        talk.append(30)
        talk.check()


# ---- enforce_memory_limit ----


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_afterwards_it_is_below_the_limit(kind: str, batch: int) -> None:
    with cache(kind, batch=batch) as kv:
        talk = Talk(kv)
        talk.append(40)
        token = kv.memory_usage_bytes // 40
        assert token == 2 * 2 * batch * kv.row_bytes
        assert kv.enforce_memory_limit(40 * token) is False
        assert kv.seq_len == 40
        for limit, n in ((30 * token + token - 1, 30), (7 * token, 7), (token - 1, 0)):
            assert kv.enforce_memory_limit(limit) is True
            talk.model.trim_to(n)
            talk.check()
            assert kv.memory_usage_bytes == n * token <= limit
            assert kv.next_position == 40
            assert kv.enforce_memory_limit(limit) is False
            # What is left begins and ends inside of a page of each lane.
            assert kv.resident_bytes <= 2 * 2 * batch * (n * kv.row_bytes + 2 * PAGE)
        talk.append(40)
        talk.check()
        assert kv.enforce_memory_limit(0) is True
        assert kv.is_empty
        assert kv.enforce_memory_limit(0) is False


@pytest.mark.parametrize("kind", KINDS)
def test_views_over_what_would_go_refuse(kind: str) -> None:
    with cache(kind) as kv:
        talk = Talk(kv)
        talk.append(40)
        view = kv.layer(0)[0]
        with pytest.raises(BufferError, match="views"):
            kv.enforce_memory_limit(kv.memory_usage_bytes // 2)
        talk.check()
        assert kv.enforce_memory_limit(kv.memory_usage_bytes) is False
        del view
        gc.collect()
        assert kv.enforce_memory_limit(kv.memory_usage_bytes // 2) is True
        assert kv.seq_len == 20
        # What stays may be looked at.
        view = kv.layer(0)[0]
        talk.model.trim_to(20)
        talk.check()
        del view


# ---- budget ----


@pytest.mark.parametrize("kind", ["fixed", "tape"])
def test_fixed_rows_are_cut_to_the_budget(kind: str) -> None:
    needed = um.KVCache.storage_bytes(*DIMS, 40)
    with cache(kind, budget_bytes=needed // 2 + 100) as kv:
        assert (kv.n_rows, kv.max_seq_len) == (20, 40)
        assert kv.capacity_bytes <= needed // 2 + 100 == kv.budget_bytes
        talk = Talk(kv)
        talk.append(18)
        with pytest.raises(um.CacheFull, match="budget_bytes") as caught:
            kv.append(0, *[np.zeros((3, 2, 64), "f4")] * 2)
        assert (caught.value.limit, caught.value.used, caught.value.asked) == (20, 18, 3)
        with pytest.raises(um.CacheFull, match="budget_bytes"):
            kv.reserve(3)
        talk.check()
        talk.append(2)
        with pytest.raises(um.CacheFull, match="budget_bytes"):
            kv.append_all(*[np.zeros((2, 2, 64), "f4")] * 2)
        talk.trim_to(4)
        talk.append(16)
        talk.check()
    with cache(kind, budget_bytes=10 * needed) as kv:
        assert (kv.n_rows, kv.capacity_bytes) == (40, needed)


@pytest.mark.parametrize("kind", ["fixed", "ring"])
def test_a_budget_below_one_token(kind: str) -> None:
    with pytest.raises(um.CacheFull, match="budget_bytes"), cache(kind, budget_bytes=100):
        pass


# ---- copies ----


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_independent(kind: str, dtype: str, batch: int) -> None:
    with cache(kind, dtype=dtype, batch=batch, name="a") as kv:
        talk = Talk(kv)
        talk.append(35)
        talk.trim_to(30)
        talk.append(9)
        with kv.copy() as copy:
            talk.kv = copy
            talk.check()
            assert (copy.window, copy.grow, copy.dtype) == (kv.window, kv.grow, kv.dtype)
            assert (copy.n_rows, copy.max_seq_len) == (kv.n_rows, kv.max_seq_len)
            assert (copy.tape, copy.name) == (None, "a")
            before = [part.tobytes() for part in copy.layer(1)]
            for part in kv.layer(1):
                memory(proc_maps.address_of(part), 100)[:] = 255
                del part
            kv.clear()
            assert [part.tobytes() for part in copy.layer(1)] == before
            talk.trim_to(20)
            talk.append(8)
            talk.check()
            talk.crop(12)
            talk.check()
        assert kv.is_empty


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_copy(kind: str) -> None:
    with cache(kind) as kv, kv.copy() as copy:
        assert copy.is_empty
        talk = Talk(copy)
        talk.append(5)
        talk.check()
        assert kv.is_empty
