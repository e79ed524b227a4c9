"""Chunks of another engine in a store: bytes that only the engine knows how to read.

They lie in the tiers of a `KVStore`, within its budgets, and are checked as its own are. What they
are called is the engine's: a key of it, in a namespace that tells its models and layouts apart.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from unimem.kv.store.chunk import HEADER_BYTES, BytesShape, seal
from unimem.kv.store.store import KVStore

__all__ = ["EngineChunks"]


class EngineChunks:
    """Chunks of one size, of one namespace. Any number of threads may use it.

    Each thread that puts or gets has memory of its own for one chunk: what is read is checked there
    before it goes where the engine reads it.

    Parameters
    ----------
    store : KVStore
        It is borrowed, and stays open.
    namespace : str
        All that the bytes of a chunk depend on beside its key: the engine, the model, the layout.
    chunk_bytes : int
        Bytes of each chunk.
    """

    def __init__(self, store: KVStore, namespace: str, chunk_bytes: int) -> None:
        self._store = store
        self._root = hashlib.sha256(f"unimem.engine-chunk/1\n{namespace}".encode()).digest()
        self._shape = BytesShape(chunk_bytes)
        self._own = threading.local()

    def identity(self, key: bytes) -> bytes:
        """Return what a chunk is called in the store: 32 bytes."""
        return hashlib.sha256(self._root + key).digest()

    def has(self, key: bytes) -> bool:
        """Whether a tier has it; its bytes are not looked at.

        Raises
        ------
        OSError
            It cannot be looked for.
        """
        identity = self.identity(key)
        return any(tier.has(identity) for tier in self._store._tiers)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that the chunks of a prefix were used now, the first of them last."""
        self._store._touch([self.identity(key) for key in keys])

    def put(self, key: bytes, data: NDArray[np.uint8]) -> bool:
        """Keep a chunk in each tier that lacks it.

        Parameters
        ----------
        key : bytes
            What the engine calls it.
        data : numpy.ndarray
            ``uint8 [chunk_bytes]``.

        Returns
        -------
        bool
            Whether the store has it now; False where no tier has room.

        Raises
        ------
        OSError
            It cannot be written.
        """
        identity, tiers = self.identity(key), self._store._tiers
        lacking = [tier for tier in tiers if not tier.has(identity)]
        if not lacking:
            return True
        blob = self._blob()
        blob[HEADER_BYTES : HEADER_BYTES + self._shape.data_bytes] = data
        seal(self._shape, identity, blob)
        used_ns = time.time_ns()
        written = [tier.write(identity, blob, used_ns) for tier in lacking]
        return any(written) or len(lacking) < len(tiers)

    def get(self, key: bytes, out: NDArray[np.uint8]) -> bool:
        """Copy a chunk to ``uint8 [chunk_bytes]``; False, and no byte of it, where it is not there.

        One that is damaged is removed, with a warning, and is not there.
        """
        blob = self._blob()
        if not self._store._load(self._shape, self.identity(key), blob, time.time_ns()):
            return False
        out[:] = blob[HEADER_BYTES : HEADER_BYTES + self._shape.data_bytes]
        return True

    def _blob(self) -> NDArray[np.uint8]:
        """Return this thread's memory for a chunk."""
        if not hasattr(self._own, "blob"):
            self._own.blob = np.empty(self._shape.nbytes, np.uint8)
        blob: NDArray[np.uint8] = self._own.blob
        return blob
