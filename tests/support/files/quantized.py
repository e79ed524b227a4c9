"""Values in any type that ggml knows, as its own quantizer makes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def quantize(values: NDArray[np.float32], kind: int) -> NDArray[np.uint8]:
    """Quantize rows to a type of this number; returns the bytes of each row."""
    from unimem.backends import ggml

    n_rows, width = values.shape
    data = np.zeros((n_rows, ggml.row_size(kind, width)), np.uint8)
    values = np.ascontiguousarray(values, np.float32)
    ggml.quantize(kind, values.ctypes.data, data.ctypes.data, n_rows, width)
    return data
