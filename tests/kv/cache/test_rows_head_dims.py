"""Heads of V of another size than those of K, and layers without V."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import Array, same_bits, stored
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")

# DeepSeek-V2's latent and its rotary part: V is the first 512 of 576 values (kv_lora_rank 512).
LATENT = um.LayerKV(1, 576, 0)


def tokens(n: int, heads: int, dim: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(n, heads, dim)).astype("f4")


def shown(x: Array, dtype: str) -> Array:
    """What `layer` shows of tokens ``[n, heads, dim]``."""
    return stored(x.swapaxes(0, 1)[None], dtype)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("v_dim", [32, 192, 0])
def test_each_has_rows_of_its_own_size(v_dim: int, order: Any, dtype: str) -> None:
    k, v = tokens(9, 3, 64), tokens(9, 3, v_dim, seed=1)
    planned = um.KVCache.storage_bytes(2, 3, 64, 12, v_head_dim=v_dim, dtype=dtype, order=order)
    with um.KVCache(2, 3, 64, 12, v_head_dim=v_dim, dtype=dtype, order=order) as kv:
        assert (kv.head_dim, kv.v_head_dim, kv.capacity_bytes) == (64, v_dim, planned)
        assert kv.layers[0] == um.LayerKV(3, 64, v_dim, dtype=dtype)
        assert kv.v_row_bytes * 64 == kv.row_bytes * v_dim
        for layer in range(2):
            kv.append(layer, k[:8], v[:8])
        kv.append_all(np.stack([k[8], k[8]]), np.stack([v[8], v[8]]))
        for layer in range(2):
            for got, x in zip(kv.layer(layer), (k, v), strict=True):
                assert same_bits(got, shown(x, dtype))
        assert kv.memory_usage_bytes == 2 * 9 * (kv.row_bytes + kv.v_row_bytes)
        copies = kv.layer(1, dtype="float32")
        assert [part.shape[3] for part in copies] == [64, v_dim]
        del got
        # What moves rows moves both.
        kv.trim_to(3, keep_first=2)
        kept = [0, 1, 6, 7, 8]
        for layer in range(2):
            for n in range(3):
                kv.append(layer, k[n : n + 1], v[n : n + 1])
        for got, x in zip(kv.layer(1), (k, v), strict=True):
            assert same_bits(got, shown(x[[*kept, 0, 1, 2]], dtype))
        with kv.copy() as other:
            assert other.v_head_dim == v_dim
            for got, x in zip(other.layer(1), kv.layer(1), strict=True):
                assert same_bits(got, x)
        del got, x
        assert kv.enforce_memory_limit(2 * 2 * (kv.row_bytes + kv.v_row_bytes))
        assert kv.seq_len == 2


def test_compressed_keys() -> None:
    """As llama.cpp, such a layer keeps only K; attention reads a part of it as V."""
    latent = tokens(5, 1, 576)
    layers = [um.LayerKV(2, 64), LATENT, um.LayerKV(1, 576, 0, share_of=1)]
    made: Any = um.KVCache(layers=layers, max_seq_len=16, dtype="f32")
    with made as kv:
        assert kv.v_head_dim == (64, 0, 0)
        assert kv.row_bytes == (512, 2304, 2304)
        assert kv.v_row_bytes == (512, 0, 0)
        assert kv.capacity_bytes == 16 * (2 * 512 + 2304)
        kv.append(1, latent, latent[..., :0])
        kv.append(0, tokens(5, 2, 64), tokens(5, 2, 64))
        k, v = kv.layer(2)
        assert (k.shape, v.shape) == ((1, 1, 5, 576), (1, 1, 5, 0))
        assert np.shares_memory(k[..., :512], kv.layer(1)[0])
        assert (k[0, 0, :, :512] == latent[:, 0, :512]).all()
        assert kv.trim_to(3)
        del k, v
        kv.clear()
        kv.give_back()


WINDOW = 40


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("v_dim", [32, 192, 0])
def test_rings(v_dim: int, order: Any, dtype: str) -> None:
    """The window of each is one array, wherever it begins; lanes of both are whole pages."""
    batch = 2
    options: dict[str, Any] = {"order": order, "dtype": dtype, "batch": batch, "pages": "4k"}
    with um.KVCache(2, 3, 64, 1 << 20, v_head_dim=v_dim, window=WINDOW, **options) as kv:
        n = kv.n_rows + 77
        shapes = ((batch, 3, n, dim) for dim in (64, v_dim))
        k, v = (np.random.default_rng(0).normal(size=shape).astype("f2") for shape in shapes)
        assert kv.capacity_bytes == 2 * batch * kv.n_rows * (kv.row_bytes + kv.v_row_bytes)
        for first in range(0, n, 300):
            for layer in range(2):
                kv.append(layer, k[:, :, first : first + 300], v[:, :, first : first + 300])
        for layer in range(2):
            for got, x in zip(kv.layer(layer), (k, v), strict=True):
                assert same_bits(got, stored(x[:, :, -WINDOW:], dtype))
        del got
        assert um.report()["kv"].nbytes == kv.capacity_bytes == kv.resident_bytes
        kv.trim_to(WINDOW // 2)
        with kv.copy() as other:
            assert (other.v_head_dim, other.window) == (v_dim, WINDOW)
            for got, x in zip(other.layer(1), (k, v), strict=True):
                assert same_bits(got, stored(x[:, :, -WINDOW // 2 :], dtype))
            del got
        kv.clear()
        kv.give_back()
        assert kv.resident_bytes == 0


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("v_dim", [32, 192, 0])
def test_growing_caches(v_dim: int, order: Any) -> None:
    """What is committed is whole pages of each lane, and no more than its tokens need."""
    n, n_lanes = 2000, 3 if order == "head" else 1
    k, v = tokens(n, 3, 64), tokens(n, 3, v_dim, seed=1)

    def pages(n_tokens: int) -> int:
        rows = (kv.row_bytes // n_lanes, kv.v_row_bytes // n_lanes)
        return sum(2 * n_lanes * -(-n_tokens * row // 4096) * 4096 for row in rows)

    with um.KVCache(
        2, 3, 64, 4000, v_head_dim=v_dim, grow=True, order=order, dtype="f32", pages="4k"
    ) as kv:
        for first, end in ((0, 1), (1, 100), (100, n)):
            for layer in range(2):
                kv.append(layer, k[first:end], v[first:end])
            assert pages(end) <= kv.capacity_bytes <= 1.25 * pages(end) + 8 * n_lanes * 4096
        kv.give_back()
        assert kv.capacity_bytes == pages(n) == kv.resident_bytes == um.report()["kv"].nbytes
        kv.trim_to(n // 2, keep_first=3)
        kv.give_back()
        assert pages(n // 2) <= kv.capacity_bytes <= pages(n // 2 + 3) + 4 * n_lanes * 4096
        kept = [0, 1, 2, *range(n // 2, n)]
        for got, x in zip(kv.layer(1), (k, v), strict=True):
            assert same_bits(got, shown(x[kept], "f32"))
        del got
        assert kv.enforce_memory_limit(pages(100))
        assert kv.capacity_bytes <= pages(100) + 4 * n_lanes * 4096
        kv.clear()
        kv.give_back()
        assert kv.capacity_bytes == 0
    budget = 2 * 40 * 4096
    with um.KVCache(
        2, 3, 64, 4000, v_head_dim=v_dim, grow=True, budget_bytes=budget, dtype="f32", pages="4k"
    ) as kv:

        def fill() -> None:
            for first in range(n):
                for layer in range(2):
                    kv.append(layer, k[first : first + 1], v[first : first + 1])

        with pytest.raises(um.CacheFull, match=f"budget_bytes={budget}"):
            fill()
        assert 0.8 * budget <= kv.capacity_bytes <= budget


LAYERS = [um.LayerKV(2, 64, 32), LATENT]
SLIDING = [*LAYERS, um.LayerKV(2, 64, 32, window=5), um.LayerKV(1, 576, 0, window=9)]


@pytest.mark.parametrize("order", ["token", "head"])
def test_layers_take_what_is_planned(order: Any) -> None:
    options: dict[str, Any] = {"order": order, "spare_rows": 3, "pages": "4k", "batch": 2}
    planned = um.KVCache.storage_bytes(layers=SLIDING, max_seq_len=99, **options)
    made: Any = um.KVCache(layers=SLIDING, max_seq_len=99, **options)
    with made as kv:
        assert kv.capacity_bytes == planned


SAVED: dict[str, tuple[list[um.LayerKV] | None, dict[str, Any]]] = {
    **{
        "equal": (None, {}),
        "equal, growing": (None, {"grow": True}),
        "ring": (None, {"window": 5}),
    },
    **{"layers": (LAYERS, {}), "layers, growing": (LAYERS, {"grow": True})},
    **{"sliding": (SLIDING, {}), "sliding, growing": (SLIDING, {"grow": True})},
}


@pytest.mark.parametrize("name", SAVED)
def test_a_snapshot_keeps_both_sizes(tmp_path: Path, name: str) -> None:
    (layers, options), path = SAVED[name], tmp_path / "session"
    made: Any = (
        um.KVCache(layers=layers, max_seq_len=16, dtype="f16", **options)
        if layers is not None
        else um.KVCache(1, 2, 64, 16, v_head_dim=32, **options)
    )
    with made as kv:
        for i, layer in enumerate(kv.layers):
            heads = layer.n_kv_heads
            kv.append(i, tokens(7, heads, layer.head_dim), tokens(7, heads, layer.v_head_dim, 1))
        kv.save(path)
        modes: list[Literal["map", "copy"]] = ["map", "copy"]
        for mode in modes:
            with um.KVCache.restore(path, mode=mode) as other:
                assert other.layers == kv.layers
                for layer in range(kv.n_layers):
                    for got, x in zip(other.layer(layer), kv.layer(layer), strict=True):
                        assert same_bits(got, x)
                assert other.v_head_dim == kv.v_head_dim
                if mode == "map" and name != "ring":
                    assert other.grow
                # It goes on, beside rows of the file.
                for i, layer in enumerate(kv.layers):
                    heads = layer.n_kv_heads
                    new = tokens(3, heads, layer.head_dim, 2), tokens(3, heads, layer.v_head_dim, 3)
                    other.append(i, *new)
                    for got, x in zip(other.layer(i), new, strict=True):
                        assert same_bits(got[:, :, -3:], shown(x, "f16"))
                del got
    if layers is None:
        assert "2 heads of 64 and 32 f16" in str(snapshot.check(path))
        said = "v_head_dim=32, and this one has 64"
        with um.KVCache(1, 2, 64, 16) as alike, pytest.raises(um.SnapshotError, match=said):
            snapshot.read_into(alike, path)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_dim: expected a multiple of 32 for q8_0, got 40"):
        um.KVCache(1, 2, 64, 16, v_head_dim=40, dtype="q8_0")
    with pytest.raises(ValueError, match="v_head_dim"):
        um.LayerKV(2, 64, -1)
    with um.KVCache(1, 2, 64, 16, v_head_dim=32) as kv:
        k, v = tokens(3, 2, 64), tokens(3, 2, 32)
        for wrong in (k, v[:2], v[:, :1], v[..., :0]):
            with pytest.raises(ValueError, match="and v of the same with 32 for 64, got"):
                kv.append(0, k, wrong)
            with pytest.raises(ValueError, match=r"and v of \(1, 2, 32\), got"):
                kv.append_all(k[:1], wrong)
        out = np.empty((1, 2, 0, 64), "f4")
        with pytest.raises(ValueError, match="out: expected two writable arrays of shapes"):
            kv.layer(0, dtype="float32", out=(out, out))
        assert kv.is_empty
    with (
        um.KVCache(1, 1, 70000, 1, v_head_dim=8) as kv,
        pytest.raises(ValueError, match="at most 65535 values where those of V have another"),
    ):
        kv.save(tmp_path / "session")
