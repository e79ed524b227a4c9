"""Descriptors are closed despite errors and interrupts."""

from __future__ import annotations

import os

import pytest

from support.processes import interrupts
from unimem.base.descriptors import Descriptors


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_one_failed_close_does_not_stop_the_others() -> None:
    with Descriptors() as fds:
        opened = [fds.add(os.open, os.devnull, os.O_RDONLY) for _ in range(3)]
        assert fds == opened
        with pytest.raises(FileNotFoundError):
            fds.add(os.open, "/nowhere/at/all", os.O_RDONLY)
        os.close(opened[1])
    assert not any(map(is_open, opened))
    assert fds == []


def test_an_interrupt_at_any_line_leaves_nothing_open() -> None:
    opened = []

    def opens() -> int:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return opened[-1]

    def use() -> None:
        with Descriptors() as fds:
            fds.add(opens)

    n = 0
    for _ in interrupts.at_each_line(use, "base/descriptors.py"):
        n += 1
        assert not any(map(is_open, opened))
    assert n >= 4
