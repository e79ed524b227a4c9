"""The decode buffers of the GPU twin: the same places and figures, in memory the CPU never sees."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest

import unimem as um
from support.contracts.buffer_sets import COUNTS, DIMS, NAMES, POINTERS, check_buffers, random_dims
from support.gpu.host_gpu import numpy_of
from unimem._core.status import device_ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def test_200_dims(cuda: Any, host_gpu: Any) -> None:
    """Every byte lies where it does in main memory."""
    with cuda.Tape(64 << 20) as tape, um.Tape(64 << 20, pages="4k") as host:
        for i, (d, dtype) in enumerate(random_dims(200)):
            with cuda.DecodeBuffers(d, dtype=dtype) as db:
                check_buffers(db, d, dtype)
                assert db.memory_bytes == db.tape.used_bytes == db.tape.total_bytes
            tape.clear()
            tape.take_bytes(i)
            before = -(-i // 256) * 256
            host.clear()
            twin = um.DecodeBuffers(d, dtype=dtype, tape=host)
            with cuda.DecodeBuffers(d, dtype=dtype, tape=tape) as db:
                check_buffers(db, d, dtype)
                assert tape.used_bytes == before + db.memory_bytes
                base, expected = tape.block.address + before, host.block.address
                assert {name: at - base for name, at in db.addresses().items()} == {
                    name: at - expected for name, at in twin.addresses().items()
                }
            twin.close()
    assert host_gpu.allocated == {}


def test_arrays_are_cupys_where_they_are_said_to_be(cuda: Any, host_gpu: Any) -> None:
    cupy = pytest.importorskip("cupy")
    with cuda.DecodeBuffers(DIMS, dtype="bfloat16") as db:
        assert [*host_gpu.allocated.values()] == [db.memory_bytes]
        assert device_ledger()[("cuda:0", "scratch")]["nbytes"] == db.memory_bytes
        for name, address in db.addresses().items():
            array = getattr(db, name)
            assert type(array) is cupy.ndarray
            assert array.data.ptr == address
            assert db.tape.owns(array)
        del array


def test_batches(cuda: Any) -> None:
    with cuda.DecodeBuffers(DIMS) as db, um.DecodeBuffers(DIMS) as host:
        addresses = db.addresses()
        for m in (1, 3, 4):
            batch = db.batch(m)
            assert batch is db.batch(m)
            for name in NAMES:
                view = getattr(batch, name)
                assert view.shape == getattr(host.batch(m), name).shape
                assert view.data.ptr == addresses[name]
                assert view.flags.c_contiguous
            assert all(getattr(batch, name).shape == (m,) for name in POINTERS + COUNTS)
        with pytest.raises(ValueError, match="from 1 to 4, got 5"):
            db.batch(5)
        del batch, view
    with cuda.DecodeBuffers(replace(DIMS, quantized=False)) as db:
        assert db.temp_dequant is None
        assert db.batch(1).temp_dequant is None


def test_swapping_moves_no_byte(cuda: Any, host_gpu: Any) -> None:
    with cuda.DecodeBuffers(DIMS) as db:
        four, before = db.batch(4), db.addresses()
        numpy_of(db.residual)[:] = 1
        numpy_of(db.post_norm_residual)[:] = 2
        n_calls = len(host_gpu.calls)
        db.swap_residual()
        swapped = db.addresses()
        assert swapped["residual"] == before["post_norm_residual"]
        assert set(swapped.values()) == set(before.values())
        assert db.residual.data.ptr == four.residual.data.ptr == swapped["residual"]
        assert (numpy_of(four.residual) == 2).all()
        db.swap_residual()
        assert (db.addresses(), len(host_gpu.calls)) == (before, n_calls)


def test_a_step_takes_nothing_and_asks_nothing(cuda: Any, host_gpu: Any) -> None:
    with cuda.Tape(1 << 20) as tape:
        db = cuda.DecodeBuffers(DIMS, tape=tape)
        tape.freeze()

        def step() -> list[int]:
            found = [db.batch(m).qkv_out.data.ptr for m in (1, 3)]
            db.swap_residual()
            db.swap_residual()
            return [*found, db.logits.data.ptr]

        first, addresses = step(), db.addresses()
        before = (tape.n_takes, host_gpu.n_allocations, len(host_gpu.calls))
        for _ in range(100):
            assert step() == first
        assert db.addresses() == addresses
        assert (tape.n_takes, host_gpu.n_allocations, len(host_gpu.calls)) == before
        db.close()


def test_wrong_tapes(cuda: Any, host_gpu: Any) -> None:
    with cuda.Tape(1 << 20) as tape, um.Tape(1 << 20) as host:
        cuda.DecodeBuffers(DIMS, tape=tape, device=tape.block.device).close()
        tape.clear()
        for options in ({"device": 1}, {"pinned": True}, {"pages": "4k"}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} not accepted beside tape"):
                cuda.DecodeBuffers(DIMS, tape=tape, **options)
        with pytest.raises(TypeError, match=r"expected a unimem\.cuda\.Tape, got unimem\.Tape$"):
            cuda.DecodeBuffers(DIMS, tape=host)
        with pytest.raises(TypeError, match=r"expected a unimem\.Tape, got unimem\.cuda\.Tape$"):
            um.DecodeBuffers(DIMS, tape=tape)
        assert tape.used_bytes == host.used_bytes == 0
    assert host_gpu.allocated == {}


def test_another_device(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the tape's own GPU is accepted; another one is refused."""
    with cuda.Tape(1 << 20) as tape:
        monkeypatch.setattr(tape.block, "device", 3)
        cuda.DecodeBuffers(DIMS, tape=tape, device=3).close()
        with pytest.raises(ValueError, match="device not accepted beside tape="):
            cuda.DecodeBuffers(DIMS, tape=tape, device=2)


def test_no_room(cuda: Any, host_gpu: Any) -> None:
    needed = cuda.DecodeBuffers.bytes_needed(DIMS)
    with cuda.Tape(needed + 255) as tape:
        tape.take_bytes(100)
        with pytest.raises(um.TapeFull) as caught:
            cuda.DecodeBuffers(DIMS, tape=tape)
        assert (caught.value.asked, tape.used_bytes, tape.n_takes) == (needed, 100, 1)
        tape.clear()
        tape.freeze()
        with pytest.raises(um.FrozenError):
            cuda.DecodeBuffers(DIMS, tape=tape)
        tape.thaw()
        cuda.DecodeBuffers(DIMS, tape=tape).close()
    host_gpu.total_bytes = needed
    cuda.DecodeBuffers(DIMS).close()


def test_the_end(cuda: Any, host_gpu: Any) -> None:
    db = cuda.DecodeBuffers(DIMS, name="mine")
    batch = db.batch(2)
    db.swap_residual()
    addresses, view = db.addresses(), batch.logits
    # CuPy decides how many: a view keeps the array that it was made from.
    with pytest.raises(BufferError, match=r"'mine' has \d live views"):
        db.close()
    assert not db.closed
    assert db.addresses() == addresses
    assert db.residual.data.ptr == batch.residual.data.ptr == addresses["residual"]
    assert repr(db).startswith("DecodeBuffers('mine', 69.3 KiB of float16, batch 4, Tape('mine', ")
    with pytest.raises(TypeError, match="a DecodeBuffers cannot be pickled"):
        pickle.dumps(db)
    del view
    db.close()
    db.close()
    assert host_gpu.allocated == {}
    for gone in (lambda: db.logits, lambda: batch.logits, db.addresses, db.swap_residual):
        with pytest.raises(um.ClosedError, match="'mine' is closed"):
            gone()
    with cuda.DecodeBuffers(DIMS) as db:
        view = db.batch(1).logits
    assert db.closed
    assert len(host_gpu.allocated) == 1  # until the view ends
    del view
    gc.collect()
    assert host_gpu.allocated == {}
