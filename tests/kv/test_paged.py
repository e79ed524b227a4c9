"""Sequences in shared blocks hold what NumPy would hold, and blocks are where they should be.

What they share with all caches is in the contract: tests/support/contracts/conformance.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import (
    GIVEN_DTYPES,
    KV_DTYPES,
    NUMPY_DTYPES,
    as_float32,
    given,
    same_bits,
    stored,
)
from support.contracts.paged_tokens import (
    append,
    fed,
    feed,
    heads_first,
    holds_tokens,
    n_cached,
    rows,
    state,
    table,
)

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def pg() -> Iterator[um.PagedKVCache]:
    with um.PagedKVCache(2, 3, 4, n_blocks=6, block_tokens=4, dtype="f32") as pg:
        yield pg


# ---- appending and gathering ----


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("n", [0, 1, 4, 13])
def test_both_shapes_hold_the_same(dtype: Any, n: int) -> None:
    dim = 32 if dtype == "q8_0" else 5
    k, v = given(np.random.default_rng(n), (2, n, 3, dim), "float32")
    pool = um.PagedKVCache(2, 3, dim, n_blocks=8, block_tokens=4, dtype=dtype)
    with pool as pg, pg.sequence() as s:
        s.append(0, k, v)
        assert len(s) == 0
        s.append(1, heads_first(k)[None], heads_first(v)[None])
        assert len(s) == n
        assert table(s) == sorted(table(s))
        assert pg.n_blocks_in_use == len(table(s)) == -(-n // 4)
        assert s.block_table.dtype == np.int32
        for layer in range(2):
            for part, whole in zip(s.gather(layer), (k, v), strict=True):
                assert part.flags.c_contiguous
                assert same_bits(part, stored(heads_first(whole), dtype))
        # The same through the block table, as a kernel reads it.
        for blocks, whole in zip(pg.layer(1), (k, v), strict=True):
            assert blocks.shape[:3] == (8, 4, 3)
            through = blocks[s.block_table].reshape(-1, *blocks.shape[2:])[:n]
            assert same_bits(np.ascontiguousarray(through), stored(whole, dtype))
        del blocks


def test_q8_0_takes_its_own_blocks() -> None:
    k, v = stored(given(np.random.default_rng(0), (2, 3, 2, 64), "float32"), "q8_0")
    with um.PagedKVCache(1, 2, 64, n_blocks=2, dtype="q8_0") as pg, pg.sequence() as s:
        s.append(0, k, v)
        assert same_bits(s.gather(0)[1], heads_first(v))
        s.append_all(k[:1], v[:1])
        assert same_bits(s.gather(0)[0][:, 3:].copy(), heads_first(k[:1]))
        with pytest.raises(ValueError, match=r"expected k and v of shape.*; append takes more"):
            s.append_all(np.zeros((1, 2, 64), k.dtype), v[:1])
    with um.PagedKVCache(1, 2, 64, n_blocks=2, dtype="f16") as pg, pg.sequence() as s:
        for append_them, n in ((partial(s.append, 0), 3), (s.append_all, 1)):
            with pytest.raises(TypeError, match="expected float32"):
                append_them(k[:n], v[:n])
        assert len(s) == 0


@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
@pytest.mark.parametrize("out_dtype", GIVEN_DTYPES)
def test_gather_into_arrays_of_the_callers(dtype: Any, out_dtype: str) -> None:
    numbers = NUMPY_DTYPES[dict(zip(GIVEN_DTYPES, KV_DTYPES, strict=False))[out_dtype]]
    k, v = given(np.random.default_rng(0), (2, 7, 3, 32), "float32")
    pool = um.PagedKVCache(2, 3, 32, n_blocks=6, block_tokens=4, dtype=dtype)
    with pool as pg, pg.sequence() as s:
        for layer in range(2):
            s.append(layer, k, v)
        whole = np.full((2, 3, 10, 32), -1).astype(numbers)
        out = whole[0, :, :7], whole[1, :, 2:9]
        assert s.gather(1, out) is out
        for part, given_part in zip(out, (k, v), strict=True):
            expected = as_float32(stored(heads_first(given_part), dtype))
            assert (part == expected.astype(numbers)).all()
        for untouched in (whole[0, :, 7:], whole[1, :, :2], whole[1, :, 9:]):
            assert (untouched == -1).all()


def test_bad_outs_are_refused(pg: um.PagedKVCache) -> None:
    def fresh(shape: tuple[int, ...] = (3, 5, 4), dtype: Any = "f4") -> Any:
        return np.full(shape, 7, dtype)

    read_only = fresh()
    read_only.flags.writeable = False
    bad: list[tuple[type[Exception], Any]] = [
        *((ValueError, fresh(shape)) for shape in ((3, 4, 4), (5, 3, 4), (3, 5, 4, 1))),
        (ValueError, fresh((3, 5, 8))[..., ::2]),
        (ValueError, fresh((3, 10, 4))[:, ::2]),
        (ValueError, np.broadcast_to(fresh((1, 5, 4)), (3, 5, 4))),
        (ValueError, fresh()[::-1]),
        (ValueError, read_only),
        *((TypeError, fresh(dtype=dtype)) for dtype in (">f4", "f8", NUMPY_DTYPES["q8_0"].descr)),
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
        with pytest.raises(ValueError, match="out: expected two"):
            s.gather(0, (fresh(),))  # type: ignore[arg-type]


def test_large_gathers_are_the_same() -> None:
    """Beyond a size the copy goes another way."""
    k, v = np.random.default_rng(0).integers(0, 2**15, (2, 9000, 4, 64)).astype(np.uint16)
    with um.PagedKVCache(1, 4, 64, n_blocks=563) as pg, pg.sequence() as s:
        s.append(0, k.view(np.float16), v.view(np.float16))
        for part, whole in zip(s.gather(0), (k, v), strict=True):
            assert (part.view("u2") == heads_first(whole)).all()


def test_wrong_appends_are_refused(pg: um.PagedKVCache) -> None:
    """Beside those of the contract."""

    def ones(*shape: int, dtype: str = "f4") -> Any:
        return np.ones(shape, dtype)

    with pg.sequence() as s:
        append(s, 5)
        before = state(pg, s)
        for k, v in (
            (ones(1, 3, 4), ones(2, 3, 4)),
            (ones(1, 4, 3), ones(1, 4, 3)),
            (ones(2, 3, 1, 4), ones(2, 3, 1, 4)),
            (ones(1, 3, 4), ones(1, 3, 1, 4)),
        ):
            with pytest.raises(ValueError, match="expected"):
                s.append(0, k, v)
        with pytest.raises(TypeError, match="one dtype"):
            s.append(0, ones(1, 3, 4), ones(1, 3, 4, dtype="f2"))
        with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
            s.append_all(ones(9, 3, 4), ones(9, 3, 4))
        with pytest.raises(TypeError, match="one dtype"):
            s.append_all(ones(2, 3, 4), ones(2, 3, 4, dtype="f2"))
        for call in (s.gather, pg.layer):
            with pytest.raises(ValueError, match="layer"):
                call(2)
        assert state(pg, s) == before


# ---- sharing ----


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
            for call, n in ((partial(c.append, 1), 1), (a.append_all, 2)):
                with pytest.raises(um.CacheFull) as caught:
                    call(*rows(n))
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


def test_a_prefix_is_shared_in_whole_blocks_and_never_all(pg: um.PagedKVCache) -> None:
    tokens = list(range(100, 111))
    with fed(pg, tokens) as a:
        assert a.n_cached == 0
        for n, found in ((11, 8), (9, 8), (8, 4), (5, 4), (4, 0), (1, 0), (0, 0)):
            with pg.sequence(tokens[:n]) as b:
                assert (b.n_cached, len(b)) == (found, found)
                assert table(b) == table(a)[: found // 4]
            assert n_cached(pg, tokens[:n]) == found
        other = [*tokens[:6], 7, 8, 9]
        with fed(pg, other) as b:
            assert b.n_cached == 4
            with pg.sequence(other) as c:
                assert table(c) == table(b)[:2]
    # What nobody holds is still found.
    assert pg.n_blocks_in_use == 0
    assert n_cached(pg, np.array([*tokens, 5], np.uint16)) == 8


def test_ids_may_be_told_later(pg: um.PagedKVCache) -> None:
    with pg.sequence([1, 2]) as a:
        feed(a, range(1, 10))
        assert n_cached(pg, range(1, 6)) == 0
        a.extend([3])
        a.extend([])
        assert n_cached(pg, range(1, 6)) == 0
        a.extend((4, 5))
        assert n_cached(pg, range(1, 6)) == 4
        a.extend(np.arange(6, 13))  # some of them before their tokens
        assert n_cached(pg, range(1, 14)) == 8
        feed(a, range(1, 13))
        assert n_cached(pg, range(1, 14)) == 12


def test_a_block_counts_when_all_layers_hold_it(pg: um.PagedKVCache) -> None:
    tokens = [1, 2, 3, 4, 5]
    with pg.sequence(tokens) as a:
        k, v = rows(5)
        for layer, part in ((0, slice(5)), (1, slice(3))):
            a.append(layer, k[part], v[part])
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
            assert n_cached(pg, [1, 2, 3]) == 0
        assert pg.n_blocks_available == 4
        assert not any(pg._is_cached(block) for block in range(4))


def test_blocks_that_nobody_uses_make_room_the_oldest_first(pg: um.PagedKVCache) -> None:
    def run(tokens: list[int]) -> list[int]:
        with fed(pg, tokens) as s:
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
    with fed(pg, range(9)) as a:
        with fed(pg, range(100, 109)):
            pass
        with pg.sequence() as c:
            append(c, 12)
            with pytest.raises(um.CacheFull) as caught:
                append(c, 1)
            assert (caught.value.used, caught.value.asked) == (6, 1)
        assert holds_tokens(a, range(9))
        assert n_cached(pg, range(9)) == 8


def test_of_two_that_compute_the_same_the_first_stays(pg: um.PagedKVCache) -> None:
    tokens = list(range(6))
    a, b = pg.sequence(tokens), pg.sequence(tokens)
    for s in (a, b):
        feed(s, tokens)
    assert not set(table(a)) & set(table(b))
    assert n_cached(pg, tokens) == 4
    with pg.sequence(tokens) as c:
        assert table(c) == table(a)[:1]
    # The second's own block is no use to anybody; those behind it are found through the first's.
    b.extend([6, 7, 8])
    feed(b, range(9))
    with pg.sequence(range(9)) as c:
        assert table(c) == [table(a)[0], table(b)[1]]
    first = table(a)[0]
    a.close()
    with pg.sequence() as c:
        append(c, 9)  # all that is free, and the one that is cached
        assert first in table(c)
        assert n_cached(pg, range(9)) == 0
        b.extend([9, 10, 11])
        feed(b, range(12))  # now the second's own blocks count
    assert n_cached(pg, range(13)) == 12
    with pg.sequence(range(13)) as c:
        assert table(c) == table(b)
    b.close()


def test_a_cached_block_that_is_written_is_not_found_any_more(pg: um.PagedKVCache) -> None:
    tokens = list(range(8))
    with fed(pg, tokens) as a:
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
        for wanted, found in ((tokens, 8), ([*tokens[:6], 60, 61], 4), (changed, 8)):
            assert n_cached(pg, [*wanted, 99]) == found


def test_a_fork_goes_on_with_ids_of_its_own(pg: um.PagedKVCache) -> None:
    with fed(pg, range(6)) as a, a.fork() as b:
        assert b.n_cached == a.n_cached == 0
        for s, end in ((a, [10, 11, 12]), (b, [20, 21, 22])):
            s.extend(end)
            feed(s, [*range(6), *end])
        for s, end in ((a, [10, 11, 12]), (b, [20, 21, 22])):
            with pg.sequence([*range(6), *end]) as c:
                assert table(c) == table(s)[:2]
    assert n_cached(pg, [*range(6), 20, 21, 22]) == 8


@pytest.mark.parametrize(("ids", "error"), [([1.5], TypeError), ([-1], ValueError)])
def test_what_is_no_token_id_is_refused(
    pg: um.PagedKVCache, ids: Any, error: type[Exception]
) -> None:
    """By the check of tests/kv/test_token_ids.py."""
    with pytest.raises(error, match="tokens: expected"):
        pg.sequence(ids)
    with pg.sequence([2**31 - 1, 0]) as s:
        with pytest.raises(error, match="ids: expected"):
            s.extend(ids)
        s.extend([1, 2])
        append(s, 4)
        with pg.sequence([2**31 - 1, 0, 1, 2, 3]) as other:
            assert other.n_cached == 4
