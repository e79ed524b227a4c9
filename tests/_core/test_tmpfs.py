"""In-memory file systems without a mount point."""

from __future__ import annotations

import os

import pytest

import unimem as um
from unimem._core.tmpfs import huge_page_bytes, open_mount, seal_mount


def test_huge_pages_have_a_size_or_are_absent() -> None:
    assert huge_page_bytes() in (0, *(1 << bits for bits in range(16, 31)))


def test_a_mount_holds_files_and_can_be_sealed() -> None:
    try:
        folder = open_mount(1 << 20, False)
    except um.PlacementError as error:
        pytest.skip(f"mounting a tmpfs needs CAP_SYS_ADMIN: {error}")
    try:
        file = os.open("x", os.O_RDWR | os.O_CREAT, dir_fd=folder)
        assert os.write(file, b"abc") == 3
        with pytest.raises(um.PlacementError):
            seal_mount(folder)  # a file is open for writing
        os.close(file)
        seal_mount(folder)
        with pytest.raises(OSError, match="Read-only"):
            os.open("y", os.O_RDWR | os.O_CREAT, dir_fd=folder)
    finally:
        os.close(folder)
