"""Conversions of every code that this CPU runs, against NumPy, ml_dtypes and ggml's quantizer."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import unimem as um
from support.project.checkout import ROOT
from support.project.tiers import examples

BLOCK = 32
NIBBLES, FIFTH_BITS = ("qs", "u1", (16,)), ("qh", "u1", (4,))
SCALE, LEAST = ("d", "<f2"), ("m", "<f2")
FLOATS: list[Any] = [np.float32, np.float16, ml_dtypes.bfloat16]
QUANTIZED: dict[str, list[Any]] = {
    "q8_0": [SCALE, ("qs", "i1", (32,))],
    "q4_0": [SCALE, NIBBLES],
    "q4_1": [SCALE, LEAST, NIBBLES],
    "q5_0": [SCALE, FIFTH_BITS, NIBBLES],
    "q5_1": [SCALE, LEAST, FIFTH_BITS, NIBBLES],
    "iq4_nl": [SCALE, NIBBLES],
}
# In the order of their numbers in unimem.h.
DTYPES = [np.dtype(each) for each in (*FLOATS, *QUANTIZED.values())]
TYPES = dict(zip(("f32", "f16", "bf16", *QUANTIZED), enumerate(DTYPES), strict=True))
NARROW = ("f16", "bf16")
ON_X86 = pytest.mark.skipif(
    platform.machine() != "x86_64",
    reason="C does not define a cast that does not fit: the expected values are those of x86",
)

Check = Callable[..., None]


@dataclass(frozen=True)
class Code:
    """One instruction set; `convert` is ``um_convert`` by it."""

    isa: str
    call: Callable[..., int]

    def convert(self, values: NDArray[Any], source: str, target: str) -> NDArray[Any]:
        """Convert a flat array."""
        n = values.size * (BLOCK if source in QUANTIZED else 1)
        out = np.empty(n // BLOCK if target in QUANTIZED else n, TYPES[target][1])
        before, after = TYPES[source][0], TYPES[target][0]
        assert self.call(out.ctypes.data, after, values.ctypes.data, before, n, None) == 0
        return out


class _Code(ctypes.Structure):
    """The beginning of ``um__convert_code``."""

    _fields_ = (("isa", ctypes.c_char_p),)


ARGUMENTS: list[Any] = [*[ctypes.c_void_p, ctypes.c_int] * 2, ctypes.c_size_t, ctypes.c_void_p]


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> list[Code]:
    """Every code of the sources, built for this test, and what the installed library chooses."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no cc on this machine: only the fastest code can be called")
    library = tmp_path_factory.mktemp("convert") / "libconvert.so"
    native = ROOT / "native"
    flags = ["-std=c17", "-O2", "-ffp-contract=off", "-fPIC", "-shared"]
    flags += [f"-I{native / 'include'}", f"-I{native / 'src'}"]
    names = ("values/convert.c", "values/quants.c", "os/cpu_features.c", "base/status.c")
    sources = [native / "src" / name for name in names]
    subprocess.run([compiler, *flags, *sources, "-lm", "-o", library], check=True)
    built = ctypes.CDLL(str(library))
    built.um__convert_code_at.argtypes = [ctypes.c_size_t]
    built.um__convert_code_at.restype = ctypes.POINTER(_Code)
    built.um__convert_by.argtypes = [ctypes.c_void_p, *ARGUMENTS]
    found: list[Code] = []
    while code := built.um__convert_code_at(len(found)):
        found.append(Code(code.contents.isa.decode(), call_by(built, code)))
    installed = ctypes.CDLL(um.get_library())
    installed.um_convert_isa.restype = ctypes.c_char_p
    installed.um_convert.argtypes = ARGUMENTS
    assert installed.um_convert_isa().decode() == found[-1].isa
    return [*found, Code("installed", installed.um_convert)]


def call_by(library: ctypes.CDLL, code: Any) -> Callable[..., int]:
    address = ctypes.cast(code, ctypes.c_void_p)

    def call(*arguments: Any) -> int:
        return int(library.um__convert_by(address, *arguments))

    return call


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    """ggml's library that has the reference quantizers."""
    binding = pytest.importorskip(
        "unimem_ggml.binding",
        reason="unimem-ggml has the reference quantizers: pip install ./ggml",
    )
    library = ctypes.CDLL(binding.BASE_LIBRARY)
    names = [f"quantize_row_{name}_ref" for name in QUANTIZED]
    for each in (*names, *(f"dequantize_row_{name}" for name in QUANTIZED)):
        function = getattr(library, each)
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


@pytest.mark.slow
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


# ---- blocks ----


def quantize(ggml: ctypes.CDLL, values: NDArray[np.float32], name: str) -> NDArray[Any]:
    out = np.zeros(values.size // BLOCK, TYPES[name][1])
    getattr(ggml, f"quantize_row_{name}_ref")(values.ctypes.data, out.ctypes.data, values.size)
    return out


def differ(got: NDArray[Any], want: NDArray[Any], values: NDArray[np.float32]) -> Any:
    """Which blocks differ."""
    bytes_ = f"V{got.itemsize}"
    return np.flatnonzero(got.view(bytes_) != want.view(bytes_))


def differ_iq4_nl(got: NDArray[Any], want: NDArray[Any], values: NDArray[np.float32]) -> Any:
    """The same, but for what ggml leaves open: a block with a NaN or an infinity, the levels of one
    that is too small for a scale, and which NaN a scale is."""
    rows = values.reshape(-1, BLOCK)
    is_finite = np.isfinite(rows).all(axis=1)
    has_scale = np.abs(np.where(np.isnan(rows), 0, rows)).max(axis=1) >= np.float32(1e-15)
    both_nan = np.isnan(got["d"]) & np.isnan(want["d"])
    scales = (got["d"].view("u2") != want["d"].view("u2")) & ~both_nan
    levels = (got["qs"] != want["qs"]).any(axis=1) & has_scale
    return np.flatnonzero(is_finite & (scales | levels))


@pytest.fixture(scope="module")
def check_quantized(codes: list[Code], ggml: ctypes.CDLL) -> Check:
    """A check of rows of a type: they quantize to what ggml makes of them as float32."""

    def check_rows(values: NDArray[Any], source: str = "f32") -> None:
        floats = cast(values, "f32")
        for name in QUANTIZED:
            want = quantize(ggml, floats, name)
            compare = differ_iq4_nl if name == "iq4_nl" else differ
            for code in codes:
                wrong = compare(code.convert(values, source, name), want, floats)
                rows = values.reshape(-1, BLOCK)[wrong]
                assert wrong.size == 0, (name, code.isa, wrong[0], rows[0].tolist())

    return check_rows


def blocks(elements: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[NDArray[Any]]:
    return hnp.arrays(dtype, st.integers(1, 3).map(lambda n: n * BLOCK), elements=elements)


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


@pytest.mark.parametrize("levels", [15, 31])
def test_levels_of_a_range(check_quantized: Check, levels: int) -> None:
    """Ties between the levels of a block that is scaled by its range, and the floats beside them;
    ranges from tiny to infinite; and zeros of either sign as the least value."""
    rng = np.random.default_rng(7)
    rows = rng.integers(0, 2 * levels + 1, (1 << 12, BLOCK)) / 2
    rows[:, 3], rows[:, 20] = 0, levels
    scales = 2.0 ** rng.integers(-130, 125, len(rows))
    with np.errstate(over="ignore"):
        moved = (rows + rng.choice([0, 0.25, -levels], (len(rows), 1))) * scales[:, None]
        values = moved.astype(np.float32)
    zero = values == 0
    values[zero] = rng.choice(np.array([0.0, -0.0], np.float32), np.count_nonzero(zero))
    steps = rng.integers(-1, 2, values.shape, dtype=np.int32)
    for array in (values, (values.view(np.int32) + steps).view(np.float32)):
        check_quantized(array[np.isfinite(array).all(axis=1)].ravel())


@pytest.mark.parametrize("name", QUANTIZED)
def test_blocks_are_read_as_in_ggml(codes: list[Code], ggml: ctypes.CDLL, name: str) -> None:
    rng = np.random.default_rng(5)
    dtype = TYPES[name][1]
    stored = rng.integers(0, 256, (1 << 14) * dtype.itemsize, dtype=np.uint8).view(dtype)
    want = np.empty(stored.size * BLOCK, np.float32)
    getattr(ggml, f"dequantize_row_{name}")(stored.ctypes.data, want.ctypes.data, want.size)
    for target in ("f32", *NARROW):
        check(codes, stored, name, target, cast(want, target))
