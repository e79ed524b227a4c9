"""Conversion of tensors of any type to float32, by ggml, gguf-py, NumPy and ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unimem._core import guard
from unimem.weights.gguf import tensor_type

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Convert: TypeAlias = Callable[[Bytes, Floats], None]

# Pieces are copied and converted one by one, and fit into the cache of a core.
_PIECE_BYTES = 256 << 10
# Types of ggml that gguf-py lacks: the bits of a level, and the level of a value from them, as
# factor and offset.
_LEVELS = {41: (1, 2, -1), 42: (2, 1, -1)}  # q1_0, q2_0


def dequantize(
    array: NDArray[Any],
    kind: str,
    number: int | None,
    out: Floats,
    *,
    name: str,
    path: str,
) -> None:
    """Convert a tensor's data to `out`, for `Tensor.dequantize`.

    `array` has values if NumPy or ml_dtypes has the type, else bytes; `number` is ggml's number of
    the type; `name` and `path` are for messages.
    """
    what = f"tensor '{name}' is {kind}"
    if array.dtype != np.uint8 or kind == "u8":
        block_values, block_bytes, convert = 1, array.itemsize, _by_numpy(array.dtype, what)
    else:
        block_values, block_bytes, convert = _of_blocks(number, what)
    data = array.reshape(-1).view(np.uint8)
    values = out.reshape(-1)
    n_blocks = data.nbytes // block_bytes
    step = max(1, _PIECE_BYTES // block_bytes)
    piece = np.empty(min(step, n_blocks) * block_bytes, np.uint8)
    try:
        # Values beyond float32 become infinite or NaN without a warning, as in any conversion.
        with np.errstate(all="ignore"):
            for first in range(0, n_blocks, step):
                end = min(first + step, n_blocks)
                part = piece[: (end - first) * block_bytes]
                # If the file is truncated meanwhile, the copy fails with an error; converting from
                # the mapping itself would end the process.
                address = data.ctypes.data + first * block_bytes
                guard.copy(part, address, part.nbytes, path)
                convert(part, values[first * block_values : end * block_values])
    finally:
        del array, data  # the traceback would keep the memory


def _by_numpy(dtype: np.dtype[Any], what: str) -> Convert:
    if dtype.kind == "c":
        raise NotImplementedError(
            f"{what}, whose complex numbers are no float32: as_array() has them"
        )

    def convert(data: Bytes, out: Floats) -> None:
        np.copyto(out, data.view(dtype), casting="unsafe")

    return convert


def _of_blocks(number: int | None, what: str) -> tuple[int, int, Convert]:
    """Return the values and bytes of a block, and the conversion of blocks."""
    if number is None:
        raise NotImplementedError(
            f"{what}, whose values are packed as no library here reads them: as_array() has the "
            "bytes"
        )
    try:
        _, block_values, block_bytes = tensor_type(number)
    except ValueError:
        raise NotImplementedError(
            f"{what}, which ggml 0.26 does not have: as_array() has the bytes"
        ) from None
    reasons = []
    for library in (_by_ggml, _by_levels, _by_gguf_py):
        found = library(number)
        if callable(found):
            return block_values, block_bytes, found
        reasons.append(found)
    raise NotImplementedError(f"{what}: {'; '.join(filter(None, reasons))}")


def _by_ggml(number: int) -> Convert | str:
    """Return ggml's conversion, or the reason for its absence."""
    try:
        from unimem.backends import ggml
    except ImportError as error:
        return str(error)
    if not ggml.has_to_float(number):
        return "ggml has no conversion, since no file has this type"

    def convert(data: Bytes, out: Floats) -> None:
        ggml.to_float(number, data.ctypes.data, out.ctypes.data, out.size)

    return convert


def _by_levels(number: int) -> Convert | str:
    """Return the conversion of blocks of a float16 scale and levels of a few bits."""
    if number not in _LEVELS:
        return ""
    n_bits, factor, offset = _LEVELS[number]
    weights = factor * (1 << np.arange(n_bits, dtype=np.int8))
    _, block_values, block_bytes = tensor_type(number)

    def convert(data: Bytes, out: Floats) -> None:
        blocks = data.reshape(-1, block_bytes)
        bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
        levels = bits.reshape(-1, block_values, n_bits).astype(np.int8) @ weights + offset
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        np.multiply(scales, levels, out=out.reshape(levels.shape), dtype=np.float32)

    return convert


def _by_gguf_py(number: int) -> Convert | str:
    """Return gguf-py's conversion, or the reason for its absence."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        return "gguf-py is not installed either: pip install gguf"
    try:
        kind = GGMLQuantizationType(number)
        quants.dequantize(np.zeros(tensor_type(number)[2], np.uint8), kind)
    except (ValueError, NotImplementedError):
        return "gguf-py has no conversion either"

    def convert(data: Bytes, out: Floats) -> None:
        out[:] = quants.dequantize(data, kind)

    return convert
