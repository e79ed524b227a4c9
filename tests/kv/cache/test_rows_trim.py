"""Forgetting: the last tokens, the first ones, all; what moves, what positions do, what refuses.

The stateful tests do all this in any order, with every dtype and several streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_caches import KINDS, ONE_MORE, PLAIN, cache
from support.contracts.kv_model import Talk, first_row
from support.kernel import proc_maps
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = proc_maps.PAGE
LANES = 4
DIMS = (2, 2, 64, 40)  # layers, heads, head_dim, tokens
TOKEN = np.zeros((2, 2, 2, 64), "f4")


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest) -> Iterator[um.KVCache]:
    """A cache of any kind."""
    with cache(request.param, *DIMS) as kv:
        yield kv


@pytest.fixture(params=PLAIN)
def plain(request: pytest.FixtureRequest) -> Iterator[um.KVCache]:
    """A cache of any kind but a ring."""
    with cache(request.param, *DIMS) as kv:
        yield kv


# ---- trim_to ----


@pytest.mark.usefixtures("no_collection")
def test_trimming_moves_nothing(kv: um.KVCache) -> None:
    talk = Talk(kv)
    talk.append(40)
    last = [proc_maps.address_of(part[:, :, -10:]) for part in kv.layer(1)]
    before = counters()["os_calls"]
    talk.trim_to(38)  # less than a page
    assert counters()["os_calls"] == before
    talk.trim_to(10)
    talk.check()
    assert [proc_maps.address_of(part) for part in kv.layer(1)] == last
    if kv.window is None:
        assert kv.row_of(30) == first_row(kv, 0) == 30


def test_what_is_not_whole_is_not_trimmed(kv: um.KVCache) -> None:
    uses: list[Callable[[um.KVCache], Any]] = [
        lambda kv: kv.trim_to(3),
        lambda kv: kv.trim_to(100),
        lambda kv: kv.crop(2),
        lambda kv: kv.enforce_memory_limit(0),
        lambda kv: kv.copy(),
        lambda kv: kv.reserve(1),
        lambda kv: kv.append_all(*TOKEN),
        lambda kv: kv.save("/nowhere/at/all"),
    ]

    def check(match: str) -> None:
        for use in uses:
            with pytest.raises(RuntimeError, match=match):
                use(kv)

    talk = Talk(kv)
    talk.append(6)
    talk.append(1, layers=[1])
    check("layers differ.*roll back")
    talk.check()
    assert kv.seq_len == 6
    kv.rollback()
    talk.model.rollback()
    kv.reserve(2)
    check("reserved")
    with pytest.raises(ValueError, match="expected n of at most"):
        kv.commit(3)
    kv.rollback()
    talk.trim_to(3)
    talk.check()


# ---- moving ----


def test_tokens_move_to_the_first_rows_when_the_last_is_used(plain: um.KVCache) -> None:
    talk, n_moves, row = Talk(plain), 0, 0
    talk.append(40)
    while plain.next_position < 400:
        talk.trim_to(25)
        talk.append(7)
        talk.check()
        n_moves += first_row(plain, 0) < row
        row, first = first_row(plain, 0), plain.next_position - plain.seq_len
        for i in range(plain.seq_len):
            assert plain.row_of(first + i) == row + i
    assert n_moves > 2
    for position in (0, first - 1, -1, 2**64):
        with pytest.raises(ValueError, match="position"):
            plain.row_of(position)


@pytest.mark.parametrize("use", ONE_MORE)
def test_tokens_do_not_move_over_a_view(plain: um.KVCache, use: str) -> None:
    talk = Talk(plain)
    talk.append(40)
    view = plain.layer(1)[0][:, :, :3]
    contents = view.tobytes()
    while left := plain.n_rows - plain.row_of(plain.next_position):  # up to the last row
        talk.trim_to(20)
        talk.append(min(20, left))
    talk.trim_to(20)
    with pytest.raises(BufferError, match="views"):
        ONE_MORE[use](plain)
    talk.check()
    assert view.tobytes() == contents
    del view
    ONE_MORE[use](plain)
    plain.rollback()
    plain.crop(20)
    talk.append(1)
    talk.check()
    assert first_row(plain, 0) == 0


# ---- views ----


@pytest.mark.parametrize("forget", ["trim_to", "crop", "clear"])
def test_with_a_view_lengths_change_and_nothing_else(kv: um.KVCache, forget: str) -> None:
    talk = Talk(kv)
    talk.append(40)
    views = kv.layer(1)
    contents, resident = [view.tobytes() for view in views], kv.resident_bytes
    if forget == "clear":
        kv.clear()
        talk.model.clear()
    else:
        getattr(talk, forget)(5)
    talk.check()
    assert [view.tobytes() for view in views] == contents
    assert kv.resident_bytes == resident
    del views
    talk.check()
    assert kv.resident_bytes <= resident
    talk.append(30)
    talk.check()


# ---- limits ----


@pytest.mark.parametrize("kind", KINDS)
def test_afterwards_it_is_below_the_limit(kind: str) -> None:
    with cache(kind, *DIMS, batch=2) as kv:
        talk = Talk(kv)
        talk.append(40)
        token = LANES * 2 * kv.row_bytes
        assert kv.memory_usage_bytes == 40 * token
        assert kv.enforce_memory_limit(40 * token) is False
        for limit, n in ((30 * token + token - 1, 30), (7 * token, 7), (token - 1, 0)):
            assert kv.enforce_memory_limit(limit) is True
            talk.model.trim_to(n)
            talk.check()
            assert kv.memory_usage_bytes == n * token <= limit
            assert kv.next_position == 40
            assert kv.enforce_memory_limit(limit) is False
            # What is left begins and ends inside of a page of each lane.
            assert kv.resident_bytes <= LANES * 2 * (n * kv.row_bytes + 2 * PAGE)
        talk.append(40)
        talk.check()


@pytest.mark.parametrize("kind", ["fixed", "tape"])
def test_fixed_rows_are_cut_to_the_budget(kind: str) -> None:
    needed = um.KVCache.storage_bytes(*DIMS)
    with cache(kind, *DIMS, budget_bytes=needed // 2 + 100) as kv:
        assert (kv.n_rows, kv.max_seq_len) == (20, 40)
        assert kv.capacity_bytes <= needed // 2 + 100 == kv.budget_bytes
        talk = Talk(kv)
        talk.append(18)
        with pytest.raises(um.CacheFull, match="budget_bytes") as caught:
            kv.append(0, *[np.zeros((3, 2, 64), "f4")] * 2)
        assert (caught.value.limit, caught.value.used, caught.value.asked) == (20, 18, 3)
        talk.append(2)
        for use in ONE_MORE.values():
            with pytest.raises(um.CacheFull, match="budget_bytes"):
                use(kv)
        talk.trim_to(4)
        talk.append(16)
        talk.check()
    with cache(kind, *DIMS, budget_bytes=10 * needed) as kv:
        assert (kv.n_rows, kv.capacity_bytes) == (40, needed)


# ---- copies ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_the_options_of_the_cache(kind: str) -> None:
    with cache(kind, *DIMS, dtype="q8_0", batch=2, name="a") as kv:
        Talk(kv).append(35)
        with kv.copy() as copy:
            for name in ("window", "grow", "dtype", "n_rows", "max_seq_len", "name"):
                assert getattr(copy, name) == getattr(kv, name)
            assert copy.tape is None
            kv.clear()
            assert copy.seq_len == 35
