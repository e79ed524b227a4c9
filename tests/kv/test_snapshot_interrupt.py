"""Interrupted twice, saving and reading leave nothing under way: no late write hits anything."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from snapshot_bytes import path
from snapshot_files import append, cache, rows, small_chunks
from unimem.kv import snapshot

__all__ = ["path"]

pytestmark = pytest.mark.usefixtures("gives_memory_back")

N_INTERRUPTS = 3


class Slow:
    """A system call that waits until the main thread was interrupted several times.

    The first interrupt comes when the main thread is in a function of this name.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, name: str, calls: Callable[[int], bool], function: str
    ) -> None:
        self._true = getattr(os, name)
        self._calls, self._functions = calls, (function,)
        self._interrupted = threading.Event()
        self._sender = threading.Thread(target=self._interrupt)
        self._lock = threading.Lock()
        self.n_begun = self.n_ended = self.n_handled = 0
        self._raises = True
        patch.setattr(os, name, self)

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        if not self._calls(offset):
            return self._true(fd, data, offset)  # type: ignore[no-any-return]
        with self._lock:
            if self.n_begun == 0:
                self._sender.start()
            self.n_begun += 1
        assert self._interrupted.wait(120)
        try:
            return self._true(fd, data, offset)  # type: ignore[no-any-return]
        finally:
            with self._lock:
                self.n_ended += 1

    def handle(self) -> None:
        self.n_handled += 1
        if self._raises:
            raise KeyboardInterrupt(self.n_handled)

    def _interrupt(self) -> None:
        main = threading.main_thread().ident
        assert main is not None

        def is_in(*functions: str) -> bool:
            frame = sys._current_frames().get(main)
            while frame is not None and frame.f_code.co_name not in functions:
                frame = frame.f_back
            return frame is not None

        functions = self._functions
        for n in range(1, N_INTERRUPTS + 1):
            until(lambda: is_in(*functions))  # noqa: B023
            signal.pthread_kill(main, signal.SIGINT)
            until(lambda: self.n_handled == n)  # noqa: B023
            functions = ("wait_until",)  # where it goes from there
        # It waits again; or it has left, too early, and waits for this thread.
        until(lambda: is_in("wait_until", "join"))
        self._interrupted.set()

    def join(self) -> None:
        """Wait for the interrupts that are to come, which do not raise any more."""
        self._raises = False
        self._sender.join()


def until(holds: Callable[[], bool]) -> None:
    """Wait, but not for ever."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Slow]]:
    """Make a call slow; every interrupt is counted and raises."""
    made: list[Slow] = []

    def make(name: str, calls: Callable[[int], bool], function: str) -> Slow:
        made.append(Slow(monkeypatch, name, calls, function))
        return made[0]

    small_chunks(monkeypatch)
    true = signal.signal(signal.SIGINT, lambda *_: made[0].handle())
    yield make
    signal.signal(signal.SIGINT, true)


def test_no_write_is_late(slow: Callable[..., Slow], path: Path) -> None:
    path.write_bytes(b"old")
    with cache(500, 512) as kv:
        calls = slow("pwrite", lambda _: True, "result")
        with pytest.raises(KeyboardInterrupt) as caught:
            kv.save(path)
        # A file that gets the number of the one that was written.
        with (path.parent / "other").open("w+b") as other:
            at_once = calls.n_begun, calls.n_ended
            calls.join()
            assert os.fstat(other.fileno()).st_size == 0
    assert at_once == (calls.n_begun, calls.n_ended)
    assert calls.n_ended == calls.n_begun <= 4
    assert caught.value.args == (N_INTERRUPTS,)
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(path.parent)) == ["other", "session"]


def test_no_read_is_late(slow: Callable[..., Slow], path: Path) -> None:
    with cache(500, 512) as saved, um.KVCache(2, 2, 32, 512) as kv, cache(500, 512, seed=1) as new:
        saved.save(path)
        data = snapshot.describe(path).data_offset
        calls = slow("preadv", lambda offset: offset >= data, "result")
        with pytest.raises(KeyboardInterrupt):
            snapshot.read_into(kv, path)
        assert kv.next_position == 0
        append(kv, 500, seed=1)  # the next conversation
        at_once = calls.n_begun, calls.n_ended
        calls.join()
        assert at_once == (calls.n_begun, calls.n_ended)
        assert rows(kv) == rows(new)
        kv.clear()
        snapshot.read_into(kv, path)
        assert rows(kv) == rows(saved)


def test_an_interrupt_after_an_error_is_not_lost(slow: Callable[..., Slow], path: Path) -> None:
    """The first write fails, and it is while the others are waited for that interrupts come."""
    with cache(500, 512) as kv:
        kv.save(path)
        data = snapshot.describe(path).data_offset
        another_began = threading.Event()

        def waits(offset: int) -> bool:
            if offset == data:
                assert another_began.wait(120)
                raise OSError(errno.ENOSPC, "")
            another_began.set()
            return True

        calls = slow("pwrite", waits, "wait_until")
        with pytest.raises(KeyboardInterrupt) as caught:
            kv.save(path)
        at_once = calls.n_begun, calls.n_ended
        calls.join()
    assert caught.value.args == (N_INTERRUPTS,)
    assert at_once == (calls.n_begun, calls.n_ended)
    assert 0 < calls.n_begun == calls.n_ended
    assert os.listdir(path.parent) == ["session"]
