"""The caches of this package have all members that snapshots ask for."""

from __future__ import annotations

from typing import Any

import pytest

import unimem as um
from unimem.kv.snapshot.protocols import Cache, CacheOfLayers, HostCache, body_of


def members(protocol: type) -> set[str]:
    """The names that a protocol declares."""
    classes = [each for each in protocol.__mro__ if each.__module__ == protocol.__module__]
    found = {name: value for each in classes for name, value in vars(each).items()}
    declared = {name for name, value in found.items() if getattr(value, "__doc__", None)}
    return {name for name in declared if not name.startswith(("__", "_abc", "_is_"))}


@pytest.mark.parametrize("options", [{}, {"grow": True}, {"window": 4}, {"order": "head"}])
def test_a_cache_of_equal_layers_has_them(options: dict[str, Any]) -> None:
    made_by = {"_mapped", "_of_layers"}  # constructors, which the class of the restored cache has
    asked = members(Cache) | members(HostCache)
    assert {"_rows", "_begin_restore", "next_position", *made_by} <= asked
    with um.KVCache(1, 2, 32, 8, pages="4k", **options) as kv:
        assert [name for name in sorted(asked - made_by) if not hasattr(body_of(kv), name)] == []
        assert not isinstance(body_of(kv), CacheOfLayers)


def test_a_cache_of_layers_that_differ_has_them() -> None:
    layers = [um.LayerKV(2, 32), um.LayerKV(2, 32, window=4)]
    with um.KVCache(layers=layers, max_seq_len=8, pages="4k") as kv:
        assert isinstance(body_of(kv), CacheOfLayers)
        assert [name for name in members(CacheOfLayers) if not hasattr(body_of(kv), name)] == []


@pytest.mark.parametrize("differ", [False, True])
def test_a_body_tells_whether_layers_differ(differ: bool) -> None:
    layers = [um.LayerKV(2, 32), um.LayerKV(1, 64)]
    made = um.KVCache(layers=layers, max_seq_len=8) if differ else um.KVCache(2, 2, 32, 8)
    with made as kv:
        body = body_of(kv)
        assert body_of(body) is body
        assert isinstance(body, CacheOfLayers) == differ
