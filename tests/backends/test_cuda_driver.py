"""The calls of CuPy, as far as they can be tested without a GPU: names, signatures, errors."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.gpu.host_gpu import array_of
from unimem.backends import cuda_driver
from unimem.backends.cuda_driver import Driver

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
without_gpu = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a GPU: tests/gpu")


class Unasked(Driver):
    """A driver that has not asked for its device."""

    def __init__(self) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._error = cupy.cuda.runtime.CUDARuntimeError
        self.id, self.name = 0, "cuda:0"
        self._device = contextlib.nullcontext()  # the real one fails before any call


CALLS: dict[str, Callable[[Driver], Any]] = {
    "allocate": lambda d: d.allocate(1 << 20),
    "free_bytes": lambda d: d.free_bytes(),
    "register": lambda d: d.register(1 << 12, 1 << 12),
    "unregister": lambda d: d.unregister(1 << 12),
    "stream": lambda d: d.stream(),
    "new_stream": lambda d: d.new_stream(),
    "new_event": lambda d: d.new_event(),
    "synchronize": lambda d: d.synchronize(0),
    "copy": lambda d: d.copy(256, 512, 8, 0),
    "copy_rows": lambda d: d.copy_rows(256, 8, 512, 8, (2, 8), 0),
    "fill": lambda d: d.fill(256, 0, 8, 0),
    "module": lambda d: d.module('extern "C" __global__ void f() {}', ["f"]),
}


# Without a driver CuPy half-makes a stream, whose destructor then fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@without_gpu
@pytest.mark.parametrize("name", CALLS)
def test_every_call_gets_as_far_as_cuda(name: str) -> None:
    # Without a GPU, a wrong name or signature would raise another error.
    with pytest.raises((cupy.cuda.runtime.CUDARuntimeError, um.PlacementError), match="cudaError"):
        CALLS[name](Unasked())


def test_arrays_are_cupys_over_any_address() -> None:
    driver, owner = Unasked(), bytearray(1 << 12)
    memory = driver.memory(1 << 20, 1 << 12, owner)
    array = driver.array(memory, 256, (4, 8), "float16", (32, 2))
    assert (array.data.ptr, array.shape, array.strides) == ((1 << 20) + 256, (4, 8), (32, 2))
    assert array.dtype == "float16"
    assert driver.is_array(array)
    assert driver.to_array(array) is array
    assert sys.getrefcount(owner) > 2


def test_arrays_elsewhere_than_on_a_gpu_are_refused() -> None:
    for wrong in (np.zeros(3), [1.0], None, "x", 3, np.ndarray, cupy.ndarray):
        expected = f"expected an array on the GPU, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=expected):
            Unasked().to_array(wrong)


def test_arrays_of_another_device_are_refused() -> None:
    class Tensor:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 3

    driver = WithInterfaces(device=3)
    for there in (array_of(np.zeros(8), 3), Tensor(), Interface()):
        with pytest.raises(
            ValueError, match=r"expected an array on cuda:0, got one on cuda:3: copy"
        ):
            driver.to_array(there)
    empty = array_of(np.zeros(0), 3)  # has no device
    assert driver.to_array(empty) is empty


class Interface:
    """An array with the interface alone."""

    def __init__(self, **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3, 4),
            "typestr": "<f4",
            "data": (1 << 20, False),
            "version": 3,
        } | more


class WithInterfaces(Unasked):
    """A driver that sees foreign arrays on this device, and notes which stream waits for which."""

    def __init__(self, device: int = 0, current: int = 0) -> None:
        super().__init__()
        self.current = current
        self.calls: list[tuple[str, int]] = []

        def memory(address: int, nbytes: int, owner: object, number: int) -> Any:
            found = device if number == -1 else number
            return cupy.cuda.UnownedMemory(address, nbytes, owner, found)

        self._cupy = SimpleNamespace(
            ndarray=cupy.ndarray,
            from_dlpack=None,
            cuda=SimpleNamespace(UnownedMemory=memory, MemoryPointer=cupy.cuda.MemoryPointer),
        )
        self._runtime = SimpleNamespace(
            eventRecord=lambda event, stream: self.calls.append(("record", stream)),
            streamWaitEvent=lambda stream, event: self.calls.append(("delay", stream)),
        )

    def stream(self, stream: Any = None) -> int:
        return self.current

    def new_event(self) -> cuda_driver._Event:
        return cuda_driver._Event(self._runtime, SimpleNamespace(ptr=99))


@pytest.mark.parametrize(
    ("maker", "current", "calls"),
    [
        (None, 0, []),
        (1, 0, []),  # the default stream has two names
        (77, 77, []),
        (77, 0, [("record", 77), ("delay", 0)]),
        (1, 77, [("record", 1), ("delay", 77)]),
        (2, 0, [("record", 2), ("delay", 0)]),
    ],
)
def test_a_stream_waits_for_the_maker(maker: int | None, current: int, calls: Any) -> None:
    driver = WithInterfaces(current=current)
    array = driver.to_array(Interface(stream=maker))
    assert (array.data.ptr, array.shape, array.strides) == (1 << 20, (3, 4), (16, 4))
    assert (array.dtype, array.data.mem.size, driver.calls) == ("float32", 48, calls)
    array = driver.to_array(Interface(strides=(4, 12), typestr="<f2"))
    assert (array.strides, array.data.mem.size) == ((4, 12), 2 * 4 + 3 * 12 + 2)
    array = driver.to_array(Interface(shape=(0, 4), data=(0, False)))
    assert array.shape == (0, 4)
    with pytest.raises(TypeError, match="masked"):
        driver.to_array(Interface(mask=Interface()))


def test_a_pool_that_is_full_says_so_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise cupy.cuda.memory.OutOfMemoryError(96, 0)

    driver = Unasked()
    monkeypatch.setattr(driver, "_cupy", SimpleNamespace(empty=full, cuda=cupy.cuda))
    monkeypatch.setattr(driver, "mem_info", lambda: (1 << 20, 1 << 30))
    with pytest.raises(
        um.CapacityError, match=r"asked for 96 B, but 1\.0 MiB of 1\.0 GiB"
    ) as caught:
        driver.empty((3, 8), "float32")
    refused = caught.value
    assert (refused.limit, refused.used, refused.asked) == (1 << 30, (1 << 30) - (1 << 20), 96)


def test_threads_get_one_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Unasked):
        def __init__(self, device: int) -> None:
            time.sleep(0.05)
            super().__init__()

    monkeypatch.setattr(cuda_driver, "Driver", Slow)
    monkeypatch.setattr(cuda_driver, "_drivers", {})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(cuda_driver.driver, [0] * 4))
    assert len({id(driver) for driver in found}) == 1


def test_kernels_are_launched_on_any_stream() -> None:
    launched = []

    class Function:
        ptr = 33

        def __call__(self, *what: Any, stream: Any) -> None:
            launched.append((*what, stream.ptr))

    kernel = cuda_driver._Kernel(Function())
    assert kernel.handle == 33
    for stream in (7, 5, 0):
        kernel((1,), (2,), (3,), stream)
    assert launched == [((1,), (2,), (3,), stream) for stream in (7, 5, 0)]


class DeviceError(RuntimeError):
    """An error of CUDA."""

    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


@pytest.mark.parametrize("use", ["allocate", "module"])
def test_a_device_that_is_full_says_so_with_figures(
    monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    driver, status = Unasked(), 2

    def refuse(*_: object) -> None:
        raise DeviceError(status)

    namespace = SimpleNamespace(Memory=refuse, compiler=SimpleNamespace(compile_using_nvrtc=refuse))
    monkeypatch.setattr(driver, "_cupy", SimpleNamespace(cuda=namespace))
    monkeypatch.setattr(driver, "mem_info", lambda: (1 << 20, 1 << 30))
    call = (
        partial(driver.allocate, 96) if use == "allocate" else partial(driver.module, "x" * 96, [])
    )
    with pytest.raises(um.CapacityError, match=r"asked for 96 B, but 1\.0 MiB of 1\.0 GiB"):
        call()
    status = 700
    with pytest.raises(DeviceError, match="error 700"):
        call()


def test_memory_that_is_not_registered_is_left_as_it_is() -> None:
    class RefusalError(Exception):
        status = 713

    def refuse(address: int) -> None:
        raise RefusalError

    driver = Unasked()
    driver._error = RefusalError
    driver._runtime = SimpleNamespace(deviceSynchronize=lambda: None, hostUnregister=refuse)
    driver.unregister(4096)
    RefusalError.status = 1
    with pytest.raises(RefusalError):
        driver.unregister(4096)


def test_streams_of_other_libraries_are_taken() -> None:
    class OfTorch:
        cuda_stream = 77

    class ByProtocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 78

    class OfCuPy:
        ptr = 76

    driver = Unasked()
    assert [driver.stream(s) for s in (OfCuPy(), OfTorch(), ByProtocol(), 79)] == [76, 77, 78, 79]
    for wrong in ("1", 1.5, True):
        with pytest.raises(TypeError, match="stream: expected a CUDA stream, got "):
            driver.stream(wrong)


def test_which_device() -> None:
    for wrong in ("0", 0.0, None):
        with pytest.raises(TypeError):
            cuda_driver.driver(wrong)  # type: ignore[arg-type]


@without_gpu
def test_importing_the_twin_without_a_gpu_says_what_is_missing(run_python: Run) -> None:
    result = run_python("""
        try:
            import unimem.cuda
        except ImportError as error:
            print(error)
        import sys
        assert "unimem.cuda" not in sys.modules
        """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("unimem.cuda needs an NVIDIA GPU and its driver, and CUDA says")
    assert "cudaError" in result.stdout


def test_importing_the_twin_without_cupy_says_what_is_missing(run_python: Run) -> None:
    result = run_python("""
        import sys
        sys.modules["cupy"] = None  # as if it were not installed
        try:
            from unimem import cuda
        except ImportError as error:
            print(error)
        """)
    assert result.returncode == 0, result.stderr
    assert "needs CuPy: install unimem-llm with the extra 'cuda13': pip install " in result.stdout


def test_importing_unimem_never_imports_cupy(run_python: Run) -> None:
    result = run_python("""
        import contextlib, sys
        import unimem, unimem.backends.cuda_driver
        with contextlib.suppress(ImportError):  # of their extra
            import unimem.cli
        with contextlib.suppress(ImportError):
            import unimem.engine
        unimem.report()
        assert not [name for name in sys.modules if name.split(".")[0].startswith("cupy")]
        assert "unimem.cuda" not in sys.modules
        """)
    assert result.returncode == 0, result.stderr
