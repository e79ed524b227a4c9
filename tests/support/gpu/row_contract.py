"""The contract of the kernels of ``rows.cu``: the bits that main memory gets.

A test module derives a class from `RowContract` and gives it the fixture `place`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.contracts.kv_model import NUMPY_DTYPES, um_convert

Array = NDArray[Any]
# An array for the kernels.
There = Any

DTYPES = NUMPY_DTYPES | {"f64": np.dtype(np.float64)}
FLOATS = ("f32", "f16", "bf16")
STORED = (*FLOATS, "q8_0")
APPENDS = [(given, stored) for given in FLOATS for stored in STORED]
APPENDS += [("f32", "f64"), ("f64", "f64")]
UNTOUCHED = 0xA5


class Place(ABC):
    """The place where kernels run."""

    driver: Any

    @abstractmethod
    def up(self, a: Array) -> There:
        """Copy an array there, with its strides."""

    @abstractmethod
    def down(self, a: There) -> Array:
        """Copy it back after all kernels."""

    @abstractmethod
    def address(self, a: There) -> int:
        """Return the address of its first element."""

    def rows(self, stored: str) -> Any:
        """The kernels for a type of rows."""
        from unimem.cuda.kernels import row_kernels

        return row_kernels(self.driver, stored)


# ---- what is expected ----

# The numbers of the types in unimem.h.
NUMBERS = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3}


def converted(values: Array, stored: str, wanted: str) -> Array:
    """Convert an array by the library's own code; for q8_0 the last axis is in blocks."""
    if "f64" in (stored, wanted):
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return values.astype(DTYPES[wanted])
    values = np.ascontiguousarray(values)
    n = values.size * (32 if stored == "q8_0" else 1)
    last = values.shape[-1] * (32 if stored == "q8_0" else 1)
    shape = (*values.shape[:-1], last // 32 if wanted == "q8_0" else last)
    out = np.empty(shape, DTYPES[wanted])
    numbers = NUMBERS[wanted], NUMBERS[stored]
    status = um_convert(out.ctypes.data, numbers[0], values.ctypes.data, numbers[1], n, None)
    assert status == 0
    return out


def same_numbers(a: Array, b: Array) -> bool:
    """Compare bits, except of NaNs, which depend on the machine."""
    bits = np.dtype(f"u{a.itemsize}")
    with np.errstate(invalid="ignore"):  # a signalling NaN
        both_nan = np.isnan(a) & np.isnan(b)
    return a.shape == b.shape and bool(np.all(both_nan | (a.view(bits) == b.view(bits))))


def tokens_of(given: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Numbers of every size, among them infinities and NaNs."""
    rng = np.random.default_rng(seed)
    if given == "f64":
        return rng.normal(size=shape)
    # Any bits are a number, but many of them would be out of a block's range.
    wild = rng.integers(0, 2**32, size=shape, dtype=np.uint32).view(np.float32)
    tame = rng.normal(scale=100, size=shape).astype(np.float32)
    return converted(np.where(rng.random(size=shape) < 0.05, wild, tame), "f32", given)


def lane_bytes(stored: str, n_rows: int, row_values: int) -> tuple[int, int]:
    """Bytes of a row, and of a lane with a gap behind it."""
    unit = 32 if stored == "q8_0" else 1
    row = row_values // unit * DTYPES[stored].itemsize
    return row, n_rows * row + 64


def expected(tokens: Array, given: str, stored: str, *, row: int = 0, n_rows: int) -> Array:
    """Lanes ``[layers, streams, bytes]`` with the tokens, by the library's own conversion."""
    layers, streams, heads, n, dim = tokens.shape
    row_bytes, lane = lane_bytes(stored, n_rows, heads * dim)
    out = np.full((layers, streams, lane), UNTOUCHED, np.uint8)
    rows = np.moveaxis(tokens, 3, 2).reshape(layers, streams, n, heads * dim)
    stored_rows = converted(rows, given, stored)
    for token in range(max(-row, 0), min(n, n_rows - row)):
        at = (row + token) * row_bytes
        bytes_of_row = np.ascontiguousarray(stored_rows[:, :, token]).view(np.uint8)
        out[:, :, at : at + row_bytes] = bytes_of_row.reshape(layers, streams, row_bytes)
    return out


def append(
    place: Place,
    k: Array,
    v: Array | None,
    given: str,
    stored: str,
    *,
    row: int = 0,
    n_rows: int,
    row_address: int = 0,
) -> tuple[Array, Array]:
    """Append to fresh lanes, and return those of K and of V."""
    there, outs, sides = [], [], []
    for part, tokens in enumerate((k, v)):
        layers, streams, heads, n, dim = (k if tokens is None else tokens).shape
        row_bytes, lane = lane_bytes(stored, n_rows, heads * dim)
        outs.append(place.up(np.full((layers, streams, lane), UNTOUCHED, np.uint8)))
        if tokens is not None:
            there.append(place.up(tokens))
            at = place.address(there[part]), place.address(outs[part])
            sides.append((*at, heads, dim, tokens.strides, streams * lane, lane, row_bytes))
    place.rows(stored).append(given, sides, (layers, streams, n), (row, n_rows, row_address), 0)
    k_lanes, v_lanes = map(place.down, outs)
    return k_lanes, v_lanes


def strided(tokens: Array, order: tuple[int, ...], gaps: tuple[int, ...]) -> Array:
    """The same tokens, laid out in memory in another order of the axes, and with gaps."""
    shape = tuple(tokens.shape[axis] * gaps[axis] for axis in order)
    memory = np.zeros(shape, tokens.dtype)
    out = memory.transpose(np.argsort(order))[tuple(slice(None, None, gap) for gap in gaps)]
    out[...] = tokens
    return out


def check_values(place: Place, values: Array, given: str, stored: str) -> None:
    """Convert values as one row, and back into every type."""
    tokens = values.reshape(1, 1, 1, 1, -1)
    found, _ = append(place, tokens, None, given, stored, n_rows=1)
    assert found.tobytes() == expected(tokens, given, stored, n_rows=1).tobytes()
    row = found[0, 0, :-64].copy()
    there = place.up(row)
    for wanted in FLOATS:
        out = place.up(np.empty(values.size, DTYPES[wanted]))
        sizes = (1, 1, 1, values.size)
        addresses = place.address(there), place.address(out)
        place.rows(stored).read(*addresses, wanted, sizes, 0, 0, 0, 0)
        want = converted(row.view(DTYPES[stored]), stored, wanted)
        assert same_numbers(place.down(out), want), wanted


class RowContract:
    """The contract of the kernels."""

    # ---- appending ----

    @pytest.mark.parametrize(("given", "stored"), APPENDS)
    def test_tokens_become_rows(self, place: Place, given: str, stored: str) -> None:
        for shape in ((1, 1, 1, 1, 32), (2, 3, 4, 5, 64), (1, 2, 3, 33, 160), (3, 1, 40, 2, 288)):
            wide = (*shape[:2], 2 * shape[2], shape[3], 96)
            for v_shape in (shape, wide):
                k, v = tokens_of(given, shape), tokens_of(given, v_shape, 1)
                found = append(place, k, v, given, stored, row=3, n_rows=40)
                for tokens, lanes in zip((k, v), found, strict=True):
                    want = expected(tokens, given, stored, row=3, n_rows=40)
                    assert lanes.tobytes() == want.tobytes(), (shape, v_shape)

    @pytest.mark.parametrize(("given", "stored"), APPENDS)
    def test_any_strides(self, place: Place, given: str, stored: str) -> None:
        rng = np.random.default_rng(2)
        tokens = tokens_of(given, (2, 2, 3, 5, 32))
        want = expected(tokens, given, stored, n_rows=5).tobytes()
        backwards = tokens[:, :, ::-1, ::-1, ::-1].copy()[:, :, ::-1, ::-1, ::-1]
        found, v_found = append(place, backwards, None, given, stored, n_rows=5)
        assert found.tobytes() == want
        assert (v_found == UNTOUCHED).all()
        for _ in range(8):  # K and V of different strides
            k, v = (
                strided(
                    tokens,
                    tuple(int(axis) for axis in rng.permutation(5)),
                    tuple(int(gap) for gap in rng.integers(1, 4, 5)),
                )
                for _ in "kv"
            )
            for lanes in append(place, k, v, given, stored, n_rows=5):
                assert lanes.tobytes() == want, (k.strides, v.strides)
        # One token for all streams, and one value for a whole head.
        wide = np.broadcast_to(tokens[:, :1, :, :, :1], tokens.shape)
        want = expected(wide, given, stored, n_rows=5).tobytes()
        assert append(place, wide, None, given, stored, n_rows=5)[0].tobytes() == want

    @pytest.mark.parametrize("stored", [*STORED, "f64"])
    @pytest.mark.parametrize("row", [-4, -2, 0, 5, 6, 7, 9, 2**31 - 1])
    def test_only_rows_that_are_there_are_written(
        self, place: Place, stored: str, row: int
    ) -> None:
        tokens = tokens_of("f32", (2, 2, 2, 3, 32))
        want = expected(tokens, "f32", stored, row=row, n_rows=8)
        assert (want == UNTOUCHED).all() == (row in (-4, 9, 2**31 - 1))
        found, v_found = append(place, tokens, tokens, "f32", stored, row=row, n_rows=8)
        assert found.tobytes() == v_found.tobytes() == want.tobytes()
        # The same row, read from memory when the kernel runs.
        at = place.up(np.array([row], np.int32))
        where = {"row": 1, "n_rows": 8, "row_address": place.address(at)}
        assert append(place, tokens, None, "f32", stored, **where)[0].tobytes() == want.tobytes()

    @pytest.mark.parametrize(
        "shape",
        [(1, 1, 1, 270_000, 2), (2, 33_000, 1, 1, 2), (1, 1, 270_000, 1, 1), (1, 1, 1, 1, 100_000)],
    )
    def test_grids_beyond_what_cuda_launches(self, place: Place, shape: tuple[int, ...]) -> None:
        tokens, n = tokens_of("f32", shape), shape[3]
        want = expected(tokens, "f32", "f16", n_rows=n)
        assert append(place, tokens, None, "f32", "f16", n_rows=n)[0].tobytes() == want.tobytes()
        row_bytes, lane = lane_bytes("f16", n, shape[2] * shape[4])
        lanes, out = place.up(want), place.up(np.empty(shape[1:], np.float16))
        addresses = place.address(lanes), place.address(out)
        place.rows("f16").read(*addresses, "f16", shape[1:], lane, row_bytes, 0, 0)
        assert place.down(out).tobytes() == converted(tokens[0], "f32", "f16").tobytes()

    # ---- conversions ----

    @pytest.mark.parametrize("stored", STORED)
    @pytest.mark.parametrize("given", ["f16", "bf16"])
    def test_every_number_of_16_bits(self, place: Place, given: str, stored: str) -> None:
        every = np.arange(65536, dtype=np.uint16).view(DTYPES[given])
        check_values(place, every, given, stored)

    @pytest.mark.parametrize("stored", STORED)
    def test_numbers_of_32_bits(self, place: Place, stored: str) -> None:
        some = np.arange(0, 2**32, 4099)
        # Around the rounding steps of every float16 exponent, denormals included.
        steps = np.add.outer(np.arange(0x2F800000, 0x48000000, 0x1000), [-1, 0, 1]).reshape(-1)
        bits = np.concatenate([some, steps, steps + 2**31])
        values = bits[: bits.size // 32 * 32].astype(np.uint32).view(np.float32)
        check_values(place, values, "f32", stored)

    def test_blocks_of_q8_0(self, place: Place) -> None:
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
            blocks = np.concatenate([usual, halves, odd, last, np.zeros((4, 32))])
            values = blocks.astype(np.float32)
        check_values(place, values.reshape(-1), "f32", "q8_0")

    # ---- reading ----

    @pytest.mark.parametrize("wanted", FLOATS)
    @pytest.mark.parametrize("stored", STORED)
    def test_rows_become_an_array(self, place: Place, stored: str, wanted: str) -> None:
        for streams, heads, n, dim in ((1, 1, 1, 32), (3, 4, 5, 64), (2, 3, 33, 160)):
            row_bytes, lane = lane_bytes(stored, n + 4, heads * dim)
            values = tokens_of("f32", (1, streams, heads, n + 4, dim))
            lanes = place.up(expected(values, "f32", stored, n_rows=n + 4))
            out = place.up(np.empty((streams, heads, n, dim), DTYPES[wanted]))
            addresses = place.address(lanes), place.address(out)
            place.rows(stored).read(*addresses, wanted, out.shape, lane, row_bytes, 3, 0)
            stored_values = converted(values[0], "f32", stored)
            want = converted(stored_values, stored, wanted)[:, :, 3 : 3 + n]
            assert same_numbers(place.down(out), np.ascontiguousarray(want))
