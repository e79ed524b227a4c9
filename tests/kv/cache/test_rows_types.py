"""Rows of any type and size: few bits, K of one type and V of another, heads of V of another size
than those of K, and no V.

That blocks are ggml's, byte for byte, is shown for the library's own conversion by
tests/_core/test_convert.py; here that conversion says what is to be stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import (
    ALL_DTYPES,
    FEWER_BITS,
    GIVEN_DTYPES,
    Array,
    blocks_of,
    floats_of,
    given,
    same_bits,
    stored,
)
from unimem.kv import snapshot
from unimem.kv.types import kv_name

pytestmark = pytest.mark.usefixtures("gives_memory_back")

HEADS, DIM, PAGE = 3, 64, 4096
PAIR = "q8_0,q4_0"
PAIRS = [("q8_0", "q4_0"), ("f16", "q5_1"), ("iq4_nl", "q4_0"), ("q4_1", "f32")]
PAIR_SIDES = {f"{k} and {v}": {"k_dtype": k, "v_dtype": v} for k, v in PAIRS}
SIDES: dict[str, dict[str, Any]] = {
    **{name: {"dtype": name} for name in FEWER_BITS},
    **PAIR_SIDES,
    **{
        f"{dtype}, V of {dim}": {"dtype": dtype, "v_head_dim": dim}
        for dtype in ("f32", "f16", "q8_0")
        for dim in (32, 192, 0)
    },
}
by_order = pytest.mark.parametrize("order", ["token", "head"])
by_side = pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)


def tokens(n: int, batch: int = 1, v_head_dim: int = DIM, **_: Any) -> tuple[Array, Array]:
    """K and V ``[batch, heads, n, dim]``, of a cache with these options."""
    rng = np.random.default_rng(0)
    k, v = (given(rng, (batch, HEADS, n, dim), "float32") for dim in (DIM, v_head_dim))
    return k, v


def as_stored(kv: um.KVCache, *parts: Array) -> list[Array]:
    return [stored(x, dtype) for x, dtype in zip(parts, (kv.dtype, kv.v_dtype), strict=True)]


def append(kv: um.KVCache, parts: tuple[Array, Array], first: int, end: int) -> None:
    for layer in range(kv.n_layers):
        kv.append(layer, *[part[:, :, first:end] for part in parts])


def check(kv: um.KVCache, want: list[Array], shown: Any) -> None:
    """Check that each layer shows these tokens."""
    for layer in range(kv.n_layers):
        for part, all_of in zip(kv.layer(layer), want, strict=True):
            assert same_bits(part, all_of[:, :, list(shown)])
    assert kv.memory_usage_bytes == kv.n_layers * kv.batch * len(shown) * (
        kv.row_bytes + kv.v_row_bytes
    )


@pytest.mark.parametrize("grow", [False, True])
@by_order
@by_side
def test_each_has_rows_of_its_own(
    tmp_path: Path, sides: dict[str, Any], order: Any, grow: bool
) -> None:
    """Appends, trims with the first tokens kept, moves, copies and snapshots are of both."""
    parts = tokens(23, **sides)
    planned = um.KVCache.storage_bytes(2, HEADS, DIM, 16, order=order, **sides)
    with um.KVCache(2, HEADS, DIM, 16, grow=grow, order=order, **sides) as kv:
        want, v_dim = as_stored(kv, *parts), sides.get("v_head_dim", DIM)
        dtype = kv_name(kv.dtype, kv.v_dtype)
        assert kv.layers == 2 * (um.LayerKV(HEADS, DIM, v_dim, dtype=dtype),)
        assert [kv.row_bytes, kv.v_row_bytes] == [part.nbytes // 23 for part in want]
        assert (kv.head_dim, kv.v_head_dim) == (DIM, v_dim)
        assert grow or kv.capacity_bytes == planned
        append(kv, parts, 0, 10)
        kv.append_all(*[np.repeat(part[:, :, 10], 2, axis=0) for part in parts])
        check(kv, want, range(11))
        for name, short in (("float32", "f32"), ("float16", "f16")):
            kinds = kv.dtype, kv.v_dtype
            for floats, blocks, of in zip(kv.layer(1, name), want, kinds, strict=True):
                assert same_bits(floats, stored(floats_of(blocks[:, :, :11], of), short))
        view = kv.layer(1)[bool(v_dim)]
        kv.trim_to(4)
        if not grow:  # a growing cache has room for them before they move
            with pytest.raises(BufferError, match="views"):
                append(kv, parts, 11, 20)  # the tokens would move under a view
        del view
        append(kv, parts, 11, 20)
        check(kv, want, range(7, 20))
        kv.trim_to(9, keep_first=1)
        check(kv, want, [7, *range(11, 20)])
        kv.crop(5)
        shown = [7, *range(11, 15)]
        check(kv, want, shown)
        kv.save(tmp_path / "kv")
        with (
            kv.copy() as copy,
            um.KVCache.restore(tmp_path / "kv") as mapped,
            um.KVCache.restore(tmp_path / "kv", mode="copy", verify=True) as again,
        ):
            assert mapped.grow
            for other in (copy, mapped, again):
                assert other.layers == kv.layers
                append(other, parts, 15, 23)  # beside rows of the file
                check(other, want, [*shown, *range(15, 23)])
                other.trim_to(9, keep_first=2)
                check(other, want, [7, 11, *range(14, 23)])
            mapped.verify()
        check(kv, want, shown)
        assert kv.enforce_memory_limit(2 * 2 * (kv.row_bytes + kv.v_row_bytes))
        check(kv, want, [13, 14])
        assert (f"{kv.dtype} and {kv.v_dtype}" in repr(kv)) is (kv.dtype != kv.v_dtype)


@pytest.mark.parametrize("batch", [1, 2])
@by_order
@by_side
def test_rings(tmp_path: Path, sides: dict[str, Any], order: Any, batch: int) -> None:
    """The window of each is one array, wherever it begins; lanes of both are whole pages."""
    window = 48
    options: dict[str, Any] = {"order": order, "batch": batch, "pages": "4k"} | sides
    with um.KVCache(2, HEADS, DIM, 1 << 20, window=window, **options) as kv:
        n = kv.n_rows + 77
        parts = tokens(n, **options)
        want = as_stored(kv, *parts)
        assert kv.capacity_bytes == 2 * batch * kv.n_rows * (kv.row_bytes + kv.v_row_bytes)
        assert kv.capacity_bytes % PAGE == 0
        for first in range(0, n, 300):
            append(kv, parts, first, first + 300)
        check(kv, want, range(n - window, n))
        assert um.report()["kv"].nbytes == kv.capacity_bytes == kv.resident_bytes
        kv.trim_to(window // 2)
        kv.save(tmp_path / "ring")
        with kv.copy() as copy, um.KVCache.restore(tmp_path / "ring") as again:
            for other in (copy, again):
                assert other.layers == kv.layers
                check(other, want, range(n - window // 2, n))
        kv.clear()
        kv.give_back()
        assert kv.resident_bytes == 0


@by_order
@by_side
def test_both_lanes_grow_and_shrink(sides: dict[str, Any], order: Any) -> None:
    """What is committed is whole pages of each lane, and no more than its tokens need."""
    n, n_lanes = 2000, HEADS if order == "head" else 1
    parts = tokens(n, **sides)

    def pages(n_tokens: int) -> int:
        rows = (kv.row_bytes // n_lanes, kv.v_row_bytes // n_lanes)
        return sum(2 * n_lanes * -(-n_tokens * row // PAGE) * PAGE for row in rows)

    options: dict[str, Any] = {"grow": True, "pages": "4k", "order": order} | sides
    with um.KVCache(2, HEADS, DIM, 4000, **options) as kv:
        want = as_stored(kv, *parts)
        for first, end in ((0, 1), (1, 100), (100, n)):
            append(kv, parts, first, end)
            assert pages(end) <= kv.capacity_bytes <= 1.25 * pages(end) + 8 * n_lanes * PAGE
        kv.give_back()
        assert kv.capacity_bytes == pages(n) == kv.resident_bytes == um.report()["kv"].nbytes
        view = kv.layer(0)[bool(kv.v_row_bytes)][:, :, :64]
        kv.trim_to(n // 2)
        assert kv.capacity_bytes == pages(n)  # a view of one keeps the memory of both
        del view
        kv.trim_to(n // 4, keep_first=3)
        kv.give_back()
        assert pages(n // 4) <= kv.capacity_bytes <= pages(n // 4 + 3) + 4 * n_lanes * PAGE
        check(kv, want, [n // 2, n // 2 + 1, n // 2 + 2, *range(n - n // 4, n)])
        assert kv.enforce_memory_limit(pages(100))
        assert kv.capacity_bytes <= pages(100) + 4 * n_lanes * PAGE
        kv.clear()
        kv.give_back()
        assert kv.capacity_bytes == 0
    budget = 2 * 40 * PAGE
    with um.KVCache(2, HEADS, DIM, 4000, budget_bytes=budget, **options) as kv:

        def fill() -> None:
            while True:
                append(kv, parts, 0, 10)

        with pytest.raises(um.CacheFull, match=f"budget_bytes={budget}"):
            fill()
        assert 0.8 * budget <= kv.capacity_bytes <= budget
        kv.rollback()
        held = kv.seq_len
        kv.trim_to(held // 2)
        append(kv, parts, 0, 10)
        assert kv.seq_len == held // 2 + 10


def test_pages_of_both_are_given_back() -> None:
    n = 1 << 12
    parts = tokens(n)
    with um.KVCache(1, HEADS, DIM, n, dtype=PAIR, pages="4k") as kv:
        append(kv, parts, 0, n)
        before, row = kv.resident_bytes, kv.row_bytes + kv.v_row_bytes
        kv.trim_to(n // 4)
        assert before - kv.resident_bytes == pytest.approx(3 * n // 4 * row, abs=5 * PAGE)
        check(kv, as_stored(kv, *parts), range(n - n // 4, n))


def test_a_budget_is_of_both() -> None:
    row = HEADS * DIM // 32 * (34 + 18)
    with um.KVCache(1, HEADS, DIM, 100, dtype=PAIR, budget_bytes=9 * row) as kv:
        assert kv.n_rows == 8  # each lane is rounded up to 64 bytes
        assert kv.capacity_bytes <= 9 * row
    with pytest.raises(um.CacheFull, match="less than a token"):
        um.KVCache(1, HEADS, DIM, 100, dtype=PAIR, budget_bytes=row)


# ---- layers ----

# DeepSeek-V2's latent and its rotary part: V is the first 512 of 576 values (kv_lora_rank 512).
LATENT = um.LayerKV(1, 576, 0)


def test_compressed_keys() -> None:
    """As llama.cpp, such a layer keeps only K; attention reads a part of it as V."""
    latent, others = np.random.default_rng(0).normal(size=(5, 1, 576)), np.ones((5, 2, 64), "f4")
    latent = latent.astype("f4")
    layers = [um.LayerKV(2, 64), LATENT, um.LayerKV(1, 576, 0, share_of=1)]
    made: Any = um.KVCache(layers=layers, max_seq_len=16, dtype="f32")
    with made as kv:
        assert kv.v_head_dim == (64, 0, 0)
        assert kv.row_bytes == (512, 2304, 2304)
        assert kv.v_row_bytes == (512, 0, 0)
        assert kv.capacity_bytes == 16 * (2 * 512 + 2304)
        kv.append(1, latent, latent[..., :0])
        kv.append(0, others, others)
        k, v = kv.layer(2)
        assert (k.shape, v.shape) == ((1, 1, 5, 576), (1, 1, 5, 0))
        assert np.shares_memory(k[..., :512], kv.layer(1)[0])
        assert (k[0, 0, :, :512] == latent[:, 0, :512]).all()
        assert kv.trim_to(3)
        del k, v
        kv.clear()
        kv.give_back()


# The third has the types of the cache.
LAYERS: list[Any] = [
    um.LayerKV(HEADS, DIM, dtype=PAIR),
    um.LayerKV(HEADS, DIM, window=48, dtype=PAIR),
    um.LayerKV(HEADS, DIM, window=48),
    um.LayerKV(HEADS, DIM, 32, dtype="f16"),
    um.LayerKV(HEADS, DIM, 0, window=9, dtype="f16"),
    um.LayerKV(HEADS, DIM, share_of=0),
]


@pytest.mark.parametrize("grow", [False, True])
@by_order
def test_layers_of_two_types_and_sizes(tmp_path: Path, order: Any, grow: bool) -> None:
    n, path = 300, tmp_path / "kv"
    k, v = tokens(n)
    same: Any = {"max_seq_len": 320, "dtype": "f16,q5_1", "order": order, "spare_rows": 32}

    def new(cache: Any, first: int, end: int) -> list[tuple[Array, Array]]:
        """Tokens of the layers that have rows."""
        dims = [spec.v_head_dim for spec in cache.layers if spec.share_of is None]
        return [(k[:, :, first:end], v[:, :, first:end, :dim]) for dim in dims]

    def check(cache: Any, end: int) -> None:
        assert cache.dtype == ("q8_0", "q8_0", "f16", "f16", "f16", "q8_0")
        assert cache.v_dtype == ("q4_0", "q4_0", "q5_1", "f16", "f16", "q4_0")
        assert [layer.dtype for layer in cache.layers] == [
            *(PAIR, PAIR, "f16,q5_1", "f16", "f16", PAIR)
        ]
        for i, layer in enumerate(cache.layers):
            first = max(0, end - layer.window) if layer.window else 0
            pair = stored(k, cache.dtype[i]), stored(v[..., : layer.v_head_dim], cache.v_dtype[i])
            for part, all_of in zip(cache.layer(i), pair, strict=True):
                assert same_bits(part, all_of[:, :, first:end])

    def made(**options: Any) -> Any:
        return um.KVCache(layers=LAYERS, grow=grow, pages="4k", **same | options)

    with made() as kv:
        planned = um.KVCache.storage_bytes(layers=LAYERS, pages="4k", **same)
        assert grow or kv.capacity_bytes == planned
        for first in range(0, n, 50):
            for layer, parts in enumerate(new(kv, first, first + 50)):
                kv.append(layer, *parts)
        check(kv, n)
        kv.crop(n - 20)
        rows = [[part[0, :, 0] for part in both] for both in new(kv, n - 20, n - 19)]
        kv.append_all(*zip(*rows, strict=True))
        check(kv, n - 19)
        kv.save(path)
        with (
            kv.copy() as copy,
            um.KVCache.restore(path) as mapped,
            um.KVCache.restore(path, mode="copy") as again,
        ):
            for other in (copy, mapped, again):
                check(other, n - 19)
        with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 24, chunk_tokens=16) as store:
            ids = list(range(n))
            assert store.put(kv, ids, model="tiny") == 272
            with made() as other, made(dtype="f16,q4_0") as different:
                assert store.restore_into(different, ids, model="tiny") == 0
                assert store.restore_into(other, ids, model="tiny") == 272
                check(other, 272)
    with made() as kv, made(dtype="f16") as different:
        snapshot.read_into(kv, path)
        check(kv, n - 19)
        with pytest.raises(um.SnapshotError, match="layers="):
            snapshot.read_into(different, path)


# ---- names, pools and plans ----


def test_one_name_is_of_both() -> None:
    with um.KVCache(1, HEADS, DIM, 8, dtype=PAIR, v_dtype="f16") as kv:
        assert (kv.dtype, kv.v_dtype) == ("q8_0", "f16")
    with um.PagedKVCache(1, HEADS, DIM, n_blocks=1, dtype=PAIR) as pool:
        assert (pool.dtype, pool.v_dtype) == ("q8_0", "q4_0")
    layers: list[Any] = [um.LayerKV(HEADS, DIM, dtype="q8_0,q8_0"), um.LayerState((3,))]
    made: Any = um.KVCache(layers=layers, max_seq_len=8)
    with made as kv:
        assert kv.layers[0].dtype == "q8_0"
        assert kv.dtype == kv.v_dtype == ("q8_0", "f32")


@pytest.mark.parametrize("given_dtype", GIVEN_DTYPES)
@pytest.mark.parametrize("dtype", [*FEWER_BITS, "q8_0"])
def test_floats_are_quantized_and_blocks_go_in_as_they_are(dtype: str, given_dtype: str) -> None:
    k = given(np.random.default_rng(0), (1, HEADS, 3, DIM), given_dtype)
    blocks = stored(k, dtype)
    with um.KVCache(1, HEADS, DIM, 8, dtype=dtype) as kv:
        kv.append(0, k, k)
        kv.append(0, blocks, blocks)
        for part in kv.layer(0):
            assert same_bits(part, np.concatenate([blocks, blocks], axis=2))
            assert not part.flags.owndata
        del part
        # A level is at most an eighth of the largest value of the block.
        copy = kv.layer(0, "float32")[0][:, :, :3]
        assert np.abs(copy - k.astype("f4")).max() < np.abs(copy).max() / 5
        for name in FEWER_BITS:
            if ALL_DTYPES[name] != blocks.dtype:
                other = stored(k, name)
                with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
                    kv.append(0, other, other)
        assert kv.seq_len == 6
    with um.KVCache(1, HEADS, DIM, 8) as half, pytest.raises(TypeError, match="k: expected"):
        half.append(0, blocks, blocks)


@pytest.mark.parametrize(
    ("k_dtype", "v_dtype"), [*PAIRS, *((name, name) for name in FEWER_BITS)], ids=str
)
def test_a_pool_of_blocks(k_dtype: str, v_dtype: str) -> None:
    k, v = tokens(50)
    want = [part[0] for part in (stored(k, k_dtype), stored(v, v_dtype))]
    with um.PagedKVCache(
        2, HEADS, DIM, n_blocks=12, block_tokens=8, k_dtype=k_dtype, v_dtype=v_dtype
    ) as pg:
        assert pg.block_bytes == -(-2 * 8 * sum(part.nbytes // 50 for part in want) // 64) * 64
        assert (pg.dtype, pg.v_dtype) == (k_dtype, v_dtype)
        assert k_dtype == v_dtype or f"{k_dtype} and {v_dtype}" in repr(pg)
        with pg.sequence(range(50)) as s:
            for layer in range(2):
                s.append(layer, k[:, :, :41], v[:, :, :41])
            with s.fork() as fork:
                for i in range(41, 50):
                    fork.append_all(*(np.repeat(part[:, :, i], 2, axis=0) for part in (k, v)))
                for part, all_of in zip(fork.gather(1), want, strict=True):
                    assert same_bits(part, all_of)
            for part, all_of in zip(s.gather(0), want, strict=True):
                assert same_bits(part, all_of[:, :41])
            for part, all_of, dtype in zip(pg.layer(1), want, (k_dtype, v_dtype), strict=True):
                first = part[s.block_table[0]].transpose(1, 0, 2)
                assert same_bits(first, all_of[:, :8]), dtype
            wide = np.empty((2, HEADS, 41, DIM), np.float32)
            s.gather(0, out=(wide[0], wide[1]))
            assert same_bits(wide[1], floats_of(want[1][:, :41], v_dtype))


@pytest.mark.parametrize("dtype", FEWER_BITS)
def test_the_plan_is_what_a_cache_takes(dtype: str) -> None:
    dims = um.ModelDims(128, 256, 6, HEADS, DIM, 1000, 3, 512)
    assert (
        um.plan(dims, ctx=100, kv_dtype=dtype)["kv"].nbytes
        >= um.KVCache.storage_bytes(3, HEADS, DIM, 100, dtype=dtype)
        == 3 * 2 * -(-100 * HEADS * DIM // 32 * ALL_DTYPES[dtype].itemsize // 64) * 64
    )


# ---- what is refused ----


@pytest.mark.parametrize(
    ("dims", "options", "said"),
    [
        *(
            ((1, 1, 48, 8), {"dtype": name}, f"head_dim: expected a multiple of 32 for {name}")
            for name in FEWER_BITS
        ),
        ((1, HEADS, 48, 8), {"v_dtype": "q4_0"}, "expected a multiple of 32 for q4_0"),
        ((1, 2, 64, 8), {"v_head_dim": 40, "dtype": "q8_0"}, "multiple of 32 for q8_0, got 40"),
        ((1, 2, 64, 8), {"v_dtype": "q3_K"}, "v_dtype: expected one of"),
        ((1, 1, 32, 8), {"dtype": "q3_K"}, "f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl"),
    ],
)
def test_types_that_do_not_fit_are_named(
    dims: tuple[int, int, int, int], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        um.KVCache(*dims, **options)
    with pytest.raises(ValueError, match=said):
        um.KVCache.storage_bytes(*dims, **options)
    if "v_head_dim" not in options:
        with pytest.raises(ValueError, match=said):
            um.PagedKVCache(*dims[:3], n_blocks=2, **options)


@pytest.mark.parametrize(
    ("sides", "other", "said"),
    [
        ({"dtype": PAIR}, {"dtype": "q8_0"}, "v_dtype"),
        ({"v_head_dim": 32}, {}, "v_head_dim=32, and this one has 64"),
    ],
)
def test_a_snapshot_of_another_v_is_refused(
    tmp_path: Path, sides: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    with um.KVCache(2, HEADS, DIM, 16, **sides) as kv:
        append(kv, tokens(7, **sides), 0, 7)
        kv.save(tmp_path / "kv")
    if "v_head_dim" in sides:
        assert "3 heads of 64 and 32 f16" in str(snapshot.check(tmp_path / "kv"))
    with (
        um.KVCache(2, HEADS, DIM, 16, **other) as alike,
        pytest.raises(um.SnapshotError, match=said),
    ):
        snapshot.read_into(alike, tmp_path / "kv")


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    with um.KVCache(1, HEADS, DIM, 16, v_head_dim=32) as kv:
        k, v = (part[0].swapaxes(0, 1) for part in tokens(3, v_head_dim=32))
        for wrong in (k, v[:2], v[:, :1], v[..., :0]):
            with pytest.raises(ValueError, match="and v of the same with 32 for 64, got"):
                kv.append(0, k, wrong)
            with pytest.raises(ValueError, match=r"and v of \(1, 3, 32\), got"):
                kv.append_all(k[:1], wrong)
        out = np.empty((1, HEADS, 0, DIM), "f4")
        with pytest.raises(ValueError, match="out: expected two writable arrays of shapes"):
            kv.layer(0, dtype="float32", out=(out, out))
        assert kv.is_empty
    with um.KVCache(1, HEADS, DIM, 8, dtype=PAIR) as kv:
        blocks = blocks_of(tokens(1)[0], "q4_0")
        with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
            kv.append(0, blocks, blocks)
        assert kv.is_empty
    with (
        um.KVCache(1, 1, 70000, 1, v_head_dim=8) as kv,
        pytest.raises(ValueError, match="at most 65535 values where those of V have another"),
    ):
        kv.save(tmp_path / "session")
