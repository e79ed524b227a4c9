"""Files of weights for tests of loading, and what their arrays must hold."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_files as gf
import unimem as um
from cgroups import SmallCgroup, cgroup_512mb  # noqa: F401 - a fixture

MIB = 1 << 20
I8 = 24
READS = ["copy", "direct"]
LOADS = ["map", *READS]


def write(path: Path, *nbytes: int) -> Path:
    """A file of tensors of random bytes, each of this many."""
    rows, offset = [], 0
    for i, n in enumerate(nbytes):
        rows.append(gf.tensor(f"t{i}", (n,), I8, offset))
        offset += -(-n // 32) * 32
    raw, _ = gf.join(gf.head(len(nbytes), 0), *rows)
    raw += bytes(-len(raw) % 32)
    path.write_bytes(raw + bytes(gf.random_bytes(offset, seed=offset)))
    return path


def write_hole(path: Path, nbytes: int) -> Path:
    """A file of one tensor, which takes no room on the disk."""
    raw, _ = gf.join(gf.head(1, 0), gf.tensor("t", (nbytes,), I8, 0))
    path.write_bytes(raw)
    os.truncate(path, len(raw) + -len(raw) % 32 + nbytes)
    return path


def check(weights: um.Weights) -> None:
    """Each tensor has the bytes of its file."""
    for tensor in weights.tensors.values():
        with open(tensor.file, "rb") as file:
            file.seek(tensor.offset)
            assert tensor.as_array().tobytes() == file.read(tensor.nbytes)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """No descriptor and no thread is left, whatever is raised."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    yield
    assert held() == before
