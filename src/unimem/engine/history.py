"""The KV cache of a decoder, and the parts that it has where layers keep as much as they see."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem._core.tape import Tape
from unimem.engine.graph import view
from unimem.engine.model import Model
from unimem.kv.cache.cache import KVCache
from unimem.kv.cache.one_kind import OneKindCache
from unimem.kv.layer_specs import LayerKV, kinds_of, places_of

__all__ = ["History"]


class History:
    """What a decoder keeps of a conversation. For one thread.

    Where all layers keep every token, the cache lies on the tape. Where they keep a window, it is a
    ring of its own; and where they differ, one cache for each kind of layers, all of which are
    placed like the tape.

    Parameters
    ----------
    model : Model
        What was checked.
    kv_dtype : str
        Type of keys and values, or those of both.
    rotates : bool
        Whether heads are stored rotated.
    ctx, window : int, int or None
        As the decoder's.
    batch : int
        Tokens that are computed at once.
    tape : Tape
        That of the history.

    Attributes
    ----------
    kv : KVCache
        The cache.
    parts : tuple of KVCache
        The cache itself, or one for each kind of layers, those that keep all tokens first.
    part_of : tuple of int
        Of each layer, the number of its part.
    windows : tuple of int
        Of each part, the tokens that each token sees.
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
                self.kv = KVCache.for_dims(dims, tape=tape, **same)
            else:
                self.kv = KVCache.for_dims(dims, window=windows[0], **ring)
            self.parts, self.part_of = (self.kv._body,), (0,) * dims.num_layers
        self.windows = tuple(part.window or ctx for part in self.parts)

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Of each part, the rows of a lane."""
        return tuple(part.n_rows for part in self.parts)

    @property
    def blocks(self) -> list[Block]:
        """The memory of the parts that do not lie on the tape."""
        return [part.block for part in self.parts if part.block is not None]

    @property
    def is_cut(self) -> bool:
        """Whether rings keep less than the conversation, so that it cannot go back far."""
        return any(part.window is not None for part in self.parts)

    def first_kept(self, end: int) -> int:
        """Return the first position that all rings have, once tokens have come up to `end`."""
        rows = (part.n_rows for part in self.parts if part.window is not None)
        return max((end - n for n in rows), default=0)

    def lanes(self) -> list[tuple[int, int, int]]:
        """List of each layer the number of its part, and where its keys and values begin."""
        kv = self.kv
        return [
            (part, kv.address(layer, "k"), kv.address(layer, "v"))
            for layer, part in enumerate(self.part_of)
        ]

    def fill_with_zeros(self) -> None:
        """Write all rows: attention multiplies those that it does not see by 0, and NaN stays."""
        for part, k, v in self.lanes():
            kv = self.parts[part]
            ctypes.memset(k, 0, kv.row_bytes * kv.n_rows)
            ctypes.memset(v, 0, kv.v_row_bytes * kv.n_rows)

    def last_rows(self) -> Iterator[NDArray[np.uint8]]:
        """View the last token's bytes in each lane."""
        position = self.kv.next_position - 1
        for part, *addresses in self.lanes():
            kv = self.parts[part]
            row = kv.row_of(position)
            for address, nbytes in zip(addresses, (kv.row_bytes, kv.v_row_bytes), strict=True):
                yield view(address + row * nbytes, nbytes, "uint8")
