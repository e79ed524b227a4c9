"""Tokens of a small paged cache: made, appended, and read back."""

from __future__ import annotations

from typing import Any

import numpy as np

import unimem as um
from kv_model import Array


def rows(n: int, seed: int = 0) -> tuple[Array, Array]:
    """K and V of n tokens of the fixture's cache."""
    k, v = np.random.default_rng(seed).normal(size=(2, n, 3, 4)).astype("float32")
    return k, v


def append(s: um.Sequence, n: int, seed: int = 0) -> None:
    """Append n tokens to all layers."""
    for layer in range(s.cache.n_layers):
        s.append(layer, *rows(n, seed))


def seen(s: um.Sequence) -> list[bytes]:
    return [part.tobytes() for layer in range(s.cache.n_layers) for part in s.gather(layer)]


def table(s: um.Sequence) -> list[int]:
    return [int(block) for block in s.block_table]


def state(pg: um.PagedKVCache, *sequences: um.Sequence) -> tuple[Any, ...]:
    """All that can be seen of a cache and its sequences."""
    holders = [pg._n_holders(block) for block in range(pg.n_blocks)]
    cached = [pg._is_cached(block) for block in range(pg.n_blocks)]
    figures = pg.n_blocks_in_use, pg.n_blocks_available, holders, cached
    return figures, [(len(s), table(s), seen(s)) for s in sequences]
