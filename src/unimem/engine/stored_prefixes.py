"""What a decoder takes from a store of prefixes instead of computing it, and puts there."""

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
    """Tell a model from others, for a store that any of them may use.

    The fingerprint is of headers and sizes, which two trainings of one model may have in common. So
    the first 4 KiB of each tensor are hashed as well: of a tensor that was trained, these differ.

    Parameters
    ----------
    weights : Weights
        The opened model; its files are read.

    Returns
    -------
    str

    Raises
    ------
    OSError
        A file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with ExitStack() as undo:
        files = {}
        for part in weights._parts:
            if not is_url(part.file.path):
                fd = os.open(part.file.absolute_path, os.O_RDONLY | os.O_CLOEXEC)
                undo.callback(os.close, fd)
                files[part.file.path] = fd
        for _, tensor in sorted(weights.tensors.items()):
            size = min(_SAMPLE_BYTES, tensor.nbytes)
            if tensor.file in files:
                digest.update(os.pread(files[tensor.file], size, tensor.offset))
            else:  # it came from a server, and is in memory
                digest.update(tensor.as_array().reshape(-1).view("uint8")[:size].tobytes())
    return f"{weights.fingerprint}+{digest.hexdigest()}"


class Prefixes:
    """A store as a decoder uses it: what goes wrong with it costs time, and no token.

    Parameters
    ----------
    store : KVStore
        It is borrowed, and stays open.
    weights : Weights
        Of the decoder.

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
        self._n_seen = 0  # tokens of the conversation that were restored, or put where possible

    def restore(self, kv: KVCache, tokens: NDArray[Any]) -> int:
        """Restore first tokens into an empty cache; the last one is always left to compute."""
        self.n_restored = 0
        try:
            self.n_restored = self._store.restore_into(kv, tokens[:-1], model=self._model)
        except (OSError, CapacityError) as error:
            policy.warn(f"nothing was taken from {self._store!r}: {error}")
        self._n_seen = self.n_restored
        return self.n_restored

    def put_before(self, first_kept: int, kv: KVCache, ids: NDArray[Any]) -> None:
        """Keep a conversation where rings are about to give up tokens that were not put.

        Parameters
        ----------
        first_kept : int
            The first position that rings will have.
        kv, ids
            As for `put`.
        """
        size = self._store.chunk_tokens
        if first_kept > min(self._n_seen, len(ids)) // size * size:
            self.put(kv, ids)

    def put(self, kv: KVCache, ids: NDArray[Any]) -> None:
        """Keep a conversation, unless its first tokens were dropped."""
        self._n_seen = len(ids)
        if kv.next_position != kv.seq_len or len(ids) < kv.seq_len:
            return
        try:
            self.n_stored = self._store.put(kv, ids, model=self._model)
        except (OSError, CapacityError) as error:
            policy.warn(f"tokens were not put into {self._store!r}: {error}")
