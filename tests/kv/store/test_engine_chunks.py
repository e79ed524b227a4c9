"""Chunks of another engine in a store: a hit has the bytes that were put."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from unimem.kv.store.engine_chunks import EngineChunks

SIZE = 5000  # no multiple of a page
KEY = b"k" * 36


def chunk(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)


def opened(folder: Path, **options: Any) -> um.KVStore:
    given: dict[str, Any] = {"ram_bytes": 0, "disk_bytes": 1 << 20} | options
    return um.KVStore(folder, **given)


def test_a_chunk_is_read_by_another_process(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        assert not chunks.has(KEY)
        assert chunks.put(KEY, chunk(1))
        assert chunks.put(KEY, chunk(2)), "it is there already, and stays"
        assert chunks.has(KEY)
    with opened(tmp_path) as store:
        out = np.zeros(SIZE, np.uint8)
        assert EngineChunks(store, "engine", SIZE).get(KEY, out)
        np.testing.assert_array_equal(out, chunk(1))
        assert not EngineChunks(store, "another", SIZE).get(KEY, out)
        assert not EngineChunks(store, "engine", SIZE).get(KEY[:-1], out)
        assert store.stat().tiers[0].n_chunks == 1


def test_the_identity_is_that_of_the_document(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        EngineChunks(store, "modèle", SIZE).put(KEY, chunk(1))
    root = hashlib.sha256("unimem.engine-chunk/1\nmodèle".encode()).digest()
    (path,) = tmp_path.glob("*.kv")
    assert path.stem == hashlib.sha256(root + KEY).hexdigest()
    header = path.read_bytes()[:4096]
    assert header[:8] == b"UNIMEMCH"
    assert np.frombuffer(header, "<u4", 2, 80).tolist() == [0, 1]  # tokens, lanes
    assert np.frombuffer(header, "<u8", 1, 88).tolist() == [SIZE]


@pytest.mark.parametrize("at", [40, 4096 + 17, -1])
def test_a_damaged_chunk_is_a_miss_and_copies_nothing(tmp_path: Path, at: int) -> None:
    with opened(tmp_path) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        chunks.put(KEY, chunk(1))
        (path,) = tmp_path.glob("*.kv")
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)
        out = np.full(SIZE, 7, np.uint8)
        with pytest.warns(um.PlacementWarning, match="was removed"):
            assert not chunks.get(KEY, out)
        assert (out == 7).all()
        assert not chunks.has(KEY)


def test_budgets_hold_and_used_chunks_stay(tmp_path: Path) -> None:
    cost = 12288 + 8192
    with opened(tmp_path, disk_bytes=16384 + 3 * cost) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        for i in range(3):
            assert chunks.put(b"%d" % i, chunk(i))
        chunks.touch([b"0"])
        assert chunks.put(b"3", chunk(3))
        # Room for several chunks is made; the least recently used ones go first.
        assert [chunks.has(b"%d" % i) for i in range(4)] == [True, False, False, True]
    with opened(tmp_path / "small", disk_bytes=20000) as store:
        assert not EngineChunks(store, "engine", SIZE).put(KEY, chunk(1))
