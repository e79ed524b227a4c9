"""Layouts on a GPU: a model's tensors arrive, sizes are those of its buffers, all or nothing.

The behaviour of all layouts is tested in tests/test_layout.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from support.gpu.host_gpu import HostDriver, numpy_of
from support.processes import interrupts
from support.project import tiers
from unimem._core.status import device_ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from support.models.make import TINY, write_model

    return write_model(tmp_path / "m.gguf", shape=TINY)


def check(layout: Any, weights: um.Weights) -> None:
    """The layout has all tensors of the model."""
    assert list(layout.tensors) == list(weights.tensors)
    for name, array in layout.tensors.items():
        here = weights.tensors[name].as_array()
        assert (array.shape, array.dtype) == (here.shape, here.dtype)
        assert numpy_of(array).tobytes() == here.tobytes()
        assert layout.weights.owns(array)


def test_a_model_arrives_with_room_for_all_that_it_needs(cuda: Any, model: Path) -> None:
    told: list[tuple[int, int]] = []
    with (
        um.open_weights(model) as weights,
        cuda.Layout.for_model(
            model, ctx=32, batch=2, kv_dtype="f32", progress=lambda *n: told.append(n)
        ) as layout,
    ):
        check(layout, weights)
        dims = um.ModelDims.from_weights(weights)
        cache = (dims.num_layers, dims.num_kv_heads, dims.head_dim)
        storage = um.KVCache.storage_bytes(*cache, 32, batch=2, dtype="f32")
        assert layout.history.total_bytes == storage
        assert layout.stat().weights_used > weights.nbytes * 0.99
        assert layout.weights.available_bytes < 256
        rows = {category: row["nbytes"] for (_, category), row in device_ledger().items()}
        assert rows["weights"] == layout.weights.total_bytes
        assert rows["history"] == storage
        assert layout.scratch.total_bytes > cuda.DecodeBuffers.bytes_needed(dims)
    assert told[-1] == (layout.weights.total_bytes, layout.weights.total_bytes)


def test_a_split_model_arrives(cuda: Any, model: Path) -> None:
    from support.files import gguf_files as gf

    parts = gf.split(model, 6)
    with um.open_weights(model) as weights, cuda.Layout.for_model(parts[1], ctx=32) as layout:
        check(layout, weights)
        assert layout.weights.available_bytes == 0


def test_the_buffers_fit_exactly(cuda: Any, model: Path) -> None:
    ctx = np.int64(16)
    with um.open_weights(model) as w, cuda.Layout.for_model(w, ctx=ctx, batch=3) as layout:
        dims = replace(um.ModelDims.from_weights(w), max_batch_size=3)
        with cuda.DecodeBuffers(dims, tape=layout.scratch):
            assert layout.scratch.available_bytes == 0
        cuda.KVCache.for_dims(dims, max_seq_len=16, batch=3, tape=layout.history)
        assert layout.history.available_bytes == 0


RESERVED = 512 * MIB


def on_device(nbytes: int) -> int:
    return -(-nbytes // (2 * MIB)) * 2 * MIB


def test_the_context_fits_beside_a_reserve(cuda: Any, host_gpu: HostDriver, model: Path) -> None:
    host_gpu.page_bytes = 2 * MIB
    batch = 1024
    with um.open_weights(model) as weights, cuda.Layout.for_model(weights, batch=batch) as layout:
        dims = um.ModelDims.from_weights(weights)
        cache = (dims.num_layers, dims.num_kv_heads, dims.head_dim)
        most = min(dims.max_seq_len, 4096)
        assert layout.history.total_bytes == um.KVCache.storage_bytes(*cache, most, batch=batch)
        fixed = on_device(layout.weights.total_bytes) + on_device(layout.scratch.total_bytes)

    def history(n: int) -> int:
        return um.KVCache.storage_bytes(*cache, n, batch=batch)

    chosen = []
    all_pages = range(on_device(history(1)) // (2 * MIB), on_device(history(most)) // (2 * MIB))
    for n_pages in all_pages if tiers.everything else all_pages[:: len(all_pages) // 8]:
        host_gpu.total_bytes = fixed + n_pages * 2 * MIB + RESERVED
        with cuda.Layout.for_model(model, batch=batch) as layout:
            assert host_gpu.free_bytes() == RESERVED
            assert layout.history.total_bytes <= n_pages * 2 * MIB
            chosen.append(layout.history.total_bytes // history(1))
            assert history(chosen[-1] + 1) > n_pages * 2 * MIB
    assert chosen[0] >= 1
    assert len(set(chosen)) > 3
    host_gpu.total_bytes -= 1  # then one page less
    with cuda.Layout.for_model(model, batch=batch) as layout:
        assert layout.history.total_bytes < history(chosen[-1])


@pytest.mark.parametrize("ctx", [None, 1, 16])
def test_a_model_that_does_not_fit_is_refused_before_anything_is_taken(
    cuda: Any, host_gpu: HostDriver, model: Path, ctx: int | None
) -> None:
    host_gpu.page_bytes = 2 * MIB
    # Three pages for three tapes. With an explicit ctx nothing is reserved.
    needed = 6 * MIB + (RESERVED if ctx is None else 0)
    before = host_gpu.n_allocations
    host_gpu.total_bytes = needed - 1
    with pytest.raises(um.CapacityError, match="a smaller ctx") as caught:
        cuda.Layout.for_model(model, ctx=ctx)
    error = caught.value
    assert (error.limit, error.used, error.asked) == (needed - 1, 0, needed)
    assert ("512.0 MiB for kernels" in str(error)) == (ctx is None)
    assert host_gpu.n_allocations == before
    host_gpu.total_bytes = needed
    cuda.Layout.for_model(model, ctx=ctx).close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ctx": 0}, ValueError),
        ({"ctx": -5}, ValueError),
        ({"ctx": 1.5}, ValueError),
        ({"ctx": True}, ValueError),
        ({"ctx": 2**31}, ValueError),
        ({"ctx": 2**31 - 1}, um.CapacityError),
        ({"batch": 0}, ValueError),
        ({"kv_dtype": "q9"}, ValueError),
        ({"device": 3}, ValueError),
    ],
)
def test_options_out_of_range(
    cuda: Any, host_gpu: HostDriver, model: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    host_gpu.total_bytes = 1 << 30
    before = host_gpu.n_allocations
    with um.open_weights(model) as weights:
        with pytest.raises(error, match=next(iter(options)).removeprefix("kv_")):
            cuda.Layout.for_model(weights, **options)
        assert not weights.closed
    assert host_gpu.n_allocations == before
    with pytest.raises(um.ClosedError):
        cuda.Layout.for_model(weights)
    with pytest.raises(FileNotFoundError):
        cuda.Layout.for_model(model.with_name("none.gguf"))


def test_an_upload_that_fails_leaves_nothing(cuda: Any, host_gpu: HostDriver, model: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        cuda.Layout.for_model(model, ctx=16, progress=Mock(side_effect=KeyboardInterrupt))
    gc.collect()
    assert (host_gpu.allocated, host_gpu.registered) == ({}, {})


def test_a_cache_on_history(cuda: Any) -> None:
    with cuda.Layout(100, 1000, 1 << 16) as layout:
        kv = cuda.KVCache(2, 2, 8, 16, tape=layout.history)
        layout.attach(kv)
        storage = layout.history.used_bytes
        assert storage == kv.capacity_bytes
        for _ in range(3):
            kv.reserve(5)
            kv.commit(5)
            layout.history.take(10)  # another part of this talk
            layout.clear_pass()
            assert kv.seq_len == 5  # a pass does not touch it
            layout.freeze()
            kv.reserve(11)  # fixed storage is complete
            kv.commit(11)
            layout.thaw()
            layout.clear_talk()
            assert kv.is_empty
            assert layout.history.used_bytes == storage
    assert kv.closed


# ---- lifetime ----


def test_tensors_of_the_layout_itself_are_no_users(
    cuda: Any, host_gpu: HostDriver, model: Path
) -> None:
    layout = cuda.Layout.for_model(model, ctx=16)
    name = next(iter(layout.tensors))
    address = layout.tensors[name].data.ptr
    parts: list[Callable[[Any], Any]] = [lambda array: array, lambda array: array[:1]]
    for part in parts:
        held = part(layout.tensors[name])
        with pytest.raises(BufferError, match="'weights' has"):
            layout.close()
        # Nothing was closed.
        assert layout.tensors[name].data.ptr == held.data.ptr == address
    with um.open_weights(model) as weights:
        check(layout, weights)
    del held
    layout.close()
    layout.close()
    assert host_gpu.allocated == {}
    with pytest.raises(um.ClosedError, match="closed"):
        len(layout.tensors)


def test_tensors_are_only_looked_at(cuda: Any, model: Path) -> None:
    with cuda.Layout.for_model(model, ctx=16) as layout:
        tensors = layout.tensors
        name = next(iter(tensors))
        with pytest.raises(TypeError):
            tensors["mine"] = tensors[name]
        with pytest.raises(TypeError):
            del tensors[name]
        assert len(tensors) == len(layout.tensors) > 3
    assert len(tensors) == 0
    with cuda.Layout(8, 8, 8) as layout:
        assert len(layout.tensors) == 0


def test_an_interrupted_close_loses_no_tensor(cuda: Any, host_gpu: HostDriver, model: Path) -> None:
    layout = cuda.Layout.for_model(model, ctx=16)
    n = len(layout.tensors)
    for _ in interrupts.at_each_line(layout.close, "cuda/layout.py"):
        assert (layout.closed, len(layout.tensors)) == (False, n)
    assert layout.closed
    assert host_gpu.allocated == {}


def test_opened_weights_are_in_main_memory(cuda: Any, model: Path) -> None:
    with um.open_weights(model) as weights, pytest.raises(TypeError, match="for_model"):
        cuda.Layout(weights, 100, 100)
