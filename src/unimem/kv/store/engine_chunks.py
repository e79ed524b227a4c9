"""Chunks of another engine in a store: bytes that only the engine can read.

They lie in the tiers of a `KVStore`, within its budgets, and are checked like its own chunks. The
engine chooses their keys, in a namespace that tells its models and layouts apart.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from unimem.kv.store.chunk import (
    HEADER_BYTES,
    ChunkShape,
    LaneGroup,
    find_fault,
    root_of,
    seal,
)
from unimem.kv.store.ram_tier import RamTier
from unimem.kv.store.store import KVStore, note_of


class EngineChunks:
    """Chunks of one size in one namespace. Any number of threads may use it.

    A chunk in RAM is hashed in the pass that copies it, to the store or to the engine. For other
    tiers, each thread has memory for one chunk. The store stays open. The namespace has all that
    the bytes of a chunk depend on besides its key: the engine, the model, the layout. `engine` and
    `model` name them for `unimem store show`.
    """

    def __init__(
        self, store: KVStore, namespace: str, chunk_bytes: int, *, engine: str = "", model: str = ""
    ) -> None:
        self._store = store
        self._root = root_of(f"unimem.engine-chunk/1\n{namespace}", store._salt)
        self._shape = ChunkShape(LaneGroup(None, (chunk_bytes,)), 1, of_engine=True)
        self._note = note_of(engine, model, namespace, store._salt, self._shape)
        self._own = threading.local()

    def identity(self, key: bytes) -> bytes:
        """Return the identity of a chunk in the store: 32 bytes."""
        return hashlib.sha256(self._root + key).digest()

    def has(self, key: bytes) -> bool:
        """Whether a tier has a chunk; its bytes are not examined."""
        identity = self.identity(key)
        return any(tier.has(identity) for tier in self._store._tiers)

    def touch(self, keys: Iterable[bytes], used_ns: int | None = None) -> None:
        """Mark the chunks of a prefix as used now, the first one as the most recently used.

        `used_ns` (nanoseconds since 1970) is another time than now, here and for `put`.
        """
        identities = [self.identity(key) for key in keys]
        for tier in self._store._tiers:
            tier.touch(identities, used_ns or time.time_ns())

    def put(self, key: bytes, data: NDArray[np.uint8], used_ns: int | None = None) -> bool:
        """Keep a chunk, ``uint8 [chunk_bytes]``, in each tier that lacks it; False without room.

        It makes room by chunks that were used before `used_ns`, which is now by default. Call
        `sync` behind the last of several.
        """
        identity, tiers = self.identity(key), self._store._tiers
        lacking = [tier for tier in tiers if not tier.has(identity)]
        if not lacking:
            self.touch([key], used_ns)
            return True
        used_ns = used_ns or time.time_ns()
        if isinstance(tiers[0], RamTier) and len(tiers) == 1:  # no copy in between

            def fill(place: NDArray[np.uint8]) -> None:
                seal(self._shape, identity, place, data)

            return tiers[0].fill(identity, self._shape.nbytes, fill, used_ns)
        blob = self._blob()
        seal(self._shape, identity, blob, data)
        written = [tier.write(identity, blob, used_ns, self._note) for tier in lacking]
        return any(written) or len(lacking) < len(tiers)

    def sync(self) -> None:
        """Make sure that what was put outlives a machine that stops, if the store is on a disk."""
        self._store._sync()

    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Copy a chunk to ``uint8 [chunk_bytes]``; return False if it is missing.

        If it is missing, `out` is as before or has zeros.

        A damaged chunk is removed with a warning, and is missing. A chunk that was not marked for
        a minute is marked as used now; `touch` marks a prefix in its order.
        """
        identity, tier = self.identity(key), self._store._tiers[0]
        is_whole = False

        def take(data: NDArray[np.uint8]) -> None:
            nonlocal is_whole
            is_whole = find_fault(self._shape, identity, data, data.nbytes, out) is None

        if isinstance(tier, RamTier) and tier.use(identity, take) and is_whole:
            return True
        if is_whole:  # it was replaced meanwhile
            out[:] = 0
        blob = self._blob()
        if not self._store._load(self._shape, identity, blob, time.time_ns(), self._note):
            return False
        out[:] = blob[HEADER_BYTES : HEADER_BYTES + self._shape.data_bytes]
        return True

    def _blob(self) -> NDArray[np.uint8]:
        """Return this thread's memory for a chunk."""
        if not hasattr(self._own, "blob"):
            self._own.blob = np.empty(self._shape.nbytes, np.uint8)
        blob: NDArray[np.uint8] = self._own.blob
        return blob
