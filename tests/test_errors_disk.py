"""Errors of a disk: calls raise an OSError that names the file, and nothing is half done.

The disk is a loop device over memory. Each write of it fails once that is sealed, and each read
while it is cut off, with the kernel's own EIO.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import streamed_models
from support.files.prefix_stores import MODEL, TOKENS, bytes_of, cache, opened
from support.files.weight_bytes import LOADS, MIB, check, drop_from_cache, write
from support.models.image_fixtures import model
from support.models.image_models import repacked_bytes
from unimem.base.atomic_file import write_text

__all__ = ["model"]  # a fixture

SIZE = 16 * MIB
SEAL_FUTURE_WRITE = 16  # F_SEAL_FUTURE_WRITE, which fcntl lacks before Python 3.13


class Disk:
    """A mounted disk, and the memory that it is."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder, self._fd = folder, fd

    def refuse_writes(self) -> None:
        """Have each write fail from now on."""
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)

    @contextmanager
    def unreadable(self) -> Iterator[None]:
        """Have each read of data fail meanwhile."""
        for path in filter(Path.is_file, self.folder.rglob("*")):
            drop_from_cache(path)
        image = os.pread(self._fd, SIZE, 0)
        os.ftruncate(self._fd, 0)
        try:
            yield
        finally:
            os.ftruncate(self._fd, SIZE)
            os.pwrite(self._fd, image, 0)

    def names(self) -> list[Path]:
        """List what is there."""
        return sorted(self.folder.rglob("*"))


def run(*words: object) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a disk that fails needs root and loop devices: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() or not shutil.which("mke2fs"):
        pytest.skip("a disk that fails needs root and mke2fs")
    folder = tmp_path / "disk"
    folder.mkdir()
    fd = os.memfd_create("disk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        device = run("losetup", "--find", "--show", f"/proc/{os.getpid()}/fd/{fd}")
        try:
            run("mke2fs", "-q", "-F", "-t", "ext2", device)
            run("mount", "-t", "ext2", device, folder)
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)  # once it is unmounted
        try:
            yield Disk(folder, fd)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    finally:
        os.close(fd)


@contextmanager
def failing(path: Path) -> Iterator[None]:
    with pytest.raises(OSError, match=r"Input/output error|cannot be read") as caught:
        yield
    assert (caught.value.errno, str(caught.value.filename)[: len(str(path))]) == (
        errno.EIO,
        str(path),
    )


def test_what_cannot_be_written_leaves_the_old_file(disk: Disk) -> None:
    talk, text, folder = (disk.folder / name for name in ("talk", "text", "store"))
    with cache(45, 1) as old, cache(45, 2) as new, cache() as out, opened(folder) as store:
        old.save(talk)
        write_text(text, "old")
        assert store.put(old, TOKENS, model=MODEL) == 40
        before = disk.names()
        disk.refuse_writes()
        writes: dict[Path, Callable[[], object]] = {
            talk: lambda: new.save(talk),
            text: lambda: write_text(text, "new"),
            folder: lambda: store.put(new, [7, *TOKENS[1:]], model=MODEL),
        }
        for path, write_to in writes.items():
            with failing(path):
                write_to()
        assert disk.names() == before
        assert store.restore_into(out, TOKENS, model=MODEL) == 40
        assert bytes_of(out, 40) == bytes_of(old, 40)
        with um.KVCache.restore(talk, verify=True) as kv:
            assert bytes_of(kv, 45) == bytes_of(old, 45)
    assert text.read_text() == "old"


def test_a_model_is_repacked_without_the_image_that_cannot_be_written(
    disk: Disk, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(disk.folder / "cache"))
    expected = repacked_bytes(model, cache=False)
    disk.refuse_writes()
    with pytest.warns(um.PlacementWarning, match="Input/output error"):
        assert repacked_bytes(model, cache=True) == expected
    assert [path for path in disk.names() if path.is_file()] == []


def test_a_session_that_cannot_be_read_is_an_error(disk: Disk) -> None:
    talk = disk.folder / "talk"
    with cache(45) as kv:
        kv.save(talk)
        for mode in ("map", "copy"):
            with disk.unreadable(), failing(talk):
                um.KVCache.restore(talk, mode=mode, verify=True)
        with um.KVCache.restore(talk, verify=True) as restored:
            assert bytes_of(restored, 45) == bytes_of(kv, 45)


def test_chunks_that_cannot_be_read_are_a_miss(disk: Disk) -> None:
    with opened(disk.folder / "store") as store, cache(45) as kv, cache() as out:
        store.put(kv, TOKENS, model=MODEL)
        with disk.unreadable(), pytest.warns(um.PlacementWarning, match="Input/output error"):
            assert store.restore_into(out, TOKENS, model=MODEL) == 0
        out.clear()
        store.put(kv, TOKENS, model=MODEL)
        assert store.restore_into(out, TOKENS, model=MODEL) == 40
        assert bytes_of(out, 40) == bytes_of(kv, 40)


def open_and_hash(path: Path, **options: Any) -> None:
    with um.open_weights(path, **options) as weights:
        weights.content_hash()


def stage(path: Path) -> None:
    um.stage(path).close()


@pytest.mark.parametrize("how", [*LOADS, "stage"])
def test_a_model_that_cannot_be_read_is_an_error(disk: Disk, how: Any) -> None:
    path = write(disk.folder / "model.gguf", MIB, MIB)
    with disk.unreadable():
        with failing(path):
            stage(path) if how == "stage" else open_and_hash(path, load=how)
        os.stat(path)
    with um.open_weights(path, load="map" if how == "stage" else how) as weights:
        check(weights)


def test_mapped_and_streamed_weights_that_cannot_be_read_are_an_error(disk: Disk) -> None:
    path = write(disk.folder / "model.gguf", MIB, MIB)
    moe = streamed_models.write(disk.folder / "moe.gguf", streamed_models.mixture())
    with (
        um.open_weights(path, load="map") as mapped,
        um.open_weights(moe, load="stream", budget="1M") as weights,
    ):
        mapped.evict()
        tensor = next(iter(streamed_models.streamed(weights).values()))
        with disk.unreadable():
            for call in (mapped.warm, mapped.content_hash, mapped["t1"].dequantize):
                with failing(path):
                    call()
            with failing(moe):
                tensor.ensure([1])
        check(mapped)
        streamed_models.check(tensor, [1])
