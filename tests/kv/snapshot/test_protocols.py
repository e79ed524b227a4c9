"""The caches of this package have all members that snapshots ask for."""

from __future__ import annotations

from typing import Any

import pytest

import unimem as um
from unimem.kv.snapshot.protocols import Cache, CacheOfLayers, HostCache


def members(protocol: type) -> set[str]:
    """The names that a protocol declares."""
    declared = {name for name, value in vars(protocol).items() if getattr(value, "__doc__", None)}
    return {name for name in declared if not name.startswith(("__", "_abc", "_is_"))}


@pytest.mark.parametrize("options", [{}, {"grow": True}, {"window": 4}, {"order": "head"}])
def test_a_cache_of_equal_layers_has_them(options: dict[str, Any]) -> None:
    asked = members(Cache) | members(HostCache)
    assert {"_rows", "_begin_restore", "_mapped", "next_position"} <= asked
    with um.KVCache(1, 2, 32, 8, pages="4k", **options) as kv:
        assert [name for name in sorted(asked) if not hasattr(kv, name)] == []
        assert not isinstance(kv, CacheOfLayers)


def test_a_cache_of_layers_that_differ_has_them() -> None:
    layers = [um.LayerKV(2, 32), um.LayerKV(2, 32, window=4)]
    with um.KVCache(layers=layers, max_seq_len=8, pages="4k") as kv:
        assert isinstance(kv, CacheOfLayers)
        assert [name for name in members(CacheOfLayers) if not hasattr(kv, name)] == []
