"""The processes that read a staged model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.processes.staged_models import start_reader, stop
from unimem.staging import readers
from unimem.staging.readers import Readers, find_readers
from unimem.weights.staged import Held, holders_of

PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


def staged_here() -> Held:
    (held,) = holders_of(os.getpid())
    return held


def test_a_file_that_is_mapped_or_open_has_a_reader(model: Path, backing: Any) -> None:
    with um.stage(model, backing=backing) as staged:
        assert find_readers([staged_here()]) == [Readers(())]
        assert not find_readers([staged_here()])[0]
        reader = start_reader(staged.path)
        try:
            assert find_readers([staged_here()]) == [Readers((reader.pid,))]
        finally:
            stop(reader)
        with subprocess.Popen(
            ["sh", "-c", f"exec 9<{staged.path}; echo; read line"], **PIPES
        ) as shell:
            assert shell.stdout is not None
            assert shell.stdout.readline()
            assert find_readers([staged_here()]) == [Readers((shell.pid,))]
            shell.communicate(b"\n")


def test_readers_that_are_hidden(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user or container maps a file in /dev/shm."""
    with um.stage(model, backing="shm") as staged:
        reader = start_reader(staged.path)
        monkeypatch.setattr(readers, "_read_by", lambda pid, names: ())
        try:
            (found,) = find_readers([staged_here()])
            assert found == Readers((), has_others=True)
            assert found
        finally:
            stop(reader)
        assert find_readers([staged_here()]) == [Readers(())]
