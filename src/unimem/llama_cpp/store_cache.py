"""A cache for `Llama.set_cache` of llama-cpp-python, in a `KVStore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unimem.base.arguments import instance
from unimem.errors import CapacityError, FormatError
from unimem.kv.store.store import KVStore
from unimem.llama_cpp.identity import model_hash, options_of
from unimem.llama_cpp.prefixes import LlamaPrefixes
from unimem.llama_cpp.state import LlamaKV, kv_to_state, state_to_kv
from unimem.system import policy

_ERRORS = (OSError, CapacityError, FormatError)


class LlamaStoreCache:
    """First tokens of a `Llama`'s prompts, taken from a store and put there.

    It has the methods of llama-cpp-python's `BaseLlamaCache`. What fails costs time and gives a
    warning, never wrong text. Make it before the first prompt: if the `Llama` has no tokens, one is
    computed to learn the layout of its states. Nothing is put while the `Llama` has a
    `chat_handler`, which may give it images.

    Parameters
    ----------
    llama : llama_cpp.Llama
        The one whose `set_cache` gets it.
    store : KVStore
        It stays open, and may be shared by any number of processes.

    Raises
    ------
    TypeError
        `llama` is no `Llama`, or `store` no `KVStore`.
    FormatError
        The states of this llama.cpp are not known.
    OSError
        The model cannot be read.

    Examples
    --------
    ::

        llama = llama_cpp.Llama("model.gguf", n_ctx=4096)
        with unimem.KVStore("/var/cache/kv", ram_bytes=1 << 30) as store:
            llama.set_cache(LlamaStoreCache(llama, store))
    """

    def __init__(self, llama: Any, store: KVStore) -> None:
        instance(store, "store", KVStore)
        if not hasattr(llama, "save_state"):
            raise TypeError(f"llama: expected a llama_cpp.Llama, got {llama!r:.60}")
        self._llama = llama
        is_new = llama.n_tokens == 0
        if is_new:
            llama.eval([max(llama.token_bos(), 0)])
        state = llama.save_state()
        if is_new:
            llama.reset()
        self._state_type = type(state)
        self._like = state_to_kv(state.llama_state)
        model, options = model_hash(llama.model_path), options_of(llama)
        self._prefixes = LlamaPrefixes(store, model, self._like, options=options)

    @property
    def cache_size(self) -> int:
        """Bytes of all chunks of the store, whoever put them."""
        return sum(tier.nbytes for tier in self._prefixes.store.stat().tiers)

    @property
    def capacity_bytes(self) -> int:
        """The budgets of the store."""
        return sum(tier.budget_bytes or 0 for tier in self._prefixes.store.stat().tiers)

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._prefixes.longest(key) > 0

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Return the `LlamaState` of the longest prefix; KeyError if the store has none."""
        kv: LlamaKV | None = None
        try:
            kv = self._prefixes.restore(key[:-1])
        except _ERRORS as error:
            policy.warn(f"nothing was taken from {self._prefixes.store!r}: {error}")
        if kv is None:
            raise KeyError("the store has no first tokens of this prompt")
        n = kv.n_tokens
        blob = kv_to_state(kv._replace(head=self._like.head, n_streams=self._like.n_streams))
        ids = np.zeros_like(self._llama.input_ids)
        ids[:n] = key[:n]
        # Logits are computed anew with the next token.
        scores = np.zeros((1, self._llama.scores.shape[1]), np.single)
        return self._state_type(
            input_ids=ids,
            scores=scores,
            n_tokens=n,
            llama_state=blob,
            llama_state_size=len(blob),
            seed=self._llama._seed,
        )

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Put the tokens of a `LlamaState`; those that it has count, not the key."""
        try:
            if self._llama.chat_handler is not None:  # ids at the places of an image are others'
                raise FormatError("a Llama with a chat handler may have images among its tokens")
            ids = value.input_ids[: value.n_tokens]
            self._prefixes.put(ids, state_to_kv(value.llama_state))
        except _ERRORS as error:
            policy.warn(f"tokens were not put into {self._prefixes.store!r}: {error}")
