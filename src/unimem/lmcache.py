"""An L2 adapter for LMCache: its server's KV chunks go to a `KVStore`, and return from it.

LMCache's multiprocess server loads it by its name (docs/engines.md)::

    {"type": "plugin", "module_path": "unimem.lmcache", "class_name": "KVStoreAdapter",
     "adapter_params": {"where": "/var/cache/kv"}}

Importing it needs LMCache. LMCache's interface changes with minor versions: this module is for 0.5.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.engine_store import EngineStore
from unimem.system import policy

try:
    from lmcache._version import __version__
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise ImportError(
        "unimem.lmcache is loaded by LMCache, and made for version 0.5 of its L2 adapters; "
        f"importing those said: {error}"
    ) from error

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

__all__ = ["KVStoreAdapter"]


class KVStoreAdapter(L2AdapterInterface):  # type: ignore[misc]
    """An L2 adapter of LMCache in a `KVStore`: budgets, any number of processes, checked chunks.

    LMCache makes it and calls it from its controllers; only `close` waits for a disk. The bytes of
    a chunk are LMCache's own, and unimem's caches cannot read them. A chunk is found under the same
    version of LMCache, model, rank, salt, shape and dtype. The store's budgets evict, not LMCache;
    nothing is locked: a chunk that is evicted between lookup and load is a miss.

    All chunks of a prompt count as used when LMCache looked for them, the first ones last: a prompt
    never makes room for its end with its beginning.

    Parameters
    ----------
    options : mapping
        LMCache's ``adapter_params``: those of ``EngineStore`` (docs/engines.md).
    l1_memory_desc : optional
        LMCache's own memory, which is not used.

    Raises
    ------
    ValueError, TypeError
        An option is unknown, missing or out of range.
    CapacityError, OSError
        As `KVStore`.
    """

    def __init__(self, options: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        self._store = EngineStore("LMCache", __version__, options)
        self._stores, self._lookups, self._loads = (_Tasks(name) for name in "put has get".split())

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is signalled when a store task ends."""
        return self._stores.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is signalled when a lookup ends."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is signalled when a load task ends."""
        return self._loads.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Write chunks in a thread, one by one."""
        return self._stores.start(partial(self._put, keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the store tasks that have ended since the last call."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look for the chunks of a prompt in a thread, and note their use."""
        return self._lookups.start(partial(self._has, keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return what a lookup has found, once; None before it has ended."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: nothing is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Read chunks, each in a thread."""
        return self._loads.start(partial(self._get, keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which chunks a task has read, once; None before it has ended."""
        return self._loads.pop(task_id)

    def get_usage(self) -> AdapterUsage:
        """Return what the store's tiers take together; they evict by themselves."""
        return AdapterUsage(sum(tier.nbytes for tier in self._store.stat().tiers), 0)

    def report_status(self) -> dict[str, Any]:
        """Return the tiers of the store, for LMCache's status page."""
        tiers = [tier._asdict() for tier in self._store.stat().tiers]
        return {"is_healthy": True, "type": "unimem.lmcache.KVStoreAdapter", "tiers": tiers}

    def close(self) -> None:
        """Wait for all tasks and close the store. Twice is no error."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._store.close()

    def _put(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        stored: list[tuple[ObjectKey, int]] = []
        is_whole = True
        for key, obj in zip(keys, objects, strict=True):
            chunks, name, data = self._chunks_of(key, obj), _name(key), _bytes(obj)
            if chunks.has(name):
                continue
            if chunks.put(name, data, self._store.used_ns(name)):
                stored.append((key, data.nbytes))
            else:
                is_whole = False
        self._store.sync()
        if stored:
            self._notify_keys_stored(*map(list, zip(*stored, strict=True)))
        return L2StoreResult(is_whole, sum(nbytes for _, nbytes in stored))

    def _has(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        found = Bitmap(len(keys))
        self._store.note_prompt(map(_name, keys))
        for i, key in enumerate(keys):
            layout = layouts[key.object_group_id]
            chunks = self._chunks(key, layout.shapes, layout.dtypes)
            if chunks.has(_name(key)):
                chunks.touch([_name(key)], self._store.used_ns(_name(key)))
                found.set(i)
        return found

    def _get(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        def read(key: ObjectKey, obj: MemoryObj) -> bool:
            try:
                return self._chunks_of(key, obj).get(_name(key), _bytes(obj))
            except (OSError, MemoryError) as error:
                policy.warn(f"a chunk of LMCache was not read: {self._store!r}: {error}")
                return False

        loaded = Bitmap(len(keys))
        for i, done in enumerate(self._store.readers.map(read, keys, objects)):
            if done:
                loaded.set(i)
        if loaded.popcount():
            self._notify_keys_accessed([keys[i] for i in loaded.get_indices_list()])
        return loaded

    def _chunks_of(self, key: ObjectKey, obj: MemoryObj) -> EngineChunks:
        return self._chunks(key, obj.get_shapes(), obj.get_dtypes(), _bytes(obj).nbytes)

    def _chunks(
        self, key: ObjectKey, shapes: Sequence[Any], dtypes: Sequence[Any], given: int | None = None
    ) -> EngineChunks:
        layout = [[*map(int, s), str(d)] for s, d in zip(shapes, dtypes, strict=True)]
        nbytes = sum(s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        if given not in (None, nbytes):
            raise ValueError(
                f"expected chunks of {nbytes} bytes, as their layout {layout} says, got {given} "
                "bytes: leave out serde from LMCache's options of this adapter"
            )
        return self._store.chunks(key.model_name, layout, nbytes)


class _Tasks:
    """Tasks of one kind: a thread, their results, a descriptor that tells when one has ended."""

    def __init__(self, name: str) -> None:
        self._notifier = create_event_notifier()
        self._thread = ThreadPoolExecutor(1, f"unimem-LMCache-{name}")
        self._ids = count()
        self._lock = threading.Lock()  # for `_results`
        self._results: dict[int, Any] = {}
        self._is_closed = False

    def fileno(self) -> int:
        return int(self._notifier.fileno())

    def start(self, work: Callable[[], Any], failed: Any) -> int:
        """Start work; if it raises, there is a warning, and the result is `failed`."""
        task_id = next(self._ids)
        self._thread.submit(self._run, task_id, work, failed)
        return task_id

    def _run(self, task_id: int, work: Callable[[], Any], failed: Any) -> None:
        result = failed
        try:
            result = work()
        except (OSError, MemoryError, ValueError, KeyError, RuntimeError) as error:
            policy.warn(f"chunks of LMCache were not moved: {error}")
        finally:
            with self._lock:
                self._results[task_id] = result
            self._notifier.notify()

    def pop(self, task_id: int) -> Any:
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._thread.shutdown()
            self._notifier.close()


def _name(key: ObjectKey) -> bytes:
    """Return what tells a chunk apart from others of its model and layout."""
    salt = key.cache_salt.encode()
    numbers = f"{key.kv_rank} {key.object_group_id} {len(salt)} ".encode()
    name: bytes = numbers + salt + bytes(key.chunk_hash)
    return name


def _bytes(obj: MemoryObj) -> NDArray[np.uint8]:
    return np.frombuffer(obj.byte_array, np.uint8)
