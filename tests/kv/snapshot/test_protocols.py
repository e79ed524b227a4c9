"""Snapshots take the cache that a user has, or the one that does its work."""

from __future__ import annotations

import pytest

import unimem as um
from unimem.kv.snapshot.protocols import CacheOfLayers, body_of


@pytest.mark.parametrize("differ", [False, True])
def test_a_body_tells_whether_layers_differ(differ: bool) -> None:
    layers = [um.LayerKV(2, 32), um.LayerKV(1, 64)]
    made = um.KVCache(layers=layers, max_seq_len=8) if differ else um.KVCache(2, 2, 32, 8)
    with made as kv:
        body = body_of(kv)
        assert body_of(body) is body
        assert isinstance(body, CacheOfLayers) == differ
