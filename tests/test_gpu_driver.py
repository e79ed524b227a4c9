"""What the twin asks of CuPy, as far as that shows without a GPU: names, signatures, refusals."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

import unimem as um
from conftest import Run
from unimem import gpu
from unimem.gpu import Driver

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
without_gpu = pytest.mark.skipif(cupy.cuda.is_available(), reason="there is a GPU: tests/gpu")


class Unasked(Driver):
    """A driver that has not asked for its device."""

    def __init__(self) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._error = cupy.cuda.runtime.CUDARuntimeError
        self.id, self.name = 0, "cuda:0"
        self._device = contextlib.nullcontext()  # the real one fails before anything is called


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
    "fill": lambda d: d.fill(256, 0, 8, 0),
    "module": lambda d: d.module('extern "C" __global__ void f() {}', ["f"]),
}


# CuPy, without a driver, makes half of a stream, whose end then fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@without_gpu
@pytest.mark.parametrize("name", CALLS)
def test_every_call_gets_as_far_as_cuda(name: str) -> None:
    # A wrong name or signature would be another error, here where no GPU is.
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


def test_what_is_no_array_on_a_gpu_is_refused() -> None:
    import numpy as np

    for wrong in (np.zeros(3), [1.0], None, "x", 3, np.ndarray):
        expected = f"expected an array on the GPU, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=expected):
            Unasked().to_array(wrong)


def test_streams_of_everybody() -> None:
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
            gpu.driver(wrong)  # type: ignore[arg-type]


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
    assert "needs CuPy: install unimem-llm with the extra 'cuda12' or 'cuda13'" in result.stdout


def test_importing_unimem_never_imports_cupy(run_python: Run) -> None:
    result = run_python("""
        import sys
        import unimem, unimem.gpu
        import unimem.engine, unimem.cli
        unimem.report()
        assert not [name for name in sys.modules if name.split(".")[0].startswith("cupy")]
        assert "unimem.cuda" not in sys.modules
        """)
    assert result.returncode == 0, result.stderr
