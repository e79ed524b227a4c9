"""Which rows of the KV cache each token sees: the masks of the two graphs of a decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem.engine.graph import Graph

__all__ = ["Attention"]

_KV_BUCKET = 256  # attention reads a multiple of so many rows: its length changes seldom
_NO_ROWS = (0, -2)  # no row comes next after these


class Attention:
    """Writes the masks, as rows of the cache are added and leave the window.

    Parameters
    ----------
    decode, prefill : Graph
        The graph of one token, and that of a batch.
    n_rows : int
        Rows of a lane of the KV cache.
    window : int
        Tokens that each one sees: itself and those before it.
    """

    def __init__(self, decode: Graph, prefill: Graph, n_rows: int, window: int) -> None:
        self._decode = decode
        self._prefill = prefill
        self._n_rows = n_rows
        self.window = window
        self._shown = _NO_ROWS  # first and last row that the decode graph's mask shows

    def show_batch(self, n: int, held: int, row: int) -> None:
        """Show each of `n` tokens from `row` on those before it; `held` precede the first."""
        graph = self._prefill
        graph.attend(self._n_kv(self._first_row(held, row), row + n))
        graph.mask[:] = -np.inf
        for i in range(n):
            at = (row + i) % self._n_rows
            _show(graph.mask[i], self._first_row(held + i, at), at)

    def show_token(self, held: int, row: int) -> None:
        """Show the token in `row` the `held` tokens before it, as far as the window goes."""
        graph, first = self._decode, self._first_row(held, row)
        n_kv, (before, last) = self._n_kv(first, row + 1), self._shown
        follows = row == last + 1 and before <= first <= before + 1
        self._shown = _NO_ROWS  # until the mask is whole
        if n_kv != graph.n_kv or not follows:
            graph.attend(n_kv)
            graph.mask[:] = -np.inf
            _show(graph.mask[0], first, row)
        else:
            if first != before:
                graph.mask[0, before] = -np.inf
            graph.mask[0, row] = 0
        self._shown = first, row

    def _first_row(self, held: int, row: int) -> int:
        """Return the first row that the token in `row` sees; below 0, counted round the ring."""
        return row - min(held, self.window - 1)

    def _n_kv(self, first: int, end: int) -> int:
        """Return how many rows attention reads, so that [first, end) are among them."""
        if first < 0:
            return self._n_rows
        return min(self._n_rows, -(-end // _KV_BUCKET) * _KV_BUCKET)


def _show(mask: NDArray[Any], first: int, last: int) -> None:
    """Show a token the rows [first, last]; those below 0 are the last ones of a ring."""
    if first < 0:
        mask[first:] = 0
    mask[max(first, 0) : last + 1] = 0
