"""Fixtures for staged models, readers in other processes, and checks for remains."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from support.files.weight_bytes import write
from unimem._core import tmpfs
from unimem.errors import PlacementError

TINY = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
MIB = 1 << 20


def may_mount() -> bool:
    try:
        os.close(tmpfs.open_mount(MIB, False))
    except PlacementError:
        return False
    return True


def left() -> tuple[list[str], list[str], set[str]]:
    """Return open descriptors, abandoned names in /dev/shm, and children."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sorted(fds), sorted(stale()), set(children)


def stale() -> Iterator[str]:
    for folder in Path("/dev/shm").glob("unimem-stage-*"):
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                yield folder.name
            finally:
                os.close(fd)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    gc.collect()
    before = left()
    yield
    gc.collect()
    assert left() == before


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a model of a little more than three huge pages that ends inside a page."""
    return write(tmp_path / "model.gguf", 5 * MIB, MIB + 12345)


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    pytest.importorskip("gguf", reason="gguf (extra test) writes split models")
    (tmp_path / "parts").mkdir()
    whole = tmp_path / "parts" / "tiny.gguf"
    shutil.copy(TINY, whole)
    with um.open_weights(whole) as weights:
        most = -(-len(weights.tensors) // 3)
    parts = gf.split(whole, most)
    whole.unlink()
    return parts


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """Write a safetensors model of two files and an index."""
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors (extra test) is missing")
    where = {}
    for i in range(2):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        numpy.save_file({f"t{i}": np.arange(1000, dtype=np.float32) + i}, tmp_path / name)
        where[f"t{i}"] = name
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index


def read_elsewhere(path: str) -> bytes:
    """Read a file in another process."""
    return subprocess.run(["cat", path], capture_output=True, check=True).stdout


READER = """
import mmap, os, re, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
total = sum(memory[i] for i in range(0, size, mmap.PAGESIZE))
print("ready", flush=True)
for line in sys.stdin:
    inode, found = os.fstat(fd).st_ino, False
    for row in open("/proc/self/smaps"):
        head = re.match(r"[0-9a-f]+-[0-9a-f]+ \\S+ \\S+ \\S+ (\\d+)", row)
        found = int(head[1]) == inode if head else found
        if found and not head and row.split()[-1] == "kB":
            print(row.split()[0][:-1], int(row.split()[1]) << 10)
    print(f"read {sum(memory[i] for i in range(0, size, mmap.PAGESIZE)) == total}", flush=True)
"""


def start_reader(path: str) -> subprocess.Popen[str]:
    """Start a process without unimem that maps the file and touches its pages."""
    reader = subprocess.Popen(
        [sys.executable, "-I", "-c", READER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    return reader


def look(reader: subprocess.Popen[str]) -> dict[str, int]:
    """Let the reader read everything again, and return its mapping's fields in smaps."""
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write("\n")
    reader.stdin.flush()
    found = {}
    for line in iter(reader.stdout.readline, "read True\n"):
        name, value = line.split()
        assert name != "read"
        found[name] = int(value)
    return found


def stop(reader: subprocess.Popen[str]) -> None:
    reader.communicate("")
    assert reader.returncode == 0
