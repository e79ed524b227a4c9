"""A decode step captured as a CUDA graph and replayed: the same bits as the step launched anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest

import unimem as um
from gpu.machine import DRIVERS_OWN, Counted, bridge, cuda, cupy, new_stream
from support.contracts.kv_model import KV_DTYPES, as_float32

pytestmark = pytest.mark.usefixtures("gives_memory_back")

runtime = cupy.cuda.runtime

N_STEPS = 1000
N_LAYERS = 2
NAMES = ("residual", "k_rotated", "rope_k_temp", "batched_positions")
DIMS = um.ModelDims(64, 176, 8, 4, 32, 512, N_LAYERS, N_STEPS + 8)

# Stands for a model: a step reads the result of the last one, and no two are the same.
STEP = r"""
typedef unsigned long long address;

extern "C" __global__ void decode_step(address residual_at, address k_at, address v_at,
                                address position_at, long long n, long long layer) {
    const float *residual = (const float *)residual_at;
    float *k = (float *)k_at, *v = (float *)v_at;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        unsigned position = *(const unsigned *)position_at;
        unsigned x = (i + 1) * 2654435761u + position * 40503u + (unsigned)layer;
        x ^= x >> 13;
        k[i] = residual[i % 64] * 0.5f + (float)(x % 2001) * 0.001f - 1.0f;
        v[i] = k[i] * 0.25f - residual[(i + 7) % 64];
    }
}
extern "C" __global__ void decode_mix(address residual_at, address k_at, address v_at) {
    float *residual = (float *)residual_at;
    const float *k = (const float *)k_at, *v = (const float *)v_at;
    int i = threadIdx.x;
    residual[i] = residual[i] * 0.75f + k[i] * 0.125f - v[i + 64] * 0.0625f;
}
"""


class Decode:
    """Buffers and a cache, and the step over them."""

    def __init__(self, dtype: str, stream: Any) -> None:
        self.buffers = cuda.DecodeBuffers(DIMS, dtype="float32")
        self.kv = cuda.KVCache.for_dims(DIMS, dtype=dtype)
        self.stream = stream
        self.position = self.buffers.batched_positions
        shape = (1, DIMS.num_kv_heads, DIMS.head_dim)
        self.k = self.buffers.k_rotated.reshape(shape)
        self.v = self.buffers.rope_k_temp.reshape(shape)
        module = cupy.RawModule(code=STEP, options=("-fmad=false",))
        self._step, self._mix = map(module.get_function, ("decode_step", "decode_mix"))
        self.restart()

    def restart(self) -> None:
        """Forget all tokens."""
        with self.stream:
            for name in NAMES:
                getattr(self.buffers, name).fill(0)
        self.stream.synchronize()
        self.kv.clear()

    def step(self, append: Callable[[int], None]) -> None:
        """Queue one step; `append` writes K and V of a layer."""
        n = DIMS.kv_size
        residual, k, v = self.buffers.residual, self.k, self.v
        for layer in range(N_LAYERS):
            arguments = (residual, k, v, self.position, n, layer)
            self._step((1,), (128,), arguments, stream=self.stream)
            append(layer)
            self._mix((1,), (64,), (residual, k, v), stream=self.stream)

    def append(self, layer: int) -> None:
        """Append at the host's row."""
        self.kv.append(layer, self.k, self.v, stream=self.stream)

    def append_at(self, layer: int) -> None:
        """Append at the row in device memory."""
        self.kv.append_at(layer, self.k, self.v, self.position, stream=self.stream)

    def count(self) -> None:
        """Count the position up, on the device."""
        with self.stream:
            cupy.add(self.position, 1, out=self.position)

    def eager(self) -> None:
        """One step launched anew."""
        self.step(self.append)
        self.count()

    def capture(self) -> Any:
        """One step as a graph. It was run before, so that its kernels are loaded."""
        self.step(self.append_at)
        self.count()
        self.restart()
        self.stream.begin_capture()
        try:
            self.step(self.append_at)
            self.count()
        finally:
            graph = self.stream.end_capture()
        return graph

    def addresses(self) -> tuple[dict[str, int], list[int]]:
        """Return the address of all memory that a step uses."""
        lanes = [self.kv.address(i, part) for i in range(N_LAYERS) for part in ("k", "v")]
        return self.buffers.addresses(), lanes

    def result(self) -> list[bytes]:
        """Return the results of the steps, bit for bit."""
        self.stream.synchronize()
        found = [bridge.down(getattr(self.buffers, name)).tobytes() for name in NAMES]
        for layer in range(N_LAYERS):
            found += [bridge.down(part).tobytes() for part in self.kv.layer(layer)]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.buffers.__exit__()
        self.kv.__exit__()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_graph_replayed_is_the_step(dtype: str, counted: Counted) -> None:
    with Decode(dtype, new_stream()) as replayed, Decode(dtype, new_stream()) as eager:
        graph = replayed.capture()
        assert int(replayed.position[0]) == 0  # captured work does not run
        addresses = replayed.addresses()
        before, free = dict(counted.calls), 0
        for i in range(N_STEPS):
            graph.launch(stream=replayed.stream)
            eager.eager()
            if i == 0:  # the memory of a first launch is taken
                runtime.deviceSynchronize()
                free = runtime.memGetInfo()[0]
        runtime.deviceSynchronize()
        assert dict(counted.calls) == before
        assert runtime.memGetInfo()[0] >= free - DRIVERS_OWN
        assert (replayed.addresses(), len(eager.kv)) == (addresses, N_STEPS)
        assert len(replayed.kv) == 0  # rows that the host did not count
        replayed.kv.reserve(N_STEPS)
        replayed.kv.commit(N_STEPS)
        assert int(replayed.position[0]) == int(eager.position[0]) == N_STEPS
        assert replayed.result() == eager.result()
        rows = bridge.down(replayed.kv.layer(1)[0])[0].swapaxes(0, 1)
        assert len({row.tobytes() for row in rows}) == N_STEPS  # no two steps are the same
        assert np.isfinite(as_float32(rows)).all()


def test_a_graph_goes_on_where_the_position_is() -> None:
    """Steps launched anew and steps replayed, in turns, over one cache."""
    with Decode("f16", new_stream()) as mixed, Decode("f16", new_stream()) as eager:
        graph = mixed.capture()
        for i in range(30):
            eager.eager()
            if i % 3 == 0:
                mixed.eager()
                continue
            assert mixed.kv.reserve(1) == i
            graph.launch(stream=mixed.stream)
            mixed.kv.commit(1)
        assert (len(mixed.kv), mixed.result()) == (30, eager.result())


def test_an_eager_append_is_captured_with_its_row() -> None:
    """A graph of `append` writes the same row at every replay, as is documented."""
    stream = new_stream()
    token = bridge.up(np.ones((1, 2, 32), np.float32))
    with cuda.KVCache(1, 2, 32, 8, dtype="f16") as kv:
        kv.append(0, token, token, stream=stream)
        with stream:
            cupy.multiply(token, 2, out=token)
        stream.synchronize()
        kv.clear()
        stream.begin_capture()
        with stream:
            kv.append(0, token, token)
            cupy.multiply(token, 2, out=token)
        graph = stream.end_capture()
        assert len(kv) == 1
        for _ in range(3):
            graph.launch(stream=stream)
        stream.synchronize()
        assert (len(kv), bridge.down(kv.layer(0)[0])[0, 0, 0, 0]) == (1, 8)
