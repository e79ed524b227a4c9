"""KV caches beside other threads, inside garbage collections, and with arguments that act."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import proc_maps
import unimem as um

PAGE = proc_maps.PAGE


def rows(n: int, value: float = 1.0, heads: int = 2, dim: int = 64) -> NDArray[Any]:
    return np.full((n, heads, dim), value, "float32")


def growing(max_seq_len: int = 10_000, **options: Any) -> um.KVCache:
    return um.KVCache(1, 2, 64, max_seq_len, grow=True, **{"pages": "4k"} | options)


def append(kv: um.KVCache, n: int, value: float = 1.0) -> None:
    kv.append(0, rows(n, value), rows(n, value))


def near_the_last_row(kv: um.KVCache) -> None:
    """Trims and appends until no row is left but by moving the tokens."""
    while kv.row_of(kv.next_position) + 100 <= kv.n_rows:
        append(kv, 100, 2)
        kv.trim_to(50)


class Acts:
    """A number that does something when it is looked at."""

    def __init__(self, number: int, act: Any) -> None:
        self.number, self.act = number, act

    def __index__(self) -> int:
        self.act()
        return self.number


# ---- other threads ----


def test_tokens_do_not_move_under_a_reader() -> None:
    with um.KVCache(1, 8, 128, 20_000, grow=True, pages="4k") as kv:
        many = np.ones((5000, 8, 128), "float16")
        while kv.row_of(kv.next_position) + 5000 <= kv.n_rows:
            kv.append(0, many, many)
            kv.trim_to(15_000)
        shape = (1, 8, kv.seq_len, 128)
        out = np.zeros(shape, "float32"), np.zeros(shape, "float32")
        reading = threading.Event()

        def read() -> None:
            reading.set()
            for _ in range(20):
                kv.layer(0, "float32", out)

        thread = threading.Thread(target=read)
        thread.start()
        reading.wait()
        refused = 0
        while thread.is_alive():
            try:
                kv.append(0, many, many)
            except BufferError:
                refused += 1
            else:
                break
        thread.join()
        assert all(np.all(part == 1) for part in out)
        if refused:
            kv.trim_to(10_000)
            kv.append(0, many, many)


# ---- collections ----


def test_a_collection_that_ends_another_view_while_memory_waits() -> None:
    with growing() as kv:
        append(kv, 5000)
        view, other = kv.layer(0)[0], kv.layer(0)[1]
        before = kv.capacity_bytes
        for _ in range(3):
            cycle: list[Any] = [other]
            cycle.append(cycle)
            del cycle
            other = kv.layer(0)[1]
        del other
        old = gc.get_threshold()
        gc.set_threshold(1)
        try:
            assert kv.trim_to(1)
        finally:
            gc.set_threshold(*old)
        assert kv.capacity_bytes == before
        del view
        gc.collect()
        assert kv.capacity_bytes <= 2 * 2 * PAGE


# ---- calls inside of calls ----


def test_a_layer_whose_number_closes_the_cache() -> None:
    uses: tuple[Callable[[Any, Any], Any], ...] = (
        lambda kv, zero: kv.append(zero, rows(1), rows(1)),
        lambda kv, zero: kv.address(zero, "k"),
        lambda kv, zero: kv.layer(zero),
        lambda kv, zero: kv.commit(zero),
    )
    for use in uses:
        kv: Any = um.KVCache(1, 2, 64, 16)
        with pytest.raises(um.ClosedError):
            use(kv, Acts(0, kv.close))


@pytest.mark.parametrize("options", [{}, {"grow": True}, {"window": 8}])
def test_a_cache_is_made_once(options: dict[str, Any]) -> None:
    with um.KVCache(1, 2, 64, 16, **options) as kv:
        append(kv, 3)
        with pytest.raises(RuntimeError, match="made already"):
            kv.__init__(1, 2, 64, 4)  # type: ignore[misc]
        assert np.all(kv.layer(0)[0] == 1)
        append(kv, 3)
        assert kv.seq_len == 6


def test_an_array_that_lies_about_its_shape() -> None:
    class Liar(np.ndarray):
        shape = property(lambda self: (1, 2, 3, 64))

    with um.KVCache(1, 2, 64, 16) as kv:
        append(kv, 3)
        liar = np.empty(0, "float32").view(Liar)
        with pytest.raises(ValueError, match="out: expected two"):
            kv.layer(0, "float32", (liar, liar))
        with pytest.raises(TypeError, match="out: expected two"):
            kv.layer(0, "float32", (1, 2))  # type: ignore[arg-type]


# ---- limits ----


def test_a_limit_is_kept_or_refused() -> None:
    with growing() as kv:
        append(kv, 1000)
        kv.crop(10)
        view = kv.layer(0)[0]
        append(kv, 900)
        kv.trim_to(895)
        with pytest.raises(BufferError, match="views"):
            kv.enforce_memory_limit(0)
        assert kv.seq_len == 895
        del view
        assert kv.enforce_memory_limit(0)
        assert kv.capacity_bytes == 0


def test_a_limit_of_a_ring_with_older_tokens_in_view() -> None:
    with um.KVCache(1, 2, 64, 1000, window=100, spare_rows=300, pages="4k") as kv:
        append(kv, 100)
        view = kv.layer(0)[0]
        append(kv, 100)
        with pytest.raises(BufferError, match="views"):
            kv.enforce_memory_limit(1)
        del view
        assert kv.enforce_memory_limit(1)
        assert kv.resident_bytes <= 2 * PAGE


def test_a_limit_gives_back_what_no_token_needs() -> None:
    with um.KVCache(1, 2, 64, 10_000, pages="4k") as kv:
        append(kv, 10_000)
        kv.crop(10)
        usage = kv.memory_usage_bytes
        assert kv.resident_bytes > 100 * usage
        assert not kv.enforce_memory_limit(usage)
        assert kv.seq_len == 10
        assert kv.resident_bytes <= usage + 4 * PAGE
        assert np.all(kv.layer(0)[0] == 1)


def test_a_view_of_one_stream_holds_no_other_rows() -> None:
    k = np.ones((2, 2, 9000, 64), "float32")
    with growing(batch=2) as kv:
        kv.append(0, k[:, :, :10], k[:, :, :10])
        view = kv.layer(0)
        kv.append(0, k, k)
        kv.crop(10)
        assert kv.capacity_bytes <= 4 * 3 * PAGE
        assert np.all(view[0] == 1)
        del view


def test_a_buffer_of_the_block_is_a_view_of_all_of_it() -> None:
    for options in ({"grow": True}, {}):
        with um.KVCache(1, 2, 64, 10_000, pages="4k", **options) as kv:  # type: ignore[arg-type]
            append(kv, 9000)
            before = kv.resident_bytes
            buffer = memoryview(kv.block)  # type: ignore[arg-type]
            kv.trim_to(1)
            assert kv.resident_bytes == before
            buffer.release()
            assert kv.resident_bytes <= 4 * PAGE


# ---- sizes and options ----


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((2**20, 170592, 25781083, 1), {}),
        ((2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1), {"grow": True}),
        ((1, 1, 64, 2**32 - 1), {"window": 2**31, "spare_rows": 2**52 - 1}),
        ((2**31, 1, 2**31, 1), {"batch": 2**31}),
        ((2**12, 2**12, 2**12, 2**31), {"grow": True}),
    ],
)
def test_sizes_that_nobody_has(dims: tuple[int, ...], options: dict[str, Any]) -> None:
    with um.Tape(1 << 20) as tape:
        with pytest.raises((ValueError, MemoryError), match=r"KVCache|kv"):
            um.KVCache(*dims, **options)
        if not options:
            with pytest.raises((ValueError, MemoryError)):
                um.KVCache(*dims, tape=tape)
        assert tape.used_bytes == 0


@pytest.mark.parametrize("option", ["shared", "reserve", "category", "page"])
def test_options_that_are_not_of_placement(option: str) -> None:
    for kind in ({}, {"grow": True}, {"window": 4}):
        with pytest.raises(TypeError, match=option):
            um.KVCache(1, 2, 64, 16, **kind, **{option: True})  # type: ignore[arg-type]


def test_budgets_are_numbers_and_hold_a_token() -> None:
    budget: Any = Acts(1 << 20, int)
    with um.KVCache(1, 2, 64, 1000, budget_bytes=budget) as kv:
        assert kv.budget_bytes == 1 << 20
    with pytest.raises(um.CacheFull, match="budget_bytes=255"):
        growing(budget_bytes=np.uint8(255))
    with um.KVCache(1, 1, 64, 1 << 20, grow=True, budget_bytes=3 << 20) as kv:
        kv.append(0, rows(100, heads=1), rows(100, heads=1))
        assert kv.capacity_bytes <= 3 << 20
