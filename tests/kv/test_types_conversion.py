"""The numbers that each stored type keeps: conversion, views and converted copies."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unimem as um
from support.contracts import kv_model as kvm
from support.contracts.kv_model import Array
from support.kernel import proc_maps

pytestmark = pytest.mark.usefixtures("gives_memory_back")

# ---- conversion ----


def f32_of_bits(bits: Array) -> Array:
    return bits.astype(np.uint32).view(np.float32)


@pytest.fixture(params=[15, 64])
def dim(request: pytest.FixtureRequest) -> int:
    """Elements that are converted at once: too few for the widest instructions, and enough."""
    return int(request.param)


def through_the_cache(values: Array, dtype: str, dim: int) -> Array:
    """What a cache of this dtype makes of values, `dim` at once."""
    n = -(-values.size // dim)
    rows = np.zeros(n * dim, values.dtype)
    rows[: values.size] = values
    with um.KVCache(1, 1, dim, max_seq_len=n, dtype=dtype) as kv:
        kv.append(0, *[rows.reshape(1, 1, n, dim)] * 2)
        k, v = kv.layer(0)
        assert k.tobytes() == v.tobytes()
        return np.ascontiguousarray(k).reshape(-1)[: values.size]


def assert_same_floats(ours: Array, theirs: Array) -> None:
    assert ours.size == theirs.size
    with np.errstate(invalid="ignore"):  # ml_dtypes converts for it
        nan = np.isnan(theirs)
        assert (np.isnan(ours) == nan).all()
    assert kvm.same_bits(ours[~nan], theirs[~nan])  # signed zeros as well


@pytest.mark.parametrize("given_dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits_comes_back(dim: int, given_dtype: Any) -> None:
    every = np.arange(65536, dtype=np.uint16).view(given_dtype)
    own = "f16" if given_dtype is np.float16 else "bf16"
    assert through_the_cache(every, own, dim).tobytes() == every.tobytes()  # NaNs bit by bit
    wide = through_the_cache(every, "f32", dim)
    assert_same_floats(through_the_cache(wide, own, dim), every)
    other = "bf16" if own == "f16" else "f16"
    with np.errstate(invalid="ignore"):  # of NaNs that signal, some CPUs tell NumPy
        assert_same_floats(wide, every.astype(np.float32))
        assert_same_floats(through_the_cache(every, other, dim), kvm.stored(every, other))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_float32_is_rounded_as_numpy_rounds(dim: int, dtype: str) -> None:
    top = 0x7C00 if dtype == "f16" else 0x7F80
    finite = np.arange(top, dtype=np.uint16).view(kvm.NUMPY_DTYPES[dtype]).astype(np.float32)
    # Midway between neighbours, where the even one wins, and one step to either side of it.
    middle = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    bits = middle.view(np.uint32).astype(np.int64)
    cases = np.concatenate([f32_of_bits(bits + step) for step in (-1, 0, 1)])
    cases = np.concatenate([cases, -cases])
    assert_same_floats(through_the_cache(cases, dtype, dim), kvm.stored(cases, dtype))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_any_bits_of_float32_convert_as_in_numpy(dim: int, dtype: str) -> None:
    random = np.random.default_rng(1).integers(0, 2**32, 400_000, dtype=np.uint64)
    edges = [0, 1, 0x007FFFFF, 0x00800000, 0x32FFFFFF, 0x33000000, 0x33000001, 0x387FFFFF]
    edges += [0x38800000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x47800000, 0x7F7FFFFF]
    edges += [0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    special = np.array(edges * 16, dtype=np.uint64)
    values = f32_of_bits(np.concatenate([special, special | 0x80000000, random]))
    ours = through_the_cache(values, dtype, dim)
    assert_same_floats(ours, kvm.stored(values, dtype))
    assert dtype != "f32" or ours.tobytes() == values.tobytes()  # NaNs bit by bit


# ---- q8_0 ----


def blocks_of_values() -> Array:
    """Blocks that are hard to quantize: [n, 32] float32."""
    rng = np.random.default_rng(3)
    random = rng.normal(size=(2000, 32)) * 10.0 ** rng.uniform(-6, 5, size=(2000, 1))
    steps = np.arange(-16, 16) + np.zeros((1, 32))
    # The scale is 1 where the largest is 127: then halves are exact.
    halves = np.concatenate([[127.0], np.arange(-15.5, 15.5)])[None]
    alone = np.zeros((1, 32))
    alone[0, 17] = -3.25
    some = [random, steps, halves, -halves, alone, np.zeros((1, 32)), np.full((1, 32), 60000.0)]
    # Halves of a scale that is no power of two, as near as float32 comes to them.
    near = (rng.integers(-126, 126, size=(500, 32)) + 0.5) * rng.uniform(1e-3, 10, size=(500, 1))
    return np.concatenate([*some, near]).astype(np.float32)


def test_q8_0_is_the_formats() -> None:
    """The tests' own quantizer is checked here, by hand."""
    values = np.zeros(32, np.float32)
    values[:6] = [127, 0.5, -0.5, 1.5, -2.49, 2.51]
    (block,) = kvm.quantized(values)
    assert block["d"] == 1
    assert block["qs"][:6].tolist() == [127, 1, -1, 2, -2, 3]
    assert kvm.quantized(np.zeros(32, np.float32)).tobytes() == bytes(34)
    assert kvm.Q8_0.itemsize == 34


def test_q8_0_is_ggmls_reference() -> None:
    values = blocks_of_values()
    try:
        from unimem.backends import ggml
    except ImportError:
        pytest.skip("ggml is not installed: pip install ./ggml")
    theirs = np.empty(values.shape[0], kvm.Q8_0)
    ggml.quantize(ggml.Q8_0, values.ctypes.data, theirs.ctypes.data, *values.shape)
    assert kvm.quantized(values).reshape(-1).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("dtype", kvm.GIVEN_DTYPES)
def test_q8_0_is_what_is_stored(dtype: str) -> None:
    values = blocks_of_values()
    with np.errstate(over="ignore"):
        values = values.astype(kvm.NUMPY_DTYPES["bf16"] if dtype == "bfloat16" else dtype)
    values = values[np.isfinite(values.astype(np.float32)).all(axis=1)]
    rows = np.ascontiguousarray(values[: len(values) // 6 * 6].reshape(-1, 2, 96))
    with um.KVCache(1, 2, 96, max_seq_len=len(rows), dtype="q8_0") as kv:
        assert kv.row_bytes == 2 * 3 * 34
        kv.append(0, rows, -rows)
        k, v = kv.layer(0)
        assert k.dtype == kvm.Q8_0
        assert k.shape == (1, 2, len(rows), 3)
        assert kvm.same_bits(k[0].swapaxes(0, 1), kvm.stored(rows, "q8_0"))
        assert kvm.same_bits(v[0].swapaxes(0, 1), kvm.stored(-rows, "q8_0"))
        del k, v
        wide, _ = kv.layer(0, "float32")
        assert kvm.same_bits(wide[0].swapaxes(0, 1), kvm.as_float32(kvm.stored(rows, "q8_0")))


def test_q8_0_of_q8_0_is_not_converted() -> None:
    rows = kvm.stored(kvm.given(np.random.default_rng(5), (4, 2, 64), "float32"), "q8_0")
    with um.KVCache(1, 2, 64, 8, dtype="q8_0") as kv, um.KVCache(1, 2, 64, 8) as other:
        kv.append(0, rows, rows)
        assert kvm.same_bits(kv.layer(0)[1][0].swapaxes(0, 1), rows)
        with pytest.raises((TypeError, ValueError)):
            other.append(0, rows, rows)
        assert other.is_empty


# ---- views and copies ----


@pytest.mark.parametrize("given_dtype", kvm.GIVEN_DTYPES)
@pytest.mark.parametrize("dtype", kvm.KV_DTYPES)
def test_views_and_copies(dtype: str, given_dtype: str) -> None:
    k, v = (kvm.given(np.random.default_rng(seed), (2, 3, 5, 64), given_dtype) for seed in range(2))
    with um.KVCache(2, 3, 64, 8, batch=2, dtype=dtype) as kv:
        for layer in range(2):
            kv.append(layer, k, v)
        for part, values in zip(kv.layer(1), (k, v), strict=True):
            assert kvm.same_bits(part, kvm.stored(values, dtype))
            assert not part.flags.owndata
            assert part.flags.writeable
        assert proc_maps.address_of(part) == kv.address(1, "v")
        del part
        floats = [kvm.as_float32(kvm.stored(values, dtype)) for values in (k, v)]
        for name, short in zip(kvm.GIVEN_DTYPES, ("f32", "f16", "bf16"), strict=True):
            copies = kv.layer(1, name)
            assert kv.layer(1, dtype=kvm.NUMPY_DTYPES[short])[0].tobytes() == copies[0].tobytes()
            for copy, expected in zip(copies, floats, strict=True):
                assert copy.flags.c_contiguous
                assert kvm.same_bits(copy, kvm.stored(expected, short))
                copy[:] = 0
        assert kvm.same_bits(kv.layer(1)[0], kvm.stored(k, dtype))  # they were copies
        for wrong in ("int8", "uint16", "object", "S3", "f17"):
            with pytest.raises((TypeError, ValueError)):
                kv.layer(0, dtype=wrong)


@pytest.mark.parametrize("dtype", kvm.KV_DTYPES)
def test_copies_into_given_arrays(dtype: str) -> None:
    k, v = (kvm.given(np.random.default_rng(seed), (5, 3, 64), "float32") for seed in range(2))
    with um.KVCache(2, 3, 64, 8, dtype=dtype) as kv:
        kv.append(0, k, v)
        out = np.empty((1, 3, 5, 64), "float32"), np.empty((1, 3, 5, 64), "float32")
        assert kv.layer(0, dtype="float32", out=out) == out
        for part, values in zip(out, (k, v), strict=True):
            assert kvm.same_bits(part[0].swapaxes(0, 1), kvm.as_float32(kvm.stored(values, dtype)))
        out[0][:] = 7  # not what would be written
        frozen = out[1].copy()
        frozen.flags.writeable = False
        wrong: list[Any] = [
            (out[0], out[1][:, :2]),
            (out[0], out[1].astype("float16")),
            (out[0],),
            (*out, out[0]),
            (out[0][..., ::2], out[1]),
            (out[0], frozen),
        ]
        for refused in wrong:
            with pytest.raises(ValueError, match=r"out|argument|read-only"):
                kv.layer(0, dtype="float32", out=refused)
            assert (out[0] == 7).all()
