"""A conversation that was put aside: its rows are in a store, and its tokens' ids are kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unimem.base.text import format_bytes, format_count
from unimem.engine.history import History
from unimem.kv.store.aside import Aside
from unimem.kv.store.store import KVStore


class PutAside:
    """The rows of a decoder's cache, in a store: byte for byte, with generated tokens.

    It raises as `Aside` and its `put`.

    Attributes
    ----------
    ids : int32 [n]
        The ids of all tokens, by position.
    """

    def __init__(
        self, store: KVStore, history: History, ids: NDArray[np.int32], model: str
    ) -> None:
        kv = history.kv
        self.ids = ids.copy()
        self._where = store.url or store.folder
        self._sizes = [part.seq_len for part in history.parts]
        self._seq_len = kv.seq_len
        self._aside = Aside(store, model)
        self._aside.put([part._rows(*lane) for part in history.parts for lane in part._lanes()])

    def restore(self, history: History) -> bool:
        """Read the rows into the cleared cache; return False if the store has lost some."""
        end, pairs = len(self.ids), list(zip(history.parts, self._sizes, strict=True))
        for part, n in pairs:
            part._begin_restore(end, n)
        views = [part._restore_rows(*lane, n, end) for part, n in pairs for lane in part._lanes()]
        is_whole = self._aside.read(views)
        del views
        if is_whole:
            for part, n in pairs:
                part._finish_restore(end, n)
            if history.kv._body not in history.parts:
                history.kv._body._finish_restore(end, self._seq_len)
        return is_whole

    def drop(self) -> None:
        """Remove what the store has."""
        self._aside.drop()

    def __str__(self) -> str:
        n = format_count(len(self.ids), "token")
        return f"{n}, {format_bytes(self._aside.nbytes)}, in {self._where}"
