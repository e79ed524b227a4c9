"""Sequences in shared blocks hold what NumPy would hold, and blocks are where they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import unimem as um
from kv_model import GIVEN_DTYPES, KV_DTYPES, Array, as_float32, given, same_bits, stored
from paged_tokens import append, rows, seen, state, table
from unimem.kv import prefix

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def pg() -> Iterator[um.PagedKVCache]:
    with um.PagedKVCache(2, 3, 4, n_blocks=6, block_tokens=4, dtype="f32") as pg:
        yield pg


# ---- appending and gathering ----


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("from_dtype", GIVEN_DTYPES)
@pytest.mark.parametrize("n", [0, 1, 4, 13])
def test_both_shapes_hold_the_same(dtype: Any, from_dtype: str, n: int) -> None:
    dim = 32 if dtype == "q8_0" else 5
    k, v = given(np.random.default_rng(n), (2, n, 3, dim), from_dtype)
    with (
        um.PagedKVCache(2, 3, dim, n_blocks=8, block_tokens=4, dtype=dtype) as pg,
        pg.sequence() as s,
    ):
        s.append(0, k, v)
        assert len(s) == (0 if n else n)
        s.append(1, k.transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None])
        assert len(s) == n
        assert table(s) == sorted(table(s))
        assert pg.n_blocks_in_use == len(table(s)) == -(-n // 4)
        for layer in range(2):
            for part, whole in zip(s.gather(layer), (k, v), strict=True):
                assert part.flags.c_contiguous
                assert same_bits(part, stored(whole.transpose(1, 0, 2), dtype))
        # The same through the block table, as a kernel reads it.
        for pool, whole in zip(pg.layer(1), (k, v), strict=True):
            assert pool.shape[:3] == (8, 4, 3)
            through = pool[s.block_table].reshape(-1, *pool.shape[2:])[:n]
            assert same_bits(np.ascontiguousarray(through), stored(whole, dtype))
        del pool


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_tokens_come_in_any_pieces(dtype: Any) -> None:
    dim = 32 if dtype == "q8_0" else 6
    k, v = given(np.random.default_rng(3), (2, 200, 2, dim), "float32")
    with um.PagedKVCache(1, 2, dim, n_blocks=40, block_tokens=5, dtype=dtype) as pg:
        s = pg.sequence()
        first = 0
        for n in (1, 1, 3, 5, 2, 90, 7, 1, 90):
            s.append(0, k[first : first + n], v[first : first + n])
            first += n
            assert len(s) == first
            assert s.block_table.dtype == np.int32
            assert s.block_table.shape == (-(-first // 5),)
        for part, whole in zip(s.gather(0), (k, v), strict=True):
            assert same_bits(part, stored(whole.transpose(1, 0, 2), dtype))
        s.close()


def test_q8_0_takes_its_own_blocks() -> None:
    k, v = given(np.random.default_rng(0), (2, 3, 2, 64), "float32")
    with um.PagedKVCache(1, 2, 64, n_blocks=2, dtype="q8_0") as pg, pg.sequence() as s:
        s.append(0, stored(k, "q8_0"), stored(v, "q8_0"))
        assert same_bits(s.gather(0)[1], stored(v.transpose(1, 0, 2), "q8_0"))
        s.append_all(stored(k[:1], "q8_0"), stored(v[:1], "q8_0"))
        assert same_bits(s.gather(0)[0][:, 3:].copy(), stored(k[:1].transpose(1, 0, 2), "q8_0"))
        with pytest.raises(ValueError, match="expected k and v of shape"):
            s.append_all(np.zeros((1, 2, 64), stored(k, "q8_0").dtype), stored(v[:1], "q8_0"))
    with um.PagedKVCache(1, 2, 64, n_blocks=2, dtype="f16") as pg, pg.sequence() as s:
        with pytest.raises(TypeError, match="expected float32"):
            s.append(0, stored(k, "q8_0"), stored(v, "q8_0"))
        with pytest.raises(TypeError, match="expected float32"):
            s.append_all(stored(k[:1], "q8_0"), stored(v[:1], "q8_0"))
        assert len(s) == 0


def test_append_all_is_one_token_of_every_layer(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        k, v = np.random.default_rng(0).normal(size=(2, 9, 2, 3, 4)).astype("float32")
        for n in range(9):
            s.append_all(k[n], v[n])
            assert len(s) == n + 1
        for layer in range(2):
            assert same_bits(s.gather(layer)[0], k[:, layer].transpose(1, 0, 2).copy())
        with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
            s.append_all(k[:, 0], v[:, 0])
        with pytest.raises(TypeError, match="one dtype"):
            s.append_all(k[0], v[0].astype("float16"))
        s.append(1, *rows(1))
        with pytest.raises(RuntimeError, match="layers differ"):
            s.append_all(k[0], v[0])
        assert len(s) == 9


def test_a_layer_may_be_ahead(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        append(s, 3)
        s.append(0, *rows(6))
        assert len(s) == 3
        assert s.gather(0)[0].shape == (3, 9, 4)
        assert s.gather(1)[0].shape == (3, 3, 4)
        assert pg.n_blocks_in_use == 3
        for refused in (lambda: s.crop(1), s.fork):
            with pytest.raises(RuntimeError, match="layers differ in length: roll back first"):
                refused()
        s.append(1, *rows(6))
        assert len(s) == 9
        s.append(1, *rows(8))
        assert pg.n_blocks_in_use == 5
        s.rollback()
        assert len(s) == 9
        assert pg.n_blocks_in_use == 3
        assert same_bits(s.gather(1)[0][:, 3:], rows(6)[0].transpose(1, 0, 2).copy())


def test_strided_arrays_are_read(pg: um.PagedKVCache) -> None:
    k, v = rows(5)
    with pg.sequence() as s:
        s.append(0, np.repeat(k, 2, axis=2)[..., ::2], np.asfortranarray(v))
        s.append(1, k[::-1].copy()[::-1], v.astype(">f4"))
        for layer in range(2):
            assert same_bits(s.gather(layer)[0], k.transpose(1, 0, 2).copy())
            assert same_bits(s.gather(layer)[1], v.transpose(1, 0, 2).copy())


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_gather_into_arrays_of_the_callers(pg: um.PagedKVCache, out_dtype: str) -> None:
    kind = stored(np.zeros(1), {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[out_dtype])
    with pg.sequence() as s:
        append(s, 7)
        whole = np.full((2, 3, 10, 4), -1).astype(kind.dtype)
        out = whole[0, :, :7], whole[1, :, 2:9]
        assert s.gather(1, out) is out
        for part, expected in zip(out, rows(7), strict=True):
            assert (part == expected.transpose(1, 0, 2).astype(kind.dtype)).all()
        assert (whole[0, :, 7:] == -1).all()
        assert (whole[1, :, :2] == -1).all()
        assert (whole[1, :, 9:] == -1).all()


def test_q8_0_is_gathered_as_floats() -> None:
    k, v = given(np.random.default_rng(0), (2, 9, 2, 32), "float32")
    with (
        um.PagedKVCache(1, 2, 32, n_blocks=4, block_tokens=4, dtype="q8_0") as pg,
        pg.sequence() as s,
    ):
        s.append(0, k, v)
        out = np.empty((2, 9, 32), "f4"), np.empty((2, 9, 32), "f4")
        s.gather(0, out)
        for part, whole in zip(out, (k, v), strict=True):
            assert same_bits(part, as_float32(stored(whole.transpose(1, 0, 2), "q8_0")))


def test_bad_outs_are_refused(pg: um.PagedKVCache) -> None:
    def fresh(shape: tuple[int, ...] = (3, 5, 4), dtype: Any = "f4") -> Array:
        return np.full(shape, 7, dtype)

    read_only = fresh()
    read_only.flags.writeable = False
    bad: list[tuple[type[Exception], Any]] = [
        (ValueError, fresh((3, 4, 4))),
        (ValueError, fresh((5, 3, 4))),
        (ValueError, fresh((3, 5, 4, 1))),
        (ValueError, fresh((3, 5, 8))[..., ::2]),
        (ValueError, fresh((3, 10, 4))[:, ::2]),
        (ValueError, np.broadcast_to(fresh((1, 5, 4)), (3, 5, 4))),
        (ValueError, fresh()[::-1]),
        (ValueError, read_only),
        (TypeError, fresh(dtype=">f4")),
        (TypeError, fresh(dtype="f8")),
        (TypeError, fresh(dtype=[("d", "<f2"), ("qs", "i1", (32,))])),
        (TypeError, [[0.0]]),
    ]
    with pg.sequence() as s:
        append(s, 5)
        for error, wrong in bad:
            good = fresh()
            for out in ((good, wrong), (wrong, good)):
                with pytest.raises(error, match=r"out: expected|expected float32"):
                    s.gather(0, out)
            assert (good == 7).all()
        with pytest.raises(ValueError, match="unpack"):
            s.gather(0, (fresh(),))  # type: ignore[arg-type]


def test_large_gathers_are_the_same() -> None:
    """Beyond a size the copy goes another way."""
    k, v = np.random.default_rng(0).integers(0, 2**15, (2, 9000, 4, 64)).astype(np.uint16)
    k, v = k.view(np.float16), v.view(np.float16)
    with um.PagedKVCache(1, 4, 64, n_blocks=563) as pg, pg.sequence() as s:
        s.append(0, k, v)
        for part, whole in zip(s.gather(0), (k, v), strict=True):
            assert (part.view("u2") == whole.transpose(1, 0, 2).view("u2")).all()


@pytest.mark.parametrize(
    ("layer", "k", "v", "error"),
    [
        (2, (1, 3, 4), (1, 3, 4), ValueError),
        (-1, (1, 3, 4), (1, 3, 4), ValueError),
        (0, (1, 3, 4), (2, 3, 4), ValueError),
        (0, (1, 4, 3), (1, 4, 3), ValueError),
        (0, (3, 4), (3, 4), ValueError),
        (0, (2, 3, 1, 4), (2, 3, 1, 4), ValueError),
        (0, (1, 3, 4), (1, 3, 1, 4), ValueError),
    ],
)
def test_wrong_appends_are_refused(
    pg: um.PagedKVCache, layer: int, k: Any, v: Any, error: type[Exception]
) -> None:
    with pg.sequence() as s:
        append(s, 5)
        before = state(pg, s)
        with pytest.raises(error, match="expected"):
            s.append(layer, np.ones(k, "f4"), np.ones(v, "f4"))
        for wrong in (np.ones((1, 3, 4)), np.ones((1, 3, 4), "i4"), [1.0]):
            with pytest.raises(TypeError, match="expected"):
                s.append(0, wrong, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="one dtype"):
            s.append(0, np.ones((1, 3, 4), "f4"), np.ones((1, 3, 4), "f2"))
        with pytest.raises(ValueError, match="layer"):
            s.gather(2)
        with pytest.raises(ValueError, match="layer"):
            pg.layer(2)
        assert state(pg, s) == before


# ---- sharing ----


def test_a_fork_shares_all_and_copies_the_tail_when_it_is_written(pg: um.PagedKVCache) -> None:
    with pg.sequence() as a:
        append(a, 10)
        with a.fork() as b, b.fork() as c:
            assert table(a) == table(b) == table(c)
            assert [pg._n_holders(block) for block in table(a)] == [3, 3, 3]
            assert pg.n_blocks_in_use == 3
            append(b, 1, seed=1)
            assert table(b)[:2] == table(a)[:2]
            assert table(b)[2] != table(a)[2]
            assert pg.n_blocks_in_use == 4
            append(c, 2, seed=2)
            append(a, 3, seed=3)  # alone with its tail by now: no copy
            assert pg.n_blocks_in_use == 6
            for s, n in ((a, 3), (b, 1), (c, 2)):
                seed = {3: 3, 1: 1, 2: 2}[n]
                expected = np.concatenate([rows(10)[0], rows(n, seed)[0]])
                assert same_bits(s.gather(1)[0], expected.transpose(1, 0, 2).copy())
        assert pg.n_blocks_in_use == 4
        assert [pg._n_holders(block) for block in table(a)] == [1, 1, 1, 1]


def test_crop_and_close_give_blocks_back(pg: um.PagedKVCache) -> None:
    a = pg.sequence()
    append(a, 24)
    assert (pg.n_blocks_in_use, pg.n_blocks_available) == (6, 0)
    b = a.fork()
    for n, held in ((24, 6), (21, 6), (20, 5), (9, 3), (8, 2)):
        a.crop(n)
        assert len(a) == n
        assert len(table(a)) == held
        assert pg.n_blocks_in_use == 6
    with pytest.raises(ValueError, match="at most 8"):
        a.crop(9)
    with pytest.raises(ValueError, match="n: expected"):
        a.crop(-1)
    b.close()
    assert (pg.n_blocks_in_use, pg.n_blocks_available) == (2, 4)
    assert same_bits(a.gather(0)[1], rows(24)[1][:8].transpose(1, 0, 2).copy())
    a.crop(0)
    assert pg.n_blocks_in_use == 0
    assert a.gather(0)[0].shape == (3, 0, 4)
    append(a, 1)
    a.close()
    a.close()
    assert pg.n_blocks_available == 6


def test_a_full_pool_refuses_and_changes_nothing(pg: um.PagedKVCache) -> None:
    with pg.sequence() as a, pg.sequence() as b:
        append(a, 18)
        before = state(pg, a, b)
        with pytest.raises(um.CacheFull, match="asked for 2 blocks, but 5 of 6 are used") as caught:
            b.append(0, *rows(5))
        assert (caught.value.limit, caught.value.used, caught.value.asked) == (6, 5, 2)
        assert state(pg, a, b) == before
        append(b, 4)
        with a.fork() as c:
            before = state(pg, a, b, c)
            # There is room in the tail, but not for a copy of it.
            calls: list[Callable[[], None]] = [
                lambda: c.append(1, *rows(1)),
                lambda: a.append_all(*rows(2)),
            ]
            for call in calls:
                with pytest.raises(um.CacheFull) as caught:
                    call()
                assert (caught.value.limit, caught.value.used, caught.value.asked) == (6, 6, 1)
            assert state(pg, a, b, c) == before
        append(a, 2)
        assert len(a) == 20


def test_the_pool_can_be_written_through_its_views(pg: um.PagedKVCache) -> None:
    with pg.sequence() as s:
        append(s, 6)
        k, v = pg.layer(1)
        block = table(s)[1]
        k[block, 1, 2] = 9
        v[block, 0] = -9
        k_seen, v_seen = s.gather(1)
        assert (k_seen[2, 5] == 9).all()
        assert (v_seen[:, 4] == -9).all()
        assert k.strides[0] == v.strides[0] == pg.block_bytes
        del k, v


# ---- prefixes ----


def n_cached(pg: um.PagedKVCache, tokens: Iterable[int]) -> int:
    with pg.sequence(list(tokens)) as s:
        assert len(s) == s.n_cached
        return s.n_cached


def feed(s: um.Sequence, tokens: list[int]) -> None:
    """Append what a model would compute for tokens: it depends on all tokens before."""
    for layer in range(s.cache.n_layers):
        n = len(s.gather(layer)[0][0])
        values = np.array(
            [hash((tuple(tokens[: i + 1]), layer)) % 10007 for i in range(n, len(tokens))], "f4"
        )
        k = np.broadcast_to(values[:, None, None], (len(values), 3, 4)).copy()
        s.append(layer, k, -k)


def holds_tokens(s: um.Sequence, tokens: list[int]) -> bool:
    with um.PagedKVCache(2, 3, 4, n_blocks=64, block_tokens=4, dtype="f32") as other:
        fresh = other.sequence()
        feed(fresh, tokens)
        same = seen(s) == seen(fresh)
        fresh.close()
    return same


def test_a_prefix_is_shared_in_whole_blocks_and_never_all(pg: um.PagedKVCache) -> None:
    tokens = list(range(100, 111))
    with pg.sequence(tokens) as a:
        assert (a.n_cached, len(a)) == (0, 0)
        feed(a, tokens)
        for n, n_cached in ((11, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0), (0, 0)):
            with pg.sequence(tokens[:n]) as b:
                assert (b.n_cached, len(b)) == (n_cached, n_cached)
                assert table(b) == table(a)[: n_cached // 4]
                assert holds_tokens(b, tokens[:n_cached])
        with pg.sequence([*tokens[:6], 7, 8, 9]) as b:
            assert b.n_cached == 4
            feed(b, [*tokens[:6], 7, 8, 9])
            assert b.n_cached == 4
            with pg.sequence([*tokens[:6], 7, 8, 9]) as c:
                assert c.n_cached == 8
                assert table(c) == table(b)[:2]
    # What nobody holds is still found.
    assert pg.n_blocks_in_use == 0
    with pg.sequence(np.array([*tokens, 5], np.uint16)) as b:
        assert b.n_cached == 8
        assert holds_tokens(b, tokens[:8])


def test_ids_may_be_told_later(pg: um.PagedKVCache) -> None:
    with pg.sequence([1, 2]) as a:
        feed(a, [1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert n_cached(pg, [1, 2, 3, 4, 5]) == 0
        a.extend([3])
        a.extend([])
        assert n_cached(pg, [1, 2, 3, 4, 5]) == 0
        a.extend((4, 5))
        with pg.sequence([1, 2, 3, 4, 5]) as b:
            assert b.n_cached == 4
        a.extend(np.arange(6, 13))  # some of them before their tokens
        with pg.sequence(range(1, 14)) as b:
            assert b.n_cached == 8
        feed(a, list(range(1, 13)))
        with pg.sequence(range(1, 14)) as b:
            assert b.n_cached == 12


def test_a_block_counts_when_all_layers_hold_it(pg: um.PagedKVCache) -> None:
    tokens = [1, 2, 3, 4, 5]
    with pg.sequence(tokens) as a:
        k, v = rows(5)
        a.append(0, k, v)
        assert n_cached(pg, tokens) == 0
        a.append(1, k[:3], v[:3])
        assert n_cached(pg, tokens) == 0
        a.append(1, k[3:], v[3:])
        with pg.sequence(tokens) as b:
            assert b.n_cached == 4


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    with um.PagedKVCache(2, 3, 4, n_blocks=4, block_tokens=2, prefix_cache=False) as pg:
        with pg.sequence([1, 2, 3]) as a:
            append(a, 3)
            a.extend([4, 5])
            append(a, 2)
            a.crop(3)
            with pg.sequence([1, 2, 3]) as b:
                assert b.n_cached == 0
        assert pg.n_blocks_available == 4
        assert not any(pg._is_cached(block) for block in range(4))


def test_blocks_that_nobody_uses_make_room_the_oldest_first(pg: um.PagedKVCache) -> None:
    def run(tokens: list[int]) -> list[int]:
        with pg.sequence(tokens) as s:
            feed(s, tokens)
            return table(s)

    a, b = run(list(range(8))), run(list(range(50, 58)))
    assert pg.n_blocks_available == 6
    assert run([0, 1, 2, 3, 9])[0] == a[0]  # used again: newer than all of b, as its own block
    gone = [a[1], b[1], b[0], a[0]]
    with pg.sequence() as c:
        append(c, 8)  # the free ones
        assert not set(table(c)) & set(gone)
        for n, block in enumerate(gone):
            assert [pg._is_cached(each) for each in gone] == [False] * n + [True] * (4 - n)
            append(c, 4)
            assert table(c)[-1] == block
        with pytest.raises(um.CacheFull):
            append(c, 1)
        assert n_cached(pg, range(50, 60)) == 0


def test_a_block_in_use_is_never_taken(pg: um.PagedKVCache) -> None:
    with pg.sequence(range(9)) as a:
        feed(a, list(range(9)))
        with pg.sequence(range(100, 109)) as b:
            feed(b, list(range(100, 109)))
        with pg.sequence() as c:
            append(c, 12)
            with pytest.raises(um.CacheFull) as caught:
                append(c, 1)
            assert (caught.value.used, caught.value.asked) == (6, 1)
        assert holds_tokens(a, list(range(9)))
        with pg.sequence(range(9)) as b:
            assert b.n_cached == 8


def test_of_two_that_compute_the_same_the_first_stays(pg: um.PagedKVCache) -> None:
    tokens = list(range(6))
    a, b = pg.sequence(tokens), pg.sequence(tokens)
    feed(a, tokens)
    feed(b, tokens)
    assert not set(table(a)) & set(table(b))
    assert n_cached(pg, tokens) == 4
    with pg.sequence(tokens) as c:
        assert table(c) == table(a)[:1]
    # The second's own block is no use to anybody; those behind it are found through the first's.
    b.extend([6, 7, 8])
    feed(b, list(range(9)))
    with pg.sequence(range(9)) as c:
        assert table(c) == [table(a)[0], table(b)[1]]
    first = table(a)[0]
    a.close()
    with pg.sequence() as c:
        append(c, 9)  # all that is free, and the one that is cached
        assert first in table(c)
        assert n_cached(pg, range(9)) == 0
        b.extend([9, 10, 11])
        feed(b, list(range(12)))  # now the second's own blocks count
    with pg.sequence(range(13)) as c:
        assert c.n_cached == 12
        assert table(c) == table(b)
        assert holds_tokens(c, list(range(12)))
    b.close()


def test_a_cached_block_that_is_written_is_not_found_any_more(pg: um.PagedKVCache) -> None:
    tokens = list(range(8))
    with pg.sequence(tokens) as a:
        feed(a, tokens)
        blocks = table(a)
        a.crop(6)
        with pg.sequence([*tokens, 8]) as b:  # cropped, but not written
            assert b.n_cached == 8
            a.extend([60, 61])
            feed(a, [*tokens[:6], 60, 61])  # shared: a copy is written
            assert table(a)[0] == blocks[0]
            assert table(a)[1] != blocks[1]
            assert holds_tokens(b, tokens)
        a.crop(5)
        changed = [*tokens[:5], 70, 71, 72]
        tail = table(a)[1]
        a.extend(changed[5:])
        feed(a, changed)
        assert table(a)[1] == tail  # nobody else held it: written in place
        for wanted, n_cached in ((tokens, 8), ([*tokens[:6], 60, 61], 4), (changed, 8)):
            with pg.sequence([*wanted, 99]) as b:
                assert b.n_cached == n_cached
                assert holds_tokens(b, wanted[:n_cached])


def test_a_sequence_that_fills_the_pool_goes_on_after_a_crop(pg: um.PagedKVCache) -> None:
    with pg.sequence(range(24)) as a:
        feed(a, list(range(24)))
        a.crop(23)
        append(a, 1)
        assert len(a) == 24
        assert pg.n_blocks_available == 0


def test_a_fork_goes_on_with_ids_of_its_own(pg: um.PagedKVCache) -> None:
    with pg.sequence(range(6)) as a:
        feed(a, list(range(6)))
        with a.fork() as b:
            assert b.n_cached == a.n_cached == 0
            a.extend([10, 11, 12])
            b.extend([20, 21, 22])
            feed(a, [*range(6), 10, 11, 12])
            feed(b, [*range(6), 20, 21, 22])
            for end, owner in ((10, a), (20, b)):
                with pg.sequence([*range(6), end, end + 1, end + 2]) as c:
                    assert c.n_cached == 8
                    assert table(c) == table(owner)[:2]
        with pg.sequence([*range(6), 20, 21, 22]) as c:
            assert c.n_cached == 8


def test_other_tokens_with_the_same_hash_are_not_shared(
    pg: um.PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "digest", lambda ids, key: 3)
    with pg.sequence(range(9)) as a, pg.sequence(range(100, 109)) as b:
        feed(a, list(range(9)))
        feed(b, list(range(100, 109)))
        for tokens, n_cached in ((range(9), 4), (range(100, 109), 0), (range(4, 13), 0)):
            with pg.sequence(tokens) as c:
                assert c.n_cached == n_cached
                assert holds_tokens(c, list(tokens[:n_cached]))


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([1.5], TypeError),
        (["1"], TypeError),
        ([[1, 2]], TypeError),
        ([True], TypeError),
        (7, TypeError),
        ([None], TypeError),
        ([-1], ValueError),
        ([2**31], ValueError),
        (np.array([2**40]), ValueError),
    ],
)
def test_what_is_no_token_id_is_refused(
    pg: um.PagedKVCache, ids: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="tokens: expected"):
        pg.sequence(ids)
    with pg.sequence([2**31 - 1, 0]) as s:
        with pytest.raises(error, match="tokens: expected"):
            s.extend(ids)
        s.extend([1, 2])
        append(s, 4)
        with pg.sequence([2**31 - 1, 0, 1, 2, 3]) as other:
            assert other.n_cached == 4
