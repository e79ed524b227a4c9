"""The kernels of ``rows.cu``: tokens become rows of a device's memory, and rows arrays."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Mapping
from importlib import resources

import numpy as np

from unimem.backends.cuda_driver import Driver, Launcher

FLOATS = ("f32", "f16", "bf16")
# Of each type of rows, what is taken and what is made of it.
GIVEN = {"f32": FLOATS, "f16": FLOATS, "bf16": FLOATS, "q8_0": FLOATS, "f64": ("f64", "f32")}
WANTED = {"f32": FLOATS, "f16": FLOATS, "bf16": FLOATS, "q8_0": FLOATS, "f64": ()}
NAMES = tuple(
    [f"append_{given}_{stored}" for stored, types in GIVEN.items() for given in types]
    + [f"read_{stored}_{wanted}" for stored, types in WANTED.items() for wanted in types]
)
# Threads of a block: along the values of a head, and along heads and tokens. A thread that
# quantizes takes 32 values at once, others 4 values one after another.
BLOCK = (32, 4)
QUANTIZING_BLOCK = (4, 32)
VALUES_ALONG_HEAD = 128
MOST_BLOCKS = 65535  # along the second and third dimension of a grid

Five = tuple[int, int, int, int, int]

# What a kernel takes: one structure by value, which CuPy passes for an array of one element.
_APPEND, _READ = struct.Struct("20q"), struct.Struct("9q")
_OF_APPEND, _OF_READ = (np.dtype((np.void, fields.size)) for fields in (_APPEND, _READ))

# Compiled once a device, since that takes a second.
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


class RowKernels:
    """The kernels for one type of rows. A call launches one and returns at once.

    Nothing is checked: addresses, sizes and strides are the caller's. Types are ``"f32"``,
    ``"f16"``, ``"bf16"``, ``"q8_0"`` and ``"f64"``. Any thread may call; after a fork the child has
    no device.

    Parameters
    ----------
    driver : Driver
        The device.
    stored : str
        The type of the rows.
    """

    def __init__(self, driver: Driver, stored: str) -> None:
        found = launchers(driver)
        self._append = {given: found[f"append_{given}_{stored}"] for given in GIVEN[stored]}
        self._read = {wanted: found[f"read_{stored}_{wanted}"] for wanted in WANTED[stored]}
        self._block = QUANTIZING_BLOCK if stored == "q8_0" else BLOCK

    def append(
        self,
        k: int,
        v: int,
        given: str,
        sizes: Five,
        strides: Five,
        k_out: int,
        v_out: int,
        layer_stride: int,
        lane_stride: int,
        row_bytes: int,
        row: int,
        n_rows: int,
        row_address: int,
        stream: int,
    ) -> None:
        """Write tokens into the rows of their lanes; K and V with one launch.

        Parameters
        ----------
        k, v : int
            Addresses of the tokens; v may be 0.
        given : str
            Their type: for rows of ``"f64"`` one of ``"f64"`` and ``"f32"``, otherwise of
            ``"f32"``, ``"f16"`` and ``"bf16"``.
        sizes, strides : tuple of int
            Layers, streams, heads, tokens, values of a head (for ``"q8_0"`` a multiple of 32); and
            the bytes from one to the next of each, the same for k and v.
        k_out, v_out : int
            Addresses of the first lanes.
        layer_stride, lane_stride : int
            Bytes from the lane of one layer, or of one stream, to the next.
        row_bytes : int
            Bytes of a row.
        row : int
            The row of the first token.
        n_rows : int
            Rows of a lane; tokens that would go elsewhere are not written.
        row_address : int
            Unless it is 0, `row` is an int32 there, read when the kernel runs.
        stream : int
            The stream.
        """
        layers, streams, heads, n, dim = sizes
        n_lanes = (2 if v else 1) * layers * streams
        if n == 0:
            return
        grid = _grid(n_lanes, n * heads, dim, self._block)
        rows = (layer_stride, lane_stride, row_bytes, row, n_rows, row_address)
        arguments = _APPEND.pack(k, v, k_out, v_out, *sizes, *strides, *rows)
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
        """Copy rows, converted, to an array.

        Parameters
        ----------
        lane : int
            Address of the first stream's lane.
        out : int
            Address of the array ``[streams, heads, n, dim]``, without gaps.
        wanted : str
            Its type: ``"f32"``, ``"f16"`` or ``"bf16"``.
        sizes : tuple of int
            Streams, heads, tokens, values of a head.
        lane_stride, row_bytes : int
            Bytes from the lane of one stream to the next, and of a row.
        row : int
            The first row.
        stream : int
            The stream.
        """
        streams, heads, n, dim = sizes
        if n == 0:
            return
        arguments = _READ.pack(lane, out, *sizes, lane_stride, row_bytes, row)
        grid = _grid(streams, n * heads, dim, BLOCK)
        self._read[wanted](grid, BLOCK, (np.frombuffer(arguments, _OF_READ),), stream)
