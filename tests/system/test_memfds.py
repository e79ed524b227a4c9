"""Named memory: only a process's own memfd is found by its name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from unimem.system.memfds import find_memfds, new_memfd

NAME = "unimem-test-of-memfds"


def found(name: str) -> list[bytes]:
    folder = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
    contents = []
    try:
        for fd in find_memfds(folder, name):
            contents.append(os.pread(fd, 16, 0))
            os.close(fd)
    finally:
        os.close(folder)
    return contents


def test_a_memfd_is_found_by_its_name_while_it_is_open() -> None:
    fd = new_memfd(NAME)
    os.write(fd, b"shown")
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)  # as another process would have it
    assert found(NAME) == [b"shown"]
    os.close(fd)
    assert found(NAME) == []
    os.close(reader)


def test_a_lookalike_file_is_no_memfd(tmp_path: Path) -> None:
    path = tmp_path / f"memfd:{NAME}"
    with path.open("w+b"):
        path.unlink()
        assert found(NAME) == []


def test_kernels_without_the_newest_flag_work(monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags = os.memfd_create, []

    def create(name: str, given: int) -> int:
        flags.append(given)
        if len(flags) == 1:
            raise OSError(errno.EINVAL, "before Linux 6.3")
        return real(name, given)

    monkeypatch.setattr(os, "memfd_create", create)
    os.close(new_memfd(NAME))
    assert flags[0] ^ flags[1] == 8  # MFD_NOEXEC_SEAL
