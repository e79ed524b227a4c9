"""Scripts that stage in processes of their own, and places where nothing can be mounted."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.processes.staged_models import (
    TINY,
    indexed,
    leaves_nothing,
    left,
    may_mount,
    model,
    split,
)
from support.servers.object_server import TINY_PATH, TINY_URL, ObjectServer, serving_objects
from unimem._core import tmpfs
from unimem.errors import PlacementError
from unimem.remote import transfers
from unimem.staging import backings
from unimem.staging.keeper import drop
from unimem.staging.unfinished import find_unfinished
from unimem.system import limits
from unimem.weights.remote_files import RemoteFiles

__all__ = ["indexed", "leaves_nothing", "model", "split"]  # fixtures


@pytest.fixture
def needs_mount() -> None:
    if not may_mount():
        pytest.skip("this process may not mount a tmpfs")


@pytest.fixture(params=["tmpfs", "memfd", "shm"])
def backing(request: pytest.FixtureRequest) -> Any:
    """Each kind but hugetlb, which needs a pool."""
    if request.param == "tmpfs":
        request.getfixturevalue("needs_mount")
    return request.param


@contextmanager
def run(script: str, *wrapper: str, status: int = 0) -> Iterator[Callable[[], str]]:
    """Run a script, and return a function that reads a line of it; its input ends at the end."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*wrapper, sys.executable, "-c", script], **pipes) as started:
        lines = started.stdout
        assert lines is not None
        yield lambda: lines.readline().rstrip("\n")
        started.communicate("")
        assert started.returncode == status


@pytest.fixture
def process() -> Callable[..., AbstractContextManager[Callable[[], str]]]:
    return run


@pytest.fixture
def no_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The script that pretends to be the mounting child, where nothing can be mounted."""

    def refuse(nbytes: int, huge: bool) -> int:
        raise PlacementError(errno.EPERM, "mounting a tmpfs: fsopen: Operation not permitted")

    child = tmp_path / "child.py"
    # ENOSPC: no user namespaces are allowed.
    child.write_text("import os, sys\nos.write(int(sys.argv[4]), b'\\x1c\\0\\0\\0unshare')\n")
    monkeypatch.setattr(tmpfs, "open_mount", refuse)
    monkeypatch.setattr(backings, "_CHILD", str(child))
    return child


@pytest.fixture
def own_shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of /dev/shm, where no other process removes stale files."""
    with tempfile.TemporaryDirectory(dir=limits.SHM) as folder:
        for module in (limits, backings):
            monkeypatch.setattr(module, "SHM", folder)
        yield Path(folder)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No descriptor, folder or child is left of a stage; connections may stay open."""

    def ours() -> tuple[list[str], list[str], set[str]]:
        gc.collect()
        fds, stale, children = left()
        return [fd for fd in fds if not fd.startswith(("socket:", "anon_inode:"))], stale, children

    before = ours()
    yield
    assert ours() == before


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """A store with a model, requested in ranges of 100 kB, one after the other."""
    pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(transfers, "MOST_WAIT_S", 0.002)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(RemoteFiles, "data_threads", 1)
    with serving_objects(monkeypatch) as state:
        state.add(TINY_PATH, TINY.read_bytes())
        yield state
        for held in find_unfinished(TINY_URL):
            drop(held)
