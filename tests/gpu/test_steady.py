"""After start-up calls queue their work and return: they allocate nothing and never wait."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import unimem as um
from gpu.machine import DRIVERS_OWN, MIB, Counted, bridge, cuda, cupy, held, new_stream
from support.contracts.kv_model import KV_DTYPES, given
from unimem._core.status import counters

pytestmark = pytest.mark.usefixtures("gives_memory_back")

runtime = cupy.cuda.runtime
N_LAYERS, N_HEADS, HEAD_DIM, N_ROWS = 3, 2, 64, 64


def tokens(n: int, dtype: str = "float32") -> Any:
    """K or V of n tokens."""
    return bridge.up(given(np.random.default_rng(n), (n, N_HEADS, HEAD_DIM), dtype))


@pytest.fixture(params=KV_DTYPES)
def kv(request: pytest.FixtureRequest) -> Iterator[Any]:
    with cuda.KVCache(N_LAYERS, N_HEADS, HEAD_DIM, N_ROWS, dtype=request.param) as kv:
        yield kv


def use_cache(kv: Any, stream: Any = None) -> Callable[[], None]:
    """Do everything that a decode step may do with a cache."""
    one, many, half = tokens(1), tokens(5), tokens(2, "float16")
    spread = bridge.up(np.repeat(bridge.down(many), 2, axis=2)[..., ::2])
    all_layers = bridge.up(np.ones((N_LAYERS, N_HEADS, HEAD_DIM), np.float32))
    row = bridge.up(np.array([N_ROWS - 1], np.int32))
    out = tuple(bridge.up(np.empty((1, N_HEADS, 14, HEAD_DIM), np.float16)) for _ in "kv")

    def run() -> None:
        for arguments in (one, many, half, spread):
            for layer in range(N_LAYERS):
                kv.append(layer, arguments, arguments, stream=stream)
        kv.append_all(all_layers, all_layers, stream=stream)
        for layer in range(N_LAYERS):
            kv.append_at(layer, one, one, row, stream=stream)
            assert kv.layer(layer)[0].shape[2] == 14
            kv.layer(layer, "float16", out, stream=stream)
        kv.crop(kv.seq_len - 4)
        kv.append(0, one, one, stream=stream)
        kv.rollback()
        kv.clear()

    return run


def use_pad(pad: Any, stream: Any = None) -> Callable[[], None]:
    """Do everything that a decode step may do with a scratchpad."""
    one, many = tokens(1).reshape(-1), tokens(4).reshape(4, -1)
    half = tokens(3, "float16").reshape(3, -1)

    def run() -> None:
        pad.append(one, stream=stream)
        pad.append_batch(many, stream=stream)
        pad.append_batch(half, stream=stream)
        pad.append_batch(many[:, ::-1], stream=stream)
        assert len(pad.as_array()) == 12
        pad.crop(5)
        pad.clear()

    return run


def use_tape(tape: Any) -> Callable[[], None]:
    """Do everything that a decode step may do with a tape."""

    def run() -> None:
        for _ in range(10):
            with tape.frame():
                tape.take((8, 8), "float16")
                tape.take_bytes(100)
                tape.take_address(100)
        tape.clear()

    return run


def steady(run: Callable[[], None], counted: Counted) -> None:
    """Run it a thousand times; nothing is allocated, waited for, or used up."""
    run()
    runtime.deviceSynchronize()
    gc.collect()
    before, own, free = dict(counted.calls), counters(), runtime.memGetInfo()[0]
    for _ in range(1000):
        run()
    assert (dict(counted.calls), counters()) == (before, own)
    runtime.deviceSynchronize()
    assert runtime.memGetInfo()[0] >= free - DRIVERS_OWN


def test_a_cache_allocates_nothing(kv: Any, counted: Counted) -> None:
    steady(use_cache(kv), counted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scratchpad_allocates_nothing(dtype: str, counted: Counted) -> None:
    with cuda.Scratchpad(32, N_HEADS * HEAD_DIM, dtype) as pad:
        steady(use_pad(pad), counted)


def test_a_tape_allocates_nothing(counted: Counted) -> None:
    with cuda.Tape(MIB) as tape:
        steady(use_tape(tape), counted)


def test_buffers_and_layouts_allocate_nothing(counted: Counted) -> None:
    dims = um.ModelDims(64, 176, 8, 4, 8, 512, 2, 64, max_batch_size=4)
    one = tokens(1)
    with cuda.Layout(MIB, MIB, MIB) as layout:
        buffers = cuda.DecodeBuffers(dims, tape=layout.scratch)
        kv = cuda.KVCache(1, N_HEADS, HEAD_DIM, N_ROWS, tape=layout.history)
        layout.attach(kv)
        layout.scratch.keep()
        with layout.scratch.frame():
            layout.scratch.take(64)
        layout.freeze()

        def run() -> None:
            for m in (1, 4):
                assert buffers.batch(m).logits.shape == (m, 512)
            buffers.swap_residual()
            layout.scratch.take(64)
            kv.append(0, one, one)
            layout.clear_pass()
            assert len(kv) == 1
            layout.clear_talk()
            assert len(kv) == 0

        steady(run, counted)
        kv.close()
        buffers.close()


# ---- nobody waits ----


def does_not_wait(run: Callable[[], None], stream: Any) -> None:
    """Run it after work that does not end before it."""
    run()
    runtime.deviceSynchronize()  # now the kernels are loaded
    with held(stream):
        run()
        assert not stream.done


@pytest.mark.parametrize("how", ["given", "number", "current"])
def test_a_cache_does_not_wait(kv: Any, how: str) -> None:
    stream = new_stream()
    if how == "current":
        with stream:
            does_not_wait(use_cache(kv), stream)
    else:
        does_not_wait(use_cache(kv, stream if how == "given" else stream.ptr), stream)


def test_a_scratchpad_does_not_wait() -> None:
    stream = new_stream()
    with cuda.Scratchpad(32, N_HEADS * HEAD_DIM) as pad:
        does_not_wait(use_pad(pad, stream), stream)


def test_queued_work_is_done_in_order(kv: Any) -> None:
    """Tokens that are written while the stream is held are read when it continues."""
    stream = new_stream()
    token = tokens(1)
    kv.append(0, token, token, stream=stream)
    with stream:
        token *= 1
    stream.synchronize()  # now the kernels are loaded
    expected = [bridge.down(kv.layer(0)[0])]
    kv.clear()
    with held(stream), stream:
        for _ in range(3):
            for layer in range(N_LAYERS):
                kv.append(layer, token, token)
            token *= -1
    k, _ = kv.layer(N_LAYERS - 1)
    found = bridge.down(k)
    assert found[:, :, 0].tobytes() == found[:, :, 2].tobytes() == expected[0].tobytes()
    assert found[:, :, 1].tobytes() != found[:, :, 0].tobytes()
