"""The kernels of ``rows.cu``: tokens become rows of a device's memory, and rows arrays."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

import numpy as np

from unimem.backends.cuda_driver import Driver, Launcher

FLOATS = ("f32", "f16", "bf16")
# For each type of rows, the types of tokens that can be written, and of arrays that can be read.
GIVEN = {"f32": FLOATS, "f16": FLOATS, "bf16": FLOATS, "q8_0": FLOATS, "f64": ("f64", "f32")}
WANTED = {"f32": FLOATS, "f16": FLOATS, "bf16": FLOATS, "q8_0": FLOATS, "f64": ()}
NAMES = tuple(
    [f"append_{given}_{stored}" for stored, types in GIVEN.items() for given in types]
    + [f"read_{stored}_{wanted}" for stored, types in WANTED.items() for wanted in types]
)
# Threads of a block: along the values of a head, and along heads and tokens. A quantizing thread
# takes 32 values at once, others 4 values one after another.
BLOCK = (32, 4)
QUANTIZING_BLOCK = (4, 32)
VALUES_ALONG_HEAD = 128
MOST_BLOCKS = 65535  # along the second and third dimension of a grid

Five = tuple[int, int, int, int, int]

# The arguments of a kernel: one structure by value, which CuPy passes for an array of one element.
_APPEND, _READ = struct.Struct("20q"), struct.Struct("9q")
_OF_APPEND, _OF_READ = (np.dtype((np.void, fields.size)) for fields in (_APPEND, _READ))

# Compiling takes a second, and is done once per device.
_compiled: weakref.WeakKeyDictionary[Driver, Mapping[str, Launcher]] = weakref.WeakKeyDictionary()


def launchers(driver: Driver) -> Mapping[str, Launcher]:
    """Return the kernels of a device by name, compiled at the first call."""
    found = _compiled.get(driver)
    if found is None:
        source = resources.files(__package__).joinpath("rows.cu").read_text()
        found = _compiled.setdefault(driver, driver.module(source, NAMES))
    return found


def _grid(n_lanes: int, n_rows: int, dim: int, block: tuple[int, int]) -> tuple[int, int, int]:
    return (
        -(-dim // VALUES_ALONG_HEAD),
        min(-(-n_rows // block[1]), MOST_BLOCKS),
        min(n_lanes, MOST_BLOCKS),
    )


class Tokens(NamedTuple):
    """Tokens to write."""

    k: int  # addresses
    v: int  # may be 0
    given: str  # "f64" or "f32" for rows of "f64", else "f32", "f16" or "bf16"
    sizes: Five  # layers, streams, heads, tokens, values of a head (for q8_0 a multiple of 32)
    strides: Five  # bytes from one to the next of each, the same for k and v


class Rows(NamedTuple):
    """Rows to write to."""

    k_out: int  # addresses of the first lanes
    v_out: int
    layer_stride: int  # bytes from the lane of one layer to the next
    lane_stride: int  # bytes from the lane of one stream to the next
    row_bytes: int
    row: int  # of the first token
    n_rows: int  # of a lane; tokens outside are not written
    row_address: int  # unless 0, `row` is an int32 there, read when the kernel runs


class RowKernels:
    """The kernels for one type of rows. A call launches one and returns at once.

    Addresses, sizes and strides are not checked. Types are ``"f32"``, ``"f16"``, ``"bf16"``,
    ``"q8_0"`` and ``"f64"``. Any thread may call; a forked child has no device.
    """

    def __init__(self, driver: Driver, stored: str) -> None:
        found = launchers(driver)
        self._append = {given: found[f"append_{given}_{stored}"] for given in GIVEN[stored]}
        self._read = {wanted: found[f"read_{stored}_{wanted}"] for wanted in WANTED[stored]}
        self._block = QUANTIZING_BLOCK if stored == "q8_0" else BLOCK

    def append(self, tokens: Tokens, rows: Rows, stream: int) -> None:
        """Write tokens into the rows of their lanes; K and V with one launch."""
        k, v, given, sizes, strides = tokens
        layers, streams, heads, n, dim = sizes
        if n == 0:
            return
        grid = _grid((2 if v else 1) * layers * streams, n * heads, dim, self._block)
        arguments = _APPEND.pack(k, v, *rows[:2], *sizes, *strides, *rows[2:])
        self._append[given](grid, self._block, (np.frombuffer(arguments, _OF_APPEND),), stream)

    def read(
        self,
        lane: int,
        out: int,
        wanted: str,
        sizes: tuple[int, int, int, int],
        lane_stride: int,
        row_bytes: int,
        row: int,
        stream: int,
    ) -> None:
        """Copy rows from `row` on, from the lanes at `lane`, to an array ``[*sizes]`` at `out`.

        They are converted to `wanted`, ``"f32"``, ``"f16"`` or ``"bf16"``. Sizes are streams,
        heads, tokens and values of a head.
        """
        streams, heads, n, dim = sizes
        if n == 0:
            return
        arguments = _READ.pack(lane, out, *sizes, lane_stride, row_bytes, row)
        grid = _grid(streams, n * heads, dim, BLOCK)
        self._read[wanted](grid, BLOCK, (np.frombuffer(arguments, _OF_READ),), stream)
