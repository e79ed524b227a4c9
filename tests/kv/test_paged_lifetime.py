"""How long a paged cache, its sequences and their views live."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_caches import meanwhile
from support.contracts.kv_model import same_bits
from support.contracts.paged_tokens import append, heads_first, rows
from support.kernel import proc_maps
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def pg() -> Iterator[um.PagedKVCache]:
    with um.PagedKVCache(2, 3, 4, n_blocks=6, block_tokens=4, dtype="f32") as pg:
        yield pg


def test_the_pool_is_one_block_of_history(pg: um.PagedKVCache) -> None:
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


REFUSED: list[dict[str, Any]] = [
    *({name: 0} for name in ("n_layers", "head_dim", "n_blocks", "block_tokens")),
    {"n_blocks": 2**31 - 1},
    {"dtype": "q8_0"},
    {"head_dim": 2**31 - 2, "n_kv_heads": 2**31 - 2},
    {"n_blocks": 2**31 - 2, "block_tokens": 2**30, "n_layers": 64},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    good = {"n_layers": 2, "n_kv_heads": 3, "head_dim": 4, "n_blocks": 5}
    with pytest.raises(ValueError, match=r"expected|not fit"):
        um.PagedKVCache(**(good | options))


@pytest.mark.usefixtures("no_collection")
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
    with um.PagedKVCache(1, 2, 32, n_blocks=220, dtype="f32") as pg, pg.sequence() as s:

        def read() -> None:
            k, v = s.gather(0)
            seen = np.arange(k.shape[1])
            assert (k[1, :, 0] == seen).all()
            assert (v[0, :, 9] == seen).all()

        with meanwhile(read):
            for n in [1, 70, 3, 100, 26] * 15:
                tokens = np.arange(len(s), len(s) + n, dtype="f4")[:, None, None]
                block = np.broadcast_to(tokens, (n, 2, 32)).copy()
                with s.fork():  # so that the append copies the tail
                    s.append(0, block, block)
        assert len(s) == 3000


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
    pg.close()
    pg.close()
    assert pg.closed
    assert s.closed
    of_cache: list[Callable[[], Any]] = [
        pg.sequence,
        lambda: pg.layer(0),
        lambda: pg.n_blocks_in_use,
        pg.warm,
        pg.__enter__,
        lambda: pg.n_blocks_available,
        lambda: pg.memory_usage_bytes,
        lambda: pg.resident_bytes,
        lambda: pg.granted,
    ]
    for use in (*uses(s), *of_cache):
        with pytest.raises(um.ClosedError, match="PagedKVCache 'paged' is closed"):
            use()
    assert (pg.n_blocks, pg.block) == (6, None)
    assert repr(pg) == "PagedKVCache('paged', closed)"
    assert repr(s) == repr(closed) == "Sequence('paged', closed)"
    s.close()


def test_what_is_dropped_open_warns_and_gives_back(pg: um.PagedKVCache) -> None:
    s = pg.sequence()
    append(s, 5)
    with pytest.warns(ResourceWarning, match="unclosed Sequence"):
        del s
    assert pg.n_blocks_in_use == 0
    other = um.PagedKVCache(2, 3, 4, n_blocks=2, name="forgotten")
    address = proc_maps.address_of(other.layer(0)[0])
    with pytest.warns(ResourceWarning, match="forgotten"):
        del other
    assert not proc_maps.is_mapped(address)


def test_a_sequence_keeps_its_cache() -> None:
    s = um.PagedKVCache(2, 3, 4, n_blocks=2, block_tokens=4, dtype="f32").sequence()
    append(s, 5)
    assert same_bits(s.gather(0)[0], heads_first(rows(5)[0]))
    s.cache.close()
    with pytest.raises(TypeError, match=r"PagedKVCache.sequence\(\)"):
        um.Sequence()


def test_repr(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        append(s, 5)
        assert repr(s) == "Sequence('paged', 5 tokens, 2 blocks)"
        assert repr(pg) == (
            "PagedKVCache('paged', 2 of 6 blocks of 4 tokens, 2 layers, 3 heads of 4 f32, 4.5 KiB)"
        )
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="memory of this process"):
            use(pg)
