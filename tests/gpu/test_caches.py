"""Caches on a GPU hold the bits that caches in main memory hold."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from gpu.machine import bridge, cuda, cupy
from kv_model import GIVEN_DTYPES, KV_DTYPES, given
from pad_model import DTYPES as PAD_DTYPES
from pad_model import TAKEN, awkward, same_bits
from row_contract import same_numbers

pytestmark = pytest.mark.usefixtures("gives_memory_back")

SHAPE = N_LAYERS, N_HEADS, HEAD_DIM, N_ROWS = 3, 2, 64, 40


def assert_same(ours: Any, host: um.KVCache) -> None:
    """Both show the same."""
    assert (len(ours), ours.seq_len, ours.next_position) == (
        len(host),
        host.seq_len,
        host.next_position,
    )
    assert ours.memory_usage_bytes == host.memory_usage_bytes
    for layer in range(host.n_layers):
        for found, expected in zip(ours.layer(layer), host.layer(layer), strict=True):
            assert found.shape == expected.shape
            assert bridge.down(found).tobytes() == expected.tobytes()


def special(dtype: str, shape: tuple[int, ...]) -> Any:
    """Numbers of every size, infinities and NaNs."""
    tokens = awkward(dtype, shape)
    tokens.reshape(-1)[77::1013] = np.nan
    return tokens


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens_dtype", GIVEN_DTYPES)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_conversions_give_the_same_bits(dtype: str, tokens_dtype: str, batch: int) -> None:
    shape = (batch, N_HEADS, 31, HEAD_DIM)
    for tokens in (
        special(tokens_dtype, shape),
        given(np.random.default_rng(0), shape, tokens_dtype),
    ):
        with (
            cuda.KVCache(1, N_HEADS, HEAD_DIM, N_ROWS, batch=batch, dtype=dtype) as ours,
            um.KVCache(1, N_HEADS, HEAD_DIM, N_ROWS, batch=batch, dtype=dtype) as host,
        ):
            host.append(0, tokens, tokens[..., ::-1])
            ours.append(0, bridge.up(tokens), bridge.up(tokens[..., ::-1]))
            assert_same(ours, host)
            for wanted in GIVEN_DTYPES:
                expected = host.layer(0, wanted)
                for i, found in enumerate(ours.layer(0, wanted)):
                    here = bridge.down(found)
                    assert here.dtype == expected[i].dtype
                    assert same_numbers(here, expected[i]), (wanted, i)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("dtype", PAD_DTYPES)
def test_rows_of_scratchpads_have_the_same_bits(dtype: str) -> None:
    for tokens_dtype in TAKEN[dtype]:
        rows = special(tokens_dtype, (50, 33))
        with cuda.Scratchpad(64, 33, dtype) as ours, um.Scratchpad(64, 33, dtype) as host:
            for pad, of in ((ours, bridge.up), (host, np.asarray)):
                pad.append(of(rows[0]))
                pad.append_batch(of(rows[1:20]))
                pad.append_batch(of(rows[20:, ::-1]))
            assert same_bits(bridge.down(ours.as_array()), np.array(host.as_array()))


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_same_calls_give_the_same_tokens(dtype: str, batch: int) -> None:
    rng = np.random.default_rng(batch)
    options: dict[str, Any] = {"batch": batch, "dtype": dtype}
    with cuda.KVCache(*SHAPE, **options) as ours, um.KVCache(*SHAPE, **options) as host:

        def append(n: int) -> None:
            for layer in range(N_LAYERS):
                k, v = (given(rng, (batch, N_HEADS, n, HEAD_DIM), "float32") for _ in range(2))
                host.append(layer, k, v)
                ours.append(layer, bridge.up(k), bridge.up(v))
            assert_same(ours, host)

        def both(what: str, *arguments: Any, **options: Any) -> None:
            found = [getattr(kv, what)(*arguments, **options) for kv in (ours, host)]
            assert found[0] == found[1]
            assert_same(ours, host)

        for round_ in range(4):
            append(7)
            append(1)
            both("trim_to", 6)
            append(20)
            both("trim_to", 9, keep_first=3)
            append(10)
            both("crop", 15)
            append(5)
            both("trim_to", 3, keep_first=round_)
            if batch == 1:
                k, v = (given(rng, (N_LAYERS, N_HEADS, HEAD_DIM), "float16") for _ in range(2))
                host.append_all(k, v)
                ours.append_all(bridge.up(k), bridge.up(v))
                assert_same(ours, host)
        with ours.copy() as copied:
            assert_same(copied, host)
            append(1)
            assert len(copied) == len(ours) - 1
        both("clear")
        append(N_ROWS)
        for kv, of in ((ours, bridge.up), (host, np.asarray)):
            token = of(np.zeros((batch, N_HEADS, 1, HEAD_DIM), np.float32))
            with pytest.raises(um.CacheFull) as caught:
                kv.append(0, token, token)
            assert (caught.value.limit, caught.value.used) == (N_ROWS, N_ROWS)
        assert_same(ours, host)


def test_an_interrupt_while_tokens_move(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    for nth in (1, 2, 20):
        with cuda.KVCache(*SHAPE) as ours, um.KVCache(*SHAPE) as host:
            for layer in range(N_LAYERS):
                k, v = (given(rng, (N_ROWS, N_HEADS, HEAD_DIM), "float16") for _ in range(2))
                host.append(layer, k, v)
                ours.append(layer, bridge.up(k), bridge.up(v))
            for kv in (ours, host):
                kv.trim_to(N_ROWS - 7)
            driver = ours._driver
            copy, left = driver.copy, itertools.count(nth - 1, -1)

            def interrupted(*arguments: Any, copy: Any = copy, left: Any = left) -> None:
                copy(*arguments)
                if next(left) == 0:
                    raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(driver, "copy", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ours.reserve(7)
            assert_same(ours, host)
            assert ours.reserve(7) == host.reserve(7) == N_ROWS - 7


def test_a_converted_layer_may_be_given_its_place(counted: Any) -> None:
    tokens = given(np.random.default_rng(0), (5, N_HEADS, HEAD_DIM), "float32")
    with cuda.KVCache(1, N_HEADS, HEAD_DIM, N_ROWS, dtype="q8_0") as kv, cuda.Tape(1 << 20) as tape:
        kv.append(0, bridge.up(tokens), bridge.up(tokens))
        out = tuple(tape.take((1, N_HEADS, 5, HEAD_DIM), "float16") for _ in range(2))
        before = dict(counted.calls)
        found = kv.layer(0, "float16", out=out)
        assert dict(counted.calls) == before
        assert [a.data.ptr for a in found] == [a.data.ptr for a in out]
        for part, expected in zip(out, kv.layer(0, "float16"), strict=True):
            assert bridge.down(part).tobytes() == bridge.down(expected).tobytes()


# ---- snapshots ----


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_snapshot_goes_to_main_memory_and_back(dtype: str, batch: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": batch, "dtype": dtype}
    rng = np.random.default_rng(4)
    with cuda.KVCache(*SHAPE, **options) as ours:
        for layer in range(N_LAYERS):
            k, v = (given(rng, (batch, N_HEADS, 30, HEAD_DIM), "float32") for _ in range(2))
            ours.append(layer, bridge.up(k), bridge.up(v))
        ours.trim_to(17, keep_first=2)
        tokens = list(range(30))  # up to the next position
        ours.save(tmp_path / "gpu", tokens=tokens, model="m")
        for mode in ("map", "copy"):
            with um.KVCache.restore(tmp_path / "gpu", mode=mode, tokens=tokens, model="m") as host:
                assert_same(ours, host)
                host.save(tmp_path / "cpu", tokens=tokens, model="m")
                with cuda.KVCache.restore(
                    tmp_path / "cpu", mode="copy", tokens=tokens, model="m"
                ) as again:
                    assert_same(again, host)
                    k, v = (given(rng, (batch, N_HEADS, 3, HEAD_DIM), "float16") for _ in range(2))
                    for layer in range(N_LAYERS):
                        again.append(layer, bridge.up(k), bridge.up(v))
                        host.append(layer, k, v)
                    assert_same(again, host)


def test_a_broken_snapshot_takes_no_device_memory(tmp_path: Path, counted: Any) -> None:
    path = tmp_path / "broken"
    with um.KVCache(*SHAPE) as host:
        for layer in range(N_LAYERS):
            host.append(layer, *np.ones((2, 1, N_HEADS, HEAD_DIM), np.float16))
        host.save(path)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(um.SnapshotError):
        cuda.KVCache.restore(path, mode="copy")
    assert counted.allocated == {}


def test_it_is_made_for_dims() -> None:
    dims = um.ModelDims(64, 176, 8, 4, 32, 512, 2, 64)
    with cuda.KVCache.for_dims(dims) as kv, um.KVCache.for_dims(dims) as host:
        assert_same(kv, host)
        assert kv.capacity_bytes >= kv.n_layers * 2 * 64 * kv.row_bytes
        assert isinstance(kv.layer(0)[0], cupy.ndarray)
