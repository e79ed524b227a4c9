"""Copying rows between chunks and caches: plain caches and paged sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from unimem._core import guard
from unimem._core.block import Block
from unimem.errors import CacheFull
from unimem.kv.cache.cache import KVCache
from unimem.kv.cache.device import KVDevice
from unimem.kv.cache.layered import LayeredKVCache
from unimem.kv.cache.one_kind import OneKindCache
from unimem.kv.layer_specs import Layer, LayerState, kinds_of, places_of
from unimem.kv.paged import Sequence
from unimem.kv.store.chunk import EqualLayers, Kind, LayerRows, MixedLayers
from unimem.kv.types import kv_pair


class AsRing(NamedTuple):
    """A device's cache whose layers attend to a window: its chunks are those of a ring."""

    kv: KVDevice
    window: int


Holder = KVCache | KVDevice | AsRing | Sequence
Lanes = list[NDArray[np.uint8]]


class Rows(Protocol):
    """The tokens of a cache of one kind, from position 0 on.

    Lanes belong to a group of its layers; each is ``uint8 [tokens, row bytes]``.
    """

    kind: Kind

    def check_tokens(self, ids: NDArray[np.int32]) -> None:
        """Refuse ids that differ from known ids of its tokens."""

    def check_source(self) -> int:
        """Return how many tokens can be read; refuse a cache without its first tokens."""

    def first_held(self, group: int) -> int:
        """Return the first position that the layers of a group still have."""

    def read(self, group: int, first: int, lanes: Lanes) -> None:
        """Copy the tokens from a position on."""

    def check_target(self) -> tuple[int, int]:
        """Return how many tokens it holds and can hold; refuse a cache that cannot continue."""

    def begin(self, n: int) -> None:
        """Prepare for n tokens in all."""

    def write(self, group: int, first: int, lanes: Lanes) -> bool:
        """Store the tokens from a position on, except held ones; return False if it is full."""

    def finish(self, n: int) -> None:
        """Keep the first n tokens."""

    def abandon(self) -> None:
        """Drop tokens that are half restored."""

    def memory(self, nbytes: int) -> AbstractContextManager[NDArray[np.uint8]]:
        """Take memory for a chunk on its way, which `read` and `write` get lanes of."""


def rows_of(kv: Holder) -> Rows:
    """Return the rows of a cache.

    It raises TypeError unless `kv` is a `KVCache` or a `Sequence`, and ValueError if it has several
    streams or layers that keep a state.
    """
    if isinstance(kv, KVCache):
        return _CacheRows(kv._body)
    if isinstance(kv, KVDevice):
        return _DeviceRows(kv)
    if isinstance(kv, AsRing):
        return _DeviceRows(*kv)
    if isinstance(kv, Sequence):
        return _SequenceRows(kv)
    raise TypeError(f"kv: expected a KVCache or a Sequence of a PagedKVCache, got {kv!r:.60}")


class _Lane(NamedTuple):
    """K or V of a layer, in the cache that has its rows."""

    cache: OneKindCache
    layer: int
    part: Literal["k", "v"]

    def rows(self, first: int, n: int) -> Iterator[NDArray[np.uint8]]:
        """View the bytes of n tokens from a position on: all heads, or one head at a time."""
        n_streams = self.cache.n_kv_heads if self.cache.order == "head" else 1
        for stream in range(n_streams):
            yield self.cache._rows_at(self.layer, self.part, stream, first, n)


def _lanes_of(cache: OneKindCache, layer: int) -> list[_Lane]:
    return [_Lane(cache, layer, part) for part in get_args(Literal["k", "v"])]


@contextmanager
def _main_memory(nbytes: int) -> Iterator[NDArray[np.uint8]]:
    with Block(nbytes, pages="4k", name="chunk", category="staging") as block:
        yield block.as_array("uint8", nbytes)


class _CacheRows:
    """Rows of a `KVCache` (its `OneKindCache` or `LayeredKVCache`), or of a device's cache."""

    _kv: OneKindCache | LayeredKVCache

    def __init__(self, kv: Any, window: int | None = None) -> None:
        if kv.batch != 1:
            raise ValueError(f"kv: expected a cache of one stream, got one of batch={kv.batch}")
        self._kv = kv
        rotation = "hadamard" if kv.rotate else "none"
        self.kind: Kind
        if isinstance(kv, LayeredKVCache):
            self.kind = MixedLayers(tuple(map(_rows_kind, range(kv.n_layers), kv.layers)), rotation)
            self._parts = kv._parts
            of_kind = dict(zip(kinds_of(kv.layers), kv._parts, strict=True))
            self._lanes: list[list[_Lane]] = [[] for _ in self.kind.groups]
            windows = [group.window for group in self.kind.groups]
            for place in places_of(kv.layers):
                if place.is_own:
                    assert place.kind is not None
                    group = self._lanes[windows.index(place.kind.window)]
                    group += _lanes_of(of_kind[place.kind], place.number)
        else:
            dims, types = (kv.n_kv_heads, kv.head_dim), (kv.dtype, kv.v_dtype)
            window = window or kv.window
            if window is None:
                self.kind = EqualLayers(kv.n_layers, *dims, *types, rotation, kv.v_head_dim)
            else:
                layer = LayerRows(*dims, *types, window, v_head_dim=kv.v_head_dim)
                self.kind = MixedLayers((layer,) * kv.n_layers, rotation)
            self._parts = (kv,)
            self._lanes = [[lane for i in range(kv.n_layers) for lane in _lanes_of(kv, i)]]
        self._windows = [window or part.window for part in self._parts]

    def check_tokens(self, ids: NDArray[np.int32]) -> None:
        pass  # a cache knows no ids

    def check_source(self) -> int:
        kv = self._kv
        kv.crop(kv.seq_len)  # drops nothing, and refuses reserved rows and unequal layers
        if isinstance(kv, LayeredKVCache):
            dropped = kv._first
        elif self._windows == [None]:
            dropped = kv.next_position - kv.seq_len
        else:  # a ring drops tokens all the time, and has those that count
            dropped = kv._first_kept() if kv.window else 0
        if dropped:
            raise ValueError(
                f"kv: expected a cache that holds its first tokens, got one in which {dropped} "
                "were dropped: put it before it is trimmed"
            )
        return kv.next_position

    def first_held(self, group: int) -> int:
        return max(lane.cache._oldest_position() for lane in self._lanes[group])

    def read(self, group: int, first: int, lanes: Lanes) -> None:
        for lane, out in zip(self._lanes[group], lanes, strict=True):
            n, file = len(out), lane.cache._file
            parts = list(lane.rows(first, n))
            for rows, to in zip(parts, np.split(out, len(parts), axis=1), strict=True):
                if file is not None:  # its pages may be lost
                    kept = np.empty_like(rows)
                    guard.copy(kept, rows.ctypes.data, rows.nbytes, file)
                    to[:] = kept.reshape(n, -1)
                else:
                    to[:] = rows.reshape(n, -1)

    def check_target(self) -> tuple[int, int]:
        kv = self._kv
        kv.crop(kv.seq_len)
        if kv.next_position:
            raise ValueError(
                f"kv: expected a cleared cache, got one at position {kv.next_position}: call "
                "clear() first"
            )
        # Windows take any number of tokens.
        parts = [part for part in self._parts if not part.window]
        return 0, min(map(_most_tokens, parts), default=sys.maxsize)

    def begin(self, n: int) -> None:
        self._kv.clear()
        for part, window in zip(self._parts, self._windows, strict=True):
            part._begin_restore(n, min(n, window or n))

    def write(self, group: int, first: int, lanes: Lanes) -> bool:
        for lane, given in zip(self._lanes[group], lanes, strict=True):
            parts = list(lane.rows(first, len(given)))
            for into, rows in zip(parts, np.split(given, len(parts), axis=1), strict=True):
                into.reshape(len(given), -1)[:] = rows
        return True

    def finish(self, n: int) -> None:
        if n == 0:
            self._kv.clear()
            return
        for part, window in zip(self._parts, self._windows, strict=True):
            part._finish_restore(n, min(n, window or n))
        if isinstance(self._kv, LayeredKVCache):
            self._kv._finish_restore(n, n)

    def abandon(self) -> None:
        self._kv.clear()

    def memory(self, nbytes: int) -> AbstractContextManager[NDArray[np.uint8]]:
        return _main_memory(nbytes)


class _DeviceRows(_CacheRows):
    """Rows of a device's cache, which the driver copies from and to pinned memory."""

    _kv: Any

    def first_held(self, group: int) -> int:
        first: int = self._kv.next_position - self._kv.seq_len
        return first

    def read(self, group: int, first: int, lanes: Lanes) -> None:
        kv = self._kv
        kv._while_held(lambda: kv._copy_chunk(kv.row_of(first), lanes, to_device=False))

    def begin(self, n: int) -> None:
        super().begin(n)
        self._first = 0 if self._windows == [None] else n

    def write(self, group: int, first: int, lanes: Lanes) -> bool:
        # The first token of a window has row 0. After a damaged chunk there is an earlier one.
        self._first = min(self._first, first)
        self._kv._copy_chunk(first - self._first, lanes, to_device=True)
        return True

    def memory(self, nbytes: int) -> AbstractContextManager[NDArray[np.uint8]]:
        memory: AbstractContextManager[NDArray[np.uint8]] = self._kv._pinned(nbytes)
        return memory


def _rows_kind(number: int, layer: Layer) -> LayerRows:
    if isinstance(layer, LayerState):
        raise ValueError(
            f"kv: expected layers of keys and values, got a state in layer {number}: save() keeps "
            "a snapshot of states and their checkpoints"
        )
    types, kept = kv_pair(layer.dtype), (layer.window, layer.share_of)
    return LayerRows(layer.n_kv_heads, layer.head_dim, *types, *kept, layer.v_head_dim)


def _most_tokens(part: OneKindCache) -> int:
    """Return how many tokens a cache or a part can take from position 0 on."""
    if part.grow:
        return part.max_seq_len
    return min(part.max_seq_len, part.n_rows)  # a budget_bytes may leave fewer rows


class _SequenceRows:
    """Rows of a sequence, whose blocks are read and written whole."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence, self._pool = sequence, sequence.cache
        pool = self._pool
        dims = pool.n_layers, pool.n_kv_heads, pool.head_dim
        self.kind: Kind = EqualLayers(*dims, pool.dtype, pool.v_dtype)

    def check_tokens(self, ids: NDArray[np.int32]) -> None:
        # Its pool shares blocks with other sequences by these ids.
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
        self._sequence.fork().close()  # refuses unequal layers, and changes nothing
        return len(self._sequence)

    def first_held(self, group: int) -> int:
        return 0

    def read(self, group: int, first: int, lanes: Lanes) -> None:
        n, size = len(lanes[0]), self._pool.block_tokens
        skipped = first % size
        blocks = self._sequence.block_table[first // size : -(-(first + n) // size)]
        for layer in range(self._pool.n_layers):
            for part, rows in enumerate(self._pool.layer(layer)):
                tokens = rows[blocks].reshape(-1, *rows.shape[2:])[skipped : skipped + n]
                lanes[2 * layer + part][:] = tokens.reshape(-1).view(np.uint8).reshape(n, -1)

    def check_target(self) -> tuple[int, int]:
        held = self.check_source()
        # Its last block may have room, and shared blocks are copied: `write` finds out what fits.
        return held, held + (self._pool.n_blocks_available + 1) * self._pool.block_tokens

    def begin(self, n: int) -> None:
        pass

    def write(self, group: int, first: int, lanes: Lanes) -> bool:
        held = len(self._sequence) - first
        try:
            for layer in range(self._pool.n_layers):
                k, v = lanes[2 * layer : 2 * layer + 2]
                self._sequence._append_stored(layer, k[held:], v[held:])
        except CacheFull:
            self._sequence.rollback()
            return False
        return True

    def finish(self, n: int) -> None:
        pass

    def abandon(self) -> None:
        with suppress(RuntimeError):  # the sequence was closed meanwhile
            self._sequence.rollback()

    def memory(self, nbytes: int) -> AbstractContextManager[NDArray[np.uint8]]:
        return _main_memory(nbytes)
