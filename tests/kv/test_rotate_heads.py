"""Rotated heads, against a product with the matrix that llama.cpp generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import Array, as_float32, same_bits
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def hadamard(n: int) -> Array:
    """The matrix of Sylvester's construction, which begins with 1 / sqrt(n)."""
    matrix: Array = np.ones((1, 1)) / np.sqrt(n)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def product(x: Array, block: int) -> Array:
    """Heads times the matrix, in float64."""
    blocks = x.astype("f8").reshape(-1, block)
    rotated: Array = (blocks @ hadamard(block)).reshape(x.shape)
    return rotated


def rotated(x: Array, part: Any) -> Array:
    return um.rotate_heads(x, part)


def check_equal(ours: Array, x: Array, block: int) -> None:
    """Equal but for the rounding of float32.

    Each of log2(block) sums, the scale and its product are off by at most 2**-24 of a value that
    the length of the block bounds.
    """
    lengths = np.linalg.norm(x.astype("f8").reshape(-1, block), axis=1)
    error = np.abs(ours.astype("f8") - product(x, block)).reshape(-1, block).max(axis=1)
    assert (error <= (np.log2(block) + 3) * 2.0**-24 * lengths).all()


@pytest.mark.parametrize(
    ("dim", "k", "v"), [(64, 64, 64), (128, 128, 64), (576, 64, 64), (512, 512, 64), (192, 64, 64)]
)
def test_heads_are_multiplied_with_the_matrix(dim: int, k: int, v: int) -> None:
    x = np.random.default_rng(dim).normal(size=(3, 5, dim)).astype("f4")
    x[0, 0, 3] = 1000  # an outlier, which is what all this is for
    for part, block in (("k", k), ("v", v)):
        ours = rotated(x, part)
        assert ours.dtype == np.float32
        check_equal(ours, x, block)
    np.testing.assert_allclose(um.rotate_heads(um.rotate_heads(x)), x, atol=2e-4)


def test_scores_do_not_change() -> None:
    """What attention computes of rotated queries, keys and values is what it would without."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(9, 128)).astype("f4") for _ in range(3))
    scores = um.rotate_heads(q) @ um.rotate_heads(k).T
    np.testing.assert_allclose(scores, q @ k.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        um.rotate_heads(scores @ um.rotate_heads(v, "v"), "v"), scores @ v, rtol=1e-3, atol=1e-3
    )


def test_where_the_result_goes() -> None:
    x = np.random.default_rng(2).normal(size=(4, 64)).astype("f4")
    want, out = um.rotate_heads(x), np.empty_like(x)
    assert um.rotate_heads(x, out=out) is out
    assert same_bits(out, want)
    assert um.rotate_heads(x, out=x) is x
    assert same_bits(x, want)
    half = want.astype("f2")
    assert same_bits(um.rotate_heads(half), um.rotate_heads(half.astype("f4")))
    strided = np.repeat(want, 2, axis=0)[::2]
    assert same_bits(um.rotate_heads(strided), um.rotate_heads(want))


@pytest.mark.parametrize(
    ("x", "options", "error", "said"),
    [
        (np.ones((2, 96), "f4"), {}, ValueError, r"multiple of 64 values.*got shape \(2, 96\)"),
        (np.float32(3), {}, ValueError, "multiple of 64"),
        (np.ones((2, 64)), {}, TypeError, "expected float32, float16 or bfloat16, got float64"),
        (3, {}, TypeError, "x: expected"),
        (np.ones((2, 64), "f4"), {"part": "q"}, ValueError, "part"),
        (np.ones((2, 64), "f4"), {"out": np.ones((2, 64))}, ValueError, "out: expected a writable"),
        (np.ones((2, 64), "f4"), {"out": np.ones((1, 64), "f4")}, ValueError, "out: expected"),
        (np.ones((1, 64), "f4"), {"out": np.ones((64, 1), "f4").T}, ValueError, None),
    ],
)
def test_a_mistake_is_named(x: Any, options: Any, error: type[Exception], said: Any) -> None:
    if said is None:  # contiguous whatever its strides say
        assert um.rotate_heads(x, **options) is options["out"]
        return
    with pytest.raises(error, match=said):
        um.rotate_heads(x, **options)


# ---- caches ----


def test_quantizing_loses_less_of_outliers() -> None:
    rng = np.random.default_rng(4)
    k = rng.normal(size=(64, 1, 128)).astype("f4")
    k[:, :, ::32] *= 100  # some channels, as keys of real models have them
    q = rng.normal(size=(64, 128)).astype("f4")
    q[:, ::32] = 0
    errors = []
    for rotate in (False, True):
        with um.KVCache(1, 1, 128, 64, dtype="q4_0", rotate=rotate) as kv:
            kv.append(0, k, k)
            there = kv.layer(0, dtype="float32")[0][0, 0]
        query = um.rotate_heads(q) if rotate else q
        errors.append(float(np.abs(query @ there.T - q @ k[:, 0].T).mean()))
    assert errors[1] < 0.7 * errors[0]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="rotate: expected heads of a multiple of 64 values"):
        um.KVCache(1, 1, 96, 8, rotate=True)
    with pytest.raises(ValueError, match="got v_head_dim=32"):
        um.KVCache(1, 1, 64, 8, v_head_dim=32, rotate=True)
    with pytest.raises(ValueError, match="rotate: expected False or True, got 3"):
        um.KVCache(1, 1, 64, 8, rotate=3)  # type: ignore[call-overload]


def test_a_snapshot_says_it(tmp_path: Path) -> None:
    paths = tmp_path / "rotated", tmp_path / "layers"
    x = np.random.default_rng(5).normal(size=(9, 2, 64)).astype("f4")
    with (
        um.KVCache(1, 2, 64, 20, dtype="q4_0", rotate=True) as kv,
        um.KVCache(layers=[um.LayerKV(2, 64)], max_seq_len=20, rotate=True) as mixed,
    ):
        for one, path in zip((kv, mixed), paths, strict=True):
            one.append(0, x, x)
            one.save(path)
    assert "rotated" in str(snapshot.describe(paths[0]))
    for path in paths:
        with um.KVCache.restore(path) as other:
            assert other.rotate
            other.append(0, x, x)
            k = other.layer(0)[0]
            assert same_bits(k[:, :, :9], k[:, :, 9:])
            del k
    with um.KVCache(1, 2, 64, 20, dtype="q4_0") as kv:
        with pytest.raises(um.SnapshotError, match="rotate=True, and this one has False"):
            snapshot.read_into(kv, paths[0])
        with pytest.raises(um.SnapshotError, match="of layers that differ"):
            snapshot.read_into(kv, paths[1])
    with (
        um.KVCache(layers=[um.LayerKV(2, 64)], max_seq_len=20) as mixed,
        pytest.raises(um.SnapshotError, match="rotate=True, and this one has False"),
    ):
        snapshot.read_into(mixed, paths[1])


def test_a_store_keeps_them_apart(tmp_path: Path) -> None:
    x = np.ones((4, 2, 64), "f4")
    options: dict[str, Any] = {"ram_bytes": 1 << 20, "disk_bytes": 0, "chunk_tokens": 2}
    with um.KVStore(tmp_path / "store", **options) as store:
        for rotate in (False, True):
            with um.KVCache(1, 2, 64, 8, rotate=rotate) as kv:
                kv.append(0, rotate + x, x)
                store.put(kv, [1, 2, 3, 4], model="tiny")
        for rotate in (False, True):
            with um.KVCache(1, 2, 64, 8, rotate=rotate) as kv:
                assert store.restore_into(kv, [1, 2, 3, 4], model="tiny") == 4
                k = um.rotate_heads(x + rotate) if rotate else x
                assert (as_float32(kv.layer(0)[0][0, :, 0]) == k[0].astype("f2")).all()
