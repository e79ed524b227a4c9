"""Conversions of every code that this CPU runs, against NumPy, ml_dtypes and ggml's quantizer."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import unimem as um
from project import ROOT
from tiers import examples

Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])
BLOCK = 32
# The numbers of the types in unimem.h.
TYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "f32": (0, np.dtype(np.float32)),
    "f16": (1, np.dtype(np.float16)),
    "bf16": (2, np.dtype(ml_dtypes.bfloat16)),
    "q8_0": (3, Q8_0),
}
NARROW = ("f16", "bf16")
ON_X86 = pytest.mark.skipif(
    platform.machine() != "x86_64",
    reason="C leaves a cast that does not fit open: what ggml makes of it is told for x86",
)

Check = Callable[..., None]


@dataclass(frozen=True)
class Code:
    """One instruction set; `convert` is ``um_convert`` by it."""

    isa: str
    call: Callable[..., int]

    def convert(self, values: NDArray[Any], source: str, target: str) -> NDArray[Any]:
        """Convert a flat array."""
        n = values.size * (BLOCK if source == "q8_0" else 1)
        out = np.empty(n // BLOCK if target == "q8_0" else n, TYPES[target][1])
        before, after = TYPES[source][0], TYPES[target][0]
        assert self.call(out.ctypes.data, after, values.ctypes.data, before, n, None) == 0
        return out


class _Code(ctypes.Structure):
    """The beginning of ``um_convert_code``."""

    _fields_ = (("isa", ctypes.c_char_p),)


ARGUMENTS: list[Any] = [
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_size_t, ctypes.c_void_p),
]


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> list[Code]:
    """Every code of the sources, built for this test, and what the installed library chooses."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no cc on this machine: only the fastest code can be called")
    library = tmp_path_factory.mktemp("convert") / "libconvert.so"
    native = ROOT / "native"
    flags = ["-std=c17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{native / 'include'}"]
    sources = [native / "src" / name for name in ("convert.c", "status.c")]
    subprocess.run([compiler, *flags, *sources, "-lm", "-o", library], check=True)
    built = ctypes.CDLL(str(library))
    built.um_convert_code_at.argtypes = [ctypes.c_size_t]
    built.um_convert_code_at.restype = ctypes.POINTER(_Code)
    built.um_convert_by.argtypes = [ctypes.c_void_p, *ARGUMENTS]
    found: list[Code] = []
    while code := built.um_convert_code_at(len(found)):
        found.append(Code(code.contents.isa.decode(), call_by(built, code)))
    installed = ctypes.CDLL(um.get_library())
    installed.um_convert_isa.restype = ctypes.c_char_p
    installed.um_convert.argtypes = ARGUMENTS
    assert installed.um_convert_isa().decode() == found[-1].isa
    return [*found, Code("installed", installed.um_convert)]


def call_by(library: ctypes.CDLL, code: Any) -> Callable[..., int]:
    address = ctypes.cast(code, ctypes.c_void_p)

    def call(*arguments: Any) -> int:
        return int(library.um_convert_by(address, *arguments))

    return call


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    """ggml's library that has the reference quantizer."""
    spec = importlib.util.find_spec("ggml")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("ggml-python (extra run) has the reference quantizer: pip install '.[run]'")
    library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "lib", "libggml-base.so")))
    for name in ("quantize_row_q8_0_ref", "dequantize_row_q8_0"):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        function.restype = None
    return library


def cast(values: NDArray[Any], name: str) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return values.astype(TYPES[name][1])


# ---- floats ----

# Sizes that end inside of a vector, too.
ANY_BITS = hnp.arrays(np.uint32, st.integers(0, 70), elements=st.integers(0, 2**32 - 1))


def check(codes: list[Code], values: NDArray[Any], source: str, target: str, want: Any) -> None:
    """Every code has the same bits, but for a NaN, which needs only be one."""
    for code in codes:
        got = code.convert(values, source, target)
        bits = np.dtype(f"u{got.itemsize}")
        with np.errstate(invalid="ignore"):  # a signalling NaN
            both_nan = np.isnan(got) & np.isnan(want)
        wrong = np.flatnonzero((got.view(bits) != want.view(bits)) & ~both_nan)
        assert wrong.size == 0, (code.isa, wrong[0], got[wrong[0]], want[wrong[0]])


@settings(max_examples=examples(300), deadline=None)
@given(bits=ANY_BITS)
def test_any_float32_narrows_as_in_numpy(codes: list[Code], bits: NDArray[np.uint32]) -> None:
    values = bits.view(np.float32)
    for name in NARROW:
        check(codes, values, "f32", name, cast(values, name))


@pytest.mark.parametrize("name", NARROW)
def test_ties_and_the_floats_beside_them(codes: list[Code], name: str) -> None:
    """Between every two neighbours, denormals and the way to infinity among them; then any bits."""
    infinity = {"f16": 0x7C00, "bf16": 0x7F80}[name]
    values = cast(np.arange(infinity, dtype=np.uint16).view(TYPES[name][1]), "f32")
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    bits = middles.view(np.uint32)
    around = np.concatenate([bits - 1, bits, bits + 1]).view(np.float32)
    drawn = np.random.default_rng(1).integers(0, 2**32, 1 << 18, dtype=np.uint32)
    every = np.concatenate([around, -around, drawn.view(np.float32)])
    want = cast(every, name)
    assert np.isnan(want).any()
    assert np.isinf(want).any()
    check(codes, every, "f32", name, want)


@pytest.mark.parametrize("source", NARROW)
@pytest.mark.parametrize("target", ["f32", *NARROW])
def test_every_narrow_value(codes: list[Code], source: str, target: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(TYPES[source][1])
    check(codes, values, source, target, cast(cast(values, "f32"), target))


# ---- q8_0 ----


def quantize(ggml: ctypes.CDLL, values: NDArray[np.float32]) -> NDArray[Any]:
    out = np.empty(values.size // BLOCK, Q8_0)
    ggml.quantize_row_q8_0_ref(values.ctypes.data, out.ctypes.data, values.size)
    return out


@pytest.fixture(scope="module")
def check_quantized(codes: list[Code], ggml: ctypes.CDLL) -> Check:
    """A check of rows of a type; that they quantize to what ggml makes of them as float32."""

    def check_rows(values: NDArray[Any], source: str = "f32") -> None:
        want = quantize(ggml, cast(values, "f32"))
        for code in codes:
            got = code.convert(values, source, "q8_0")
            wrong = np.flatnonzero(got.view("V34") != want.view("V34"))
            assert wrong.size == 0, (code.isa, values.reshape(-1, BLOCK)[wrong[0]].tolist())

    return check_rows


def blocks(elements: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[NDArray[Any]]:
    return hnp.arrays(dtype, st.integers(1, 3).map(lambda n: n * BLOCK), elements=elements)


# Where no scale is denormal, nor its reciprocal infinite.
USUAL = st.floats(-(2.0**100), 2.0**100, width=32).map(lambda x: x if abs(x) > 2e-30 else 0.0)


@settings(max_examples=examples(300), deadline=None)
@given(values=blocks(USUAL, np.float32))
def test_rows_quantize_as_in_ggml(check_quantized: Check, values: NDArray[np.float32]) -> None:
    check_quantized(values)


@ON_X86
@settings(max_examples=examples(300), deadline=None)
@given(bits=blocks(st.integers(0, 2**32 - 1), np.uint32))
def test_any_bits_quantize_as_in_ggml(check_quantized: Check, bits: NDArray[np.uint32]) -> None:
    """Denormals, infinities and NaNs among them."""
    check_quantized(bits.view(np.float32))


@ON_X86
@settings(max_examples=examples(300), deadline=None)
@given(
    values=blocks(st.floats(-8, 8, width=32), np.float32),
    at=st.integers(0, BLOCK - 1),
    odd=st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45, 2e-39, 3.4e38, 1e-38]),
    scale=st.sampled_from([1.0, 1e-30, 1e-37, 1e-41, 1e37]),
)
def test_one_odd_value_quantizes_as_in_ggml(
    check_quantized: Check, values: NDArray[np.float32], at: int, odd: float, scale: float
) -> None:
    row = (values.astype(np.float64) * scale).astype(np.float32)
    row[at] = odd
    check_quantized(row)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-3, 1.0, 30.0, 1e4, 1e7, 1e30])
def test_many_random_rows_quantize_as_in_ggml(check_quantized: Check, scale: float) -> None:
    rng = np.random.default_rng(2)
    check_quantized(rng.standard_normal(1 << 16, dtype=np.float32) * np.float32(scale))
    for source in NARROW:
        check_quantized(cast(rng.standard_normal(1 << 12) * min(scale, 1e4), source), source)


def test_values_between_two_steps_are_rounded_away_from_zero(check_quantized: Check) -> None:
    """Ties, exact ones where the scale is a power of two, and the floats beside them."""
    rng = np.random.default_rng(3)
    rows = rng.integers(-127, 127, (1 << 13, BLOCK)) + 0.5
    powers = 2.0 ** rng.integers(-20, 20, len(rows))
    scales = np.where(rng.random(len(rows)) < 0.5, powers, rng.random(len(rows)))
    values = (rows * scales[:, None]).astype(np.float32)
    values[:, 0] = np.float32(127) * scales.astype(np.float32)
    steps = rng.integers(-1, 2, values.shape, dtype=np.int32)
    moved = (values.view(np.int32) + steps).view(np.float32)
    moved[:, 0] = values[:, 0]
    for array in (values, moved):
        check_quantized(array.ravel())


def test_blocks_are_read_as_in_ggml(codes: list[Code], ggml: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    stored = rng.integers(0, 256, (1 << 14) * Q8_0.itemsize, dtype=np.uint8).view(Q8_0)
    want = np.empty(stored.size * BLOCK, np.float32)
    ggml.dequantize_row_q8_0(stored.ctypes.data, want.ctypes.data, want.size)
    for name in ("f32", *NARROW):
        check(codes, stored, "q8_0", name, cast(want, name))
