"""Rows of chunks, copied from caches and into them: plain caches and paged sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unimem._core import guard
from unimem.errors import CacheFull
from unimem.kv.cache import KVCache
from unimem.kv.chunk_format import Kind
from unimem.kv.mixed import MixedKVCache
from unimem.kv.paged import Sequence

__all__ = ["Holder", "Rows", "rows_of"]

Holder = KVCache | Sequence


class Rows(Protocol):
    """The tokens of a cache from position 0 on.

    Attributes
    ----------
    kind : Kind
        Of the cache.
    """

    kind: Kind

    def check_tokens(self, ids: NDArray[np.int32]) -> None:
        """Refuse ids that are known to be others than those of its tokens."""

    def check_source(self) -> int:
        """Return how many tokens can be read; refuse what holds none from position 0 on."""

    def read(self, first: int, n: int, lanes: NDArray[np.uint8]) -> None:
        """Copy n tokens to ``[n_lanes, n * row_bytes]``."""

    def check_target(self) -> tuple[int, int]:
        """Return how many tokens it holds and can hold; refuse what cannot go on from there."""

    def begin(self, n: int) -> None:
        """Prepare for n tokens in all."""

    def write(self, first: int, n: int, lanes: NDArray[np.uint8]) -> bool:
        """Take n tokens, of which those that it holds are left out; False where it is full."""

    def finish(self, n: int) -> None:
        """Keep the first n tokens."""

    def abandon(self) -> None:
        """Leave no token half restored."""


def rows_of(kv: Holder) -> Rows:
    """Return the rows of a cache.

    Raises
    ------
    TypeError
        It is neither a `KVCache` nor a `Sequence`.
    ValueError
        It has several streams or layers that differ, or K and V are of different types or sizes.
    """
    if isinstance(kv, MixedKVCache):
        raise ValueError("kv: expected a cache whose layers are alike, got layers that differ")
    if isinstance(kv, KVCache):
        return _CacheRows(kv)
    if isinstance(kv, Sequence):
        return _SequenceRows(kv)
    raise TypeError(f"kv: expected a KVCache or a Sequence of a PagedKVCache, got {kv!r:.60}")


class _CacheRows:
    """Those of a `KVCache`, whose lanes are those of a chunk, or one head of them each."""

    def __init__(self, kv: KVCache) -> None:
        if kv.batch != 1:
            raise ValueError(f"kv: expected a cache of one stream, got one of batch={kv.batch}")
        if kv.dtype != kv.v_dtype:
            raise ValueError(
                f"kv: expected K and V of one type, got {kv.dtype} and {kv.v_dtype}: a store has "
                "chunks of one type; save() keeps a snapshot of both"
            )
        if kv.v_head_dim != kv.head_dim:
            raise ValueError(
                f"kv: expected heads of one size of K and V, got {kv.head_dim} and "
                f"{kv.v_head_dim}: save() keeps a snapshot of both"
            )
        self._kv = kv
        self._into: list[NDArray[np.uint8]] = []
        rotation = "hadamard" if kv.rotate else "none"
        self.kind = Kind(kv.n_layers, kv.n_kv_heads, kv.head_dim, kv.dtype, rotation)
        self._lane_heads = 1 if kv.order == "head" else kv.n_kv_heads
        self._row_bytes = kv.row_bytes // kv.n_kv_heads * self._lane_heads

    def _parts(self, n: int, lanes: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        """View what a chunk's lanes have of each lane of the cache: ``[n, row bytes]``."""
        for lane in lanes:
            rows = lane.reshape(n, -1, self._row_bytes)
            yield from (rows[:, i] for i in range(rows.shape[1]))

    def check_tokens(self, ids: NDArray[np.int32]) -> None:
        pass  # it knows none

    def check_source(self) -> int:
        kv = self._kv
        kv.crop(kv.seq_len)  # drops nothing, and refuses reserved rows and layers that differ
        if kv.next_position != kv.seq_len:
            raise ValueError(
                "kv: expected a cache that holds its first tokens, got one in which "
                f"{kv.next_position - kv.seq_len} were dropped: put it before it is trimmed, or "
                "before its window is full"
            )
        return kv.seq_len

    def read(self, first: int, n: int, lanes: NDArray[np.uint8]) -> None:
        kv, size = self._kv, self._row_bytes
        for lane, out in zip(kv._lanes(), self._parts(n, lanes), strict=True):
            rows = kv._rows(*lane)[first * size : (first + n) * size]
            if kv._file is not None:  # its pages may be lost
                kept = np.empty_like(rows)
                guard.copy(kept, rows.ctypes.data, rows.nbytes, kv._file)
                rows = kept
            out[:] = rows.reshape(n, size)

    def check_target(self) -> tuple[int, int]:
        kv = self._kv
        kv.crop(kv.seq_len)
        if kv.next_position:
            raise ValueError(
                f"kv: expected a cleared cache, got one at position {kv.next_position}: call "
                "clear() first"
            )
        if kv.window or kv.grow:
            return 0, kv.window or kv.max_seq_len
        return 0, min(kv.max_seq_len, kv.n_rows)  # fewer rows for its budget_bytes

    def begin(self, n: int) -> None:
        self._kv._begin_restore(n, n)
        self._into = [self._kv._restore_rows(*lane, n, n) for lane in self._kv._lanes()]

    def write(self, first: int, n: int, lanes: NDArray[np.uint8]) -> bool:
        size = self._row_bytes
        for into, rows in zip(self._into, self._parts(n, lanes), strict=True):
            into[first * size : (first + n) * size].reshape(n, size)[:] = rows
        return True

    def finish(self, n: int) -> None:
        self._into = []
        if n:
            self._kv._finish_restore(n, n)
        else:
            self._kv.clear()

    def abandon(self) -> None:
        self._into = []
        self._kv.clear()


class _SequenceRows:
    """Those of a sequence, whose blocks are taken and put whole."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence, self._pool = sequence, sequence.cache
        pool = self._pool
        self.kind = Kind(pool.n_layers, pool.n_kv_heads, pool.head_dim, pool.dtype)

    def check_tokens(self, ids: NDArray[np.int32]) -> None:
        # Its pool gives blocks to others by the ids that it was told.
        told = self._sequence._told_ids()
        n = min(len(told), len(ids))
        different = np.flatnonzero(told[:n] != ids[:n])
        if different.size:
            i = different[0]
            raise ValueError(
                f"tokens: expected those of the sequence, which was told {told[i]} for position "
                f"{i}, got {ids[i]}: make a sequence of these tokens"
            )

    def check_source(self) -> int:
        self._sequence.fork().close()  # which refuses layers that differ, and changes nothing
        return len(self._sequence)

    def read(self, first: int, n: int, lanes: NDArray[np.uint8]) -> None:
        size = self._pool.block_tokens
        skipped = first % size
        blocks = self._sequence.block_table[first // size : -(-(first + n) // size)]
        for layer in range(self.kind.n_layers):
            for part, rows in enumerate(self._pool.layer(layer)):
                tokens = rows[blocks].reshape(-1, *rows.shape[2:])[skipped : skipped + n]
                lanes[2 * layer + part] = tokens.reshape(-1).view(np.uint8)

    def check_target(self) -> tuple[int, int]:
        held = self.check_source()
        # Its tail block may have room, and what is shared is copied: `write` sees what fits.
        return held, held + (self._pool.n_blocks_available + 1) * self._pool.block_tokens

    def begin(self, n: int) -> None:
        pass

    def write(self, first: int, n: int, lanes: NDArray[np.uint8]) -> bool:
        kept = lanes.reshape(self.kind.n_lanes, n, -1)[:, len(self._sequence) - first :]
        dtype = self._pool.layer(0)[0].dtype
        shape = (kept.shape[1], self.kind.n_kv_heads, -1)
        try:
            for layer in range(self.kind.n_layers):
                k, v = (
                    np.ascontiguousarray(kept[2 * layer + part]).view(dtype).reshape(shape)
                    for part in (0, 1)
                )
                self._sequence.append(layer, k, v)
        except CacheFull:
            self._sequence.rollback()
            return False
        return True

    def finish(self, n: int) -> None:
        pass

    def abandon(self) -> None:
        with suppress(RuntimeError):  # it was closed meanwhile
            self._sequence.rollback()
