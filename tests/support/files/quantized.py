"""Values in any type that ggml knows, as its own quantizer makes them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["quantize"]


@cache
def _quantizer() -> Any:
    from unimem.backends import ggml

    function = ctypes.CDLL(ggml.LIBRARIES[0]).ggml_quantize_chunk
    function.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    )  # fmt: skip
    return function


def quantize(values: NDArray[np.float32], kind: int) -> NDArray[np.uint8]:
    """Quantize rows to a type of this number; returns the bytes of each row."""
    from unimem.backends import ggml

    n_rows, width = values.shape
    data = np.zeros((n_rows, int(ggml.row_size(kind, width))), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    _quantizer()(kind, values.ctypes.data, data.ctypes.data, 0, n_rows, width, None)
    return data
