"""A cache that grows takes memory in steps as tokens come, and gives back what they do not need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_caches import ONE_MORE, each_call_fails, meanwhile
from support.contracts.kv_model import KV_DTYPES, Talk
from support.kernel import proc_maps
from support.kernel.cgroups import SmallCgroup
from support.kernel.os_faults import os_faults
from unimem._core.status import counters, ledger
from unimem.base.threads import wait_until
from unimem.system import limits

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PAGE = proc_maps.PAGE
HUGE = proc_maps.huge_page_bytes()
MIB = 1 << 20
DIMS = (2, 4, 64)  # layers, heads, head_dim: 512 bytes a row of f16, 8 rows a page
LANES = 4


def growing(max_seq_len: int = 1 << 20, **options: Any) -> um.KVCache:
    return um.KVCache(*DIMS, max_seq_len=max_seq_len, grow=True, **{"pages": "4k"} | options)


@pytest.fixture
def kv() -> Iterator[um.KVCache]:
    with growing() as kv:
        yield kv


def committed(kv: um.KVCache) -> int:
    """What is committed, as the kernel says: neither reserved nor given back."""
    assert kv.block is not None
    parts = proc_maps.mappings(kv.block.address, kv.block.reserved_bytes)
    size = sum(part.fields["Size"] for part in parts if part.access[0] == "r")
    assert size == kv.capacity_bytes == kv.block.committed_bytes
    return size


# ---- growing ----


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_memory_comes_with_the_tokens_and_nothing_moves(dtype: str) -> None:
    before = ledger()["history"]["mapped_bytes"]
    with growing(dtype=dtype, batch=2) as kv:

        def addresses() -> list[int]:
            return [kv.address(layer, part) for layer in range(2) for part in ("k", "v")]

        there = addresses()
        assert (committed(kv), kv.n_growths, kv.resident_bytes) == (0, 0, 0)
        assert ledger()["history"]["mapped_bytes"] == before
        assert kv.grow
        assert kv.tape is None
        talk = Talk(kv)
        for n in (1, 1, 30, 200, 1000):
            talk.append(n)
            talk.check()
            used = kv.memory_usage_bytes
            # A page more for where a lane ends, and at most a quarter in advance.
            assert used <= committed(kv) <= used * 5 // 4 + 2 * LANES * 2 * PAGE
            assert kv.resident_bytes == kv.capacity_bytes  # prefaulted
            assert ledger()["history"]["mapped_bytes"] == before + kv.capacity_bytes
        assert addresses() == there


@pytest.mark.usefixtures("no_collection")
def test_steps_are_counted_and_nothing_else_makes_a_system_call(kv: um.KVCache) -> None:
    token = np.zeros((2, 4, 64), "float16")
    for n in range(300):
        before, growths = counters()["os_calls"], kv.n_growths
        room = kv.capacity_bytes - kv.memory_usage_bytes
        kv.append_all(token, token)
        grew = kv.n_growths - growths
        assert (counters()["os_calls"] > before) == (grew == 1)
        assert grew == (room == 0)
        if n == 0:
            assert committed(kv) == LANES * PAGE  # of all lanes, in one step
    # Each by a quarter of what there is: 300 rows are 38 pages a lane.
    assert 5 < kv.n_growths < 25
    growths = kv.n_growths
    kv.reserve(3)
    kv.commit(1)
    kv.layer(0)
    kv.crop(300)
    assert kv.n_growths == growths


@pytest.mark.skipif(HUGE == 0, reason="this kernel gives no transparent huge pages")
@pytest.mark.parametrize("pages", ["auto", "thp"])
def test_huge_steps(pages: Any) -> None:
    with growing(pages=pages) as kv:
        talk = Talk(kv)
        talk.append(10)
        assert kv.block is not None
        assert kv.block.step_bytes == HUGE
        assert all(kv.address(layer, "v") % HUGE == 0 for layer in range(2))
        assert committed(kv) == LANES * HUGE
        talk.append(HUGE // kv.row_bytes)
        talk.check()
        assert kv.n_growths == 2
        assert committed(kv) == LANES * 2 * HUGE
        talk.trim_to(4)
        talk.check()
        assert committed(kv) <= LANES * 2 * HUGE
    with growing(100, pages=pages) as short:
        Talk(short).append(100)
        assert pages == "thp" or committed(short) < 2 * short.memory_usage_bytes


# ---- giving back ----


@pytest.mark.parametrize("n", [80, 0])
@pytest.mark.parametrize("forget", ["trim_to", "crop", "clear", "limit"])
def test_memory_goes_with_the_tokens(kv: um.KVCache, forget: str, n: int) -> None:
    talk = Talk(kv)
    talk.append(8 * 100)
    assert committed(kv) == LANES * 100 * PAGE
    if forget == "limit":
        assert kv.enforce_memory_limit(n * LANES * kv.row_bytes)
        talk.model.trim_to(n)
    elif forget == "clear":
        n = 0
        kv.clear()
        talk.model.clear()
    else:
        getattr(talk, forget)(n)
    talk.check()
    # What the tokens lie in, a quarter, and a spare step; of no tokens, a step.
    pages = -(-n // 8) + 1
    assert committed(kv) <= LANES * (pages + pages // 4 + (n > 0)) * PAGE
    assert kv.resident_bytes == kv.capacity_bytes
    talk.append(400)
    talk.check()


@pytest.mark.usefixtures("no_collection")
def test_going_back_and_forth_takes_no_step(kv: um.KVCache) -> None:
    talk = Talk(kv)
    talk.append(8 * 50 + 1)
    n_growths, before = kv.n_growths, counters()["os_calls"]
    for _ in range(20):
        talk.crop(8 * 50)
        talk.append(1)
    assert (kv.n_growths, counters()["os_calls"]) == (n_growths, before)


def test_a_window_that_slides_stays_small() -> None:
    """Trimmed and appended to without end, in a fixed range of addresses."""
    with growing(64) as kv:
        talk = Talk(kv)
        for _ in range(30):
            talk.append(24)
            talk.trim_to(40)
            talk.check()
            assert committed(kv) <= LANES * 10 * PAGE
        assert kv.next_position == 30 * 24


def test_views_go_in_any_order(kv: um.KVCache) -> None:
    talk = Talk(kv)
    talk.append(80)
    kept = kv.layer(0)  # of what stays: in nobody's way
    talk.append(720)
    views = [kv.layer(layer)[part][:, :, 100:] for layer in range(2) for part in range(2)]
    full = committed(kv)
    talk.crop(80)
    while views:
        assert committed(kv) == full
        views.pop(len(views) // 2)
    assert committed(kv) <= LANES * 14 * PAGE
    assert kept[0].tobytes() == kv.layer(0)[0].tobytes()
    del kept
    talk.append(9)
    talk.check()


@pytest.mark.parametrize("grow", [True, False])
def test_readers_hold_views_while_one_thread_appends_and_trims(grow: bool) -> None:
    n_tokens, n_at_once = 16_000, 80  # this many at once are copied without the GIL
    with um.KVCache(1, 2, 64, n_tokens, dtype="f32", grow=grow, pages="4k") as kv:
        held = threading.local()

        def read() -> None:
            held.views = [*getattr(held, "views", ())[-3:], kv.layer(0)]
            for part in held.views[0]:
                seen = part[0, :, :, -1]
                assert not seen.size or (seen == seen[0, 0] + np.arange(seen.shape[1])).all()

        with meanwhile(read):
            for first in range(0, n_tokens, n_at_once):
                rows = np.arange(first, first + n_at_once, dtype="float32")[:, None, None]
                rows = np.ascontiguousarray(np.broadcast_to(rows, (n_at_once, 2, 64)))
                kv.append(0, rows, rows)
                if first % (5 * n_at_once) == 0:
                    kv.trim_to(first % 300)

        def is_given_back() -> bool:
            kv.trim_to(10)
            # K and V: ten rows on up to three pages, and up to two to spare behind them.
            return not grow or committed(kv) <= 2 * (3 + 2) * PAGE

        # What a thread has held may outlive it for a moment; each call tries again.
        wait_until(is_given_back)
        assert kv.layer(0)[1][0, 1, -1, 5] == n_tokens - 1


# ---- refusals ----


@pytest.mark.parametrize("budget", [LANES * PAGE, LANES * 7 * PAGE - 1, LANES * 10 * PAGE + 17])
def test_the_budget_is_never_passed(budget: int) -> None:
    with growing(budget_bytes=budget) as kv:
        talk = Talk(kv)
        most = budget // LANES // PAGE * 8
        for _ in range(2):
            while kv.seq_len < most:
                talk.append(1)
                assert kv.capacity_bytes <= budget
            assert committed(kv) <= budget
            with pytest.raises(um.CacheFull, match="budget_bytes") as caught:
                ONE_MORE["append"](kv)
            assert (caught.value.limit, caught.value.used) == (budget, kv.capacity_bytes)
            assert caught.value.asked == LANES * PAGE
            talk.check()
            talk.crop(3)
        talk.append(2)
        talk.check()


def test_a_budget_counts_what_the_tokens_need_and_no_advance() -> None:
    with growing(budget_bytes=LANES * 10 * PAGE) as kv:
        talk = Talk(kv)
        talk.append(70)
        talk.append(10)
        assert committed(kv) == kv.budget_bytes == kv.memory_usage_bytes
        talk.trim_to(40)
        talk.append(40)
        talk.check()
        assert committed(kv) <= LANES * 10 * PAGE


@pytest.mark.parametrize("use", ONE_MORE)
def test_every_step_is_asked_for(use: str) -> None:
    with growing(name="talk") as kv:
        talk = Talk(kv)
        talk.append(8)
        refusal = um.CapacityError("does not fit", 10, 5, 1)
        with mock.patch.object(limits, "require", side_effect=refusal) as require:
            with pytest.raises(um.CapacityError, match="does not fit"):
                ONE_MORE[use](kv)
            nbytes, what = require.call_args.args
            assert nbytes % (LANES * PAGE) == 0
            assert "talk" in what
            talk.check()
            assert committed(kv) == LANES * PAGE
        ONE_MORE[use](kv)
        kv.rollback()


def test_a_step_that_the_system_refuses_changes_nothing(kv: um.KVCache) -> None:
    def state() -> tuple[int, int, int]:
        return committed(kv), kv.n_growths, kv.resident_bytes

    talk, failed = Talk(kv), []
    talk.append(20)
    k, before = np.zeros((100, 4, 64), "f4"), state()
    for faults, outcome in each_call_fails(lambda: kv.append(1, k, k)):
        if outcome is not None:
            failed.append(faults.failed)
            assert state() == before
            talk.check()
    assert {*failed} >= {"mmap", "madvise"}
    assert len(failed) >= LANES
    kv.rollback()
    talk.check()


def test_memory_that_cannot_be_given_back_is_given_back_later(kv: um.KVCache) -> None:
    talk = Talk(kv)
    talk.append(800)
    with os_faults() as faults:
        faults.arm(1)
        talk.trim_to(80)
        assert faults.failed
    talk.check()
    talk.trim_to(8)
    talk.append(800)
    kv.clear()
    assert committed(kv) <= LANES * PAGE


def test_in_a_cgroup(cgroup_512mb: SmallCgroup) -> None:
    """The step that would pass the limit is refused by name, and the process lives."""
    said = cgroup_512mb.run("""
import numpy as np
import unimem as um

with um.KVCache(4, 8, 128, 1 << 20, grow=True, name="talk") as kv:
    k = np.ones((1024, 8, 128), "float16")  # 2 MiB: 16 MiB of 8 lanes
    try:
        while True:
            for layer in range(4):
                kv.append(layer, k, k)
    except um.CapacityError as error:
        assert "talk" in str(error) and "cgroup" in str(error), str(error)
        assert error.limit == 512 << 20, error.limit
        print(error)
    kv.rollback()
    n = kv.seq_len
    assert 200 << 20 < kv.memory_usage_bytes <= kv.capacity_bytes < 512 << 20
    assert kv.layer(3)[1][0, 0, -1, 0] == 1
    kv.trim_to(1024)
    assert kv.capacity_bytes < 100 << 20
    for layer in range(4):
        kv.append(layer, k, k)
    kv.clear()
    for _ in range(n // 1024):
        for layer in range(4):
            kv.append(layer, k, k)
    assert kv.seq_len == n
try:
    um.KVCache(4, 8, 128, 1 << 16, window=1 << 16, warm=True)
except um.CapacityError as error:
    print(error)
""")
    assert said.count(cgroup_512mb.name) == 2
