"""The kernels of ``rows.cu``, run on the CPU, and compiled as for a GPU."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

import unimem as um
from support.gpu import host_kernels
from support.gpu.row_contract import FLOATS, STORED, Place, RowContract
from unimem.backends import cuda_driver

Array = NDArray[Any]

SOURCE = Path(um.__file__).parent / "cuda" / "rows.cu"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twin be imported without a GPU and CuPy."""
    monkeypatch.setattr(cuda_driver, "require", lambda: None)


class CpuDriver:
    """A driver that runs kernels on the CPU, and counts how often it compiles them."""

    launch_address = 0

    def __init__(self) -> None:
        self.n_modules = 0

    def module(self, source: str, names: Sequence[str]) -> dict[str, host_kernels.Launcher]:
        self.n_modules += 1
        return host_kernels.module(source, names)


class Cpu(Place):
    """Main memory."""

    def __init__(self) -> None:
        self.driver = CpuDriver()

    def up(self, a: Array) -> Array:
        return a

    def down(self, a: Array) -> Array:
        return a

    def address(self, a: Array) -> int:
        return a.ctypes.data


class TestRows(RowContract):
    """On the CPU."""

    @pytest.fixture
    def place(self) -> Place:
        return Cpu()


def test_compiled_once_a_driver() -> None:
    cpu, other = Cpu(), Cpu()
    for stored in (*STORED, "f64"):
        cpu.rows(stored)
    other.rows("f16")
    assert (cpu.driver.n_modules, other.driver.n_modules) == (1, 1)


# ---- compilers of CUDA ----


def names_of_kernels() -> tuple[str, ...]:
    from unimem.cuda.kernels import NAMES

    assert len(NAMES) == len(FLOATS) * len(STORED) * 2 + 2
    return NAMES


@pytest.mark.parametrize("arch", ["sm_75", pytest.param("sm_90", marks=pytest.mark.slow)])
def test_nvcc_compiles_the_kernels(tmp_path: Path, arch: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc: the kernels are not compiled for a GPU here")
    cubin = tmp_path / "rows.cubin"
    options = [f"-arch={arch}", "-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-cubin"]
    subprocess.run([nvcc, *options, "-o", str(cubin), str(SOURCE)], check=True)
    built = cubin.read_bytes()
    assert [name for name in names_of_kernels() if f".text.{name}\0".encode() not in built] == []


def test_denormals_are_not_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gives NVRTC its own options: CuPy's RawModule would add -ftz=true."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import compiler, nvrtc

    class AskedError(Exception):
        """NVRTC was asked to compile."""

    def compile_program(_: int, options: Sequence[str]) -> None:
        raise AskedError(*options)

    arch = ("-arch=sm_90", "cubin")
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda _: arch)
    monkeypatch.setattr(compiler, "_get_nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "createProgram", lambda *_: 0)
    monkeypatch.setattr(nvrtc, "compileProgram", compile_program)
    driver = cuda_driver.Driver.__new__(cuda_driver.Driver)
    driver._cupy, driver._device = cupy, contextlib.nullcontext()
    with pytest.raises(AskedError) as asked:
        driver.module(SOURCE.read_text(), names_of_kernels())
    options = asked.value.args
    assert "-fmad=false" in options
    assert [option for option in options if "ftz" in option or "fast" in option] == []


def test_nvrtc_compiles_the_kernels() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError:
        pytest.skip("no NVRTC (libnvrtc.so): the kernels are not compiled as CuPy does it")
    program = nvrtc.createProgram(SOURCE.read_text(), "rows.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-arch=compute_75", "-std=c++17", "-fmad=false"))
        assert nvrtc.getProgramLog(program).strip() == ""
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = ptx if isinstance(ptx, str) else ptx.decode()
    assert [name for name in names_of_kernels() if f".entry {name}(" not in text] == []
