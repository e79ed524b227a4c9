"""A store for an engine whose chunks differ in size: one `EngineChunks` for each of its layouts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unimem._core.arrays import checked_nbytes
from unimem.base.arguments import integer, string
from unimem.base.closing import Closing
from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.store import KVStore, StoreStat
from unimem.weights.files_hash import files_hash

# What a tier needs beside the bytes of a chunk: its header, its file, and the folder.
_BESIDE_BYTES = 1 << 16
_OPTIONS = ("where", "ram_bytes", "disk_bytes", "model", "n_threads", "salt")
_MOST_PROMPT_CHUNKS = 1 << 16


class EngineStore(Closing):
    """A `KVStore` for an engine, and threads that read chunks.

    A chunk is found only under the same engine and version, model, weights and layout. Its pool in
    RAM lies in huge pages, as far as the kernel has them.

    Parameters
    ----------
    engine : str
        The name of the engine.
    version : str
        Its version.
    options : mapping
        ``where``, ``ram_bytes`` (default 0) and ``disk_bytes`` as for `KVStore`; ``model``, a text
        that tells models of one name apart, such as a revision (a model in a local folder is known
        by all bytes of its files); ``n_threads`` (default 8), the threads that read chunks.

    Raises
    ------
    ValueError, TypeError
        An option is unknown, missing or out of range.
    CapacityError, OSError
        As `KVStore`.
    """

    def __init__(self, engine: str, version: str, options: Mapping[str, Any] | None) -> None:
        if not isinstance(options, Mapping) or {*options} - {*_OPTIONS} or "where" not in options:
            raise ValueError(
                f"options: expected where, and any of {_OPTIONS[1:]}, got {options!r:.200}"
            )
        self._engine = engine
        self._known = {"engine": engine, "version": version}
        self._known["model"] = string(options.get("model", ""), "model")
        n_threads = integer(options.get("n_threads", 8), "n_threads", 1, 1024)
        self._ram, self._disk = options.get("ram_bytes", 0), options.get("disk_bytes")
        budgets: dict[str, Any] = {"ram_bytes": self._ram, "disk_bytes": self._disk}
        salt = string(options.get("salt", ""), "salt")
        self._store = KVStore(options["where"], **budgets, pages="thp", salt=salt)
        self.readers = ThreadPoolExecutor(n_threads, f"unimem-{engine}")
        self._lock = threading.Lock()  # for all below
        self._weights: dict[str, str | None] = {}
        self._chunks: dict[str, EngineChunks] = {}
        self._used_ns: dict[bytes, int] = {}

    def chunks(self, model_name: str, layout: object, chunk_bytes: int) -> EngineChunks:
        """Return the chunks of a layout, which JSON can write; a model's folder is hashed once.

        ValueError if no chunk fits into a budget.
        """
        with self._lock:
            if model_name not in self._weights:
                is_here = bool(model_name) and os.path.exists(model_name)
                found = files_hash(Path(model_name), self._engine) if is_here else None
                self._weights[model_name] = found
            names = {"name": model_name, "weights": self._weights[model_name], "layout": layout}
            namespace = json.dumps(self._known | names, sort_keys=True)
            if namespace not in self._chunks:
                check_budgets(self._engine, chunk_bytes, self._ram, self._disk)
                self._chunks[namespace] = EngineChunks(
                    self._store, namespace, chunk_bytes, engine=self._engine, model=model_name
                )
            return self._chunks[namespace]

    def note_prompt(self, keys: Iterable[bytes]) -> None:
        """Note that a prompt uses chunks now, the first one as the most recently used."""
        now = time.time_ns()
        with self._lock:
            for i, key in enumerate(keys):
                self._used_ns.pop(key, None)
                self._used_ns[key] = now - i
            while len(self._used_ns) > _MOST_PROMPT_CHUNKS:
                del self._used_ns[next(iter(self._used_ns))]

    def used_ns(self, key: bytes) -> int:
        """Return when a prompt used a chunk last, in nanoseconds since 1970; now if none did."""
        with self._lock:
            return self._used_ns.get(key) or time.time_ns()

    def sync(self) -> None:
        """Make sure that what was put outlives a machine that stops, if the store is on a disk."""
        self._store._sync()

    def stat(self) -> StoreStat:
        """Count what the tiers hold."""
        return self._store.stat()

    def close(self) -> None:
        """End the threads and close the store. Twice is no error."""
        self.readers.shutdown()
        self._store.close()

    def __repr__(self) -> str:
        return repr(self._store)


def check_budgets(
    engine: str, chunk_bytes: int, ram_bytes: int | str, disk_bytes: int | str | None
) -> None:
    """Raise ValueError if a chunk does not fit into a budget that is not 0."""
    least = chunk_bytes + _BESIDE_BYTES
    for name, budget in (("ram_bytes", ram_bytes), ("disk_bytes", disk_bytes)):
        if budget is not None and 0 < checked_nbytes(budget, name) < least:
            raise ValueError(
                f"{name}: expected 0, or at least {least} for one chunk of {engine}, got {budget}"
            )
