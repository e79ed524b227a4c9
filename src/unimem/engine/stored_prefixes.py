"""First tokens that a decoder takes from a store of prefixes, and puts there."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import xxhash
from numpy.typing import NDArray

from unimem.errors import CapacityError
from unimem.kv.cache.cache import KVCache
from unimem.kv.store.store import KVStore
from unimem.remote.client import is_url
from unimem.system import policy
from unimem.weights.opened import Weights

__all__ = ["Prefixes", "model_name"]

_SAMPLE_BYTES = 4096


def model_name(weights: Weights) -> str:
    """Name a model in a store that other models use, too.

    Two trainings of one model may have the same fingerprint, which is of headers and sizes. So the
    first 4 KiB of each tensor are hashed as well, read from the model's files.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with ExitStack() as undo:
        files = {}
        for part in weights._parts:
            if part.file.memory is None and not is_url(part.file.path):
                fd = os.open(part.file.absolute_path, os.O_RDONLY | os.O_CLOEXEC)
                undo.callback(os.close, fd)
                files[part.file.path] = fd
        for _, tensor in sorted(weights.tensors.items()):
            size = min(_SAMPLE_BYTES, tensor.nbytes)
            if tensor.file in files:
                digest.update(os.pread(files[tensor.file], size, tensor.offset))
            else:  # it came from a server and is in memory
                digest.update(tensor.as_array().reshape(-1).view("uint8")[:size].tobytes())
    return f"{weights.fingerprint}+{digest.hexdigest()}"


class Prefixes:
    """A borrowed store as a decoder uses it: its failures cost time, and no token.

    Attributes
    ----------
    n_restored : int
        Tokens that the last prompt took from the store.
    n_stored : int
        Tokens of the conversation that the store has.
    """

    def __init__(self, store: KVStore, weights: Weights) -> None:
        if not isinstance(store, KVStore):
            raise TypeError(f"store: expected a unimem.KVStore, got {store!r:.60}")
        self._store, self._model = store, model_name(weights)
        self.n_restored = self.n_stored = 0
        self._n_seen = 0  # tokens of the conversation that were restored, or put if possible

    def restore(self, kv: KVCache, tokens: NDArray[Any]) -> int:
        """Restore first tokens into an empty cache; the last token is always left to compute."""
        self.n_restored = 0
        try:
            self.n_restored = self._store.restore_into(kv, tokens[:-1], model=self._model)
        except (OSError, CapacityError) as error:
            policy.warn(f"nothing was taken from {self._store!r}: {error}")
        self._n_seen = self.n_restored
        return self.n_restored

    def put_before(self, first_kept: int, kv: KVCache, ids: NDArray[Any]) -> None:
        """Put a conversation if its rings are about to drop tokens before `first_kept`."""
        size = self._store.chunk_tokens
        if first_kept > min(self._n_seen, len(ids)) // size * size:
            self.put(kv, ids)

    def put(self, kv: KVCache, ids: NDArray[Any]) -> None:
        """Put a conversation, unless its first tokens were dropped."""
        self._n_seen = len(ids)
        if kv.next_position != kv.seq_len or len(ids) < kv.seq_len:
            return
        try:
            self.n_stored = self._store.put(kv, ids, model=self._model)
        except (OSError, CapacityError) as error:
            policy.warn(f"tokens were not put into {self._store!r}: {error}")
