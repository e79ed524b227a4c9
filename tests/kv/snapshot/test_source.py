"""The file of a snapshot: errors name it, and it is closed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import unimem as um
from support.files import snapshot_bytes as sb
from support.files.snapshot_bytes import file, header, path, refused
from unimem.errors import SnapshotError
from unimem.kv import snapshot

__all__ = ["file", "path"]  # fixtures

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = os.preadv
    data = header(file.read_bytes())["data_offset"]

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if offset > data:
            os.truncate(file, data + 100)
        return true(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(SnapshotError, match="became shorter while it was read"):
        um.KVCache.restore(file, mode="copy")


def test_a_read_error_names_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", mock.Mock(side_effect=OSError(errno.EIO, "")))
    with pytest.raises(OSError, match="Input/output error") as caught:
        um.KVCache.restore(file, mode="copy")
    assert caught.value.filename == str(file)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        um.KVCache.restore(tmp_path)
    with pytest.raises(FileNotFoundError):
        um.KVCache.restore(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="Expected a regular file"):
        um.KVCache.restore(tmp_path / "fifo")


def test_descriptors_are_closed(file: Path) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = n_open()
    for mode in sb.MODES:
        with um.KVCache.restore(file, mode=mode, verify=True) as kv:
            kv.save(file)
    refused(file, "no model", model="tiny")
    snapshot.describe(file)
    file.write_bytes(sb.flipped(file.read_bytes(), -1 + file.stat().st_size))
    refused(file, "checksum", verify=True)
    del kv
    assert n_open() == before
