"""How long a paged cache, its sequences and their views live."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import proc_maps
import unimem as um
from kv_model import same_bits
from paged_tokens import append, rows
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def pg() -> Iterator[um.PagedKVCache]:
    with um.PagedKVCache(2, 3, 4, n_blocks=6, block_tokens=4, dtype="f32") as pg:
        yield pg


# ---- lifetime ----


def test_the_pool_is_one_block_of_history(pg: um.PagedKVCache) -> None:
    assert pg.block is not None
    assert pg.block_bytes == 2 * 2 * 4 * 3 * 4 * 4
    assert pg.capacity_bytes == 6 * pg.block_bytes
    assert pg.memory_usage_bytes == 0
    assert (pg.n_blocks, pg.block_tokens) == (6, 4)
    assert (pg.n_layers, pg.n_kv_heads, pg.head_dim, pg.dtype) == (2, 3, 4, "f32")
    before = ledger()["history"]
    with um.PagedKVCache(2, 3, 4, n_blocks=100, name="other", pages="4k", warm=True) as other:
        assert other.block is not None
        assert other.name == other.block.name == "other"
        after = ledger()["history"]
        assert after["n_mappings"] == before["n_mappings"] + 1
        assert after["mapped_bytes"] == before["mapped_bytes"] + other.block.nbytes
        assert other.granted.pages == "4k"
        assert other.resident_bytes == other.block.nbytes >= other.capacity_bytes
        other.warm()
        with other.sequence() as s:
            append(s, 17)
            assert other.memory_usage_bytes == 2 * other.block_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"n_layers": 0},
        {"n_kv_heads": -1},
        {"head_dim": 0},
        {"n_blocks": 0},
        {"n_blocks": 2**31 - 1},
        {"block_tokens": 0},
        {"dtype": "int8"},
        {"dtype": "q8_0"},
        {"head_dim": 2**31 - 2, "n_kv_heads": 2**31 - 2},
        {"n_blocks": 2**31 - 2, "block_tokens": 2**30, "n_layers": 64},
        {"pages": "5m"},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    good = {"n_layers": 2, "n_kv_heads": 3, "head_dim": 4, "n_blocks": 5}
    with pytest.raises(ValueError, match=r"expected|not fit"):
        um.PagedKVCache(**(good | options))


def test_appending_makes_no_system_call_and_no_allocation() -> None:
    with um.PagedKVCache(2, 3, 4, n_blocks=40, warm=True) as pg, pg.sequence(range(200)) as s:
        k, v = rows(1)
        fork = s.fork()
        before = counters()
        for _ in range(200):
            s.append(0, k, v)
            s.append(1, k, v)
            s.gather(0)
        fork.append_all(np.zeros((2, 3, 4), "f2"), np.zeros((2, 3, 4), "f2"))
        s.crop(7)
        s.append_all(np.zeros((2, 3, 4), "f2"), np.zeros((2, 3, 4), "f2"))
        fork.close()
        assert counters() == before


def test_readers_see_whole_tokens_while_one_thread_writes() -> None:
    n_tokens = 3000
    torn: list[int] = []
    with um.PagedKVCache(1, 2, 32, n_blocks=220, dtype="f32") as pg, pg.sequence() as s:

        def read() -> None:
            n = 0
            while n < n_tokens:
                k, v = s.gather(0)
                n = k.shape[1]
                if not ((k[1, :, 0] == np.arange(n)).all() and (v[0, :, 9] == np.arange(n)).all()):
                    torn.append(n)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        first = 0
        for n in [1, 70, 3, 100, 26] * 15:
            tokens = np.arange(first, first + n, dtype="f4")[:, None, None]
            block = np.broadcast_to(tokens, (n, 2, 32)).copy()
            with s.fork():  # so that the append copies the tail
                s.append(0, block, block)
            first += n
        for reader in readers:
            reader.join()
        assert len(s) == n_tokens
    assert torn == []


def test_views_keep_the_memory(pg: um.PagedKVCache) -> None:
    s = pg.sequence()
    append(s, 3)
    view = pg.layer(0)[0][:, 1]
    address = proc_maps.address_of(view)
    with pytest.raises(BufferError, match="live"):
        pg.close()
    assert not pg.closed
    append(s, 3)  # nothing was closed
    contents = view.tobytes()
    with pg:
        pass
    assert pg.closed
    assert s.closed
    assert proc_maps.is_mapped(address)
    assert view.tobytes() == contents
    del view
    gc.collect()
    assert not proc_maps.is_mapped(address)
    s.close()


def test_closed_things_say_so() -> None:
    pg = um.PagedKVCache(2, 3, 4, n_blocks=6)
    s, closed = pg.sequence([1]), pg.sequence()
    closed.close()
    k, v = rows(2)

    def uses(s: um.Sequence) -> list[Callable[[], Any]]:
        return [
            lambda: s.append(0, k, v),
            lambda: s.append_all(k, v),
            lambda: s.extend([1]),
            s.fork,
            lambda: s.crop(0),
            s.rollback,
            lambda: s.gather(0),
            lambda: s.block_table,
            lambda: len(s),
            s.__enter__,
        ]

    for use in uses(closed):
        with pytest.raises(um.ClosedError, match="the Sequence of PagedKVCache 'paged' is closed"):
            use()
    assert closed.closed
    assert not s.closed
    assert repr(closed) == "Sequence('paged', closed)"
    pg.close()
    pg.close()
    assert pg.closed
    assert s.closed
    of_cache: list[Callable[[], Any]] = [
        pg.sequence,
        lambda: pg.layer(0),
        lambda: pg.n_blocks_in_use,
        lambda: pg.n_blocks_available,
        lambda: pg.memory_usage_bytes,
        lambda: pg.resident_bytes,
        lambda: pg.granted,
        pg.warm,
        pg.__enter__,
    ]
    for use in (*uses(s), *of_cache):
        with pytest.raises(um.ClosedError, match="PagedKVCache 'paged' is closed"):
            use()
    assert (pg.n_blocks, pg.block) == (6, None)
    assert repr(pg) == "PagedKVCache('paged', closed)"
    assert repr(s) == "Sequence('paged', closed)"
    s.close()


def test_what_is_dropped_open_warns_and_gives_back(pg: um.PagedKVCache) -> None:
    s = pg.sequence()
    append(s, 5)
    with pytest.warns(ResourceWarning, match="unclosed Sequence"):
        del s
    assert pg.n_blocks_in_use == 0
    other = um.PagedKVCache(2, 3, 4, n_blocks=2, name="forgotten")
    view = other.layer(0)[0]
    address = proc_maps.address_of(view)
    with pytest.warns(ResourceWarning, match="forgotten"):
        del other
    del view
    assert not proc_maps.is_mapped(address)


def test_a_sequence_keeps_its_cache() -> None:
    s = um.PagedKVCache(2, 3, 4, n_blocks=2, block_tokens=4, dtype="f32").sequence()
    append(s, 5)
    assert same_bits(s.gather(0)[0], rows(5)[0].transpose(1, 0, 2).copy())
    s.cache.close()
    del s


def test_a_sequence_is_made_by_a_cache() -> None:
    with pytest.raises(TypeError, match=r"PagedKVCache.sequence\(\)"):
        um.Sequence()


def test_a_forked_process_has_its_own_copy(run_python: Any) -> None:
    done = run_python(
        """
        import os, numpy as np, unimem as um
        pg = um.PagedKVCache(1, 1, 4, n_blocks=3, block_tokens=2, dtype="f32")
        s = pg.sequence()
        ones = np.ones((3, 1, 4), "f4")
        s.append(0, ones, ones)
        child = os.fork()
        if child == 0:
            s.append(0, ones[:2] * 2, ones[:2] * 2)
            ok = s.gather(0)[0][0, :, 0].tolist() == [1, 1, 1, 2, 2] and pg.n_blocks_in_use == 3
            os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(s) == 3 and s.gather(0)[0].sum() == 12 and pg.n_blocks_in_use == 2
        s.close()
        pg.close()
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_neither_is_pickled(pg: um.PagedKVCache, use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="memory of this process"):
        use(pg)
    with pg.sequence() as s, pytest.raises(TypeError, match="memory of this process"):
        use(s)


def test_repr(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        append(s, 5)
        assert repr(s) == "Sequence('paged', 5 tokens, 2 blocks)"
        assert repr(pg) == (
            "PagedKVCache('paged', 2 of 6 blocks of 4 tokens, 2 layers, 3 heads of 4 f32, 4.5 KiB)"
        )
