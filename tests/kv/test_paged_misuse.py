"""Paged caches and scratchpads to which something happens in the middle of a call."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import Array

pytestmark = pytest.mark.usefixtures("gives_memory_back")

N_TOKENS = 200_000


@pytest.fixture
def pg() -> Iterator[um.PagedKVCache]:
    with um.PagedKVCache(1, 1, 8, n_blocks=8, block_tokens=4, dtype="f32") as pg:
        yield pg


def rows(n: int) -> Array:
    return np.arange(n * 8, dtype="float32").reshape(n, 1, 8)


class Evil:
    """What does something when it is converted to an integer, to 0, or to an array, of one 0."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.do = do

    def __index__(self) -> int:
        self.do()
        return 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        self.do()
        return np.zeros(1, "int32")


def leave(thing: Any) -> None:
    thing.__exit__(None, None, None)


# ---- another thread, while tokens are written with the lock released ----


@contextmanager
def in_the_middle(make: Callable[[], um.Sequence], tokens: Array) -> Iterator[um.Sequence]:
    """Append in another thread, which has taken its blocks and cannot end, since we have the lock.

    Where that came too late, it is done again with another sequence. On one CPU it always comes too
    late where the lock is off.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)() and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("without the interpreter's lock, it takes a CPU for each of two threads")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = None
    try:
        while True:
            s = make()
            before, n = s.cache.n_blocks_in_use, len(s)
            thread = threading.Thread(target=s.append, args=(0, tokens, tokens))
            thread.start()
            while s.cache.n_blocks_in_use == before:
                time.sleep(0)
            if len(s) == n:
                break
            thread.join()
            s.close()
        yield s
    finally:
        sys.setswitchinterval(interval)
        if thread is not None:
            thread.join()


def small_blocks() -> um.PagedKVCache:
    """As many blocks as tokens, so that taking them lasts as long as writing the tokens."""
    return um.PagedKVCache(
        1, 1, 1, n_blocks=2 * N_TOKENS, block_tokens=1, dtype="f16", prefix_cache=False
    )


def test_blocks_change_hands_under_the_lock_only() -> None:
    """So a sequence may be dropped at any time: by another thread, by a garbage collection."""
    tokens = np.ones((N_TOKENS, 1, 1), "float16")
    with small_blocks() as pg:
        dropped = pg.sequence()
        dropped.append(0, tokens[:1000], tokens[:1000])
        with in_the_middle(pg.sequence, tokens) as s:
            # All of them at once.
            assert pg.n_blocks_in_use == N_TOKENS + 1000
            with pytest.warns(ResourceWarning, match="unclosed Sequence"):
                del dropped
            assert pg.n_blocks_in_use == N_TOKENS
        assert len(s) == N_TOKENS
        assert pg.n_blocks_in_use + pg.n_blocks_available == pg.n_blocks
        # The others are there, each once.
        with pg.sequence() as other:
            other.append(0, tokens, tokens)
            assert pg.n_blocks_available == 0
            both = np.concatenate([s.block_table, other.block_table])
            assert np.array_equal(np.sort(both), np.arange(pg.n_blocks))
        s.close()


ONE_TOKEN = np.ones((2, 1, 1, 1), "f2")
WRITERS: dict[str, Callable[[um.Sequence], Any]] = {
    "append": lambda s: s.append(0, *ONE_TOKEN),
    "append_all": lambda s: s.append_all(*ONE_TOKEN),
    **{"fork": um.Sequence.fork, "crop": lambda s: s.crop(0), "rollback": um.Sequence.rollback},
    **{"close": um.Sequence.close, "leave": leave},
}


@pytest.mark.parametrize("use", WRITERS.values(), ids=WRITERS)
def test_a_sequence_has_one_writer(use: Callable[[um.Sequence], Any]) -> None:
    tokens = np.ones((N_TOKENS, 1, 1), "float16")
    with small_blocks() as pg:
        with in_the_middle(pg.sequence, tokens) as s:
            with pytest.raises(RuntimeError, match="another thread appends"):
                use(s)
            assert not s.closed
            assert (len(s), pg.n_blocks_in_use) == (0, N_TOKENS)
        assert len(s) == N_TOKENS
        assert s.gather(0)[1].sum(dtype="f4") == N_TOKENS
        other = use(s)  # it is over
        if other is not None:
            other.close()
        s.close()


def test_a_fork_may_go_while_its_block_is_copied() -> None:
    tokens = np.arange(2000, dtype="float32")[:, None, None].repeat(1000, 2)
    forks: list[um.Sequence] = []
    with um.PagedKVCache(1, 1, 1000, n_blocks=3, block_tokens=2000, dtype="f32") as pg:

        def forked() -> um.Sequence:
            s = pg.sequence()
            s.append(0, tokens[:1000], tokens[:1000])
            while forks:
                forks.pop().close()
            forks.append(s.fork())
            return s

        with in_the_middle(forked, tokens[1000:]) as s:
            shared = int(s.block_table[0])
            forks[0].close()
            assert int(s.block_table[0]) == shared
            assert pg.n_blocks_in_use == 2
        assert int(s.block_table[0]) != shared
        assert (pg.n_blocks_in_use, pg.n_blocks_available) == (1, 2)
        assert np.array_equal(s.gather(0)[0][0], tokens[:, 0])
        s.close()


@pytest.mark.parametrize("make", [um.Scratchpad, um.PagedScratchpad])
@pytest.mark.parametrize(
    "use",
    [lambda pad: pad.append_batch(np.ones((0, 1024), "float32")), lambda pad: pad.crop(0)],
    ids=["append", "crop"],
)
def test_a_pad_has_one_writer(make: type[Any], use: Callable[[Any], Any]) -> None:
    batch = np.ones((20_000, 1024), "float32")
    refused = ""
    while not refused:  # else the append was over, or had not begun
        with make(20_000, 1024) as pad:
            thread = threading.Thread(target=pad.append_batch, args=(batch,))
            thread.start()
            while thread.is_alive() and not refused:
                try:
                    use(pad)
                except RuntimeError as error:
                    refused = str(error)
            thread.join()
            if refused:
                assert len(pad) == 20_000
                assert (pad.as_array() == 1).all()
    assert "another thread appends" in refused


# ---- the writer, while another thread makes an array ----


@contextmanager
def when_an_array_is_made(do: Callable[[], object]) -> Iterator[list[Array]]:
    """Do something before np.empty returns; what it returns has two rows of 7 behind it."""
    behind: list[Array] = []
    empty = np.empty

    def with_rows_behind(shape: Any, dtype: Any) -> Array:
        n, *others = (shape,) if isinstance(shape, int) else shape
        all_rows = empty((n + 2, *others), dtype)
        all_rows[n:] = 7
        behind.append(all_rows[n:])
        do()
        return all_rows[:n]

    with mock.patch.object(np, "empty", with_rows_behind):
        yield behind


def test_a_paged_pad_is_copied_while_its_writer_appends() -> None:
    with um.PagedScratchpad(8, 4, block_tokens=2) as pad:
        pad.append_batch(np.ones((3, 4), "float32"))
        more = np.full((2, 4), 2, "float32")
        with when_an_array_is_made(lambda: pad.append_batch(more)) as behind:
            seen = pad.as_array()
        assert (seen == np.ones((3, 4))).all()
        assert (behind[0] == 7).all()
        assert len(pad) == 5


def test_a_block_table_is_copied_while_its_writer_appends(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        s.append(0, rows(5), rows(5))
        with when_an_array_is_made(lambda: s.append(0, rows(8), rows(8))) as behind:
            seen = s.block_table
        assert np.array_equal(seen, s.block_table[:2])
        assert (behind[0] == 7).all()
        assert len(s.block_table) == 4


# ---- arguments that close what they are given to ----


ASKING: dict[str, Callable[[um.Sequence, Evil], Any]] = {
    "append": lambda s, evil: s.append(evil, rows(1), rows(1)),  # type: ignore[arg-type]
    "append many": lambda s, evil: s.append(evil, rows(90), rows(90)),  # type: ignore[arg-type]
    "gather": lambda s, evil: s.gather(evil),  # type: ignore[call-overload]
    "crop": lambda s, evil: s.crop(evil),  # type: ignore[arg-type]
    "extend": lambda s, evil: s.extend(evil),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("use", ASKING.values(), ids=ASKING)
def test_an_argument_may_close_the_sequence(use: Callable[[um.Sequence, Evil], Any]) -> None:
    with um.PagedKVCache(1, 1, 8, n_blocks=40, block_tokens=4) as pg:
        for close in (um.Sequence.close, lambda s: leave(s.cache)):
            s = pg.sequence()
            s.append(0, rows(3), rows(3))
            with pytest.raises(um.ClosedError, match="closed"):
                use(s, Evil(partial(close, s)))
            assert s.closed
            if not pg.closed:
                assert pg.n_blocks_in_use == 0
            s.close()
        assert pg.closed


@pytest.mark.parametrize(
    ("make", "uses"),
    [
        (lambda: um.PagedKVCache(1, 1, 8, n_blocks=8), ["layer", "sequence"]),
        (lambda: um.PagedScratchpad(8, 4), ["get_token", "crop"]),
    ],
    ids=["cache", "pad"],
)
def test_an_argument_may_close_what_it_is_given_to(
    make: Callable[[], Any], uses: list[str]
) -> None:
    for use, how in itertools.product(uses, ("close", "__exit__")):
        with make() as it:
            if isinstance(it, um.PagedScratchpad):
                it.append(np.ones(4, "float32"))
            with pytest.raises(um.ClosedError, match="closed"):
                getattr(it, use)(Evil(getattr(it, how)))
            assert it.closed


# ---- an array that is not what it says ----


def test_the_memory_of_an_out_counts_and_not_its_attributes(pg: um.PagedKVCache) -> None:
    class Large(np.ndarray[Any, Any]):
        @property  # type: ignore[misc]
        def shape(self) -> tuple[int, ...]:
            return (1, 5, 8)

    memory = np.full((2, 1, 5, 8), 7, "float32")
    small = [part[:, :2].view(Large) for part in memory]
    assert small[0].shape == (1, 5, 8)
    with pg.sequence() as s:
        s.append(0, rows(5), rows(5))
        with pytest.raises(ValueError, match=r"out: expected.*\(1, 5, 8\).*got shape \(1, 2, 8\)"):
            s.gather(0, (small[0], small[1]))
        assert (memory == 7).all()
        s.gather(0, (memory[0].view(Large), memory[1].view(Large)))
        assert np.array_equal(memory[1, 0], rows(5)[:, 0])


# ---- a second __init__ ----


def test_a_cache_is_made_once(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        s.append(0, rows(9), rows(9))
        for options in ({"n_blocks": 2}, {"n_blocks": 0}, {"n_blocks": 8, "dtype": "f16"}):
            with pytest.raises(RuntimeError, match="the PagedKVCache is made already"):
                pg.__init__(1, 1, 8, **options)  # type: ignore[misc]
        assert (pg.n_blocks, pg.dtype, pg.n_blocks_in_use) == (8, "f32", 3)
        assert np.array_equal(s.gather(0)[0][0], rows(9)[:, 0])
    pg.close()
    half = um.PagedKVCache.__new__(um.PagedKVCache)
    while_it_is_made = Evil(lambda: half.__init__(1, 1, 8, n_blocks=2))  # type: ignore[misc]
    for cache, n_blocks in ((pg, 2), (half, while_it_is_made)):
        with pytest.raises(RuntimeError, match="is made already"):
            cache.__init__(1, 1, 8, n_blocks=n_blocks)  # type: ignore[misc]
        assert cache.closed
