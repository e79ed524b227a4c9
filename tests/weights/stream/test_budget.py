"""The division of a budget among pools."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unimem.errors import CapacityError
from unimem.system.limits import Limit
from unimem.system.pressure import wanted_room
from unimem.weights.stream.budget import Pool, choose_budget, move_slots, plan_budget
from unimem.weights.stream.piece_table import PieceKind

KEPT = 10_000
GIB = 1 << 30


def pool(n: int, least: int, slot: int, step: int = 1) -> Pool:
    return Pool(PieceKind((slot,), n, least, least), slot, step)


class Limits:
    def __init__(self, *rooms: int) -> None:
        self._rooms = rooms

    def memory_limits(self) -> tuple[Limit, ...]:
        return tuple(Limit("cgroup /a", 64 * GIB, 64 * GIB - room, "") for room in self._rooms)


POOLS = st.builds(
    lambda n, least, slot, step: pool(n, min(n, least), slot, step),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(1, 5000),
    st.sampled_from([1, 4096, 1 << 16]),
)


@given(st.lists(POOLS, min_size=1, max_size=4), st.data())
def test_a_division_keeps_the_budget_and_wastes_less_than_a_slot(
    pools: list[Pool], data: Any
) -> None:
    least = KEPT + sum(each.least_bytes for each in pools)
    most = KEPT + sum(each.most_bytes for each in pools)
    asked = data.draw(st.integers(least, most + 1000))
    found = plan_budget("m", asked, KEPT, pools)
    assert (found.nbytes, found.kept_bytes, found.least_bytes) == (asked, KEPT, least)
    for each, n in zip(pools, found.slots, strict=True):
        assert each.kind.least_slots <= n <= each.kind.n_pieces
    assert KEPT + found.slot_bytes <= asked
    if asked >= most:
        assert found.slots == tuple(each.kind.n_pieces for each in pools)
    spare = asked - KEPT - found.slot_bytes
    last = max(range(len(pools)), key=lambda i: (pools[i].most_bytes, i))
    is_full = found.slots[last] == pools[last].kind.n_pieces
    assert is_full or spare < pools[last].slot_bytes + pools[last].step_bytes


def test_pools_get_the_shares_of_their_pieces() -> None:
    pools = pool(100, 2, 1000), pool(300, 2, 1000)
    assert plan_budget("m", KEPT + 200_000, KEPT, pools).slots == (50, 150)
    sizes = [plan_budget("m", KEPT + n, KEPT, pools).slot_bytes for n in range(4000, 400_000, 999)]
    assert all(small <= large for small, large in pairwise(sizes))


@pytest.mark.parametrize("asked", [13_999, "13k", None])
def test_below_the_least_raises_and_names_it(asked: Any) -> None:
    with pytest.raises(CapacityError, match=r"14000 bytes .*budget=14000 or more") as caught:
        plan_budget("m.gguf", asked, KEPT, [pool(9, 4, 1000)], Limits(15_000))
    assert re.search("^streaming m.gguf .*(has room for|allows) ", str(caught.value))
    assert caught.value.limit < caught.value.asked == 14_000
    assert plan_budget("m", 14_000, KEPT, [pool(9, 4, 1000)]).slots == (4,)


def test_by_default_an_eighth_of_the_least_room_stays_free() -> None:
    assert choose_budget(Limits(32 * GIB, 16 * GIB)) == 14 * GIB
    small = 512 << 20
    assert choose_budget(Limits(small)) == small - 2 * wanted_room(64 * GIB)
    pools = [pool(1000, 2, GIB >> 4)]
    found = plan_budget("m", None, 0, pools, Limits(16 * GIB))
    assert (found.nbytes, found.slots) == (14 * GIB, (14 * 16,))
    again = plan_budget("m", None, 0, pools, Limits(8 * GIB), taken_bytes=6 * GIB)
    assert again.nbytes == 13 * GIB
    all_fits = plan_budget("m", None, KEPT, [pool(9, 2, 1000)], Limits(16 * GIB))
    assert (all_fits.nbytes, all_fits.slots) == (KEPT + 9000, (9,))


def test_a_share_is_of_the_limit() -> None:
    assert plan_budget("m", "25%", 0, [pool(1000, 2, GIB)], Limits(GIB)).slots == (16,)


@given(st.lists(POOLS, min_size=1, max_size=4), st.data())
def test_slots_move_within_the_budget(pools: list[Pool], data: Any) -> None:
    least = KEPT + sum(each.least_bytes for each in pools)
    found = plan_budget("m", data.draw(st.integers(least, 3 * least)), KEPT, pools)
    for _ in range(4):
        fetched = [data.draw(st.integers(0, 10_000)) for _ in pools]
        found = move_slots(found, fetched)
        assert KEPT + found.slot_bytes <= found.nbytes
        for each, n in zip(pools, found.slots, strict=True):
            assert each.kind.block_slots <= n <= each.kind.n_pieces


@pytest.mark.parametrize(
    ("fetched", "slots"),
    [
        ((100, 900), (44, 56)),
        ((900, 100), (56, 44)),
        ((900, 1100), (50, 50)),  # by chance
        ((10, 200), (50, 50)),  # too few
        ((0, 400), (44, 56)),
    ],
)
def test_slots_move_to_where_they_save_reads(fetched: Any, slots: Any) -> None:
    found = plan_budget("m", KEPT + 100_000, KEPT, (pool(100, 8, 1000), pool(100, 8, 1000)))
    assert found.slots == (50, 50)
    assert move_slots(found, fetched).slots == slots
    for _ in range(50):
        found = move_slots(found, (0, 400))
    assert found.slots == (8, 92)
