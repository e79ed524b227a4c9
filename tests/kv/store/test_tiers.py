"""Tiers of a store: budgets hold, the least recently used chunks make room, RAM is shared."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR
from unittest.mock import patch

import pytest

import unimem as um
from support.files.prefix_stores import (
    CHUNK_COST,
    MODEL,
    ROOM,
    TOKENS,
    cache,
    files_of,
    opened,
    shm,
    taken,
)
from unimem.kv.store.tiers import DiskTier

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


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_lock_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / ".lock")
    with pytest.raises(OSError, match=rf".+: '{tmp_path}/.lock'"):
        DiskTier(str(tmp_path), 1 << 20)


def test_names_are_synced_once_behind_their_files(tmp_path: Path) -> None:
    synced: list[bool] = []

    def sync(fd: int) -> None:
        synced.append(S_ISDIR(os.fstat(fd).st_mode))

    with opened(tmp_path / "s") as store, cache(45) as kv, patch("os.fsync", sync):
        for _ in range(2):  # the second time, all chunks are there
            assert store.put(kv, TOKENS, model=MODEL) == 40
    assert synced == [False] * 5 + [True]
