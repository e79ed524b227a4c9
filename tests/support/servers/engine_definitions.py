"""Stand-ins for what LMCache and SGLang define, for tests where neither is installed.

They have the names that unimem's doors import, and no behaviour but that of plain values. With the
real ones installed (`make test-lmcache`), the same tests run against those.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LMCACHE = {
    "lmcache._version": {"__version__": "0.5.6"},
    "lmcache.lmcache_native": {"Bitmap": "Bitmap"},
    "lmcache.v1.distributed.internal_api": {"L2StoreResult": "StoreResult"},
    "lmcache.v1.distributed.l2_adapters.base": {
        "AdapterUsage": "Usage",
        "L2AdapterInterface": "Adapter",
    },
    "lmcache.v1.platform": {"create_event_notifier": "Notifier"},
}
SGLANG = {
    "sglang.srt.mem_cache.hicache_storage": {
        "HiCacheStorage": "Storage",
        "PoolHitPolicy": "HitPolicy",
        "PoolName": "Pool",
        "PoolTransferResult": "TransferResult",
    },
    "sglang.version": {"__version__": "0.5.23"},
}


@contextmanager
def imported(engine: str, door: str, definitions: dict[str, dict[str, str]]) -> Iterator[None]:
    """Make an engine's names importable; undo it, and the import of its door, afterwards."""
    made: set[str] = set()
    if importlib.util.find_spec(engine) is None:
        for name, values in definitions.items():
            parents = name.split(".")
            for i in range(1, len(parents) + 1):
                package = ".".join(parents[:i])
                if package not in sys.modules:
                    module: Any = types.ModuleType(package)
                    module.__path__ = []
                    sys.modules[package] = module
                    made.add(package)
            for key, value in values.items():
                setattr(sys.modules[name], key, globals().get(value, value))
    try:
        yield
    finally:
        for name in made | ({door} & set(sys.modules) if made else set()):
            del sys.modules[name]
        import unimem

        vars(unimem).pop(door.rpartition(".")[2], None)


class Bitmap:
    def __init__(self, size: int) -> None:
        self.size, self._set = size, set[int]()

    def set(self, i: int) -> None:
        assert 0 <= i < self.size
        self._set.add(i)

    def popcount(self) -> int:
        return len(self._set)

    def get_indices_list(self) -> list[int]:
        return sorted(self._set)


class StoreResult(int):
    def __new__(cls, success: bool, nbytes: int) -> StoreResult:
        return super().__new__(cls, nbytes if success else -1)

    def is_successful(self) -> bool:
        return self >= 0

    def bytes_transferred(self) -> int:
        return max(0, self)


@dataclass(frozen=True)
class Usage:
    total_bytes_used: int
    total_capacity_bytes: int


class Adapter:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._listeners: list[Any] = []

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)


class Notifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


class HitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


class Pool(StrEnum):
    KV = "kv"
    MAMBA = "mamba"


@dataclass
class TransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class Storage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.registered_pools[host_pool_name] = host_pool  # type: ignore[attr-defined]
