"""Stores of prefixes in a folder, and small caches to put into them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from unimem.kv.store.store import KVStore

N_LAYERS, HEADS, DIM, CHUNK = 2, 2, 32, 8
MODEL = "tiny"
TOKENS = list(range(100, 145))  # five chunks, and five tokens more
CHUNK_COST = 4096 + 4096 + 8192  # header, data, and what the file system adds
ROOM = 16384


@pytest.fixture
def shm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder instead of ``/dev/shm``, which other programs use. Import it to use it."""
    path = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr("unimem.system.limits.SHM", str(path))
    return path


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[KVStore]:
    given = {"ram_bytes": 0, "disk_bytes": 1 << 24, "chunk_tokens": CHUNK} | options
    with um.KVStore(folder, **given) as store:
        yield store


def rows(n: int, seed: int = 0) -> np.ndarray:
    """K and V of n tokens in all layers."""
    shape = (N_LAYERS, 2, n, HEADS, DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of_v(kv: um.KVCache, v: np.ndarray) -> np.ndarray:
    """V of these rows, with the size of heads that the cache has."""
    return np.concatenate([v, -v], -1)[..., : kv.v_head_dim]


@contextmanager
def cache(n: int = 0, seed: int = 0, **options: Any) -> Iterator[um.KVCache]:
    with um.KVCache(N_LAYERS, HEADS, DIM, 64, pages="4k", **options) as kv:
        if n:
            for layer, (k, v) in enumerate(rows(n, seed)):
                kv.append(layer, k, of_v(kv, v))
        yield kv


def bytes_of(kv: um.KVCache, n: int) -> bytes:
    """The bytes of the first n tokens."""
    heads = kv.n_kv_heads if kv.order == "head" else 1
    sizes = {"k": n * kv.row_bytes // heads, "v": n * kv.v_row_bytes // heads}
    return b"".join(kv._body._rows(*lane)[: sizes[lane[1]]].tobytes() for lane in kv._body._lanes())


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def taken(folder: Path) -> int:
    """The bytes that ``du`` reports."""
    paths = [folder, *folder.iterdir()]
    return sum(path.lstat().st_blocks * 512 for path in paths)


@contextmanager
def large_cache(value: int | None = 7) -> Iterator[um.KVCache]:
    """A cache for one chunk of 4 MiB, with bytes of this value or empty."""
    with um.KVCache(2, 8, 128, 512, pages="4k") as kv:
        if value is not None:
            kv.reserve(512)
            for lane in kv._body._lanes():
                kv._body._restore_rows(*lane, 512, 512)[:] = value
            kv.commit(512)
        yield kv


def needs_notes(folder: Path) -> None:
    """Skip a test where the file system keeps no attributes of files."""
    try:
        os.setxattr(folder, "user.unimem", b"x")
    except OSError:
        pytest.skip("the file system keeps no attributes of files")
