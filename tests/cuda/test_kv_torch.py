"""Caches of a GPU take tensors of torch by their addresses, and show tensors.

The device is main memory, whose number of DLPack tensors of the CPU have.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import given, same_bits, stored
from support.gpu.foreign_arrays import CUDA, Exchanged
from support.gpu.host_gpu import HostDriver, array_of, numpy_of

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.usefixtures("gives_memory_back")

LAYERS, HEADS, DIM, ROWS = 2, 2, 32, 8
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def cuda(cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The twin, on a device whose tensors are those of torch in main memory."""
    monkeypatch.setattr(host_gpu, "device_type", 1)
    return cuda


def tokens(n: int, dtype: str = "float32", seed: int = 0) -> tuple[Any, Any]:
    make = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, n, HEADS, DIM, generator=make)
    return k.to(TYPES[dtype]), v.to(TYPES[dtype])


LAYOUTS = {
    "in order": lambda a: a,
    "by head": lambda a: a.transpose(0, 1)[None],
    "every second": lambda a: torch.stack([a, a], -1)[..., 0],
    "in a larger one": lambda a: torch.cat([a, a], 1)[:, :HEADS],
    "negated lazily": lambda a: torch._neg_view(-a),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_are_read_where_they_are(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, dtype: str, layout: str
) -> None:
    monkeypatch.setattr(host_gpu, "to_array", None)  # no detour by CuPy
    k, v = map(LAYOUTS[layout], tokens(3, dtype))
    with (
        cuda.KVCache(LAYERS, HEADS, DIM, ROWS, dtype="f16", arrays="torch") as kv,
        um.KVCache(LAYERS, HEADS, DIM, ROWS, dtype="f16") as expected,
    ):
        for layer in range(LAYERS):
            kv.append(layer, k, v)
            expected.append(layer, k, v)
        whole = tokens(LAYERS, dtype, 1)
        for cache in (kv, expected):
            cache.append_all(*whole)
        for layer in range(LAYERS):
            for there, here in zip(kv.layer(layer), expected.layer(layer), strict=True):
                assert isinstance(there, torch.Tensor)
                assert same_bits(there.numpy(), here)
            for there, here in zip(
                kv.layer(layer, "float32"), expected.layer(layer, "float32"), strict=True
            ):
                assert same_bits(there.numpy(), here)
        del there


def test_a_row_may_be_a_tensor(cuda: Any) -> None:
    k, v = tokens(1)
    with cuda.KVCache(1, HEADS, DIM, ROWS, dtype="f32", arrays="torch") as kv:
        row = torch.zeros(1, dtype=torch.int32)
        for at in range(2):
            row[0] = at
            kv.reserve(1)
            kv.append_at(0, k * at, v, row)
            kv.commit(1)
        assert torch.equal(kv.layer(0)[0], torch.cat([k * 0, k]).transpose(0, 1)[None])
        for wrong in (row.long(), torch.zeros(2, dtype=torch.int32)):
            with pytest.raises(TypeError, match="row: expected one int32, got int"):
                kv.append_at(0, k, v, wrong)


def test_the_stream_is_that_of_the_library(cuda: Any, host_gpu: HostDriver) -> None:
    k, v = (a.astype(np.float16) for a in np.ones((2, 1, HEADS, DIM)))
    with cuda.KVCache(1, HEADS, DIM, ROWS, dtype="f16") as kv:
        host_gpu.calls.clear()
        kv.append(0, Exchanged(k), Exchanged(v))
        kv.append(0, Exchanged(k), Exchanged(v), stream=7)
        kv.append(0, array_of(k), array_of(v))
        assert [call[-1] for call in host_gpu.calls] == [77, 7, 0]


def test_tensors_elsewhere_are_refused(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = tokens(1)
    own = array_of(k.numpy())
    with cuda.KVCache(1, HEADS, DIM, ROWS, dtype="f32") as kv:
        for pair in ((k.double(), v.double()), (k.int(), v.int())):
            with pytest.raises(TypeError, match="expected float32, float16 or bfloat16, got"):
                kv.append(0, *pair)
        with pytest.raises(ValueError, match=r"expected k and v of one shape.*got \(1, 2, 32\)"):
            kv.append(0, k, v[:, :1])
    monkeypatch.setattr(host_gpu, "device_type", CUDA)
    with cuda.KVCache(1, HEADS, DIM, ROWS, dtype="f32") as kv:
        for pair in ((k, v), (own, v), (k, own)):
            with pytest.raises(TypeError, match=r"[kv]: expected an array on the GPU, got Tensor"):
                kv.append(0, *pair)
        assert kv.seq_len == 0


def test_views_are_slices_of_one_tensor(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = tokens(ROWS)
    with cuda.KVCache(1, HEADS, DIM, ROWS, dtype="f32", arrays="torch") as kv:
        kv.append(0, k, v)
        first = kv.layer(0)
        assert first[0].data_ptr() == kv.address(0, "k")
        assert first[1].untyped_storage().data_ptr() == kv.layer(0)[1].untyped_storage().data_ptr()
        kv.trim_to(2)
        assert torch.equal(kv.layer(0)[0][0], k[-2:].transpose(0, 1))
        with pytest.raises(BufferError, match="views"):
            kv.append(0, k[:1], v[:1])  # two tokens would move
        with pytest.raises(BufferError, match="live views"):
            kv.close()
        del first
        kv.append(0, k[:1], v[:1])
        assert torch.equal(kv.layer(0)[0][0], torch.cat([k[-2:], k[:1]]).transpose(0, 1))
        kv.save(tmp_path / "session")
        with cuda.KVCache.restore(tmp_path / "session", arrays="torch") as other, kv.copy() as copy:
            for cache in (other, copy):
                assert cache.arrays == "torch"
                assert torch.equal(cache.layer(0)[1], kv.layer(0)[1])
        kv.close()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="arrays='torch' needs torch: "):
        cuda.KVCache(1, HEADS, DIM, ROWS, arrays="torch")
    for wrong, dtype, text in (
        ("numpy", "f32", "arrays: expected one of cupy, torch, got 'numpy'"),
        ("torch", "q8_0", "arrays: expected 'cupy' for dtype='q8_0'"),
    ):
        with pytest.raises(ValueError, match=text):
            cuda.KVCache(1, HEADS, DIM, ROWS, dtype=dtype, arrays=wrong)


def test_sessions_go_from_one_to_the_other(cuda: Any, tmp_path: Path) -> None:
    rows = given(np.random.default_rng(0), (2, 3, HEADS, DIM), "float32")
    k, v = map(torch.from_numpy, rows)
    for there, here in ((cuda, um), (um, cuda)):
        with there.KVCache(1, HEADS, DIM, ROWS, dtype="bf16") as kv:
            kv.append(0, k, v)
            kv.save(tmp_path / there.__name__)
        with here.KVCache.restore(tmp_path / there.__name__, mode="copy") as kv:
            for part, want in zip(kv.layer(0), rows, strict=True):
                found = numpy_of(part) if here is cuda else part
                assert same_bits(found[0].swapaxes(0, 1), stored(want, "bf16"))
            del part, found


@pytest.mark.parametrize("status", [0, 201])
def test_copies_are_queued_by_the_drivers_own_call(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def queue(to: int, from_: int, nbytes: int, stream: int) -> int:
        if status == 0:
            HostDriver.copy(host_gpu, to, from_, nbytes, stream)
        return status

    k, v = (a.repeat(400, 1, 1) for a in tokens(3, "float16"))  # more than one launch copies
    call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 4)(queue)
    where = ctypes.cast(call, ctypes.c_void_p).value
    monkeypatch.setattr(host_gpu, "copy_address", where)
    with cuda.KVCache(1, HEADS, DIM, len(k), dtype="f16", arrays="torch") as kv:
        if status == 0:
            monkeypatch.setattr(host_gpu, "copy", None)  # not called
        host_gpu.calls.clear()
        kv.append(0, k, v, stream=9)
        assert [(call[0], call[-1]) for call in host_gpu.calls] == [("copy", 9)] * 2
        assert torch.equal(kv.layer(0)[1], v.transpose(0, 1)[None])
