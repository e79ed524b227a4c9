"""First tokens that a decoder takes from a store of prefixes, and puts there."""

from __future__ import annotations

from math import lcm
from typing import Any

from numpy.typing import NDArray

from unimem.errors import CapacityError
from unimem.kv.cache.cache import KVCache
from unimem.kv.store.store import KVStore
from unimem.system import policy
from unimem.weights.opened import Weights
from unimem.weights.whole_hash import whole_hash


def model_name(weights: Weights) -> str:
    """Name a model in a store that other models use, too, and in sessions: by all of its bytes.

    Raises
    ------
    OSError
        As `whole_hash`.
    """
    return whole_hash(weights)


class Prefixes:
    """A borrowed store as a decoder uses it: its failures cost time, and no token.

    A row depends, in its last bits, on the batch that it was computed in. So only rows of whole
    batches of a prompt are put, and a prompt is restored up to the end of a batch: the rest of it
    is then computed in the batches of a decoder without a store, and so is every later token. A
    batch has `batch` tokens.

    Attributes
    ----------
    n_restored : int
        Tokens that the last prompt took from the store.
    n_stored : int
        Tokens of the conversation that the store has.
    """

    def __init__(self, store: KVStore, weights: Weights, batch: int) -> None:
        if not isinstance(store, KVStore):
            raise TypeError(f"store: expected a unimem.KVStore, got {store!r:.60}")
        self._store, self._model, self._batch = store, model_name(weights), batch
        self.n_restored = self.n_stored = 0
        self.forget()

    def forget(self) -> None:
        """Begin a new conversation."""
        self._n_seen = 0  # tokens of the conversation that were restored, or put if possible
        self._n_whole = 0  # first tokens that were computed in whole batches, or restored
        self._goes_on = False  # whether a prompt continues behind these

    def begin(self, kv: KVCache, tokens: NDArray[Any]) -> int:
        """Begin to compute a prompt; return how many tokens were restored into an empty cache.

        At least the last token is left to compute.
        """
        if position := kv.next_position:
            self._n_whole = min(self._n_whole, position)
            self._goes_on = position == self._n_whole and position % self._batch == 0
            return 0
        self.n_restored = 0
        try:
            self.n_restored = self._restore(kv, tokens)
        except (OSError, CapacityError) as error:
            policy.warn(f"nothing was taken from {self._store!r}: {error}")
        self._n_seen = self._n_whole = self.n_restored
        self._goes_on = True
        return self.n_restored

    def _restore(self, kv: KVCache, tokens: NDArray[Any]) -> int:
        n, step = len(tokens) - 1, lcm(self._store.chunk_tokens, self._batch)
        if not isinstance(kv.window, tuple):
            n = self._store.restore_into(kv, tokens[:n], model=self._model)
            n -= n % self._batch
            kv.crop(n)
            return n
        # Restored windows cannot be cropped: they have to end where a batch does.
        while n := n - n % step:
            n = self._store.restore_into(kv, tokens[:n], model=self._model)
            if n % step == 0:
                break
            kv.clear()
        return n

    def put_before(self, first_kept: int, kv: KVCache, ids: NDArray[Any]) -> None:
        """Put a conversation if its rings are about to drop tokens before `first_kept`."""
        size = self._store.chunk_tokens
        if first_kept > min(self._n_seen, len(ids)) // size * size:
            self.put(kv, ids)

    def put(self, kv: KVCache, ids: NDArray[Any]) -> None:
        """Put the whole batches of a conversation, unless its first tokens were dropped."""
        self._n_seen = len(ids)
        if kv.next_position != kv.seq_len or len(ids) < kv.seq_len:
            return
        if self._goes_on:
            self._n_whole = len(ids) - len(ids) % self._batch
        try:
            self.n_stored = self._store.put(kv, ids[: self._n_whole], model=self._model)
        except (OSError, CapacityError) as error:
            policy.warn(f"tokens were not put into {self._store!r}: {error}")
