"""A storage for SGLang's HiCache: KV pages that leave its host memory go to a `KVStore`.

SGLang loads it by its name (docs/engines.md)::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
      "backend_name": "unimem", "module_path": "unimem.sglang", "class_name": "KVStoreStorage",
      "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
      "store": {"where": "/var/cache/kv"}}'

Importing it needs SGLang, whose interface changes with minor versions: this module is for 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.engine_store import EngineStore
from unimem.system import policy

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransferResult,
    )
    from sglang.version import __version__
except ImportError as error:
    raise ImportError(
        "unimem.sglang is loaded by SGLang, and made for version 0.5 of its HiCache storages; "
        f"importing those said: {error}"
    ) from error

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolTransfer,
    )

__all__ = ["KVStoreStorage"]

# What the bytes of a page depend on besides its key, as far as a pool of SGLang has it.
_POOL = "layout dtype page_size layer_num head_num head_dim kv_lora_rank qk_rope_head_dim".split()
_RANKS = "pp_rank pp_size attn_cp_rank attn_cp_size dcp_rank dcp_size logical_page_size".split()


class KVStoreStorage(HiCacheStorage):  # type: ignore[misc]
    """A storage of SGLang in a `KVStore`: budgets, any number of processes, checked pages.

    SGLang makes it, and calls it in threads of its own, which wait. The bytes of a page are
    SGLang's own, and unimem's caches cannot read them. A page is found under the same version of
    SGLang, model, ranks, pool and layout. The first pages of a prompt count as the most recently
    used, as far as SGLang tells its pages before the given ones (``interface_v1`` and
    ``hicache_storage_pass_prefix_keys``): a prompt never makes room for its end with its beginning.

    Parameters
    ----------
    storage_config : sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig
        Its ``extra_config["store"]`` has the options of ``EngineStore`` (docs/engines.md).
    kwargs : optional
        SGLang's further arguments, which are not used.

    Raises
    ------
    ValueError, TypeError
        An option is unknown, missing or out of range. `register_mem_pool_host` raises it if no page
        fits into a budget.
    CapacityError, OSError
        As `KVStore`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        config = storage_config
        self._store = EngineStore("SGLang", __version__, (config.extra_config or {}).get("store"))
        self._model_name = config.model_name or ""
        self._ranks = {name: getattr(config, name) for name in _RANKS}
        self._heads = {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
        self._is_mla = config.is_mla_model
        self._pages: dict[str, EngineChunks] = {}
        self.registered_pools: dict[str, Any] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool of the pages, which tells their layout."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take a pool beside it, such as that of Mamba's states."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        layout = {name: str(getattr(host_pool, name, None)) for name in _POOL} | self._ranks
        # MLA's rows are the same on all ranks; states beside them are not.
        if not self._is_mla or host_pool_name != PoolName.KV:
            layout |= self._heads
        page = host_pool.get_dummy_flat_data_page()
        nbytes = page.numel() * page.element_size()
        layout |= {"pool": str(host_pool_name), "type": type(host_pool).__name__, "bytes": nbytes}
        self._pages[host_pool_name] = self._store.chunks(self._model_name, layout, nbytes)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many of the first pages the store has, and note their use."""
        pages, before = self._pages[PoolName.KV], _before(extra_info)
        if not before:
            self._store.note_prompt(key.encode() for key in keys[:1])
        n = next((i for i, key in enumerate(keys) if not pages.has(key.encode())), len(keys))
        for key, used_ns in self._ages(keys[:n], before):
            pages.touch([key], used_ns)
        return n

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Write pages of the pool, one by one."""
        return self._set_pages(PoolName.KV, keys, host_indices, _before(extra_info))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read pages into the pool, each in a thread."""
        return self._get_pages(PoolName.KV, keys, host_indices)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return after how many pages all pools can continue."""
        n = self.batch_exists(keys, extra_info)
        hits, restorable = ({PoolName.KV: n} if n else {}), [*range(1, n + 1)]
        for transfer in pool_transfers or []:
            pages = self._pages[transfer.name]
            has = [pages.has(key.encode()) for key in keys[:n]]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lasts = n
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                lasts = max(1, len(transfer.keys or ()))
            else:
                raise ValueError(
                    f"hit_policy: expected all_pages or trailing_pages, got {transfer.hit_policy}"
                )
            able = {end for end in range(1, n + 1) if all(has[max(0, end - lasts) : end])}
            if able:
                hits[transfer.name] = max(able)
            restorable = [end for end in restorable if end in able]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Write pages of several pools."""
        before = _before(extra_info)
        return {
            t.name: self._set_pages(t.name, t.keys or [], t.host_indices, before) for t in transfers
        }

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Read pages into several pools."""
        return {t.name: self._get_pages(t.name, t.keys or [], t.host_indices) for t in transfers}

    def exists(self, key: str) -> bool:
        """Return whether the store has a page."""
        return self._pages[PoolName.KV].has(key.encode())

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write a page that is given as a tensor."""
        return self.batch_set([key], [value])

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Read a page into a tensor and return it; None if it is missing."""
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Write pages that are given as tensors; False if one was not written."""
        ages = self._ages(keys, [])
        done = all(
            self._set(PoolName.KV, key, value, used_ns)
            for (key, used_ns), value in zip(ages, values, strict=True)
        )
        self._store.sync()
        return done

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into tensors, each in a thread; None for a missing page."""

        def read(key: str, out: torch.Tensor) -> torch.Tensor | None:
            return out if self._get(PoolName.KV, key, out) else None

        return list(self._store.readers.map(read, keys, target_locations))

    def close(self) -> None:
        """End the threads and close the store. Twice is no error."""
        self._store.close()

    def _ages(self, keys: Sequence[str], before: Sequence[str]) -> list[tuple[bytes, int]]:
        """Return each page's key, and when it counts as used."""
        if not keys:
            return []
        start_ns = self._store.used_ns([*before[:1], keys[0]][0].encode()) - len(before)
        return [(key.encode(), start_ns - i) for i, key in enumerate(keys)]

    def _set_pages(
        self, name: str, keys: Sequence[str], host_indices: Any, before: Sequence[str]
    ) -> list[bool]:
        pool = self.registered_pools[name]
        firsts = _first_rows(name, pool, keys, host_indices)
        done = [
            self._set(name, key, pool.get_data_page(first, flat=True), used_ns)
            for (key, used_ns), first in zip(self._ages(keys, before), firsts, strict=True)
        ]
        self._store.sync()
        return done

    def _get_pages(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pool = self.registered_pools[name]

        def read(key: str, first: int) -> bool:
            page = pool.get_dummy_flat_data_page()
            done = self._get(name, key, page)
            if done:
                pool.set_from_flat_data_page(first, page)
            return done

        firsts = _first_rows(name, pool, keys, host_indices)
        return list(self._store.readers.map(read, keys, firsts))

    def _set(self, name: str, key: bytes, page: torch.Tensor, used_ns: int) -> bool:
        try:
            return self._pages[name].put(key, _bytes(page.contiguous()), used_ns)
        except (OSError, MemoryError) as error:
            policy.warn(f"a page of SGLang was not written: {self._store!r}: {error}")
            return False

    def _get(self, name: str, key: str, page: torch.Tensor) -> bool:
        try:
            return self._pages[name].get(key.encode(), _bytes(page))
        except (OSError, MemoryError) as error:
            policy.warn(f"a page of SGLang was not read: {self._store!r}: {error}")
            return False


def _before(extra_info: HiCacheStorageExtraInfo | None) -> list[str]:
    """Return the keys of all pages before the given ones, as far as SGLang tells."""
    return (extra_info.prefix_keys if extra_info else None) or []


def _first_rows(name: str, pool: Any, keys: Sequence[str], host_indices: Any) -> list[int]:
    """Return the index of each page's first row in the pool."""
    got = 0 if host_indices is None else host_indices.numel()
    if got != len(keys) * pool.page_size:
        raise ValueError(
            f"host_indices: expected {len(keys) * pool.page_size} of pool {name}, {pool.page_size} "
            f"for each of {len(keys)} keys, got {got}"
        )
    return [int(index) for index in host_indices.tolist()[:: pool.page_size]]


def _bytes(page: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    found: NDArray[np.uint8] = page.view(torch.uint8).numpy()
    return found
