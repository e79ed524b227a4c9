"""The part of device caches that needs no device: their plan, and their state before they are made.

`tests/cuda` runs the rest, with a driver in main memory and on a GPU.
"""

from __future__ import annotations

import pytest

import unimem as um
from unimem.kv.cache.device import KVDevice
from unimem.kv.cache.spec import KVSpec


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_a_plan_is_fixed_storage(dtype: str) -> None:
    dims = 3, 2, 32, 100
    cache = KVDevice.__new__(KVDevice)
    assert cache._plan(KVSpec(*dims, 2, dtype)) == um.KVCache.storage_bytes(
        *dims, batch=2, dtype=dtype
    )
    assert (cache.dtype, cache.batch, cache.window, cache.grow) == (dtype, 2, None, False)


def test_a_cache_without_storage_is_closed() -> None:
    cache = KVDevice.__new__(KVDevice)
    assert cache.closed
    for use in (cache.warm, cache.clear, lambda: cache.append(0, None, None)):
        with pytest.raises(um.ClosedError):
            use()
