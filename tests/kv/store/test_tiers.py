"""Tiers of a store: budgets hold, the least recently used chunks make room, RAM is shared."""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

import unimem as um
from support.files.prefix_stores import (
    CHUNK_COST,
    MODEL,
    ROOM,
    TOKENS,
    bytes_of,
    cache,
    files_of,
    large_cache,
    opened,
    shm,
    taken,
)
from unimem.system import limits

__all__ = ["shm"]  # a fixture


def test_the_least_recently_used_chunks_make_room(tmp_path: Path) -> None:
    budget = ROOM + 10 * CHUNK_COST
    with opened(tmp_path / "s", disk_bytes=budget) as store, cache(45) as kv, cache() as out:
        a, b, c = ([n, *TOKENS[1:]] for n in (1, 2, 3))
        for tokens in (a, b):
            assert store.put(kv, tokens, model=MODEL) == 40
        assert store.restore_into(out, a, model=MODEL) == 40  # b is older now
        assert store.put(kv, c[:24], model=MODEL) == 24
        assert store.longest(a, model=MODEL, kv=kv) == 40
        # The last chunks of b went first; the rest is a prefix.
        assert store.longest(b, model=MODEL, kv=kv) == 8
        stat = store.stat().tiers[0]
        assert taken(tmp_path / "s") <= stat.nbytes + ROOM <= budget


@pytest.mark.parametrize("known", [0, 16])
def test_the_beginning_of_a_too_long_prompt_is_kept(tmp_path: Path, known: int) -> None:
    with opened(tmp_path / "s", disk_bytes=ROOM + 3 * CHUNK_COST) as store, cache(45) as kv:
        store.put(kv, TOKENS[:known], model=MODEL)
        assert store.put(kv, TOKENS, model=MODEL) == 24
        assert store.longest(TOKENS, model=MODEL, kv=kv) == 24
        assert store.put(kv, TOKENS, model="next") == 24


def test_chunks_from_the_future_make_room(tmp_path: Path) -> None:
    with opened(tmp_path / "s", disk_bytes=ROOM + CHUNK_COST) as store, cache(45) as kv:
        store.put(kv, TOKENS[:8], model=MODEL)
        (path,) = files_of(tmp_path / "s")
        os.utime(path, (4e9, 4e9))
        assert store.put(kv, TOKENS[:8], model="other") == 8


def test_a_budget_below_one_chunk_keeps_none(tmp_path: Path) -> None:
    with opened(tmp_path / "s", disk_bytes=ROOM + CHUNK_COST - 1) as store, cache(45) as kv:
        with pytest.warns(
            um.PlacementWarning, match=f"disk_bytes is .* expected {ROOM + CHUNK_COST}"
        ):
            assert store.put(kv, TOKENS, model=MODEL) == 0
        assert store.put(kv, TOKENS, model=MODEL) == 0, "it warns once"
        assert store.stat().refused_chunks == 2


def test_blocks_of_a_file_system_are_counted_whole(tmp_path: Path) -> None:
    with cache(45) as kv:
        given = os.statvfs(tmp_path)
        large = os.statvfs_result((1 << 16, 1 << 16, *given[2:]))
        with (
            patch.object(os, "fstatvfs", return_value=large),
            opened(tmp_path / "s", disk_bytes=ROOM + 2 * ((1 << 16) + 8192)) as store,
        ):
            assert store.put(kv, TOKENS, model=MODEL) == 16
            assert store.stat().tiers[0].nbytes == 2 * ((1 << 16) + 8192)


def test_a_chunk_being_read_is_not_dropped(tmp_path: Path) -> None:
    with opened(tmp_path / "s", disk_bytes=ROOM + CHUNK_COST) as store, cache(45) as kv:
        assert store.put(kv, TOKENS[:8], model=MODEL) == 8
        (path,) = files_of(tmp_path / "s")
        with path.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # as a reader does
            assert store.put(kv, [7, *TOKENS[1:8]], model=MODEL) == 0
        assert path.exists()
        assert store.put(kv, [7, *TOKENS[1:8]], model=MODEL) == 8
        assert not path.exists()


def test_remains_of_a_killed_writer_make_room(tmp_path: Path) -> None:
    with opened(tmp_path / "s", disk_bytes=ROOM + CHUNK_COST) as store, cache(45) as kv:
        (tmp_path / "s/.0123456789abcdef.unimem-tmp").write_bytes(bytes(8192))
        (tmp_path / "s/.lock").write_bytes(b"unimem KV chunks 1 99999999 another-boot")
        assert store.put(kv, TOKENS[:8], model=MODEL) == 8
        assert {path.name for path in (tmp_path / "s").iterdir()} == {
            ".lock",
            files_of(tmp_path / "s")[0].name,
        }


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


# ---- placement of chunks in RAM, in the machine's /dev/shm ----

LARGE = {"ram_bytes": 1 << 24, "disk_bytes": 0, "chunk_tokens": 512}
LARGE_BYTES = 4096 + (4 << 20)


def test_chunks_lie_in_huge_pages_on_request(tmp_path: Path) -> None:
    with opened(tmp_path / "s", **LARGE, pages="thp") as store, large_cache() as kv:
        assert store.granted is None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert store.put(kv, range(512), model=MODEL) == 512
        placement = store.granted
        assert placement is not None
        assert placement.resident_bytes == LARGE_BYTES
        assert placement.huge_bytes == (0 if said else 4 << 20)
        if said:
            pytest.skip(str(said[0].message))
        store.put(kv, [7, *range(511)], model=MODEL)
        assert store.granted.huge_bytes == 8 << 20
        # Neither the bytes of the folder nor the rows have changed.
        tier = store.stat().tiers[0]
        assert taken(Path(tier.path)) <= tier.nbytes + ROOM
        expected = bytes_of(kv, 512)
        kv.clear()
        assert store.restore_into(kv, range(512), model=MODEL) == 512
        assert bytes_of(kv, 512) == expected


def test_the_numa_policy_is_set_before_memory_is_taken(tmp_path: Path) -> None:
    node = min(limits.nodes(), default=None)
    if node is None:
        pytest.skip("this kernel has no NUMA")
    before = []

    def look(fd: int, nbytes: int) -> None:
        with um.Block.map(f"/proc/self/fd/{fd}") as block:
            before.append((os.fstat(fd).st_blocks, numa_policy(block.address)))
        posix_fallocate(fd, 0, nbytes)

    posix_fallocate = os.posix_fallocate
    with opened(tmp_path / "s", **LARGE, numa=f"bind:{node}") as store, large_cache() as kv:
        with patch.object(os, "posix_fallocate", side_effect=lambda fd, _, n: look(fd, n)):
            store.put(kv, range(512), model=MODEL)
        assert before == [(0, f"bind:{node}")]
        assert store.granted is not None
        assert store.granted.nodes == {node: LARGE_BYTES}


def numa_policy(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{address:x} "))


@pytest.mark.parametrize("fault", ["no memory", "no room"])
def test_a_chunk_that_cannot_be_placed_is_not_kept(tmp_path: Path, fault: str) -> None:
    with opened(tmp_path / "s", **LARGE, numa="interleave") as store, large_cache() as kv:
        if fault == "no memory":
            error: Exception = um.CapacityError("none is left", 0, 0, 0)
            broken = patch("unimem.kv.store.tiers.Block", Mock(_filled=Mock(side_effect=error)))
        else:
            error = OSError(28, "No space left")
            broken = patch("os.posix_fallocate", Mock(side_effect=error))
        with broken:
            assert store.put(kv, range(512), model=MODEL) == 0
        tier = store.stat().tiers[0]
        assert (tier.nbytes, tier.n_chunks) == (0, 0)
        assert store.put(kv, range(512), model=MODEL) == 512
