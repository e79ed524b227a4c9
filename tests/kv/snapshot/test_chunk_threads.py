"""Threads over chunks: no work outlives an interrupt, and the first chunk's error is raised."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from support.files.snapshot_files import cache, small_chunks
from support.processes import interrupts
from unimem.errors import SnapshotError
from unimem.kv import snapshot
from unimem.kv.snapshot import chunk_threads
from unimem.kv.snapshot.source import LocalSnapshot, RemoteSnapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The description of a file of several chunks."""
    small_chunks(monkeypatch)
    path = tmp_path / "session"
    with cache(60, 64) as kv:
        kv.save(path)
    return snapshot.describe(path)


@pytest.mark.filterwarnings("ignore:unclosed Block:ResourceWarning")  # it goes with its last user
def test_no_work_is_late_after_an_interrupt_at_any_line(saved: Any) -> None:
    begun: list[None] = []
    done: list[None] = []

    def work(chunk: Any, buffer: Any) -> None:
        if chunk.number == 3:  # earlier chunks begin in any case
            raise ValueError
        begun.append(None)
        time.sleep(0.002)
        done.append(None)

    def each_chunk() -> None:
        with suppress(ValueError):
            chunk_threads.for_each_chunk(saved, work)

    for _ in interrupts.at_each_line(each_chunk, "kv/snapshot/chunk_threads.py", "base/threads.py"):
        assert len(begun) == len(done)
    assert len(begun) == len(done) > 0


def test_the_error_of_the_first_failed_chunk_is_raised(saved: Any) -> None:
    later_failed = threading.Event()

    def work(chunk: Any, _: Any) -> None:
        if chunk.number == 3:
            later_failed.set()
            raise ValueError(chunk.number)
        if chunk.number == 1:
            assert later_failed.wait(60)
            raise ValueError(chunk.number)

    with pytest.raises(ValueError, match="1"):
        chunk_threads.for_each_chunk(saved, work)


def test_each_chunk_is_done_once_with_aligned_memory(saved: Any) -> None:
    done: list[int] = []

    def work(chunk: Any, buffer: Any) -> None:
        assert buffer.ctypes.data % 4096 == 0
        assert buffer.nbytes >= chunk.nbytes + chunk.padding
        done.append(chunk.number)

    chunk_threads.for_each_chunk(saved, work)
    assert sorted(done) == list(range(len(saved.checksums)))


@pytest.mark.parametrize("is_remote", [False, True])
def test_only_damage_on_the_way_is_read_again(is_remote: bool) -> None:
    kind = RemoteSnapshot if is_remote else LocalSnapshot
    source: Any = Mock(spec=kind)
    errors = [SnapshotError("damaged", 0, "path")]

    def work() -> int:
        if errors:
            raise errors.pop()
        return 7

    if is_remote:
        assert chunk_threads.again(source, work) == 7
    else:
        with pytest.raises(SnapshotError):
            chunk_threads.again(source, work)
