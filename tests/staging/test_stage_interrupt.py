"""Interrupted before any line, staging leaves no descriptor, no name and no process."""

from __future__ import annotations

import pytest

import unimem as um
from support.files.weight_bytes import mapped_bytes
from support.processes import interrupts
from support.processes.staged_models import TINY, left, may_mount

pytestmark = pytest.mark.usefixtures("gives_memory_back")

FILES = ("staging/", "base/descriptors.py", "system/memfds.py")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it goes with its last user
@pytest.mark.parametrize("backing", ["tmpfs", "memfd", "shm"])
def test_interrupted_at_each_line_nothing_is_left(backing: str) -> None:
    if backing == "tmpfs" and not may_mount():
        pytest.skip("this user may not mount")

    def stage() -> None:
        um.stage(TINY, backing=backing).close()  # type: ignore[arg-type]

    stage()
    before, n = (left(), mapped_bytes()), 0
    for _ in interrupts.at_each_line(stage, *FILES):
        n += 1
        assert (left(), mapped_bytes()) == before, n
    assert n > 50
