"""Snapshots that are verified, and read into existing caches."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.snapshot_bytes import FIELDS, KINDS, by_kind, file, flipped, path
from support.files.snapshot_files import append, cache, rows
from unimem.errors import SnapshotError
from unimem.kv import snapshot

__all__ = ["file", "path"]

pytestmark = pytest.mark.usefixtures("gives_memory_back")


# ---- verify() ----


def test_verify_checks_the_file_that_was_mapped(file: Path) -> None:
    with um.KVCache.restore(file) as mapped:
        append(mapped, 5)
        mapped.verify()
        with cache(3) as other:
            other.save(file)  # replaces the file; the mapped one stays
        mapped.verify()
        mapped.clear()
        mapped.verify()


def test_only_mapped_caches_are_verified(file: Path) -> None:
    with cache(3) as kv, um.KVCache.restore(file, mode="copy", verify=False) as copied:
        for cache_, match in (
            (kv, "nothing to verify"),
            (copied, r"not restored with mode='map'$"),
        ):
            with pytest.raises(ValueError, match=match):
                cache_.verify()


def test_verify_reports_a_truncated_file(file: Path) -> None:
    whole = file.stat().st_size
    with um.KVCache.restore(file) as mapped:
        os.truncate(file, 8192)
        match = f"truncated after it was mapped: it has 8192 of {whole} bytes"
        with pytest.raises(SnapshotError, match=match) as caught:
            mapped.verify()
        assert (caught.value.offset, caught.value.path) == (8192, str(file))


# ---- read_into ----


@pytest.mark.parametrize("kind", ["fixed", "grow"])
def test_a_snapshot_is_read_into_a_cache(kind: str, file: Path) -> None:
    with um.KVCache.restore(file) as expected, um.KVCache(2, 2, 32, 100, **KINDS[kind]) as kv:
        assert snapshot.read_into(kv, file, range(44), "tiny").seq_len == 40
        assert rows(kv) == rows(expected)
        assert (kv.seq_len, kv.next_position, kv.max_seq_len) == (40, 40, 100)
        append(kv, 60)
        assert kv.seq_len == 100


def test_reading_into_a_ring(path: Path) -> None:
    with cache(50, window=24) as kv, um.KVCache(2, 2, 32, 90, window=24, spare_rows=9) as other:
        kv.save(path)
        snapshot.read_into(other, path)
        assert (other.seq_len, other.next_position) == (24, 50)
        assert rows(other) == rows(kv)


@pytest.mark.parametrize(
    ("dims", "options", "named"),
    [
        ((3, 2, 32), {}, "n_layers=2, and this one has 3"),
        ((2, 4, 16), {}, "n_kv_heads=2, and this one has 4"),
        ((2, 2, 64), {}, "head_dim=32, and this one has 64"),
        ((2, 2, 32), {"batch": 2}, "batch=1, and this one has 2"),
        ((2, 2, 32), {"dtype": "bf16"}, "dtype='f16', and this one has 'bf16'"),
        ((2, 2, 32), {"window": 50}, "window=None, and this one has 50"),
    ],
)
def test_a_cache_of_other_dimensions_is_refused(
    dims: tuple[int, int, int], options: dict[str, Any], named: str, file: Path
) -> None:
    with um.KVCache(*dims, 64, **options) as kv:
        with pytest.raises(SnapshotError, match=re.escape(named)) as caught:
            snapshot.read_into(kv, file)
        assert caught.value.offset == FIELDS[named.partition("=")[0]][0]
        assert kv.seq_len == kv.next_position == 0


def test_reading_into_a_cache_is_all_or_nothing(file: Path) -> None:
    with um.KVCache(2, 2, 32, 64) as kv:
        with pytest.raises(SnapshotError, match="expected a snapshot of model"):
            snapshot.read_into(kv, file, model="big")
        with pytest.raises(SnapshotError, match="no prefix"):
            snapshot.read_into(kv, file, tokens=[1])
        raw = file.read_bytes()
        file.write_bytes(flipped(raw, len(raw) - 1))
        with pytest.raises(SnapshotError, match="checksum does not match in v of layer 1"):
            snapshot.read_into(kv, file)
        assert kv.seq_len == kv.next_position == 0
        file.write_bytes(raw)
        snapshot.read_into(kv, file)
        before = rows(kv)
        with pytest.raises(ValueError, match="expected a cleared cache, got one at position 40"):
            snapshot.read_into(kv, file)
        assert rows(kv) == before


@by_kind
def test_a_cache_must_be_cleared_before_reading(kind: str, path: Path) -> None:
    with cache(20, **KINDS[kind]) as saved, um.KVCache(2, 2, 32, 64, **KINDS[kind]) as kv:
        saved.save(path)
        one = np.full((1, 2, 32), 3, np.float32)
        kv.append(0, one, one)  # a token that layer 1 lacks
        with pytest.raises(ValueError, match="expected a cleared cache, got one with reserved"):
            snapshot.read_into(kv, path)
        assert (kv.layer(0)[0] == 3).all()
        assert kv.layer(0)[0].shape[2] == 1
        kv.clear()
        kv.reserve(2)
        with pytest.raises(ValueError, match="expected a cleared cache, got one with reserved"):
            snapshot.read_into(kv, path)
        kv.commit(1)
        assert kv.seq_len == 1
        kv.clear()
        snapshot.read_into(kv, path)
        assert rows(kv) == rows(saved)


def test_a_cache_without_room_is_refused(file: Path) -> None:
    with um.KVCache(2, 2, 32, 39) as kv:
        with pytest.raises(um.CacheFull, match="40 tokens, and the cache has room for 39") as error:
            snapshot.read_into(kv, file)
        assert (error.value.limit, error.value.used, error.value.asked) == (39, 0, 40)
        assert kv.seq_len == 0
