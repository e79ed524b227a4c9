"""Tokens of a small paged cache: made, appended, and read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import unimem as um
from support.contracts.kv_model import Array


def rows(n: int, seed: int = 0) -> tuple[Array, Array]:
    """K and V of n tokens of a cache of 3 heads of 4."""
    k, v = np.random.default_rng(seed).normal(size=(2, n, 3, 4)).astype("float32")
    return k, v


def heads_first(part: Array) -> Array:
    """Tokens [n, heads, dim] as they are gathered."""
    return np.ascontiguousarray(part.swapaxes(0, 1))


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


# ---- what a model would compute ----


def feed(s: um.Sequence, tokens: Iterable[int]) -> None:
    """Append what a model would compute for tokens: it depends on all tokens before."""
    ids = [*tokens]
    for layer in range(s.cache.n_layers):
        n = len(s.gather(layer)[0][0])
        values = [hash((tuple(ids[: i + 1]), layer)) % 10007 for i in range(n, len(ids))]
        k = np.array(values, "f4")[:, None, None].repeat(3, 1).repeat(4, 2)
        s.append(layer, k, -k)


@contextmanager
def fed(pg: um.PagedKVCache, tokens: Iterable[int]) -> Iterator[um.Sequence]:
    """A sequence of these tokens."""
    ids = [*tokens]
    with pg.sequence(ids) as s:
        feed(s, ids)
        yield s


def holds_tokens(s: um.Sequence, tokens: Iterable[int]) -> bool:
    """Whether a sequence holds what a model would have computed."""
    with um.PagedKVCache(2, 3, 4, n_blocks=64, block_tokens=4, dtype="f32") as other:
        fresh = other.sequence()
        feed(fresh, tokens)
        same = seen(s) == seen(fresh)
        fresh.close()
    return same


def n_cached(pg: um.PagedKVCache, tokens: Iterable[int]) -> int:
    """How many of the tokens are found, which hold what they should."""
    ids = [*tokens]
    with pg.sequence(ids) as s:
        assert len(s) == s.n_cached
        assert holds_tokens(s, ids[: s.n_cached])
        return s.n_cached
