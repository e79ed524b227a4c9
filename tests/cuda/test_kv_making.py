"""Making a cache of the twin: on a tape, in memory of its own, and errors."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from support.gpu.host_gpu import HostDriver, array_of
from support.gpu.kv_twins import DIM, HEADS, LAYERS, ROWS
from unimem._core.status import device_ledger

pytestmark = pytest.mark.usefixtures("cuda", "gives_memory_back")


# ---- making one ----


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"window": 8}, NotImplementedError, r"a ring \(window=\) is not supported on a GPU"),
        ({"spare_rows": 8}, NotImplementedError, "a ring"),
        ({"grow": True}, NotImplementedError, r"growing \(grow=True\) is not supported on a GPU"),
        ({"order": "row"}, ValueError, "order: expected one of token, head"),
        ({"pages": "2m"}, NotImplementedError, "placing device memory"),
        ({"page": "2m"}, TypeError, "unexpected option 'page'; placement is pages"),
        ({"pages": "9m", "pinned": True}, ValueError, "pages"),
        ({"device": 1}, ValueError, "device: expected 0 to 0, got 1"),
        ({"budget_bytes": 10}, um.CacheFull, "less than a token needs"),
        ({"max_seq_len": 2**31}, um.CapacityError, "no room"),
        ({"max_seq_len": 2**62}, ValueError, "than there can be|at most"),
    ],
)
def test_a_refused_cache_leaves_nothing(
    cuda: Any, host_gpu: HostDriver, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    shape = {"n_layers": 8, "n_kv_heads": 8, "head_dim": 64, "max_seq_len": 99}
    with pytest.raises(error, match=text) as caught:
        cuda.KVCache(**shape | options)
    del caught
    gc.collect()
    assert host_gpu.allocated == {}


def test_a_limit_below_what_the_cache_has(cuda: Any) -> None:
    with cuda.KVCache(1, HEADS, DIM, ROWS) as kv:
        k = array_of(np.ones((3, HEADS, DIM), "float16"))
        kv.append(0, k, k)
        assert kv.enforce_memory_limit(kv.capacity_bytes) is False
        with pytest.raises(NotImplementedError, match="giving memory back is not supported"):
            kv.enforce_memory_limit(kv.capacity_bytes - 1)
        assert len(kv) == 3


def test_on_a_borrowed_tape(cuda: Any) -> None:
    with cuda.Tape(1 << 20) as tape:
        tape.take(3)
        kv = cuda.KVCache(LAYERS, HEADS, DIM, ROWS, tape=tape)
        assert (kv.tape, kv.block, kv.address(0, "k") % 256) == (tape, None, 0)
        assert tape.owns(kv.address(LAYERS - 1, "v") + kv.lane_stride - 1)
        assert kv.capacity_bytes == um.KVCache.storage_bytes(LAYERS, HEADS, DIM, ROWS)
        assert kv.granted.pages == "device"
        assert (kv.resident_bytes, kv.warm()) == (kv.capacity_bytes, None)
        for options in ({"pinned": True}, {"device": 1}, {"pages": "4k"}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} not accepted beside tape"):
                cuda.KVCache(LAYERS, HEADS, DIM, ROWS, tape=tape, **options)
        with pytest.raises(um.TapeFull):
            cuda.KVCache(LAYERS, HEADS, DIM, 10_000, tape=tape)
        view = kv.layer(0)
        kv.close()
        kv.close()
        with pytest.raises(um.ClosedError, match="KVCache 'kv' is closed"):
            kv.layer(0)
        other = cuda.KVCache(LAYERS, HEADS, DIM, ROWS, tape=tape)
        del view
    assert other.closed
    with pytest.raises(um.ClosedError, match="Tape 'tape' is closed"):
        len(other)
    with um.Tape(1 << 20) as tape, pytest.raises(TypeError, match=r"cuda\.Tape, got Tape"):
        cuda.KVCache(LAYERS, HEADS, DIM, ROWS, tape=tape)


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_of_its_own(cuda: Any, host_gpu: HostDriver, pinned: bool) -> None:
    def held() -> int:
        row = device_ledger().get(("cuda:0", "history"))
        return row["nbytes"] if row else 0

    kv = cuda.KVCache(LAYERS, HEADS, DIM, ROWS, pinned=pinned)
    assert kv.tape is None
    assert kv.block.address == kv.address(0, "k")
    assert held() == (0 if pinned else kv.capacity_bytes)
    assert (kv.block.host is not None) is pinned
    assert len(host_gpu.registered) == pinned
    view = kv.layer(0)[0]
    with pytest.raises(BufferError, match="KVCache 'kv' has 1 live views: drop them first"):
        kv.close()
    assert not kv.closed
    del view
    kv.close()
    assert (held(), host_gpu.allocated, host_gpu.registered) == (0, {}, {})


def test_a_closed_cache_refuses_every_call(cuda: Any, tmp_path: Path) -> None:
    with cuda.KVCache(1, HEADS, DIM, ROWS) as kv:
        k = array_of(np.ones((1, HEADS, DIM), "float16"))
        row = array_of(np.zeros(1, "int32"))
    uses: list[Callable[[], Any]] = [
        lambda: kv.append_all(k, k),
        lambda: kv.append_at(0, k, k, row),
        lambda: kv.layer(0, "float32"),
        lambda: kv.enforce_memory_limit(1 << 30),
        lambda: kv.save(tmp_path / "session"),
        lambda: kv.reserve(1),
        lambda: kv.granted,
        lambda: kv.resident_bytes,
        kv.copy,
        kv.verify,
        kv.warm,
    ]
    for use in uses:
        with pytest.raises(um.ClosedError, match="KVCache 'kv' is closed"):
            use()


def test_a_cache_that_was_never_made_is_closed(cuda: Any) -> None:
    bare = cuda.KVCache.__new__(cuda.KVCache)
    assert bare.closed
    with pytest.raises(um.ClosedError):
        bare.clear()


def test_a_cache_that_cannot_be_begun_closes_its_memory(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Mock(side_effect=MemoryError("no room for the lengths of the layers"))
    monkeypatch.setattr(cuda.KVCache, "_place", place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MemoryError, match="lengths") as caught:
            cuda.KVCache(1, HEADS, DIM, ROWS)
        del caught
        gc.collect()
    assert host_gpu.allocated == {}


def test_kernels_are_compiled_when_the_cache_is_made(cuda: Any) -> None:
    other = HostDriver()
    other.module = Mock(side_effect=RuntimeError("NVRTC is missing"))  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unimem.backends.cuda_driver._drivers", {0: other})
        with pytest.raises(RuntimeError, match="NVRTC"):
            cuda.KVCache(1, HEADS, DIM, ROWS)
    assert other.allocated == {}
