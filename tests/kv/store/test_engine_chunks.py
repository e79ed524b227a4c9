"""Chunks of another engine in a store: a hit has the bytes that were put."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.prefix_stores import shm
from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.ram_tier import RamTier

__all__ = ["shm"]  # a fixture

SIZE = 5000  # no multiple of a page
KEY = b"k" * 36
COST = 12288 + 8192


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
    with opened(tmp_path, disk_bytes=16384 + 3 * COST) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        for i in range(3):
            assert chunks.put(b"%d" % i, chunk(i))
        chunks.touch([b"0"])
        assert chunks.put(b"3", chunk(3))
        # Room for several chunks is made; the least recently used ones go first.
        assert [chunks.has(b"%d" % i) for i in range(4)] == [True, False, False, True]
    with (
        opened(tmp_path / "small", disk_bytes=20000) as store,
        pytest.warns(um.PlacementWarning, match="disk_bytes is 20000; expected 36864"),
    ):
        assert not EngineChunks(store, "engine", SIZE).put(KEY, chunk(1))


@pytest.mark.parametrize("use", ["get", "put", "touch"])
@pytest.mark.parametrize("tier", ["ram_bytes", "disk_bytes"])
def test_a_use_keeps_a_chunk(tmp_path: Path, shm: Path, tier: str, use: str) -> None:
    hour = 3600 * 10**9
    budgets = {"ram_bytes": 0, "disk_bytes": 0, tier: 16384 + 2 * COST}
    with opened(tmp_path / "s", **budgets) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        for age, key in ((3, b"a"), (2, b"b")):
            assert chunks.put(key, chunk(1), time.time_ns() - age * hour)
        if use == "get":
            assert chunks.get(b"a", chunk(2))
        elif use == "put":
            assert chunks.put(b"a", chunk(1))
        else:
            chunks.touch([b"a"], time.time_ns())
        assert chunks.put(b"c", chunk(1), time.time_ns() - hour + 10**9)
        assert [chunks.has(key) for key in (b"a", b"b", b"c")] == [True, False, True]


@pytest.mark.parametrize("tier", ["ram_bytes", "disk_bytes"])
def test_a_clock_that_jumps_fills_no_tier_for_good(
    tmp_path: Path, shm: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    day, began = 24 * 3600 * 10**9, time.time_ns()
    budgets = {"ram_bytes": 0, "disk_bytes": 0, tier: 16384 + 2 * COST}
    with opened(tmp_path / "s", **budgets) as store:
        chunks, out = EngineChunks(store, "engine", SIZE), np.zeros(SIZE, np.uint8)
        for i, days in enumerate((0, 1, 1, 0, 0, -1, -1, -2, 2, -2, 0)):
            monkeypatch.setattr(time, "time_ns", lambda now=began + days * day + i: now)
            assert chunks.put(key := bytes([i]), chunk(i)), (i, days)
            assert chunks.get(key, out)
            np.testing.assert_array_equal(out, chunk(i))


@pytest.mark.parametrize("tier", ["ram_bytes", "disk_bytes"])
def test_a_use_marks_a_chunk_from_the_future_anew(tmp_path: Path, shm: Path, tier: str) -> None:
    now = time.time_ns()
    with opened(tmp_path / "s", **{"ram_bytes": 0, "disk_bytes": 0, tier: 1 << 20}) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        assert chunks.put(b"a", chunk(1), now + 24 * 3600 * 10**9)  # a clock that jumped
        assert chunks.get(b"a", chunk(2))
        marks = [path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*.kv")]
        marks += [tier._used.min() for tier in store._tiers if isinstance(tier, RamTier)]
        assert [abs(mark - now) < 3600 * 10**9 for mark in marks] == [True]


def test_a_prompt_in_any_order_keeps_its_beginning(tmp_path: Path) -> None:
    with opened(tmp_path, disk_bytes=16384 + 7 * COST) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        now, order = time.time_ns(), np.random.default_rng(1).permutation(18)
        for i in order:
            chunks.put(b"%d" % i, chunk(i), now - int(i))
        there = [i for i in range(18) if chunks.has(b"%d" % i)]
        assert there[:6] == [*range(6)]


@pytest.mark.parametrize("disk_bytes", [0, 1 << 20])
def test_a_chunk_damaged_in_ram_is_not_copied_from_there(
    tmp_path: Path, shm: Path, disk_bytes: int
) -> None:
    with opened(tmp_path / "s", ram_bytes=1 << 20, disk_bytes=disk_bytes) as store:
        chunks = EngineChunks(store, "engine", SIZE)
        assert chunks.put(KEY, chunk(1))
        out = np.full(SIZE, 7, np.uint8)
        assert chunks.get(KEY, out)
        np.testing.assert_array_equal(out, chunk(1))
        (pool,) = shm.glob("*/pool")
        with pool.open("r+b") as file:
            file.seek(4096 + 17)
            file.write(b"damaged!")
        out[:] = 7
        with pytest.warns(um.PlacementWarning, match="was removed"):
            assert chunks.get(KEY, out) == (disk_bytes > 0)
        np.testing.assert_array_equal(out, chunk(1) if disk_bytes else np.zeros(SIZE, np.uint8))
