"""Memory of a GPU, and memory that it shares with the CPU."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import unimem as um
from gpu.machine import MIB, Counted, bridge, cuda, cuda_driver, cupy, held, new_stream
from support.processes.forks import in_child
from unimem._core.status import device_ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

runtime = cupy.cuda.runtime


def test_a_block_is_device_memory(counted: Counted) -> None:
    with cuda.Block(64 * MIB, category="history") as block:
        assert counted.allocated == {block.address: 64 * MIB}
        assert runtime.pointerGetAttributes(block.address).type == runtime.memoryTypeDevice
        assert device_ledger()[("cuda:0", "history")]["nbytes"] == 64 * MIB
        a = block.as_array("float32", (1024, 1024), offset=MIB)
        a[...] = cupy.arange(MIB, dtype="float32").reshape(1024, 1024)
        assert float(a[1023, 1023]) == MIB - 1
        whole = bridge.down(block.as_array())
        assert np.array_equal(whole[MIB : 5 * MIB].view(np.float32), np.arange(MIB))
        del a
    assert counted.allocated == {}
    assert (counted.calls["allocate"], counted.calls["synchronize"]) == (1, 0)


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


def test_copies_from_pinned_memory_do_not_wait() -> None:
    driver, stream = cuda_driver.driver(0), new_stream()
    with cuda.Block(MIB, pinned=True) as staging, cuda.Block(MIB) as block:
        assert staging.host is not None
        staging.host.as_array()[...] = 5
        with held(stream):
            driver.copy(block.address, staging.address, MIB, stream.ptr)
            staging.host.as_array()[...] = 6  # before the copy begins
        assert set(bridge.down(block.as_array())) == {6}


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

        assert in_child(child)
        assert bridge.down(array).tolist() == [2] * 10


def test_views_may_go_in_any_thread(counted: Counted) -> None:
    with cuda.Block(MIB) as block:
        views = [block.as_array()]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert counted.allocated == {}
