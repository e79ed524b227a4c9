"""The RAM of a store: one pool that processes share, placed as asked, whole after any kill."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import unimem as um
from support.files.prefix_stores import (
    MODEL,
    TOKENS,
    bytes_of,
    cache,
    large_cache,
    opened,
    shm,
    taken,
)
from support.kernel import taken_names
from unimem.kv.store import ram_tier
from unimem.kv.store.ram_tier import RamTier
from unimem.system import limits

__all__ = ["shm"]  # a fixture


def test_the_last_store_frees_the_shared_ram(tmp_path: Path, shm: Path) -> None:
    ram: dict[str, Any] = {"ram_bytes": 1 << 22, "disk_bytes": 0}
    with opened(tmp_path / "s", **ram) as second, cache() as out:
        with opened(tmp_path / "s", **ram) as first, cache(45) as kv:
            first.put(kv, TOKENS, model=MODEL)
        assert second.restore_into(out, TOKENS, model=MODEL) == 40
        (folder,) = shm.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        assert second.give_back() > 0 == second.longest(TOKENS, model=MODEL, kv=out)
    assert list(shm.iterdir()) == []


def test_the_next_store_frees_ram_of_killed_processes(tmp_path: Path, shm: Path) -> None:
    with opened(tmp_path / "s", ram_bytes=1 << 22), opened(tmp_path / "t", ram_bytes=1 << 22):
        kept, _ = sorted(shm.iterdir())
        stale = kept.with_name(kept.name + "0")
        stale.mkdir()
        (stale / "chunk").write_bytes(b"x")
        with opened(tmp_path / "u", ram_bytes=1 << 22):
            assert kept.exists()
            assert not stale.exists()


def test_a_budget_beyond_shared_memory_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(um.CapacityError, match="ram_bytes"),
        opened(tmp_path / "s", ram_bytes=1 << 60),
    ):
        pass


@pytest.mark.parametrize("kind", sorted(taken_names.KINDS))
def test_a_name_that_others_have_taken_is_skipped(tmp_path: Path, shm: Path, kind: str) -> None:
    with opened(tmp_path / "s", ram_bytes=1 << 22):
        (folder,) = shm.iterdir()
    taken_names.take(folder, kind)
    told = pytest.warns(um.PlacementWarning, match=rf"{folder} is .*; chunks .* lie in {folder}-1")
    ram: dict[str, Any] = {"ram_bytes": 1 << 22, "disk_bytes": 0}
    with told, opened(tmp_path / "s", **ram) as first, opened(tmp_path / "s", **ram) as second:
        with cache(45) as kv:
            assert first.put(kv, TOKENS, model=MODEL) == 40
        with cache() as out:
            assert second.restore_into(out, TOKENS, model=MODEL) == 40
    assert [path.name for path in shm.iterdir()] == [folder.name]


def test_a_store_whose_names_are_all_taken_says_what_to_do(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram_tier, "_MOST_NAMES", 3)
    with opened(tmp_path / "s", ram_bytes=1 << 22):
        (folder,) = shm.iterdir()
    for i in range(3):
        taken_names.take(folder.with_name(folder.name + f"-{i}" * (i > 0)), "a FIFO")
    with pytest.raises(PermissionError, match=r"next 2: .*ram_bytes=0"):
        um.KVStore(tmp_path / "s", ram_bytes=1 << 22)


# ---- placement of the pool, in the machine's /dev/shm ----

LARGE: dict[str, Any] = {"ram_bytes": 1 << 24, "disk_bytes": 0, "chunk_tokens": 512}


def pool_bytes(store: um.KVStore) -> int:
    return Path(store.stat().tiers[0].path, "pool").stat().st_size


def test_the_pool_lies_in_huge_pages_on_request(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said, large_cache() as kv:
        warnings.simplefilter("always")
        with opened(tmp_path / "s", **LARGE, pages="thp") as store:
            assert store.granted is None
            assert store.put(kv, range(512), model=MODEL) == 512
            placement = store.granted
            assert placement is not None
            nbytes = pool_bytes(store)
            assert placement.resident_bytes == nbytes
            assert placement.huge_bytes == (0 if said else nbytes >> 21 << 21)
            assert taken(Path(store.stat().tiers[0].path)) <= LARGE["ram_bytes"]
            expected = bytes_of(kv, 512)
            kv.clear()
            assert store.restore_into(kv, range(512), model=MODEL) == 512
            assert bytes_of(kv, 512) == expected
    if said:
        pytest.skip(str(said[0].message))


def test_the_numa_policy_is_set_before_memory_is_taken(tmp_path: Path) -> None:
    node = min(limits.nodes(), default=None)
    if node is None:
        pytest.skip("this kernel has no NUMA")
    before = []

    def look(fd: int, begin: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/pool"):
            with um.Block.map(f"/proc/self/fd/{fd}") as block:
                before.append((os.fstat(fd).st_blocks, numa_policy(block.address)))
        posix_fallocate(fd, begin, nbytes)

    posix_fallocate = os.posix_fallocate
    with (
        patch.object(os, "posix_fallocate", side_effect=look),
        opened(tmp_path / "s", **LARGE, numa=f"bind:{node}") as store,
        large_cache() as kv,
    ):
        assert before == [(0, f"bind:{node}")]
        assert store.put(kv, range(512), model=MODEL) == 512
        assert store.granted is not None
        assert store.granted.nodes == {node: pool_bytes(store)}


def numa_policy(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{address:x} "))


@pytest.mark.parametrize("numa", [None, "interleave"])
def test_a_pool_without_room_is_refused(tmp_path: Path, numa: str | None) -> None:
    full = patch("os.posix_fallocate", side_effect=OSError(28, "No space left"))
    with full, pytest.raises(um.CapacityError, match="ram_bytes: there is no room for 16777216"):
        um.KVStore(tmp_path / "s", **LARGE, numa=numa)
    with opened(tmp_path / "s", **LARGE, numa=numa) as store, large_cache() as kv:
        assert store.put(kv, range(512), model=MODEL) == 512


# ---- the pool ----

KEYS = [bytes([i]) * 32 for i in range(1, 40)]


def chunk(i: int, nbytes: int = 8192) -> np.ndarray:
    return np.full(nbytes, i, np.uint8)


def tier_of(folder: Path, n_units: int) -> RamTier:
    folder.mkdir(exist_ok=True)
    # A unit with its part of the table, the folder, and the table's pages.
    return RamTier(str(folder), 16384 + 8192 + n_units * (4096 + 120 + 17) + 100)


def held(tier: RamTier) -> list[int]:
    """Return the numbers of the chunks. Each has its own bytes."""
    found = []
    for i, key in enumerate(KEYS):
        out = np.zeros(8192, np.uint8)
        if tier.read(key, out):
            assert (out == i).all()
            found.append(i)
    return found


@pytest.mark.parametrize("field", ["unit_bytes", "n_units"])
@pytest.mark.parametrize("value", [0, 1, 1 << 40, 2**64 - 1])
def test_a_damaged_head_is_an_error(tmp_path: Path, shm: Path, field: str, value: int) -> None:
    with closing(tier_of(tmp_path / "s", 10)) as tier:
        before = tier._head[field].copy()
        tier._head[field] = value
        with pytest.raises(OSError, match="table of chunks is damaged"):
            tier_of(tmp_path / "s", 10)
        tier._head[field] = before
        tier_of(tmp_path / "s", 10).close()


class KilledError(BaseException):
    """Ends a call between two lines. As after a kill, only the kernel's lock is released."""


def is_killed(call: Callable[[], Any], n_lines: int) -> bool:
    """Tell whether a call was ended after its first lines in the pool's module."""
    left = n_lines

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if not code.co_filename.endswith("ram_tier.py") or code.co_name == "_flock":
            return None
        left -= event == "line"
        if left < 0:
            raise KilledError
        return trace

    sys.settrace(trace)
    try:
        call()
    except KilledError:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("what", ["write", "remove", "give_back"])
def test_a_writer_killed_at_any_line_leaves_a_whole_pool(
    tmp_path: Path, shm: Path, what: str
) -> None:
    now, n_lines = time.time_ns(), 0
    with closing(tier_of(tmp_path / "s", 8)) as tier:
        assert [tier.write(KEYS[i], chunk(i), now - 100 + i) for i in range(5)] == [True] * 5
        assert held(tier) == [1, 2, 3, 4], "there is room for four"
        calls: dict[str, Callable[[], Any]] = {
            "write": lambda: tier.write(KEYS[9], chunk(9), now),
            "remove": lambda: tier.remove(KEYS[3]),
            "give_back": tier.give_back,
        }
        while is_killed(calls[what], n_lines):
            n_lines += 1
            there = held(tier)
            assert set(there) <= {1, 2, 3, 4, 9}
            assert len(there) >= (0 if what == "give_back" else 3)
            tier.remove(KEYS[9])
            for i in range(1, 5):  # no room was lost
                assert tier.write(KEYS[i], chunk(i), now - 100 + i)
            assert held(tier) == [1, 2, 3, 4]
            assert tier.stat().nbytes == 4 * 8192
        assert n_lines > 15


def test_a_chunk_replaced_while_it_is_read_is_a_miss(tmp_path: Path, shm: Path) -> None:
    now = time.time_ns()
    with closing(tier_of(tmp_path / "s", 2)) as tier:
        assert tier.write(KEYS[0], chunk(0), now)

        class Replacing(np.ndarray):
            def __setitem__(self, at: Any, value: Any) -> None:
                super().__setitem__(at, value)
                tier.write(KEYS[1], chunk(1), now + 1)

        assert tier.read(KEYS[0], np.zeros(8192, np.uint8).view(Replacing)) == 0
        assert held(tier) == [1]


def test_tags_that_meet_are_told_apart_by_their_keys(tmp_path: Path, shm: Path) -> None:
    with closing(tier_of(tmp_path / "s", 8)) as tier:
        keys = [KEYS[0][:8] + bytes([i]) * 24 for i in range(3)]
        for i, key in enumerate(keys):
            assert tier.write(key, chunk(i), i + 1)
        tier.remove(keys[1])
        assert [tier.has(key) for key in keys] == [True, False, True]
        out = np.zeros(8192, np.uint8)
        assert tier.read(keys[2], out) == 8192
        assert (out == 2).all()


def test_a_process_with_another_budget_keeps_to_the_smaller_one(tmp_path: Path, shm: Path) -> None:
    with closing(tier_of(tmp_path / "s", 8)) as tier:
        for units, n_kept in ((4, 2), (100, 4)):
            with closing(tier_of(tmp_path / "s", units)) as other:
                for i in range(6):
                    assert other.write(KEYS[i], chunk(i), time.time_ns())
                assert other.stat().n_chunks == n_kept == tier.stat().n_chunks
                tier.give_back()


def test_memory_that_was_given_back_is_taken_again(tmp_path: Path, shm: Path) -> None:
    with closing(tier_of(tmp_path / "s", 64)) as tier:
        assert tier.write(KEYS[0], chunk(0), 1)
        pool = Path(tier.folder, "pool")
        whole = pool.stat().st_blocks
        assert tier.give_back() == 8192
        assert pool.stat().st_blocks < whole
        with patch("os.posix_fallocate", side_effect=OSError(28, "No space left")):
            assert not tier.write(KEYS[1], chunk(1), 1)
        assert tier.write(KEYS[1], chunk(1), 1)
        assert held(tier) == [1]


def test_a_chunk_larger_than_the_pool_is_a_warning(tmp_path: Path, shm: Path) -> None:
    with (
        closing(tier_of(tmp_path / "s", 2)) as tier,
        pytest.warns(um.PlacementWarning, match="ram_bytes is .*, and chunks have 8192 of it"),
    ):
        assert not tier.write(KEYS[0], chunk(0, 12288), 1)
