"""The KV cache of a decoder, and its parts if layers keep different numbers of tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem._core.tape import Tape
from unimem.engine.graph import KVLane, view
from unimem.engine.model import Model
from unimem.kv.cache.cache import KVCache
from unimem.kv.cache.one_kind import OneKindCache
from unimem.kv.layer_specs import LayerKV, kinds_of, places_of


class History:
    """The KV cache of a decoder. For one thread.

    If all layers keep every token, the cache lies on the tape, head by head: attention reads a head
    at a time, and over a long context strided rows cost it up to three times the time of rows that
    follow each other (`unimem bench decode`). If they keep a window, it is a ring
    of its own; if they differ, there is one cache for each kind of layers. Both are placed like the
    tape. A batch has `batch` tokens; the other arguments are the decoder's.

    Attributes
    ----------
    kv : KVCache
        The cache.
    parts : tuple of KVCache
        The cache itself, or one for each kind of layers; the kind that keeps all tokens is first.
    part_of : tuple of int
        The part of each layer.
    windows : tuple of int
        For each part, how many tokens a token sees.
    """

    def __init__(
        self,
        model: Model,
        kv_dtype: str,
        rotates: bool,
        ctx: int,
        window: int | None,
        batch: int,
        tape: Tape,
    ) -> None:
        dims, windows = model.dims, model.windows(ctx, window)
        same: Any = {"max_seq_len": ctx, "dtype": kv_dtype, "rotate": rotates}
        ring = same | {
            "spare_rows": batch,
            **{name: tape.block.requested[name] for name in ("pages", "numa", "lock")},
        }
        self.parts: tuple[OneKindCache, ...]
        if len(set(windows)) > 1:
            layers = [LayerKV(dims.num_kv_heads, dims.head_dim, window=each) for each in windows]
            self.kv = KVCache(layers=layers, **ring)
            self.parts = self.kv._body._parts
            kinds: list[Any] = list(kinds_of(self.kv.layers))
            self.part_of = tuple(kinds.index(place.kind) for place in places_of(self.kv.layers))
        else:
            if windows[0] is None:
                self.kv = KVCache.for_dims(dims, tape=tape, order="head", **same)
            else:
                self.kv = KVCache.for_dims(dims, window=windows[0], **ring)
            self.parts, self.part_of = (self.kv._body,), (0,) * dims.num_layers
        self.windows = tuple(part.window or ctx for part in self.parts)

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Rows of a lane, for each part."""
        return tuple(part.n_rows for part in self.parts)

    @property
    def blocks(self) -> list[Block]:
        """The memory of parts that do not lie on the tape."""
        return [part.block for part in self.parts if part.block is not None]

    @property
    def is_cut(self) -> bool:
        """Whether rings drop old tokens, so that the conversation cannot go back far."""
        return any(part.window is not None for part in self.parts)

    @property
    def is_trimmed(self) -> bool:
        """Whether first tokens were trimmed, which later ones never saw; a window trims nothing."""
        return any(part._first_kept() for part in self.parts)

    def first_kept(self, end: int) -> int:
        """Return the first position that all rings still hold when `end` is the next one."""
        rows = (part.n_rows for part in self.parts if part.window is not None)
        return max((end - n for n in rows), default=0)

    def lanes(self) -> list[tuple[int, KVLane, KVLane]]:
        """List the part, the keys and the values of each layer."""

        def lane(layer: int, part: int, name: Literal["k", "v"]) -> KVLane:
            return KVLane(self.kv.address(layer, name), *self.parts[part].strides(name))

        return [
            (part, lane(layer, part, "k"), lane(layer, part, "v"))
            for layer, part in enumerate(self.part_of)
        ]

    def _pieces(self) -> Iterator[tuple[OneKindCache, int, int]]:
        """List the cache, the address and the bytes of a row of each piece of K and V.

        A piece is a head, or all heads of a cache whose rows hold them beside each other.
        """
        for part, *lanes in self.lanes():
            kv = self.parts[part]
            for lane, nbytes in zip(lanes, (kv.row_bytes, kv.v_row_bytes), strict=True):
                is_apart = lane.row_stride < nbytes
                for head in range(kv.n_kv_heads if is_apart else 1):
                    yield kv, lane.address + head * lane.head_stride, lane.row_stride

    def fill_with_zeros(self) -> None:
        """Clear all rows: attention multiplies hidden rows by 0, which would keep a NaN."""
        for kv, address, row_bytes in self._pieces():
            ctypes.memset(address, 0, row_bytes * kv.n_rows)

    def last_rows(self) -> Iterator[NDArray[np.uint8]]:
        """View the last token's bytes in each lane."""
        position = self.kv.next_position - 1
        for kv, address, row_bytes in self._pieces():
            yield view(address + kv.row_of(position) * row_bytes, row_bytes, "uint8")
