"""Caches of ggml's types of four and five bits: every kind, what they show, and what they refuse.

That blocks are ggml's, byte for byte, is shown for the library's own conversion by
tests/_core/test_convert.py; here that conversion says what is to be stored.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.contracts.kv_model import GIVEN_DTYPES, given, same_bits, stored
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]

# The numbers of unimem.h, and the fields of a block.
D: Any = ("d", "<f2")
M: Any = ("m", "<f2")
QH: Any = ("qh", "u1", (4,))
QS: Any = ("qs", "u1", (16,))
TYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "q4_0": (4, np.dtype([D, QS])),
    "q4_1": (5, np.dtype([D, M, QS])),
    "q5_0": (6, np.dtype([D, QH, QS])),
    "q5_1": (7, np.dtype([D, M, QH, QS])),
    "iq4_nl": (8, np.dtype([D, QS])),
}
HEADS, DIM = 2, 64

um_convert = ctypes.CDLL(um.get_library()).um_convert
um_convert.argtypes = [
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_void_p,
]


def blocks_of(values: Array, dtype: str) -> Array:
    floats = np.ascontiguousarray(values.astype(np.float32))
    number, kind = TYPES[dtype]
    out = np.empty((*floats.shape[:-1], floats.shape[-1] // 32), kind)
    assert um_convert(out.ctypes.data, number, floats.ctypes.data, 0, floats.size, None) == 0
    return out


def floats_of(blocks: Array, dtype: str) -> Array:
    blocks = np.ascontiguousarray(blocks)
    out = np.empty((*blocks.shape[:-1], blocks.shape[-1] * 32), np.float32)
    assert um_convert(out.ctypes.data, 0, blocks.ctypes.data, TYPES[dtype][0], out.size, None) == 0
    return out


def tokens(n: int, seed: int = 0, dtype: str = "float32") -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return given(rng, (1, HEADS, n, DIM), dtype), given(rng, (1, HEADS, n, DIM), dtype)


def shown(kv: Any, layer: int = 0) -> list[bytes]:
    return [part.tobytes() for part in kv.layer(layer)]


@pytest.fixture(params=TYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("given_dtype", GIVEN_DTYPES)
def test_what_is_stored_and_read(dtype: str, given_dtype: str) -> None:
    k, v = tokens(7, dtype=given_dtype)
    want = [blocks_of(part, dtype) for part in (k, v)]
    with um.KVCache(1, HEADS, DIM, 8, dtype=dtype) as kv:
        kv.append(0, k, v)
        assert kv.row_bytes == HEADS * DIM // 32 * TYPES[dtype][1].itemsize
        assert kv.memory_usage_bytes == 2 * 7 * kv.row_bytes
        for part, blocks in zip(kv.layer(0), want, strict=True):
            assert same_bits(part, blocks)
            assert not part.flags.owndata
        del part
        copies = kv.layer(0, "float32")
        for copy, blocks, values in zip(copies, want, (k, v), strict=True):
            assert same_bits(copy, floats_of(blocks, dtype))
            # A level is at most an eighth of the largest value of the block.
            assert np.abs(copy - values.astype(np.float32)).max() < np.abs(copy).max() / 5
        half = kv.layer(0, "float16")[0]
        assert same_bits(half, floats_of(want[0], dtype).astype(np.float16))


def test_own_blocks_go_in_as_they_are(dtype: str) -> None:
    blocks = blocks_of(tokens(3)[0], dtype)
    with um.KVCache(1, HEADS, DIM, 8, dtype=dtype) as kv:
        kv.append(0, blocks, blocks)
        assert same_bits(kv.layer(0)[1], blocks)
        for name, (_, kind) in TYPES.items():
            if kind != blocks.dtype:
                other = blocks_of(tokens(1)[0], name)
                with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
                    kv.append(0, other, other)
        assert kv.seq_len == 3
    with um.KVCache(1, HEADS, DIM, 8) as half, pytest.raises(TypeError, match="k: expected"):
        half.append(0, blocks, blocks)


@pytest.mark.parametrize(
    "options",
    [{}, {"order": "head"}, {"grow": True}, {"window": 5}, {"window": 5, "order": "head"}],
    ids=str,
)
def test_every_kind_of_cache(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    """Tokens come, one by one and many at once, and go; copies and snapshots have the same."""
    k, v = tokens(12)
    stored = [blocks_of(part, dtype) for part in (k, v)]
    with um.KVCache(2, HEADS, DIM, 32, dtype=dtype, **options) as kv:
        for first, n in ((0, 5), (5, 1), (6, 6)):
            for layer in range(2):
                kv.append(layer, k[:, :, first : first + n], v[:, :, first : first + n])
        kv.trim_to(5)
        want = [part[:, :, 7:].tobytes() for part in stored]
        assert shown(kv, 1) == want
        with kv.copy() as copy:
            assert shown(copy) == want
        kv.save(tmp_path / "kv")
        for mode in ("map", "copy"):
            with um.KVCache.restore(tmp_path / "kv", mode=mode, verify=True) as again:
                assert again.dtype == dtype
                assert shown(again, 1) == want
                again.append(0, k[:, :, :1], v[:, :, :1])
        kv.crop(4)
        assert shown(kv)[0] == stored[0][:, :, (6 if "window" in options else 7) : 11].tobytes()


def test_paged(dtype: str) -> None:
    k, v = (part[0] for part in tokens(9))
    with (
        um.PagedKVCache(1, HEADS, DIM, n_blocks=4, block_tokens=4, dtype=dtype) as pg,
        pg.sequence() as s,
    ):
        s.append(0, k.swapaxes(0, 1), v.swapaxes(0, 1))
        for part, values in zip(s.gather(0), (k, v), strict=True):
            assert same_bits(part, blocks_of(values, dtype))
        out = np.empty((2, HEADS, 9, DIM), np.float32)
        s.gather(0, out=(out[0], out[1]))
        assert same_bits(out[1], floats_of(blocks_of(v, dtype), dtype))


def test_heads_are_whole_blocks(dtype: str) -> None:
    for make in (
        lambda: um.KVCache(1, 1, 48, 8, dtype=dtype),
        lambda: um.PagedKVCache(1, 1, 48, n_blocks=1, dtype=dtype),
        lambda: um.KVCache.storage_bytes(1, 1, 48, 8, dtype=dtype),
    ):
        with pytest.raises(ValueError, match=f"head_dim: expected a multiple of 32 for {dtype}"):
            make()


def test_the_plan_is_what_a_cache_takes(dtype: str) -> None:
    dims = um.ModelDims(128, 256, 4, HEADS, DIM, 1000, 3, 512)
    assert (
        um.plan(dims, ctx=100, kv_dtype=dtype)["kv"].nbytes
        >= um.KVCache.storage_bytes(3, HEADS, DIM, 100, dtype=dtype)
        == 3 * 2 * -(-100 * HEADS * DIM // 32 * TYPES[dtype][1].itemsize // 64) * 64
    )


# ---- K of one type, V of another ----


PAIRS = [("q8_0", "q4_0"), ("f16", "q5_1"), ("iq4_nl", "q4_0"), ("q4_1", "f32")]
FLOATS: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}


def kept(values: Array, name: str) -> Array:
    """What a cache keeps of values."""
    if name == "q8_0":
        return stored(values, name)
    return values.astype(FLOATS[name]) if name in FLOATS else blocks_of(values, name)


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize(("k_dtype", "v_dtype"), PAIRS)
def test_types_apart(tmp_path: Path, k_dtype: str, v_dtype: str, order: str, grow: bool) -> None:
    """Appends, trims with the first tokens kept, moves, copies and snapshots are of both."""
    k, v = tokens(20)
    want = kept(k, k_dtype), kept(v, v_dtype)
    types: Any = {"k_dtype": k_dtype, "v_dtype": v_dtype, "order": order}
    with um.KVCache(2, HEADS, DIM, 16, grow=grow, **types) as kv:
        assert (kv.dtype, kv.v_dtype) == (k_dtype, v_dtype)
        sizes = [part.nbytes // part.shape[2] for part in want]
        assert [kv.row_bytes, kv.v_row_bytes] == sizes
        assert grow or um.KVCache.storage_bytes(2, HEADS, DIM, 16, **types) == kv.capacity_bytes

        def append(first: int, end: int) -> None:
            for layer in range(2):
                kv.append(layer, k[:, :, first:end], v[:, :, first:end])

        def check(cache: um.KVCache, *shown: int) -> None:
            for layer in range(2):
                for part, all_of in zip(cache.layer(layer), want, strict=True):
                    assert same_bits(part, all_of[:, :, list(shown)])
            assert cache.memory_usage_bytes == 2 * len(shown) * sum(sizes)

        append(0, 10)
        kv.append_all(*[np.repeat(part[:, :, 10], 2, axis=0) for part in (k, v)])
        check(kv, *range(11))
        wide = kv.layer(1, "float32")[1]
        if v_dtype in TYPES:
            assert same_bits(wide, floats_of(want[1][:, :, :11], v_dtype))
        view = kv.layer(1)[1]
        kv.trim_to(4)
        if not grow:  # a growing cache has room for them before they move
            with pytest.raises(BufferError, match="views"):
                append(11, 20)  # the tokens would move under a view of V
        del view
        append(11, 20)
        check(kv, *range(7, 20))
        kv.trim_to(9, keep_first=1)
        check(kv, 7, *range(11, 20))
        kv.crop(5)
        check(kv, 7, *range(11, 15))
        kv.save(tmp_path / "kv")
        with kv.copy() as copy, um.KVCache.restore(tmp_path / "kv") as again:
            for other in (copy, again):
                assert (other.dtype, other.v_dtype) == (k_dtype, v_dtype)
                check(other, 7, *range(11, 15))
        with (
            um.KVCache(2, HEADS, DIM, 16, **types | {"v_dtype": k_dtype}) as equal,
            pytest.raises(um.SnapshotError, match="v_dtype"),
        ):
            snapshot.read_into(equal, tmp_path / "kv")
        assert kv.enforce_memory_limit(2 * 2 * sum(sizes))
        check(kv, 13, 14)
        assert f"{k_dtype} and {v_dtype}" in repr(kv)


def test_pages_of_both_are_given_back() -> None:
    n, row = 1 << 12, [HEADS * DIM // 32 * nbytes for nbytes in (34, 18)]
    k, v = tokens(n)
    with um.KVCache(1, HEADS, DIM, n, dtype="q8_0", v_dtype="q4_0", pages="4k") as kv:
        kv.append(0, k, v)
        before = kv.resident_bytes
        kv.trim_to(n // 4)
        assert before - kv.resident_bytes == pytest.approx(3 * n // 4 * sum(row), abs=5 * 4096)
        last = [part[:, :, -(n // 4) :] for part in (k, v)]
        assert same_bits(kv.layer(0)[0], kept(last[0], "q8_0"))
        assert same_bits(kv.layer(0)[1], kept(last[1], "q4_0"))


def test_a_budget_is_of_both() -> None:
    row = HEADS * DIM // 32 * (34 + 18)
    with um.KVCache(1, HEADS, DIM, 100, v_dtype="q4_0", dtype="q8_0", budget_bytes=9 * row) as kv:
        assert kv.n_rows == 8  # each lane is rounded up to 64 bytes
        assert kv.capacity_bytes <= 9 * row
    with pytest.raises(um.CacheFull, match="less than a token"):
        um.KVCache(1, HEADS, DIM, 100, v_dtype="q4_0", dtype="q8_0", budget_bytes=row)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize(("k_dtype", "v_dtype"), PAIRS)
def test_a_ring_of_two_types(
    tmp_path: Path, k_dtype: str, v_dtype: str, order: Any, batch: int
) -> None:
    """The window of each is one array, wherever it begins; rows are those of both."""
    window = 48
    types: Any = {"k_dtype": k_dtype, "v_dtype": v_dtype, "order": order, "batch": batch}
    with um.KVCache(2, HEADS, DIM, 1 << 20, window=window, pages="4k", **types) as kv:
        n = 2 * kv.n_rows + 77
        k, v = (np.repeat(part, batch, axis=0) for part in tokens(n))
        want = kept(k, k_dtype), kept(v, v_dtype)
        assert kv.capacity_bytes == 2 * batch * kv.n_rows * (kv.row_bytes + kv.v_row_bytes)
        assert kv.capacity_bytes % 4096 == 0
        for first in range(0, n, 100):
            for layer in range(2):
                kv.append(layer, k[:, :, first : first + 100], v[:, :, first : first + 100])
        for layer in range(2):
            for part, all_of in zip(kv.layer(layer), want, strict=True):
                assert same_bits(part, all_of[:, :, -window:])
        assert kv.resident_bytes == kv.capacity_bytes
        kv.trim_to(window // 2)
        assert kv.resident_bytes <= kv.capacity_bytes
        kv.save(tmp_path / "ring")
        with kv.copy() as copy, um.KVCache.restore(tmp_path / "ring") as again:
            for other in (copy, again):
                assert (other.dtype, other.v_dtype, other.window) == (k_dtype, v_dtype, window)
                for part, all_of in zip(other.layer(1), want, strict=True):
                    assert same_bits(part, all_of[:, :, -(window // 2) :])


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize(("k_dtype", "v_dtype"), [("q8_0", "q4_0"), ("q4_0", "f32")])
def test_both_lanes_grow_and_shrink(k_dtype: str, v_dtype: str, order: Any) -> None:
    """What is committed is whole pages of each lane, and no more than its tokens need."""
    n, most = 1 << 11, 1 << 12
    k, v = tokens(n)
    want = kept(k, k_dtype), kept(v, v_dtype)
    lanes = HEADS if order == "head" else 1

    def pages(n_tokens: int) -> int:
        rows = (kv.row_bytes // lanes, kv.v_row_bytes // lanes)
        return sum(2 * lanes * -(-n_tokens * row // 4096) * 4096 for row in rows)

    with um.KVCache(
        2, HEADS, DIM, most, grow=True, k_dtype=k_dtype, v_dtype=v_dtype, order=order, pages="4k"
    ) as kv:
        for end in (1, 100, n):
            first = kv.seq_len
            for layer in range(2):
                kv.append(layer, k[:, :, first:end], v[:, :, first:end])
            assert pages(end) <= kv.capacity_bytes <= 1.25 * pages(end) + 8 * lanes * 4096
        kv.give_back()
        assert kv.capacity_bytes == pages(n) == kv.resident_bytes
        view = kv.layer(0)[1][:, :, :64]
        kv.trim_to(n // 2)
        assert kv.capacity_bytes == pages(n)  # a view of V keeps the memory of both
        del view
        kv.give_back()
        assert pages(n // 2) <= kv.capacity_bytes <= pages(n // 2) + 4 * lanes * 4096
        for part, all_of in zip(kv.layer(1), want, strict=True):
            assert same_bits(part, all_of[:, :, n // 2 :])
        del part
        kv.clear()
        kv.give_back()
        assert kv.capacity_bytes == 0


def test_a_growing_cache_of_two_types_keeps_to_its_budget() -> None:
    k, v = tokens(4000)
    types: Any = {"k_dtype": "q8_0", "v_dtype": "q4_0"}
    with um.KVCache(
        1, HEADS, DIM, 4000, grow=True, budget_bytes=50 * 4096, pages="4k", **types
    ) as kv:

        def fill() -> None:
            for at in range(0, 4000, 10):
                kv.append(0, k[:, :, at : at + 10], v[:, :, at : at + 10])

        with pytest.raises(um.CacheFull, match="budget_bytes=204800"):
            fill()
        assert 48 * 4096 <= kv.capacity_bytes <= 50 * 4096
        held = kv.seq_len
        kv.trim_to(held // 2)
        kv.append(0, k[:, :, held : held + 10], v[:, :, held : held + 10])
        assert kv.seq_len == held // 2 + 10


def test_a_mapped_snapshot_of_two_types(tmp_path: Path) -> None:
    k, v = tokens(300)
    want = kept(k, "q8_0"), kept(v, "q4_0")
    with um.KVCache(1, HEADS, DIM, 512, k_dtype="q8_0", v_dtype="q4_0") as kv:
        kv.append(0, k[:, :, :200], v[:, :, :200])
        kv.save(tmp_path / "kv")
    with um.KVCache.restore(tmp_path / "kv") as kv:
        assert kv.grow
        kv.append(0, k[:, :, 200:], v[:, :, 200:])  # beside rows of the file
        for part, all_of in zip(kv.layer(0), want, strict=True):
            assert same_bits(part, all_of)
        del part
        kv.trim_to(250, keep_first=3)
        kept_rows = [0, 1, 2, *range(50, 300)]
        for part, all_of in zip(kv.layer(0), want, strict=True):
            assert same_bits(part, all_of[:, :, kept_rows])
        kv.verify()


PAIR = "q8_0,q4_0"
# The last but one has the types of the cache.
LAYERS: list[Any] = [
    um.LayerKV(HEADS, DIM, dtype=PAIR),
    um.LayerKV(HEADS, DIM, window=48, dtype=PAIR),
    um.LayerKV(HEADS, DIM, window=48),
    um.LayerKV(HEADS, DIM, share_of=0),
]


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("order", ["token", "head"])
def test_layers_of_two_types(tmp_path: Path, order: Any, grow: bool) -> None:
    n, path = 300, tmp_path / "kv"
    k, v = tokens(n)
    same: Any = {"max_seq_len": 320, "dtype": "f16,q5_1", "order": order, "spare_rows": 32}

    def check(cache: Any, end: int) -> None:
        assert cache.dtype == ("q8_0", "q8_0", "f16", "q8_0")
        assert cache.v_dtype == ("q4_0", "q4_0", "q5_1", "q4_0")
        assert [layer.dtype for layer in cache.layers] == [PAIR, PAIR, "f16,q5_1", PAIR]
        for i, layer in enumerate(cache.layers):
            first = max(0, end - layer.window) if layer.window else 0
            pair = kept(k, cache.dtype[i]), kept(v, cache.v_dtype[i])
            for part, all_of in zip(cache.layer(i), pair, strict=True):
                assert same_bits(part, all_of[:, :, first:end])

    def made(**options: Any) -> Any:
        return um.KVCache(layers=LAYERS, grow=grow, pages="4k", **same | options)

    with made() as kv:
        planned = um.KVCache.storage_bytes(layers=LAYERS, pages="4k", **same)
        assert grow or kv.capacity_bytes == planned
        for first in range(0, n, 50):
            for layer in range(3):
                kv.append(layer, k[:, :, first : first + 50], v[:, :, first : first + 50])
        check(kv, n)
        kv.crop(n - 20)
        rows = [[part[0, :, n - 20]] * 3 for part in (k, v)]
        kv.append_all(*rows)
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


def test_one_name_is_of_both(tmp_path: Path) -> None:
    with um.KVCache(1, HEADS, DIM, 8, dtype=PAIR) as kv:
        assert (kv.dtype, kv.v_dtype) == ("q8_0", "q4_0")
        assert kv.layers == (um.LayerKV(HEADS, DIM, dtype=PAIR),)
        assert kv.capacity_bytes == um.KVCache.storage_bytes(1, HEADS, DIM, 8, dtype=PAIR)
    with um.KVCache(1, HEADS, DIM, 8, dtype=PAIR, v_dtype="f16") as kv:
        assert (kv.dtype, kv.v_dtype) == ("q8_0", "f16")
    with um.PagedKVCache(1, HEADS, DIM, n_blocks=1, dtype=PAIR) as pool:
        assert (pool.dtype, pool.v_dtype) == ("q8_0", "q4_0")
    layers: list[Any] = [um.LayerKV(HEADS, DIM, dtype="q8_0,q8_0"), um.LayerState((3,))]
    made: Any = um.KVCache(layers=layers, max_seq_len=8)
    with made as kv:
        assert kv.layers[0].dtype == "q8_0"
        assert kv.dtype == kv.v_dtype == ("q8_0", "f32")
    with pytest.raises(ValueError, match=r"dtype: expected one of f32, .*got 'f32,f16'"):
        um.LayerState((3,), "f32,f16")
    with pytest.raises(ValueError, match=r"dtype: expected one of f32, .*got 'q3'"):
        um.LayerKV(HEADS, DIM, dtype="q8_0,q3")


@pytest.mark.parametrize(("k_dtype", "v_dtype"), PAIRS)
def test_a_pool_of_two_types(k_dtype: str, v_dtype: str) -> None:
    k, v = (part[0] for part in tokens(50))
    want = kept(k, k_dtype), kept(v, v_dtype)
    with um.PagedKVCache(
        2, HEADS, DIM, n_blocks=12, block_tokens=8, k_dtype=k_dtype, v_dtype=v_dtype
    ) as pg:
        sizes = [part.nbytes // 50 for part in want]
        assert pg.block_bytes == -(-2 * 8 * sum(sizes) // 64) * 64
        assert (pg.dtype, pg.v_dtype) == (k_dtype, v_dtype)
        assert f"{k_dtype} and {v_dtype}" in repr(pg)
        with pg.sequence(range(50)) as s:
            for layer in range(2):
                s.append(layer, k[None, :, :41], v[None, :, :41])
            with s.fork() as fork:
                for i in range(41, 50):
                    fork.append_all(*(np.repeat(part[None, :, i], 2, axis=0) for part in (k, v)))
                for part, all_of in zip(fork.gather(1), want, strict=True):
                    assert same_bits(part, all_of)
            for part, all_of in zip(s.gather(0), want, strict=True):
                assert same_bits(part, all_of[:, :41])
            for part, all_of, dtype in zip(pg.layer(1), want, (k_dtype, v_dtype), strict=True):
                first = part[s.block_table[0]].transpose(1, 0, 2)
                assert same_bits(first, all_of[:, :8]), dtype
            wide = np.empty((2, HEADS, 41, DIM), np.float32)
            s.gather(0, out=(wide[0], wide[1]))
            if v_dtype in TYPES:
                assert same_bits(wide[1], floats_of(want[1][:, :41], v_dtype))


def test_what_types_apart_refuse() -> None:
    with pytest.raises(ValueError, match="expected a multiple of 32 for q4_0"):
        um.PagedKVCache(1, HEADS, 48, n_blocks=2, v_dtype="q4_0")
    with pytest.raises(ValueError, match="v_dtype: expected one of"):
        um.KVCache(1, HEADS, DIM, 8, v_dtype="q3_K")
    with pytest.raises(ValueError, match="expected a multiple of 32 for q4_0"):
        um.KVCache(1, HEADS, 48, 8, v_dtype="q4_0")
    with um.KVCache(1, HEADS, DIM, 8, dtype="q8_0", v_dtype="q4_0") as kv:
        blocks = blocks_of(tokens(1)[0], "q4_0")
        with pytest.raises(TypeError, match="expected float32, float16 or bfloat16"):
            kv.append(0, blocks, blocks)
        assert kv.is_empty


def test_unknown_types_are_named() -> None:
    with pytest.raises(ValueError, match=r"f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl"):
        um.KVCache(1, 1, 32, 8, dtype="q3_K")
