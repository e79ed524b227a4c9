"""Tapes of a GPU: arrays that are remembered, what counts as a view, threads.

The behaviour of all tapes is tested in tests/_core/test_tape.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.gpu.host_gpu import HostDriver, numpy_of
from unimem._core.status import device_ledger, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

KIB = 1024


@pytest.fixture
def tape(cuda: Any) -> Iterator[Any]:
    with cuda.Tape(64 * KIB, name="t") as tape:
        yield tape


# ---- arrays that are remembered ----


def test_the_same_take_gets_the_same_array(
    tape: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> list[Any]:
        arrays = [
            tape.take(100),
            tape.take((4, 25), np.float16),
            tape.take((2, 3), np.dtype("int8"), align=1),
            tape.take_bytes(7),
        ]
        with tape.frame():
            arrays += [tape.take([5, 5]), tape.take(np.int64(3), "float64")]
        with tape.frame():
            arrays.append(tape.take(25))  # another shape at the same place
        tape.clear()
        return arrays

    first = step()
    assert len({id(array) for array in first}) == len(first)
    monkeypatch.setattr(host_gpu, "array", None)  # would make an array
    for _ in range(3):
        again = step()
        assert [id(array) for array in again] == [id(array) for array in first]
        assert [array.shape for array in again] == [array.shape for array in first]


def test_another_take_gets_another_array(tape: Any) -> None:
    arrays = []
    for shape, dtype in (
        (8, "<f4"),
        (8, "<i4"),
        (8, ">f4"),
        (8, "<f2"),
        ((2, 4), "<f4"),
        ((4, 2), "<f4"),
    ):
        array = tape.take(shape, dtype)
        assert (array.shape, array.dtype.str) == (np.empty(shape).shape, dtype)
        assert array.data.ptr == tape.block.address
        arrays.append(array)
        tape.clear()
    assert len({id(array) for array in arrays}) == 6


def test_an_array_whose_shape_was_changed_is_not_handed_out(tape: Any) -> None:
    array = tape.take((4, 6))
    array.shape = (24,)
    tape.clear()
    again = tape.take((4, 6))
    assert again is not array
    assert (again.shape, array.shape) == ((4, 6), (24,))
    tape.clear()
    assert tape.take((4, 6)) is again  # it replaced the other
    tape.clear()
    array = tape.take(24)
    array.shape = (2, 12)
    tape.clear()
    assert tape.take(24).shape == (24,)


def test_arrays_without_bytes_are_each_its_own(tape: Any) -> None:
    first, second = tape.take((0, 3)), tape.take((0, 3))
    assert first is not second
    first.shape = (3, 0)
    assert second.shape == (0, 3)
    assert first.data.ptr == second.data.ptr == tape.block.address


def test_the_memory_of_arrays_is_bounded(cuda: Any) -> None:
    with cuda.Tape(64 * KIB) as tape:
        held = tape.take(1)
        memory = held.data.mem
        del held
        most = 0
        for n in range(10_000):
            tape.clear()
            tape.take(1 + n, "uint8")
            most = max(most, sys.getrefcount(memory))
        assert 4096 <= most < 4200
        del memory


def test_a_misaligned_array_is_refused(tape: Any) -> None:
    for dtype, align in (("float32", 2), ("float64", 4), ("float16", 1)):
        with pytest.raises(ValueError, match=f"align: expected at least .* for {dtype}"):
            tape.take(4, dtype, align=align)
    assert tape.n_takes == 0
    tape.take_bytes(1, align=1)
    assert tape.take(4, align=4).data.ptr == tape.block.address + 4


# ---- views and lifetime ----


@pytest.mark.parametrize(
    "keep",
    [
        lambda tape: tape.take(8),
        lambda tape: tape.take((2, 4))[1],
        lambda tape: tape.take(8).view("int32"),
        lambda tape: tape.take(8).reshape(2, 4).T,
        lambda tape: tape.take(8).data,
        lambda tape: tape.take(8).data + 4,
        lambda tape: [tape.take(8)],
        lambda tape: tape.take(0),
        lambda tape: tape.block.as_array(),
        lambda tape: tape.block.as_array("float32", 4, 64)[2:],
    ],
)
def test_held_views_count(cuda: Any, host_gpu: HostDriver, keep: Callable[[Any], Any]) -> None:
    for after in ("at once", "after clear", "taken again"):
        tape = cuda.Tape(64 * KIB, name="mine")
        view = keep(tape)
        if after != "at once":
            tape.clear()
        if after == "taken again":
            keep(tape)
        for _ in range(2):
            with pytest.raises(BufferError, match=r"'mine' has \d live views"):
                tape.close()
            assert not tape.closed
        tape.take(3)
        assert len(host_gpu.allocated) == 1
        del view
        tape.close()
        assert host_gpu.allocated == {}


def test_a_refused_close_counts_the_views(cuda: Any) -> None:
    with cuda.Tape(64 * KIB) as tape:
        views = [tape.take(8) for _ in range(5)]
        views += [tape.block.as_array()]
        for n in range(6, 0, -1):
            with pytest.raises(BufferError, match=f"has {n} live"):
                tape.close()
            views.pop()


def test_a_tape_over_a_block(cuda: Any, host_gpu: HostDriver) -> None:
    with cuda.Block(4096, name="ground", pinned=True) as block:
        tape = cuda.Tape(block)
        assert (tape.name, tape.block, tape.total_bytes) == ("ground", block, 4096)
        array = tape.take(4)
        assert array.data.ptr == block.address
        assert block.host is not None
        numpy_of(array)[:] = 5
        assert (block.host.as_array("float32", 4) == 5).all()
        with pytest.raises(BufferError, match="live"):
            block.close()
        for options in ({"pinned": True}, {"device": 1}, {"numa": "bind:0"}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} not accepted"):
                cuda.Tape(block, **options)
        tape.close()  # the block is borrowed: views may live on
        with pytest.raises(BufferError, match="1 live"):
            block.close()
        del array
        block.close()  # the tape has dropped its arrays
    assert host_gpu.registered == {}
    with pytest.raises(um.ClosedError):
        cuda.Tape(block)
    with um.Block(4096) as host, pytest.raises(TypeError, match=r"unimem\.Block.*pinned=True"):
        cuda.Tape(host)


def test_placement_and_category(cuda: Any) -> None:
    with cuda.Tape(12 * KIB, category="history", name="h") as tape:
        assert device_ledger()[("cuda:0", "history")]["nbytes"] == 12 * KIB
        assert repr(tape).startswith("Tape('h', 0 B of 12.0 KiB used, device, 12.0 KiB in RAM")
        tape.warm()
        tape.warm(4)
    before = ledger()["staging"]["mapped_bytes"]
    with cuda.Tape(100, category="staging", pinned=True, pages="4k") as tape:
        assert tape.total_bytes == 100  # not the page
        assert ledger()["staging"]["mapped_bytes"] == before + 4096
        assert "4k" in repr(tape)


def test_poison_goes_by_the_current_stream(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIMEM_DEBUG", "1")
    with cuda.Tape(KIB) as tape:
        tape.take_bytes(100)
        tape.clear()
        assert host_gpu.calls == [("fill", tape.block.address, 0xDB, 100, 0)]
        tape.clear()  # nothing is left to overwrite
        assert len(host_gpu.calls) == 1


def test_a_frozen_tape_hands_out_nothing_that_it_remembers(tape: Any) -> None:
    tape.take(8)
    tape.clear()
    tape.freeze()
    with pytest.raises(um.FrozenError):
        tape.take(8)
    tape._freeze_at(tape.high_water_bytes)
    tape.take(8)
    with pytest.raises(um.FrozenError):
        tape.take(8)


# ---- threads ----


def test_threads_take_and_get_what_they_asked_for(cuda: Any) -> None:
    """In each round threads find arrays of other threads at the same places."""
    n_threads, n_rounds = 6, 30
    sizes = [1, 7, 64]
    barrier = threading.Barrier(n_threads, timeout=100)

    def work(n: int) -> None:
        for _ in range(n_rounds):
            if barrier.wait() == 0:
                shared.clear()
            barrier.wait()
            mine = []
            for i in range(20):
                shape = (sizes[(n + i) % 3], 4)
                array = shared.take(shape, ("float32", "float16")[i % 2])
                numpy_of(array)[...] = n
                mine.append((array, shape))
            barrier.wait()
            for array, shape in mine:
                assert array.shape == shape
                assert (numpy_of(array) == n).all()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with cuda.Tape(1 << 18) as shared, ThreadPoolExecutor(n_threads) as pool:
            for done in [pool.submit(work, n) for n in range(n_threads)]:
                done.result()
            assert shared.used_bytes <= shared.total_bytes
    finally:
        sys.setswitchinterval(interval)
