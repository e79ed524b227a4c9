"""Files of weights for tests of loading, and checks of their arrays and of the page cache."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files as gf
from unimem._core.status import ledger

MIB = 1 << 20
READS: list[Any] = ["copy", "direct"]
LOADS: list[Any] = ["map", *READS]


@cache
def _random(nbytes: int) -> bytes:
    return gf.random_bytes(nbytes).tobytes()


def write(path: Path, *nbytes: int) -> Path:
    """A file of tensors of random bytes, each of this many."""
    rows, offset = [], 0
    for i, n in enumerate(nbytes):
        rows.append(gf.tensor(f"t{i}", (n,), gf.I8, offset))
        offset += -(-n // 32) * 32
    raw, _ = gf.join(gf.head(len(nbytes), 0), *rows)
    raw += bytes(-len(raw) % 32)
    path.write_bytes(raw + _random(offset))
    return path


def write_hole(path: Path, nbytes: int) -> Path:
    """A file of one tensor, which takes no room on the disk."""
    raw, _ = gf.join(gf.head(1, 0), gf.tensor("t", (nbytes,), gf.I8, 0))
    path.write_bytes(raw)
    os.truncate(path, len(raw) + -len(raw) % 32 + nbytes)
    return path


def check(weights: um.Weights) -> None:
    """Each tensor has the bytes of its file."""
    for tensor in weights.tensors.values():
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            assert tensor.as_array().tobytes() == file.read(tensor.nbytes)


def cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache."""
    with um.Block.map(path) as block:
        return block._resident_range(0, path.stat().st_size)


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(path):
        pytest.skip(f"the file system of {path} keeps files in RAM")


def mapped_bytes() -> dict[str, int]:
    return {name: row["mapped_bytes"] for name, row in ledger().items()}


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def locked_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmLck:")[1].split()[0]) << 10


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No descriptor and no thread is left, whatever is raised."""

    def held() -> tuple[int, int]:
        return n_descriptors(), len(os.listdir("/proc/self/task"))

    gc.collect()  # an earlier test may have left some to the collector

    def left() -> list[int]:
        # Fewer are fine: NumPy's threads end at a fork.
        return [n for n, n_before in zip(held(), before, strict=True) if n > n_before]

    before = held()
    yield
    end = time.monotonic() + 10
    while left() and time.monotonic() < end:
        time.sleep(0.001)  # the kernel's part of a thread ends a moment after Python's
    assert left() == []


@pytest.fixture
def leaves_no_descriptor() -> Iterator[None]:
    gc.collect()  # an earlier test may have left some to the collector
    before = n_descriptors()
    yield
    assert n_descriptors() == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A GGUF file with every type of metadata."""
    file = tmp_path / "file.gguf"
    file.write_bytes(gf.everything())
    return file


@pytest.fixture
def weights(path: Path) -> Iterator[um.Weights]:
    with um.open_weights(path) as opened:
        yield opened
