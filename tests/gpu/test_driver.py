"""The driver, on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import unimem as um
from gpu.machine import DRIVERS_OWN, MIB, Interface, bridge, cuda_driver, cupy, held, new_stream

runtime = cupy.cuda.runtime

SOURCE = r"""
extern "C" __global__ void round_twice(unsigned long long to) {
    float *out = (float *)to;
    out[3] = out[0] * out[1] + out[2];
}
extern "C" __global__ void small(unsigned long long of, unsigned long long to, long long n) {
    const float *in = (const float *)of;
    unsigned *bits = (unsigned *)to;
    for (long long i = 0; i < n; i++) {
        bits[i] = __float_as_uint(in[2 * i] * in[2 * i + 1]);
        bits[n + i] = __float_as_uint(in[2 * i] / in[2 * i + 1]);
    }
}
"""


@pytest.fixture
def driver() -> cuda_driver.Driver:
    return cuda_driver.driver(0)


@pytest.fixture
def host() -> Iterator[um.Block]:
    with um.Block(2 * MIB) as block:
        yield block


def test_there_is_one_driver_a_device(driver: cuda_driver.Driver) -> None:
    cuda_driver.require()
    assert cuda_driver.driver(0) is driver
    assert (driver.id, driver.name) == (0, "cuda:0")
    n = runtime.getDeviceCount()
    for wrong in (n, -1):
        with pytest.raises(ValueError, match=f"device: expected 0 to {n - 1}, got {wrong}"):
            cuda_driver.driver(wrong)


# ---- memory ----


def test_memory_is_allocated_and_freed(driver: cuda_driver.Driver) -> None:
    gc.collect()
    free = driver.free_bytes()
    allocation = driver.allocate(256 * MIB)
    assert allocation.ptr % 256 == 0
    found = runtime.pointerGetAttributes(allocation.ptr)
    assert (found.type, found.device) == (runtime.memoryTypeDevice, 0)
    assert driver.free_bytes() <= free - 256 * MIB
    del allocation
    assert driver.free_bytes() >= free - DRIVERS_OWN


def test_no_room(driver: cuda_driver.Driver) -> None:
    free, total = runtime.memGetInfo()
    with pytest.raises(um.CapacityError, match="cuda:0: asked for") as caught:
        driver.allocate(total + MIB)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.limit, error.asked) == (total, total + MIB)
    assert 0 <= error.used < total
    assert driver.free_bytes() >= free
    driver.allocate(MIB)  # the device still works
    runtime.deviceSynchronize()


def test_host_memory_is_pinned(driver: cuda_driver.Driver, host: um.Block) -> None:
    assert runtime.pointerGetAttributes(host.address).type == runtime.memoryTypeUnregistered
    driver.register(host.address, host.nbytes)
    try:
        found = runtime.pointerGetAttributes(host.address)
        assert found.type == runtime.memoryTypeHost
        assert found.devicePointer == found.hostPointer == host.address
        with pytest.raises(um.PlacementError, match="cannot be pinned"):
            driver.register(host.address, host.nbytes)
    finally:
        driver.unregister(host.address)
    assert runtime.pointerGetAttributes(host.address).type == runtime.memoryTypeUnregistered


# ---- copies ----


def test_copies_go_every_way(driver: cuda_driver.Driver, host: um.Block) -> None:
    driver.register(host.address, host.nbytes)
    try:
        bytes_ = host.as_array()
        bytes_[:MIB] = np.random.default_rng(0).integers(0, 256, MIB, np.uint8)
        first, second = driver.allocate(MIB), driver.allocate(MIB)
        stream = driver.new_stream()
        assert isinstance(stream.ptr, int)
        driver.copy(first.ptr, host.address, MIB, stream.ptr)
        driver.copy(second.ptr, first.ptr, MIB, stream.ptr)
        driver.copy(host.address + MIB, second.ptr, MIB, stream.ptr)
        driver.synchronize(stream.ptr)
        assert np.array_equal(bytes_[:MIB], bytes_[MIB:])
        driver.fill(second.ptr, 0xAB, MIB, stream.ptr)
        driver.copy(host.address, second.ptr, MIB, stream.ptr)
        driver.copy(host.address + MIB, host.address, 16, stream.ptr)
        driver.synchronize(stream.ptr)
        assert np.all(bytes_[: MIB + 16] == 0xAB)
        del bytes_
    finally:
        driver.unregister(host.address)


# ---- streams ----


def test_an_event_is_a_point_in_a_stream(driver: cuda_driver.Driver) -> None:
    first, second = new_stream(), new_stream()
    event = driver.new_event()
    event.record(first.ptr)
    with held(second):
        event.synchronize()  # it does not wait for work queued elsewhere
        driver.synchronize(first.ptr)
    event.record(second.ptr)
    event.synchronize()
    assert second.done


# ---- kernels ----


def test_products_and_sums_round_each(driver: cuda_driver.Driver) -> None:
    kernel = driver.module(SOURCE, ["round_twice"])["round_twice"]
    values = np.array([1 + 2**-12, 1 + 2**-12, -1 - 2**-11, 0], np.float32)
    out = bridge.up(values)
    kernel((1,), (1,), (out.data.ptr,), 0)
    expected = values[0] * values[1] + values[2]
    assert bridge.down(out)[3] == expected == 0  # fused it would be 2 ** -24


def test_denormals_are_kept(driver: cuda_driver.Driver) -> None:
    kernel = driver.module(SOURCE, ["small"])["small"]
    pairs = [(2.0**-140, 2.0**-3), (2.0**-100, -(2.0**-40)), (3 * 2.0**-149, 2.0**60), (1e-40, 7)]
    numbers = np.array(pairs, np.float32)
    of, out = bridge.up(numbers), bridge.up(np.zeros((2, len(pairs)), np.uint32))
    kernel((1,), (1,), (of.data.ptr, out.data.ptr, len(pairs)), 0)
    a, b = numbers.T
    assert bridge.down(out).tolist() == [(a * b).view("u4").tolist(), (a / b).view("u4").tolist()]


def test_errors_of_the_compiler_are_reported(driver: cuda_driver.Driver) -> None:
    with pytest.raises(cupy.cuda.compiler.CompileException, match="nothing_like_that"):
        driver.module('extern "C" __global__ void f() { nothing_like_that(); }', ["f"])


# ---- arrays of others ----


def test_arrays_of_everybody(driver: cuda_driver.Driver, torch: Any) -> None:
    array = cupy.arange(24, dtype="float32").reshape(4, 6)[:, ::2]
    assert driver.is_array(array)
    assert driver.to_array(array) is array
    there = driver.to_array(Interface(array))
    assert (there.data.ptr, there.strides) == (array.data.ptr, array.strides)
    assert not driver.is_array(Interface(array))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor = torch.arange(24, device="cuda").to(dtype).reshape(4, 6).T
        there = driver.to_array(tensor)
        assert (there.data.ptr, there.shape) == (tensor.data_ptr(), (6, 4))
        assert there.strides == tuple(n * tensor.element_size() for n in tensor.stride())
        assert str(there.dtype) == str(dtype).removeprefix("torch.")
    for wrong in (np.zeros(3), [1.0], None, 1.0, torch.zeros(3), b"abc", cupy.ndarray):
        with pytest.raises(TypeError, match=r"expected an array on the GPU, got "):
            driver.to_array(wrong)


def test_the_stream_waits_for_the_maker_of_an_array(driver: cuda_driver.Driver) -> None:
    maker, here = new_stream(), new_stream()
    array = bridge.up(np.zeros(8, np.uint8))
    with held(maker):
        driver.fill(array.data.ptr, 1, 4, maker.ptr)
        with here:
            there = driver.to_array(Interface(array, maker))  # this thread does not wait
        driver.fill(there.data.ptr, 2, 2, here.ptr)
        assert not here.done
    assert bridge.down(array).tolist() == [2, 2, 1, 1, 0, 0, 0, 0]
