"""States of llama.cpp's sequences, made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from unimem.llama_cpp.state import CellRows, LlamaKV, Recurrent, StateLane

F16, Q8_0 = (1, 32), (8, 34)  # ggml's number of a type, and bytes of a row


def cells(
    n: int = 20,
    first: int = 0,
    *,
    layers: int = 2,
    kinds: tuple[tuple[int, int], ...] = (F16, F16),
    is_transposed: bool = False,
    extra: bool = False,
    rotations: tuple[int, ...] = (0, 0),
    n_values: int | None = None,
    seed: int = 0,
) -> CellRows:
    """Return cells with random rows at the positions from `first` on."""
    rng = np.random.default_rng(seed)

    def lanes(kind: tuple[int, int], count: int) -> tuple[StateLane, ...]:
        rows = (rng.integers(0, 256, (n, kind[1]), np.uint8) for _ in range(count))
        return tuple(StateLane(kind[0], row) for row in rows)

    more = rng.integers(0, 256, (n, 12), np.uint8) if extra else None
    positions = np.arange(first, first + n, dtype=np.int32)
    keys, values = (
        lanes(kinds[0], layers),
        lanes(kinds[1], layers if n_values is None else n_values),
    )
    return CellRows(positions, more, is_transposed, rotations, keys, values)


def recurrent(n: int = 20, seed: int = 0) -> Recurrent:
    """Return the states of two layers behind n tokens."""
    rng = np.random.default_rng(seed)
    sizes = (12, 12, 64, 64)
    rows = (rng.integers(0, 256, (1, size), np.uint8) for size in sizes)
    return Recurrent(n - 1, 3, tuple(StateLane(0, row) for row in rows))


def state(*parts: Any, version: int = 4, head: bytes = b"", n_streams: int = 1) -> LlamaKV:
    """Return a state of parts, or of cells."""
    return LlamaKV(version, head, n_streams, parts or (cells(),))


def same(a: Any, b: Any) -> bool:
    """Compare two states, or parts of them."""
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
