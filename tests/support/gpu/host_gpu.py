"""A driver over main memory in place of `cuda_driver.Driver`: the twin without a GPU.

Allocations are NumPy arrays, copies are done at once, kernels are the same source compiled for the
CPU, and arrays are real CuPy arrays over host addresses: offsets, shapes and lifetimes are CuPy's.
Only access to their data fails; `array_of` and `numpy_of` are for that.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from unimem.backends import cuda_driver
from unimem.backends.cuda_driver import Launcher
from unimem.errors import CapacityError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

Array = NDArray[Any]


class HostMemory:
    """An allocation, at a multiple of 256 bytes as cudaMalloc's."""

    def __init__(self, driver: HostDriver, nbytes: int) -> None:
        self._driver = driver
        self._nbytes = nbytes
        self.ptr = 0  # if main memory has no room
        # Not zeros: the content is undefined.
        self._bytes = np.full(nbytes + 256, 0xA5, np.uint8)
        self.ptr = -(-self._bytes.ctypes.data // 256) * 256
        driver.allocated[self.ptr] = nbytes
        driver.n_allocations += 1

    def __del__(self) -> None:
        self._driver.allocated.pop(self.ptr, None)


class HostStream:
    """A stream, which is always idle."""

    _numbers = itertools.count(1000)

    def __init__(self) -> None:
        self.ptr = next(self._numbers)


class HostEvent:
    """An event, which is always over."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def record(self, stream: int) -> None:
        self._driver.calls.append(("record", stream))

    def synchronize(self) -> None:
        self._driver.calls.append(("wait",))


class HostDriver(cuda_driver.Driver):
    """`cuda_driver.Driver` in main memory.

    Attributes
    ----------
    allocated, registered : dict of int to int
        From addresses to sizes.
    calls : list of tuple
        Queued work, and waits.
    total_bytes : int
        Memory of the device.
    page_bytes : int
        Allocations take a multiple of this; 2 MiB on a device.
    """

    def __init__(self, device: int = 0) -> None:
        if device != 0:
            raise ValueError(f"device: expected 0 to 0, got {device}")
        self._cupy = cupy
        self.id = device
        self.name = f"cuda:{device}"
        self.allocated: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.n_allocations = 0
        self._pid = os.getpid()
        self.total_bytes = 1 << 30  # a wrong size is refused, whatever the machine has
        self.page_bytes = 1

    def use(self) -> None:
        pass

    # ---- memory ----

    def allocate(self, nbytes: int) -> HostMemory:
        if self._on_device(nbytes) > self.free_bytes():
            used = self.total_bytes - self.free_bytes()
            raise CapacityError(f"{self.name} has no room", self.total_bytes, used, nbytes)
        return HostMemory(self, nbytes)

    def free_bytes(self) -> int:
        return self.total_bytes - sum(map(self._on_device, self.allocated.values()))

    def mem_info(self) -> tuple[int, int]:
        return self.free_bytes(), self.total_bytes

    def _on_device(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes) * self.page_bytes

    def register(self, address: int, nbytes: int) -> None:
        assert address not in self.registered
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        self.registered.pop(address, None)

    # ---- arrays ----

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return array_of(np.empty(shape, dtype))

    def to_tensor(self, array: Any) -> Any:
        from unimem.torch import tensor

        with cuda_driver.torch().inference_mode(False):
            return tensor(numpy_of(array))

    def new_tensor(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.to_tensor(self.empty(shape, dtype))

    # ---- streams ----

    def stream(self, stream: Any = None) -> int:
        # A forked child has no CUDA, and not even a current stream.
        assert os.getpid() == self._pid, "CUDA is asked in a forked child"
        return 0 if stream is None else super().stream(stream)

    def torch_stream(self) -> int:
        return self.stream()

    def new_stream(self) -> HostStream:
        return HostStream()

    def new_event(self) -> Any:
        return HostEvent(self)

    def synchronize(self, stream: int) -> None:
        self.calls.append(("synchronize", stream))

    def copy(self, to: int, from_: int, nbytes: int, stream: int) -> None:
        overlap = min(to, from_) + nbytes > max(to, from_) and nbytes > 0
        assert not overlap, "the order in which a GPU copies is not known"
        self._check_inside(to, nbytes)
        self._check_inside(from_, nbytes)
        self.calls.append(("copy", to, from_, nbytes, stream))
        ctypes.memmove(to, from_, nbytes)

    def copy_rows(
        self, to: int, to_step: int, from_: int, from_step: int, shape: tuple[int, int], stream: int
    ) -> None:
        self.calls.append(("copy rows", to, from_, shape, stream))
        for row in range(shape[0]):
            at = to + row * to_step, from_ + row * from_step
            for address in at:
                self._check_inside(address, shape[1])
            ctypes.memmove(*at, shape[1])

    def _check_inside(self, address: int, nbytes: int) -> None:
        for begin, size in self.allocated.items():
            assert not begin <= address < begin + size < address + nbytes, "beyond the allocation"

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        self.calls.append(("fill", address, byte, nbytes, stream))
        ctypes.memset(address, byte, nbytes)

    # ---- kernels ----

    def module(self, source: str, names: Sequence[str]) -> Mapping[str, Launcher]:
        from support.gpu import host_kernels

        return {
            name: self._noted(name, launch)
            for name, launch in host_kernels.module(source, names).items()
        }

    def launching(self, name: str) -> None:
        """Do nothing, before each launch; tests replace it."""

    def _noted(self, name: str, launch: Launcher) -> Launcher:
        def noted(
            grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], stream: int
        ) -> None:
            self.launching(name)
            self.calls.append(("launch", name, stream))
            launch(grid, block, args, stream)

        return noted


def array_of(a: Array, device: int = 0) -> Any:
    """A cupy.ndarray over a NumPy array's memory, with its strides."""
    low, high = np.lib.array_utils.byte_bounds(a)
    memory = cupy.cuda.UnownedMemory(low, max(high - low, 1), a, device)
    pointer = cupy.cuda.MemoryPointer(memory, a.ctypes.data - low)
    return cupy.ndarray(a.shape, a.dtype, pointer, a.strides)


class _Seen:
    """An object through which NumPy sees a cupy.ndarray's memory, and keeps it alive."""

    def __init__(self, a: Any) -> None:
        self.array = a
        # bfloat16 has no type string: these are bytes of its size.
        self.__array_interface__ = {
            "shape": a.shape,
            "typestr": f"|V{a.itemsize}",
            "data": (a.data.ptr, False),
            "strides": a.strides,
            "version": 3,
        }


def numpy_of(a: Any) -> Array:
    """A NumPy array over the host memory under a cupy.ndarray, which it keeps alive."""
    if a.size == 0:
        return np.empty(a.shape, a.dtype)
    return np.asarray(_Seen(a)).view(a.dtype)


def install(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """Put a new one in the place of device 0, until the end of the test."""
    monkeypatch.setattr(cuda_driver, "require", lambda: None)
    monkeypatch.setattr(cuda_driver, "Driver", HostDriver)
    monkeypatch.setattr(cuda_driver, "_drivers", {})
    driver = cuda_driver.driver(0)
    assert isinstance(driver, HostDriver)
    return driver
