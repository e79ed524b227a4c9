"""The slots of a llama-server, each for one completion at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from unimem.kv.token_ids import n_common


class ServerSlots:
    """ServerSlots, with the tokens that each was last seen to hold.

    That serves to choose one: a slot that holds something else costs time alone.
    """

    def __init__(self, n: int) -> None:
        self.held: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * n
        self._free = list(range(n))  # the first one was used the longest time ago
        self._saving: set[int] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.held)

    @contextmanager
    def taken(self, ids: NDArray[np.int32], wanted: int | None = None) -> Iterator[int]:
        """Wait for a free slot, the wanted one or the one with the longest prefix, and give it.

        A slot with a longer prefix that is only being saved is waited for, too: the next question
        of a conversation comes at once.
        """

        def common(slot: int) -> int:
            return n_common(self.held[slot], ids)

        def is_ready() -> bool:
            if wanted is not None or not self._free:
                return wanted in self._free
            return max(map(common, self._free)) >= max(map(common, self._saving), default=0)

        with self._changed:
            self._changed.wait_for(is_ready)
            slot = max(self._free, key=common) if wanted is None else wanted
            self._free.remove(slot)
        try:
            yield slot
        finally:
            with self._changed:
                self._saving.discard(slot)
                self._free.append(slot)
                self._changed.notify_all()

    def begin_saving(self, slot: int, ids: NDArray[np.int32]) -> None:
        """Note that a taken slot has these tokens, and will soon be free."""
        with self._changed:
            self.held[slot] = ids
            self._saving.add(slot)

    def wait(self, seconds: float) -> None:
        """Wait until all slots are free, at most for this time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) == len(self.held), seconds)
