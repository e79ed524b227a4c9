"""Blocks, tapes, grids, layouts and decode buffers in the memory of a GPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unimem as um
from buffer_sets import check_buffers, random_dims
from conformance import exit_status
from gpu.machine import MIB, Counted, bridge, cuda, cupy, gpu, held, new_stream
from unimem._core.status import device_ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

runtime = cupy.cuda.runtime


def entered(category: str) -> int:
    row = device_ledger().get(("cuda:0", category))
    return int(row["nbytes"]) if row else 0


# ---- blocks ----


def test_a_block_is_device_memory(counted: Counted) -> None:
    with cuda.Block(64 * MIB, category="history") as block:
        assert counted.allocated == {block.address: 64 * MIB}
        assert runtime.pointerGetAttributes(block.address).type == runtime.memoryTypeDevice
        assert entered("history") == 64 * MIB
        a = block.as_array("float32", (1024, 1024), offset=MIB)
        a[...] = cupy.arange(MIB, dtype="float32").reshape(1024, 1024)
        assert float(a[1023, 1023]) == MIB - 1
        assert np.array_equal(
            bridge.down(block.as_array()[MIB : 5 * MIB]).view(np.float32), np.arange(MIB)
        )
        del a
    assert counted.allocated == {}
    assert counted.calls["allocate"] == 1
    assert counted.calls["synchronize"] == 0


def test_memory_goes_with_the_last_view(counted: Counted) -> None:
    for _ in range(2):  # the first time also the code of a kernel is loaded
        gc.collect()
        free = runtime.memGetInfo()[0]
        with cuda.Block(256 * MIB) as block:
            part = block.as_array()[MIB : 2 * MIB]
        assert block.closed
        assert runtime.memGetInfo()[0] <= free - 256 * MIB
        part[...] = 7
        assert bridge.down(part[-3:]).tolist() == [7, 7, 7]
        del part
        assert counted.allocated == {}
    assert runtime.memGetInfo()[0] >= free


@pytest.mark.parametrize("options", [{"pages": "4k"}, {"pages": "auto"}, {"warm": True}])
def test_both_see_pinned_memory(options: dict[str, Any], counted: Counted) -> None:
    with cuda.Block(8 * MIB, pinned=True, **options) as block:
        assert block.host is not None
        found = runtime.pointerGetAttributes(block.address)
        assert found.type == runtime.memoryTypeHost
        assert block.address == block.host.address == found.devicePointer
        host, device = block.host.as_array("int32"), block.as_array("int32")
        host[...] = np.arange(host.size)
        device *= 3  # a kernel, over the bus
        runtime.deviceSynchronize()
        assert np.array_equal(host, 3 * np.arange(host.size))
        host[...] = -1
        assert int(device.sum()) == -host.size
        del host, device
    assert counted.calls["register"] == counted.calls["unregister"] == 1
    assert counted.calls["allocate"] == 0


def test_a_view_of_the_host_keeps_pinned_memory(counted: Counted) -> None:
    block = cuda.Block(MIB, pinned=True, pages="4k")
    assert block.host is not None
    view = block.host.as_array()
    with pytest.raises(BufferError, match="1 live views"):
        block.close()
    assert runtime.pointerGetAttributes(block.address).type == runtime.memoryTypeHost
    block.as_array().fill(7)
    runtime.deviceSynchronize()
    address = block.address
    with block:
        pass
    assert counted.calls["unregister"] == 1
    assert runtime.pointerGetAttributes(address).type == runtime.memoryTypeUnregistered
    assert set(view) == {7}


def test_copies_from_pinned_memory_do_not_wait() -> None:
    driver, stream = gpu.driver(0), new_stream()
    with cuda.Block(MIB, pinned=True) as staging, cuda.Block(MIB) as block:
        assert staging.host is not None
        staging.host.as_array()[...] = 5
        with held(stream):
            driver.copy(block.address, staging.address, MIB, stream.ptr)
            staging.host.as_array()[...] = 6  # before the copy begins
        assert set(bridge.down(block.as_array())) == {6}


def test_no_room_changes_nothing(counted: Counted) -> None:
    _, total = runtime.memGetInfo()
    makers: list[Callable[[], Any]] = [
        lambda: cuda.Block(total),
        lambda: cuda.Tape(total),
        lambda: cuda.Grid(MIB, total // MIB),
        lambda: cuda.Layout(MIB, MIB, total),
        lambda: cuda.KVCache(64, 64, 256, total // (64 * 64 * 256), dtype="f32"),
        lambda: cuda.Scratchpad(total // 1024, 1024),
    ]
    for _ in range(2):  # the first time also the code of kernels is loaded
        free = runtime.memGetInfo()[0]
        for make in makers:
            with pytest.raises(um.CapacityError, match="cuda:0: asked for"):
                make()
            gc.collect()
            assert counted.allocated == {}
    assert runtime.memGetInfo()[0] >= free
    with cuda.Block(MIB) as block:
        block.as_array()[...] = 1
        runtime.deviceSynchronize()


def test_a_full_tape_keeps_what_it_has() -> None:
    with cuda.Tape(MIB) as tape:
        array = tape.take(1000, "float32")
        array[...] = 3
        used = tape.used_bytes
        with pytest.raises(um.TapeFull):
            tape.take(MIB, "float32")
        with pytest.raises(um.TapeFull):
            cuda.KVCache(2, 2, 64, 10_000, tape=tape)
        with pytest.raises(um.TapeFull):
            cuda.Scratchpad(10_000, 64, tape=tape)
        assert tape.used_bytes == used
        assert set(bridge.down(array)) == {3}


def test_a_forked_child_has_none() -> None:
    with cuda.Tape(MIB) as tape, cuda.Block(MIB, pinned=True) as pinned:
        array = tape.take(10)
        array.fill(2)

        def child() -> bool:
            for use in (lambda: tape.take(1), tape.clear, pinned.as_array, lambda: tape.block):
                with pytest.raises(um.ClosedError, match="forked child"):
                    use()
            with pytest.raises(um.ClosedError, match="forked child has no CUDA"):
                cuda.Block(MIB)
            assert um.report().device_bytes == {}
            tape.close()
            pinned.close()
            return bool(tape.closed and pinned.closed)

        assert exit_status(child) == 0
        assert bridge.down(array).tolist() == [2] * 10


def test_views_may_go_in_any_thread(counted: Counted) -> None:
    views = []
    with cuda.Block(MIB) as block:
        views.append(block.as_array())
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert counted.allocated == {}


# ---- tapes, grids and layouts ----


def test_a_tape_gives_arrays_of_its_block(counted: Counted) -> None:
    with cuda.Tape(MIB) as tape:
        for _ in range(2):
            a = tape.take((3, 5), "float16")
            b = tape.take(7, "int16")
            c = tape.take_bytes(100)
            a.fill(1)
            b.fill(2)
            c.fill(3)
            assert [x.data.ptr - tape.block.address for x in (a, b, c)] == [0, 256, 512]
            assert set(bridge.down(a).ravel().tolist()) == {1.0}
            assert set(bridge.down(b).tolist()) == {2}
            with tape.frame():
                assert tape.take(1).data.ptr == tape.block.address + 768
            assert tape.used_bytes == 612
            tape.clear()
        assert counted.calls == {"allocate": 1}


def test_cells_of_a_grid_are_apart() -> None:
    with cuda.Grid(1000, 8) as grid:
        cells = [grid.take() for _ in range(8)]
        for cell in cells:
            cell.as_array().fill(cell.id)
        assert [set(bridge.down(cell.as_array())) for cell in cells] == [
            {cell.id} for cell in cells
        ]
        with pytest.raises(um.GridFull):
            grid.take()
        for cell in cells:
            grid.give(cell)
        assert grid.n_available == 8


def test_a_frozen_layout_goes_on(counted: Counted) -> None:
    dims = um.ModelDims(64, 176, 8, 4, 8, 512, 2, 64, max_batch_size=2)
    with cuda.Layout(MIB, MIB, 4 * MIB) as layout:
        buffers = cuda.DecodeBuffers(dims, tape=layout.scratch)
        layout.scratch.keep()
        kv = cuda.KVCache(2, 4, 8, 64, dtype="f16", tape=layout.history)
        layout.attach(kv)
        with layout.scratch.frame():
            layout.scratch.take(1000)
        layout.freeze()
        with pytest.raises(um.FrozenError):
            layout.history.take(1)
        token = bridge.up(np.ones((1, 4, 8), np.float32))
        addresses, before = buffers.addresses(), bridge.counters()
        for _ in range(20):
            layout.scratch.take(1000)
            for layer in range(2):
                kv.append(layer, token, token)
            layout.clear_pass()
        assert len(kv) == 20
        assert (buffers.addresses(), bridge.counters()) == (addresses, before)
        stat = layout.stat()
        assert stat.scratch_used == buffers.memory_bytes
        assert stat.history_total == 4 * MIB
        layout.clear_talk()
        assert len(kv) == 0
        kv.close()
        buffers.close()
    assert counted.allocated == {}


# ---- decode buffers ----


def test_200_dims(counted: Counted) -> None:
    with cuda.Tape(64 * MIB) as tape:
        for i, (dims, dtype) in enumerate(random_dims(200)):
            with cuda.DecodeBuffers(dims, dtype=dtype) as buffers:
                check_buffers(buffers, dims, dtype)
                tape_of_its_own = buffers.tape
                assert buffers.memory_bytes == tape_of_its_own.used_bytes
                assert counted.allocated[tape_of_its_own.block.address] == buffers.memory_bytes
                assert entered("scratch") == 64 * MIB + buffers.memory_bytes
            tape.clear()
            tape.take_bytes(i)
            with cuda.DecodeBuffers(dims, dtype=dtype, tape=tape) as buffers:
                check_buffers(buffers, dims, dtype)
                assert tape.used_bytes == -(-i // 256) * 256 + buffers.memory_bytes


def test_every_buffer_holds_what_is_written() -> None:
    dims = um.ModelDims(64, 176, 8, 4, 8, 512, 2, 64, quantized=True, max_batch_size=3)
    with cuda.DecodeBuffers(dims, dtype="bfloat16") as buffers:
        names = sorted(buffers.addresses())
        for i, name in enumerate(names):
            getattr(buffers, name).view("uint8").fill(i)
        for i, name in enumerate(names):
            array = getattr(buffers, name)
            assert array.data.ptr == buffers.addresses()[name]
            assert set(bridge.down(array).tobytes()) == {i}
        first, second = buffers.addresses()["residual"], buffers.addresses()["post_norm_residual"]
        buffers.swap_residual()
        assert buffers.residual.data.ptr == second
        assert buffers.batch(2).post_norm_residual.data.ptr == first
        assert buffers.batch(2).qkv_out.shape == (2, dims.qkv_size)
        del array
