"""The kernels of ``rows.cu`` give the bits that main memory gets, run on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import host_kernels
import unimem as um
from kv_model import NUMPY_DTYPES
from unimem import gpu

Array = NDArray[Any]

SOURCE = Path(um.__file__).parent / "cuda" / "rows.cu"
DTYPES = NUMPY_DTYPES | {"f64": np.dtype(np.float64)}
FLOATS = ("f32", "f16", "bf16")
STORED = (*FLOATS, "q8_0")
# The numbers of the types in unimem.h.
NUMBERS = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3}
APPENDS = [(given, stored) for given in FLOATS for stored in STORED]
APPENDS += [("f32", "f64"), ("f64", "f64")]
UNTOUCHED = 0xA5


class Cpu:
    """A driver that runs kernels on the CPU, and counts the launches."""

    def __init__(self) -> None:
        self.n_launches = 0
        self.n_modules = 0

    def module(self, source: str, names: Any) -> dict[str, host_kernels.Launcher]:
        self.n_modules += 1
        return {
            name: self.counted(launch)
            for name, launch in host_kernels.module(source, names).items()
        }

    def counted(self, launch: host_kernels.Launcher) -> host_kernels.Launcher:
        def counted(*arguments: Any) -> None:
            self.n_launches += 1
            launch(*arguments)

        return counted


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; importing it asks for a GPU otherwise."""
    monkeypatch.setattr(gpu, "require", lambda: None)
    from unimem.cuda import kernels

    return kernels


@pytest.fixture
def cpu() -> Cpu:
    return Cpu()


# ---- what is expected ----

um_convert = ctypes.CDLL(um.get_library()).um_convert
um_convert.argtypes = [
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_size_t, ctypes.c_void_p),
]


def converted(values: Array, stored: str, wanted: str) -> Array:
    """What the library's own code makes of an array, whose last axis is in blocks for q8_0."""
    if "f64" in (stored, wanted):
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return values.astype(DTYPES[wanted])
    values = np.ascontiguousarray(values)
    shape = values.shape
    if stored == "q8_0":
        shape = (*shape[:-1], shape[-1] * 32)
    n = int(np.prod(shape))
    if wanted == "q8_0":
        shape = (*shape[:-1], shape[-1] // 32)
    out = np.empty(shape, DTYPES[wanted])
    numbers = NUMBERS[wanted], NUMBERS[stored]
    status = um_convert(out.ctypes.data, numbers[0], values.ctypes.data, numbers[1], n, None)
    assert status == 0
    return out


def tokens_of(given: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers of every size, among them both zeros, infinities and NaNs."""
    rng = np.random.default_rng(seed)
    if given == "f64":
        return rng.normal(size=shape)
    # Any bits are a number, but many of them would be out of a block's range.
    wild = rng.integers(0, 2**32, size=shape, dtype=np.uint32).view(np.float32)
    tame = rng.normal(scale=100, size=shape).astype(np.float32)
    values = np.where(rng.random(size=shape) < 0.05, wild, tame)
    return converted(values, "f32", given)


# ---- running a kernel ----


def lane_bytes(stored: str, n_rows: int, row_values: int) -> tuple[int, int]:
    """Bytes of a row, and of a lane with a gap behind it."""
    unit = 32 if stored == "q8_0" else 1
    row = row_values // unit * DTYPES[stored].itemsize
    return row, n_rows * row + 64


def append(
    rows: Any,
    k: Array,
    v: Array | None,
    given: str,
    stored: str,
    *,
    row: int = 0,
    n_rows: int,
    row_address: int = 0,
) -> tuple[Array, Array]:
    """Append to lanes that nobody wrote to; K's and V's as ``[layers, streams, bytes]``."""
    layers, streams, heads, _, dim = k.shape
    row_bytes, lane = lane_bytes(stored, n_rows, heads * dim)
    out = np.full((2, layers, streams, lane), UNTOUCHED, np.uint8)
    rows.append(
        k.ctypes.data,
        0 if v is None else v.ctypes.data,
        given,
        k.shape,
        k.strides,
        out[0].ctypes.data,
        out[1].ctypes.data,
        streams * lane,
        lane,
        row_bytes,
        row,
        n_rows,
        row_address,
        0,
    )
    return out[0], out[1]


def expected(tokens: Array, given: str, stored: str, *, row: int = 0, n_rows: int) -> Array:
    """The same lanes, by the library's own conversion."""
    layers, streams, heads, n, dim = tokens.shape
    row_bytes, lane = lane_bytes(stored, n_rows, heads * dim)
    out = np.full((layers, streams, lane), UNTOUCHED, np.uint8)
    rows = np.moveaxis(tokens, 3, 2).reshape(layers, streams, n, heads * dim)
    stored_rows = converted(rows, given, stored)
    for token in range(n):
        if 0 <= row + token < n_rows:
            at = (row + token) * row_bytes
            bytes_of_row = np.ascontiguousarray(stored_rows[:, :, token]).view(np.uint8)
            out[:, :, at : at + row_bytes] = bytes_of_row.reshape(layers, streams, row_bytes)
    return out


def strided(tokens: Array, order: tuple[int, ...], gaps: tuple[int, ...]) -> Array:
    """The same tokens, laid out in memory in another order of the axes, and with gaps."""
    shape = tuple(tokens.shape[axis] * gaps[axis] for axis in order)
    memory = np.zeros(shape, tokens.dtype)
    out = memory.transpose(np.argsort(order))[tuple(slice(None, None, gap) for gap in gaps)]
    out[...] = tokens
    return out


# ---- appending ----


@pytest.mark.parametrize(("given", "stored"), APPENDS)
def test_tokens_become_rows(kernels: Any, cpu: Cpu, given: str, stored: str) -> None:
    rows = kernels.RowKernels(cpu, stored)
    for shape in ((1, 1, 1, 1, 32), (2, 3, 4, 5, 64), (1, 2, 3, 33, 160), (3, 1, 40, 2, 288)):
        k, v = tokens_of(given, shape), tokens_of(given, shape, seed=1)
        where = {"row": 3, "n_rows": 40}
        found = append(rows, k, v, given, stored, **where)
        for tokens, lanes in zip((k, v), found, strict=True):
            want = expected(tokens, given, stored, **where)
            assert lanes.tobytes() == want.tobytes(), shape
    assert (cpu.n_modules, cpu.n_launches) == (1, 4)  # K and V with one launch


@pytest.mark.parametrize(("given", "stored"), APPENDS)
def test_any_strides(kernels: Any, cpu: Cpu, given: str, stored: str) -> None:
    rows = kernels.RowKernels(cpu, stored)
    rng = np.random.default_rng(2)
    tokens = tokens_of(given, (2, 2, 3, 5, 32))
    want = expected(tokens, given, stored, n_rows=5)
    for _ in range(8):
        order = tuple(int(axis) for axis in rng.permutation(5))
        k = strided(tokens, order, tuple(int(gap) for gap in rng.integers(1, 4, 5)))
        found, v_found = append(rows, k, None, given, stored, n_rows=5)
        assert found.tobytes() == want.tobytes(), k.strides
        assert (v_found == UNTOUCHED).all()
        backwards = tokens[:, :, ::-1, ::-1, ::-1].copy()[:, :, ::-1, ::-1, ::-1]
        assert append(rows, backwards, None, given, stored, n_rows=5)[0].tobytes() == want.tobytes()
    # One token for all streams, and one value for a whole head.
    wide = np.broadcast_to(tokens[:, :1, :, :, :1], tokens.shape)
    want = expected(wide, given, stored, n_rows=5)
    assert append(rows, wide, None, given, stored, n_rows=5)[0].tobytes() == want.tobytes()


@pytest.mark.parametrize("stored", [*STORED, "f64"])
@pytest.mark.parametrize("row", [-4, -2, 0, 5, 6, 7, 9, 2**31 - 1])
def test_only_rows_that_are_there_are_written(
    kernels: Any, cpu: Cpu, stored: str, row: int
) -> None:
    rows = kernels.RowKernels(cpu, stored)
    tokens = tokens_of("f32", (2, 2, 2, 3, 32))
    want = expected(tokens, "f32", stored, row=row, n_rows=8)
    assert (want == UNTOUCHED).all() == (row in (-4, 9, 2**31 - 1))
    found, v_found = append(rows, tokens, tokens, "f32", stored, row=row, n_rows=8)
    assert found.tobytes() == v_found.tobytes() == want.tobytes()
    # The same row, read from memory when the kernel runs.
    at = np.array([row], np.int32)
    found, _ = append(
        rows, tokens, None, "f32", stored, row=1, n_rows=8, row_address=at.ctypes.data
    )
    assert found.tobytes() == want.tobytes()


def test_no_token_is_no_launch(kernels: Any, cpu: Cpu) -> None:
    rows = kernels.RowKernels(cpu, "f16")
    none = np.zeros((2, 2, 2, 0, 32), np.float32)
    found, _ = append(rows, none, none, "f32", "f16", n_rows=8)
    rows.read(0, 0, "f32", (2, 2, 0, 32), 64, 64, 0, 0)
    assert (found == UNTOUCHED).all()
    assert cpu.n_launches == 0


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 270_000, 2), (2, 33_000, 1, 1, 2), (1, 1, 270_000, 1, 1), (1, 1, 1, 1, 100_000)],
)
def test_grids_beyond_what_cuda_launches(kernels: Any, cpu: Cpu, shape: tuple[int, ...]) -> None:
    rows = kernels.RowKernels(cpu, "f16")
    tokens, n = tokens_of("f32", shape), shape[3]
    want = expected(tokens, "f32", "f16", n_rows=n)
    assert append(rows, tokens, None, "f32", "f16", n_rows=n)[0].tobytes() == want.tobytes()
    out = np.empty(shape[1:], np.float16)
    row_bytes, lane = lane_bytes("f16", n, shape[2] * shape[4])
    rows.read(want.ctypes.data, out.ctypes.data, "f16", shape[1:], lane, row_bytes, 0, 0)
    assert out.tobytes() == converted(tokens[0], "f32", "f16").tobytes()


def test_compiled_once_a_driver(kernels: Any, cpu: Cpu) -> None:
    for stored in (*STORED, "f64"):
        kernels.RowKernels(cpu, stored)
    assert cpu.n_modules == 1
    kernels.RowKernels(Cpu(), "f16")
    assert cpu.n_modules == 1


# ---- conversions ----


def check_values(kernels: Any, values: Array, given: str, stored: str) -> None:
    """Convert values as one row, and back into every type."""
    rows = kernels.RowKernels(Cpu(), stored)
    tokens = values.reshape(1, 1, 1, 1, -1)
    found, _ = append(rows, tokens, None, given, stored, n_rows=1)
    assert found.tobytes() == expected(tokens, given, stored, n_rows=1).tobytes()
    row = found[0, 0, :-64].view(DTYPES[stored])
    for wanted in FLOATS:
        out = np.empty(values.size, DTYPES[wanted])
        rows.read(row.ctypes.data, out.ctypes.data, wanted, (1, 1, 1, values.size), 0, 0, 0, 0)
        assert out.tobytes() == converted(row, stored, wanted).tobytes()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("given", ["f16", "bf16"])
def test_every_number_of_16_bits(kernels: Any, given: str, stored: str) -> None:
    every = np.arange(65536, dtype=np.uint16).view(DTYPES[given])
    check_values(kernels, every, given, stored)


@pytest.mark.parametrize("stored", STORED)
def test_numbers_of_32_bits(kernels: Any, stored: str) -> None:
    some = np.arange(0, 2**32, 4099)
    # Around the rounding steps of every float16 exponent, denormals included.
    steps = np.add.outer(np.arange(0x2F800000, 0x48000000, 0x1000), [-1, 0, 1]).reshape(-1)
    bits = np.concatenate([some, steps, steps + 2**31])
    values = bits[: bits.size // 32 * 32].astype(np.uint32).view(np.float32)
    check_values(kernels, values, "f32", stored)


def test_blocks_of_q8_0(kernels: Any) -> None:
    rng = np.random.default_rng(3)
    usual = rng.normal(size=(2000, 32)) * 10.0 ** rng.integers(-44, 38, size=(2000, 1))
    halves = np.tile(np.arange(-16, 16) + 0.5, (200, 1)) * 2.0 ** np.arange(-100, 100)[:, None]
    halves[:, 0] = 127 * 2.0 ** np.arange(-100, 100)  # so that d is a power of 2
    odd = rng.normal(size=(600, 32))
    for i, special in enumerate((np.nan, -np.nan, np.inf, -np.inf, 0.0, 1e-45)):
        for j in range(100):
            odd[100 * i + j, rng.integers(0, 32, size=1 + j % 3)] = special
    last = rng.normal(size=(64, 32))
    last[:32, 31] = np.nan
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.concatenate([usual, halves, odd, last, np.zeros((4, 32))]).astype(np.float32)
    check_values(kernels, values.reshape(-1), "f32", "q8_0")


@pytest.mark.parametrize("stored", STORED)
def test_the_rows_are_those_of_a_cache_in_main_memory(kernels: Any, cpu: Cpu, stored: str) -> None:
    rows = kernels.RowKernels(cpu, stored)
    for given in FLOATS:
        k, v = (tokens_of(given, (2, 3, 4, 5, 64), seed=seed) for seed in (4, 5))
        found = append(rows, k, v, given, stored, n_rows=5)
        row_bytes, _ = lane_bytes(stored, 5, 4 * 64)
        with um.KVCache(2, 4, 64, 5, batch=3, dtype=stored) as kv:
            for layer in range(2):
                kv.append(layer, k[layer], v[layer])
                for view, lanes in zip(kv.layer(layer), found, strict=True):
                    host_rows = np.moveaxis(view, 2, 1).tobytes()
                    assert host_rows == lanes[layer, :, : 5 * row_bytes].tobytes()
                del view


# ---- reading ----


@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("stored", STORED)
def test_rows_become_an_array(kernels: Any, cpu: Cpu, stored: str, wanted: str) -> None:
    rows = kernels.RowKernels(cpu, stored)
    for streams, heads, n, dim in ((1, 1, 1, 32), (3, 4, 5, 64), (2, 3, 33, 160)):
        row_bytes, lane = lane_bytes(stored, n + 4, heads * dim)
        values = tokens_of("f32", (1, streams, heads, n + 4, dim))
        lanes = expected(values, "f32", stored, n_rows=n + 4)
        out = np.empty((streams, heads, n, dim), DTYPES[wanted])
        rows.read(lanes.ctypes.data, out.ctypes.data, wanted, out.shape, lane, row_bytes, 3, 0)
        stored_values = converted(values[0], "f32", stored)
        want = converted(stored_values, stored, wanted)[:, :, 3 : 3 + n]
        assert out.tobytes() == want.tobytes()


# ---- compilers of CUDA ----


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_nvcc_compiles_the_kernels(kernels: Any, tmp_path: Path, arch: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc: the kernels are not compiled for a GPU here")
    cubin = tmp_path / "rows.cubin"
    options = [f"-arch={arch}", "-std=c++17", "-fmad=false", "-Werror", "all-warnings", "-cubin"]
    subprocess.run([nvcc, *options, "-o", str(cubin), str(SOURCE)], check=True)
    built = cubin.read_bytes()
    assert [name for name in kernels.NAMES if f".text.{name}\0".encode() not in built] == []


def test_nvrtc_compiles_the_kernels(kernels: Any) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: the kernels are not compiled as CuPy does: {error}")
    program = nvrtc.createProgram(SOURCE.read_text(), "rows.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-arch=compute_75", "-std=c++17", "-fmad=false"))
        assert nvrtc.getProgramLog(program).strip() == ""
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = ptx if isinstance(ptx, bytes) else ptx.encode()
    assert [name for name in kernels.NAMES if f".entry {name}(".encode() not in text] == []
