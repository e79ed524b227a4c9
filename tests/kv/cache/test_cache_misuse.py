"""KV caches beside other threads, inside garbage collections, and with arguments that act."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.kernel import proc_maps

PAGE = proc_maps.PAGE


def rows(n: int, value: float = 1.0, heads: int = 2, dim: int = 64) -> NDArray[Any]:
    return np.full((n, heads, dim), value, "float32")


def growing(max_seq_len: int = 10_000, **options: Any) -> um.KVCache:
    return um.KVCache(1, 2, 64, max_seq_len, grow=True, **{"pages": "4k"} | options)


def append(kv: um.KVCache, n: int, value: float = 1.0) -> None:
    kv.append(0, rows(n, value), rows(n, value))


class Acts:
    """A number that does something when it is looked at."""

    def __init__(self, number: int, act: Any) -> None:
        self.number, self.act = number, act

    def __index__(self) -> int:
        self.act()
        return self.number


# ---- other threads ----


def test_tokens_do_not_move_under_a_reader() -> None:
    """An append that would move them is refused as long as they are read."""
    with um.KVCache(1, 8, 128, 20_000, grow=True, pages="4k") as kv:
        numbered = np.arange(2000, dtype="float16")[:, None, None].repeat(8, 1).repeat(128, 2)
        while kv.row_of(kv.next_position) + 2000 <= kv.n_rows:
            kv.append(0, numbered, numbered)
            kv.trim_to(16_000)
        shape = (1, 8, kv.seq_len, 128)
        out = np.zeros(shape, "float32"), np.zeros(shape, "float32")
        reading = threading.Event()

        def read() -> None:
            reading.set()
            for _ in range(5):
                with suppress(ValueError):  # there are more tokens by now than fit
                    kv.layer(0, "float32", out)

        thread = threading.Thread(target=read)
        thread.start()
        reading.wait()
        refused = True
        while refused and thread.is_alive():
            try:
                kv.append(0, numbered, numbered)
            except BufferError:
                continue
            refused = False
        thread.join()
        # Nothing was read, where the first append came before it.
        for part in out:
            assert (part == np.tile(numbered, (8, 1, 1)).swapaxes(0, 1)).all() or not part.any()
        if refused:
            kv.trim_to(10_000)
            kv.append(0, numbered, numbered)


# ---- collections ----


def test_a_collection_that_ends_another_view_while_memory_waits() -> None:
    with growing() as kv:
        append(kv, 5000)
        view = kv.layer(0)[0]
        before = kv.capacity_bytes
        for _ in range(3):
            cycle: list[Any] = [kv.layer(0)[1]]
            cycle.append(cycle)
            del cycle
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


def test_an_array_that_lies_about_its_shape() -> None:
    class Liar(np.ndarray):
        shape = property(lambda self: (1, 2, 3, 64))

    with um.KVCache(1, 2, 64, 16) as kv:
        append(kv, 3)
        liar = np.empty(0, "float32").view(Liar)
        with pytest.raises(ValueError, match="out: expected two"):
            kv.layer(0, "float32", (liar, liar))
        with pytest.raises(TypeError, match=r"^out: expected a NumPy array, .*got int"):
            kv.layer(0, "float32", (1, 2))  # type: ignore[type-var]


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


@pytest.mark.parametrize("grow", [True, False])
def test_a_buffer_of_the_block_is_a_view_of_all_of_it(grow: bool) -> None:
    with um.KVCache(1, 2, 64, 10_000, pages="4k", grow=grow) as kv:
        append(kv, 9000)
        before = kv.resident_bytes
        buffer = memoryview(kv.block)  # type: ignore[arg-type]
        kv.trim_to(1)
        assert kv.resident_bytes == before
        buffer.release()
        assert kv.resident_bytes <= 4 * PAGE


def test_budgets_are_numbers_and_hold_a_token() -> None:
    budget: Any = Acts(1 << 20, int)
    with um.KVCache(1, 2, 64, 1000, budget_bytes=budget) as kv:
        assert kv.budget_bytes == 1 << 20
    with pytest.raises(um.CacheFull, match="budget_bytes=255"):
        growing(budget_bytes=np.uint8(255))
    with um.KVCache(1, 1, 64, 1 << 20, grow=True, budget_bytes=3 << 20) as kv:
        kv.append(0, rows(100, heads=1), rows(100, heads=1))
        assert kv.capacity_bytes <= 3 << 20
