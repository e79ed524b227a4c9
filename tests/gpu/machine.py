"""The GPU that the tests of this folder run on, and ways to see it that are not the library's.

Importing this skips the module that does so where there is no GPU.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from support.contracts.cache_kinds import Array, CudaBridge, OnDevice, own_counters, span

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other packages, about each other
    cupy = pytest.importorskip("cupy", reason="needs a GPU and CuPy: make test-gpu")
if not cupy.cuda.is_available():
    pytest.skip("needs a GPU: make test-gpu", allow_module_level=True)

from unimem import cuda
from unimem.backends import cuda_driver

__all__ = [
    "DRIVERS_OWN",
    "MIB",
    "Counted",
    "bridge",
    "cuda",
    "cuda_driver",
    "cupy",
    "held",
    "new_stream",
]

MIB = 1 << 20
# The driver may take this for itself, such as for code that runs for the first time.
# `Counted` has the exact figures of the library.
DRIVERS_OWN = 8 * MIB
runtime = cupy.cuda.runtime
MemoryHook: Any = cupy.cuda.MemoryHook

# Spins until the host sets the flag, at most for these cycles, so that a call that waits by mistake
# fails instead of hanging.
HOLD = r"""
extern "C" __global__ void hold(volatile int *flag, long long most_cycles) {
    long long start = clock64();
    while (*flag == 0 && clock64() - start < most_cycles) {
    }
}
"""
MOST_CYCLES = 120_000_000_000  # 60 s at 2 GHz


@cache
def _holding() -> tuple[Any, Any, Any]:
    """The kernel, and the flag as the GPU and as the CPU sees it."""
    memory = cupy.cuda.alloc_pinned_memory(4)
    return cupy.RawKernel(HOLD, "hold"), memory, np.frombuffer(memory, np.int32, 1)


@contextmanager
def held(stream: Any) -> Iterator[None]:
    """Queued work of the stream begins only after the ``with``.

    Raises
    ------
    AssertionError
        The stream was done before: some call has waited for it.
    """
    hold, memory, flag = _holding()
    gc.collect()
    gc.disable()  # freeing memory waits for the device
    flag[0] = 1
    hold((1,), (1,), (memory.ptr, MOST_CYCLES), stream=stream)  # now it is loaded
    stream.synchronize()
    flag[0] = 0
    hold((1,), (1,), (memory.ptr, MOST_CYCLES), stream=stream)
    try:
        yield
        is_held = not stream.done
    finally:
        flag[0] = 1
        stream.synchronize()
        gc.enable()
    assert is_held, "somebody has waited for the stream"


def new_stream() -> Any:
    """A stream that does not wait for the default one, as graphs need it."""
    return cupy.cuda.Stream(non_blocking=True)


class Interface:
    """An array with the interface alone, which names its stream."""

    def __init__(self, array: Any, maker: Any = None) -> None:
        self._array, self._maker = array, maker

    @property
    def __cuda_array_interface__(self) -> Any:
        if self._maker is None:
            return self._array.__cuda_array_interface__
        return self._array.__cuda_array_interface__ | {"stream": self._maker.ptr}


class Allocation:
    """An allocation of the driver."""

    def __init__(self, counted: Counted, nbytes: int, memory: Any) -> None:
        self._counted, self._memory = counted, memory
        self.ptr = memory.ptr
        counted.allocated[self.ptr] = nbytes

    def __del__(self) -> None:
        del self._counted.allocated[self.ptr]


class Counted(MemoryHook):  # type: ignore[misc]
    """Counts calls of the driver by the library, and of the pool by CuPy.

    Attributes
    ----------
    calls : Counter
        By the driver's method, and as `pool` what CuPy has taken from its pool.
    allocated : dict of int to int
        Addresses to sizes of what the library has.
    """

    name = "Counted"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.allocated: dict[int, int] = {}
        for cls, method in (
            *(
                (cuda_driver.Driver, name)
                for name in ("synchronize", "register", "unregister", "module")
            ),
            *((cuda_driver.Driver, name) for name in ("new_stream", "new_event")),
            (cuda_driver._Event, "synchronize"),
        ):
            monkeypatch.setattr(cls, method, self._counting(getattr(cls, method)))
        allocate = cuda_driver.Driver.allocate

        def counting(driver: Any, nbytes: int) -> Allocation:
            self.calls["allocate"] += 1
            return Allocation(self, nbytes, allocate(driver, nbytes))

        monkeypatch.setattr(cuda_driver.Driver, "allocate", counting)

    def _counting(self, method: Any) -> Any:
        def counting(*arguments: Any) -> Any:
            self.calls[method.__name__] += 1
            return method(*arguments)

        return counting

    def malloc_preprocess(self, **_: Any) -> None:
        self.calls["pool"] += 1


class DeviceBridge(CudaBridge):
    """A real device. Its own allocations are neither the library's nor the pool's."""

    counted: Counted  # of this test

    def up(self, a: Array) -> OnDevice:
        memory, first = span(a)
        allocation = cupy.cuda.Memory(memory.nbytes)
        kind = runtime.memcpyHostToDevice
        runtime.memcpy(allocation.ptr, memory.ctypes.data, memory.nbytes, kind)
        runtime.deviceSynchronize()  # which a small copy does not wait for
        return cupy.ndarray(a.shape, a.dtype, cupy.cuda.MemoryPointer(allocation, first), a.strides)

    def down(self, a: OnDevice) -> Array:
        runtime.deviceSynchronize()
        if a.size == 0:
            return np.empty(a.shape, a.dtype)
        ends = [(n - 1) * stride for n, stride in zip(a.shape, a.strides, strict=True)]
        low = sum(end for end in ends if end < 0)
        nbytes = sum(end for end in ends if end > 0) - low + a.itemsize
        memory = np.empty(nbytes, np.uint8)
        runtime.memcpy(memory.ctypes.data, a.data.ptr + low, nbytes, runtime.memcpyDeviceToHost)
        return np.ndarray(a.shape, a.dtype, memory.data, -low, a.strides).copy()

    def zero(self, a: OnDevice) -> None:
        a.fill(0)

    def is_mapped(self, address: int) -> bool:
        allocated = self.counted.allocated.items()
        return any(first <= address < first + nbytes for first, nbytes in allocated)

    def counters(self) -> Mapping[str, int]:
        return own_counters() | self.counted.calls


bridge = DeviceBridge()
