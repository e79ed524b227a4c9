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
    seal,
    sealed_parts,
)
from unimem.kv.store.ram_tier import RamTier
from unimem.kv.store.store import KVStore

__all__ = ["EngineChunks"]


class EngineChunks:
    """Chunks of one size in one namespace. Any number of threads may use it.

    Each thread that puts or gets has memory for one chunk. A chunk is checked there before it is
    copied to the engine. The store stays open. The namespace has all that the bytes of a chunk
    depend on besides its key: the engine, the model, the layout.
    """

    def __init__(self, store: KVStore, namespace: str, chunk_bytes: int) -> None:
        self._store = store
        self._root = hashlib.sha256(f"unimem.engine-chunk/1\n{namespace}".encode()).digest()
        self._shape = ChunkShape(LaneGroup(None, (chunk_bytes,)), 1, of_engine=True)
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

        It makes room by chunks that were used before `used_ns`, which is now by default.
        """
        identity, tiers = self.identity(key), self._store._tiers
        lacking = [tier for tier in tiers if not tier.has(identity)]
        if not lacking:
            self.touch([key], used_ns)
            return True
        used_ns = used_ns or time.time_ns()
        if isinstance(tiers[0], RamTier) and len(tiers) == 1:  # no copy in between
            parts = sealed_parts(self._shape, identity, data)
            return tiers[0].write_parts(identity, parts, used_ns)
        blob = self._blob()
        blob[HEADER_BYTES : HEADER_BYTES + self._shape.data_bytes] = data
        seal(self._shape, identity, blob)
        written = [tier.write(identity, blob, used_ns) for tier in lacking]
        return any(written) or len(lacking) < len(tiers)

    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Copy a chunk to ``uint8 [chunk_bytes]``; return False if it is missing.

        It is checked before it is copied. If it is replaced in RAM in the midst of that, False is
        returned, and `out` has bytes of both.

        A damaged chunk is removed with a warning, and is missing. A chunk that was not marked for
        a minute is marked as used now; `touch` marks a prefix in its order.
        """
        identity, tier = self.identity(key), self._store._tiers[0]
        whole = False

        def take(data: NDArray[np.uint8]) -> None:
            nonlocal whole
            whole = find_fault(self._shape, identity, data, data.nbytes) is None
            if whole:
                out[:] = data[HEADER_BYTES : HEADER_BYTES + self._shape.data_bytes]

        if isinstance(tier, RamTier) and tier.use(identity, take) and whole:
            return True
        blob = self._blob()
        if not self._store._load(self._shape, identity, blob, time.time_ns()):
            return False
        out[:] = blob[HEADER_BYTES : HEADER_BYTES + self._shape.data_bytes]
        return True

    def _blob(self) -> NDArray[np.uint8]:
        """Return this thread's memory for a chunk."""
        if not hasattr(self._own, "blob"):
            self._own.blob = np.empty(self._shape.nbytes, np.uint8)
        blob: NDArray[np.uint8] = self._own.blob
        return blob
