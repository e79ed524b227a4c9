"""Memory that holds no tokens is given back, by any thread, and no token is lost."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest

import unimem as um

pytestmark = pytest.mark.usefixtures("gives_memory_back")

LAYERS, HEADS, DIM = 2, 2, 64
ROW = LAYERS * 2 * HEADS * DIM * 4  # bytes of a token in all layers
MANY = 2048


def rows(first: int, n: int) -> Any:
    """Tokens that say where they stand."""
    tokens = np.arange(first, first + n, dtype="f4")[:, None, None]
    return np.broadcast_to(tokens, (n, HEADS, DIM))


def append(cache: Any, first: int, n: int) -> None:
    for layer in range(LAYERS):
        cache.append(layer, rows(first, n), -rows(first, n))


def check(k: Any, v: Any, n: int) -> None:
    expected = np.broadcast_to(np.arange(n, dtype="f4")[None, :, None], (HEADS, n, DIM))
    np.testing.assert_array_equal(k, expected)
    np.testing.assert_array_equal(v, -expected)


def check_cache(cache: um.KVCache, n: int) -> None:
    assert cache.seq_len == n
    for layer in range(LAYERS):
        k, v = cache.layer(layer)
        check(k.reshape(HEADS, n, DIM), v.reshape(HEADS, n, DIM), n)


def new_cache(**options: Any) -> um.KVCache:
    return um.KVCache(LAYERS, HEADS, DIM, MANY, dtype="f32", pages="4k", **options)


@pytest.mark.parametrize("options", [{"grow": True}, {"warm": True}], ids=["growing", "fixed"])
def test_a_cache(options: dict[str, Any]) -> None:
    with new_cache(**options) as cache:
        append(cache, 0, 1000)
        cache.crop(100)
        addresses = [cache.address(layer, "k") for layer in range(LAYERS)]
        before = cache.resident_bytes
        assert cache.give_back() >= before - 2 * 100 * ROW
        assert cache.resident_bytes <= 2 * 100 * ROW
        assert cache.give_back() == 0  # there is nothing more
        check_cache(cache, 100)
        append(cache, 100, 700)
        check_cache(cache, 800)
        assert [cache.address(layer, "k") for layer in range(LAYERS)] == addresses


def test_on_a_tape_only_its_own_memory() -> None:
    nbytes = um.KVCache.storage_bytes(LAYERS, HEADS, DIM, MANY, dtype="f32")
    with um.Tape(nbytes + (1 << 20), pages="4k", warm=True) as tape:
        before = tape.take_bytes(5000)
        before[:] = 7
        with um.KVCache(LAYERS, HEADS, DIM, MANY, dtype="f32", tape=tape) as cache:
            after = tape.take_bytes(5000)
            after[:] = 9
            append(cache, 0, 10)
            assert cache.give_back() > nbytes // 2
            check_cache(cache, 10)
            assert (before == 7).all()
            assert (after == 9).all()
        del before, after


def test_rows_that_are_reserved_stay() -> None:
    with new_cache(warm=True) as cache:
        append(cache, 0, 5)
        cache.reserve(200)
        row = cache.address(0, "k") + 150 * cache.row_bytes
        k = np.ctypeslib.as_array((ctypes.c_float * DIM).from_address(row))
        k[:] = 3
        assert cache.give_back() > 0
        assert (k == 3).all()
        cache.rollback()


@pytest.mark.parametrize(
    "options", [pytest.param({"lock": True}, marks=pytest.mark.locks), {"frozen": True}, {}]
)
def test_what_gives_nothing_back(options: dict[str, Any]) -> None:
    frozen = options.pop("frozen", False)
    cache = um.KVCache(LAYERS, HEADS, DIM, 256, dtype="f32", pages="4k", warm=True, **options)
    with um.Layout(4096, 4096, 4096) as layout, cache:
        append(cache, 0, 200)
        view: Any = cache.layer(0)
        cache.crop(1)
        if frozen:
            layout.attach(cache)
            layout.freeze()
            del view
        elif options:
            del view
        assert cache.give_back() == 0  # and under a view
        assert cache.resident_bytes >= 256 * ROW
        view = None
    assert cache.give_back() == 0


def test_a_paged_cache() -> None:
    with um.PagedKVCache(LAYERS, HEADS, DIM, n_blocks=128, dtype="f32", pages="4k") as pool:
        live, gone = pool.sequence(range(200)), pool.sequence(range(5000, 5800))
        append(live, 0, 200)
        append(gone, 0, 800)
        gone.close()
        with pool.sequence(range(5000, 5800)) as again:
            assert again.n_cached == 784
        before = pool.resident_bytes
        assert pool.give_back() == before - pool.resident_bytes > 700 * ROW
        assert pool.give_back() == 0
        for layer in range(LAYERS):
            check(*live.gather(layer), 200)
        # Prefixes that nobody holds are gone; those of live sequences are found.
        with pool.sequence(range(5000, 5800)) as again:
            assert again.n_cached == 0
            append(again, 0, 800)
            check(*again.gather(1), 800)
        with pool.sequence(range(200)) as again:
            assert again.n_cached == 192
        live.close()
    assert pool.give_back() == 0


@pytest.mark.locks
def test_prefixes_stay_where_nothing_would_be_given_back() -> None:
    with um.PagedKVCache(1, 2, 8, n_blocks=8, dtype="f32", pages="4k", lock=True) as pool:
        if not pool.granted.locked_bytes:
            pytest.skip("this user may not lock memory")
        with pool.sequence(range(40)) as first:
            first.append(0, np.ones((40, 2, 8), "f4"), np.ones((40, 2, 8), "f4"))
        assert pool.give_back() == 0
        with pool.sequence(range(40)) as second:
            assert second.n_cached == 32


def test_while_another_thread_appends() -> None:
    done = threading.Event()
    given = 0

    def give() -> None:
        nonlocal given
        while not done.is_set():
            given += pool.give_back() + cache.give_back() + fixed.give_back()

    with (
        um.PagedKVCache(LAYERS, HEADS, DIM, n_blocks=64, dtype="f32", pages="4k") as pool,
        new_cache(grow=True) as cache,
        new_cache() as fixed,
    ):
        thread = threading.Thread(target=give)
        thread.start()
        try:
            for turn in range(20):
                with pool.sequence(range(turn * 1000, turn * 1000 + 300)) as sequence:
                    for first in range(0, 300, 75):
                        append(sequence, first, 75)
                        append(cache, cache.seq_len, 20)
                        append(fixed, fixed.seq_len, 20)
                    check(*sequence.gather(1), 300)
            deadline = time.monotonic() + 60
            # On a busy machine, the thread may not have had a turn.
            while not given and time.monotonic() < deadline:
                time.sleep(0.001)
        finally:
            done.set()
            thread.join()
        check_cache(cache, 1600)
        check_cache(fixed, 1600)
    assert given > 0


def test_a_decoder_that_computes_meanwhile() -> None:
    why = "the engine needs the extra 'run'"
    engine = pytest.importorskip("unimem.engine", reason=why, exc_type=ImportError)

    def story(decoder: Any) -> str:
        return "".join(decoder.generate("Once upon a time", 60))

    with engine.Decoder(engine.embedded_model(), ctx=512) as decoder:
        expected = story(decoder)
        done = threading.Event()
        given: list[int] = []

        def give() -> None:
            while not done.is_set():
                given.append(decoder.give_back())

        thread = threading.Thread(target=give)
        thread.start()
        try:
            assert [story(decoder) for _ in range(3)] == [expected] * 3
        finally:
            done.set()
            thread.join()
        assert max(given) > 0
    assert decoder.give_back() == 0
