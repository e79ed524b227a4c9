"""Memory that is put aside in a store, in pieces that no other conversation can find."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from unimem.errors import CapacityError
from unimem.kv.store.chunk import HEADER_BYTES, ChunkShape, LaneGroup, find_fault, seal
from unimem.kv.store.ram_tier import RamTier
from unimem.kv.store.store import KVStore, note_of

_PIECE_BYTES = 1 << 20

_Views = Sequence[NDArray[np.uint8]]


class Aside:
    """Bytes on a store's disk, or on its server: its RAM would be memory as well.

    The pieces are chunks that may make room for others, so that the bytes may be lost. The store is
    borrowed. ValueError if it has neither a disk nor a server.
    """

    def __init__(self, store: KVStore, model: str) -> None:
        tiers = [tier for tier in store._tiers if not isinstance(tier, RamTier)]
        if not tiers:
            raise ValueError(f"store: expected one with a disk or a server, got {store!r}")
        self._store, self._tier = store, tiers[0]
        self._model = model
        self._keys: list[bytes] = []
        self.nbytes = 0

    def put(self, views: _Views) -> None:
        """Write the bytes of these arrays, one after the other.

        Raises
        ------
        CapacityError
            The store has no room for all of them. None of them stays.
        OSError
            They cannot be written. None of them stays.
        """
        blob = np.empty(HEADER_BYTES + _PIECE_BYTES, np.uint8)
        now = time.time_ns()
        try:
            for number, parts in enumerate(_pieces(views)):
                shape, key = _shape(parts), os.urandom(32)
                note = note_of("unimem, put aside", self._model, "", self._store._salt, shape)
                piece = blob[: shape.nbytes]
                np.concatenate(parts, out=piece[HEADER_BYTES : HEADER_BYTES + shape.data_bytes])
                seal(shape, key, piece)
                # A later piece makes no room by an earlier one.
                if not self._tier.write(key, piece, now - number, note):
                    total = sum(view.nbytes for view in views)
                    room = f"{self._store!r} has no room for {total} bytes of a conversation"
                    raise CapacityError(room, self._tier.stat().budget_bytes, self.nbytes, total)
                self._keys.append(key)
                self.nbytes += shape.data_bytes
        except BaseException:
            self.drop()
            raise

    def read(self, views: _Views) -> bool:
        """Read the bytes into arrays of the same sizes; return False if some of them are lost."""
        blob = np.empty(HEADER_BYTES + _PIECE_BYTES, np.uint8)
        for parts, key in zip(_pieces(views), self._keys, strict=True):
            shape, begin = _shape(parts), HEADER_BYTES
            piece = blob[: shape.nbytes]
            n = 0
            with suppress(OSError):
                n = self._tier.read(key, piece)
            if find_fault(shape, key, piece, n):
                return False
            for part in parts:
                part[:] = piece[begin : begin + part.nbytes]
                begin += part.nbytes
        return True

    def drop(self) -> None:
        """Remove all pieces, unless the store is closed."""
        for key in self._keys if not self._store.closed else ():
            with suppress(OSError):
                self._tier.remove(key)
        self._keys = []


def _pieces(views: _Views) -> Iterator[list[NDArray[np.uint8]]]:
    """Give the parts of the arrays that make up each piece."""
    parts: list[NDArray[np.uint8]] = []
    room = _PIECE_BYTES
    for view in views:
        rest = view.reshape(-1)
        while rest.nbytes:
            parts.append(rest[:room])
            room -= parts[-1].nbytes
            rest = rest[parts[-1].nbytes :]
            if not room:
                yield parts
                parts, room = [], _PIECE_BYTES
    if parts:
        yield parts


def _shape(parts: _Views) -> ChunkShape:
    return ChunkShape(LaneGroup(None, (sum(part.nbytes for part in parts),)), 1, of_engine=True)
