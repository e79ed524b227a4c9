"""Caches on a GPU hold the bits that caches in main memory hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from gpu.machine import bridge, cuda
from support.contracts.kv_model import KV_DTYPES, given

pytestmark = pytest.mark.usefixtures("gives_memory_back")

SHAPE = N_LAYERS, N_HEADS, HEAD_DIM, N_ROWS = 3, 2, 64, 40


def assert_same(ours: Any, host: um.KVCache) -> None:
    """Both show the same."""
    for name in ("seq_len", "next_position", "memory_usage_bytes"):
        assert getattr(ours, name) == getattr(host, name)
    for layer in range(host.n_layers):
        for found, expected in zip(ours.layer(layer), host.layer(layer), strict=True):
            assert found.shape == expected.shape
            assert bridge.down(found).tobytes() == expected.tobytes()


def append(rng: np.random.Generator, n: int, ours: Any, host: um.KVCache) -> None:
    """Append the same tokens to all layers of both."""
    for layer in range(N_LAYERS):
        k, v = (given(rng, (host.batch, N_HEADS, n, HEAD_DIM), "float32") for _ in "kv")
        host.append(layer, k, v)
        ours.append(layer, bridge.up(k), bridge.up(v))
    assert_same(ours, host)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_same_calls_give_the_same_tokens(dtype: str, batch: int) -> None:
    rng = np.random.default_rng(batch)
    options: dict[str, Any] = {"batch": batch, "dtype": dtype}
    with cuda.KVCache(*SHAPE, **options) as ours, um.KVCache(*SHAPE, **options) as host:

        def both(what: str, *arguments: Any, **options: Any) -> None:
            found = [getattr(kv, what)(*arguments, **options) for kv in (ours, host)]
            assert found[0] == found[1]
            assert_same(ours, host)

        for round_ in range(4):
            append(rng, 7, ours, host)
            append(rng, 1, ours, host)
            both("trim_to", 6)
            append(rng, 20, ours, host)
            both("trim_to", 9, keep_first=3)
            append(rng, 10, ours, host)
            both("crop", 15)
            append(rng, 5, ours, host)
            both("trim_to", 3, keep_first=round_)
            if batch == 1:
                k, v = (given(rng, (N_LAYERS, N_HEADS, HEAD_DIM), "float16") for _ in "kv")
                host.append_all(k, v)
                ours.append_all(bridge.up(k), bridge.up(v))
                assert_same(ours, host)
        with ours.copy() as copied:
            assert_same(copied, host)
            append(rng, 1, ours, host)
            assert len(copied) == len(ours) - 1


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_snapshot_goes_to_main_memory_and_back(dtype: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 2, "dtype": dtype}
    rng = np.random.default_rng(4)
    known: dict[str, Any] = {"tokens": list(range(30)), "model": "m"}  # up to the next position
    with cuda.KVCache(*SHAPE, **options) as ours, um.KVCache(*SHAPE, **options) as twin:
        append(rng, 30, ours, twin)
        ours.trim_to(17, keep_first=2)
        ours.save(tmp_path / "gpu", **known)
        for mode in ("map", "copy"):
            with um.KVCache.restore(tmp_path / "gpu", mode=mode, **known) as host:
                assert_same(ours, host)
                host.save(tmp_path / "cpu", **known)
                with cuda.KVCache.restore(tmp_path / "cpu", mode="copy", **known) as again:
                    append(rng, 3, again, host)
