"""Repeated interrupts leave no read or write under way, so that none is late."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.files.snapshot_files import append, cache, rows, small_chunks
from support.processes import interrupts
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")

N_INTERRUPTS = 3


class Slow:
    """A system call that waits until the main thread was interrupted several times."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, calls: Callable[..., bool]) -> None:
        self._true = getattr(os, name)
        self._calls = calls
        self._interrupted = threading.Event()
        self._sender = threading.Thread(target=self._interrupt)
        self._lock = threading.Lock()
        self.n_begun = self.n_ended = 0
        self.n_handled = 0
        self._raises = True
        patch.setattr(os, name, self)

    def __call__(self, fd: int, data: Any, offset: int) -> int:
        if not self._calls(offset):
            return self._true(fd, data, offset)  # type: ignore[no-any-return]
        with self._lock:
            if self.n_begun == 0:
                self._sender.start()
            self.n_begun += 1
        assert self._interrupted.wait(60)
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
        for n in range(1, N_INTERRUPTS + 1):
            time.sleep(0.05)  # the main thread waits by then
            signal.pthread_kill(main, signal.SIGINT)
            end = time.monotonic() + 60
            while self.n_handled < n and time.monotonic() < end:
                time.sleep(0.001)
        time.sleep(0.05)
        self._interrupted.set()

    def join(self) -> None:
        """Wait for the remaining interrupts, which no longer raise."""
        self._raises = False
        self._sender.join()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Slow]]:
    """Make a call slow; every interrupt is counted and raises."""
    made: list[Slow] = []

    def make(name: str, calls: Callable[[int], bool]) -> Slow:
        made.append(Slow(monkeypatch, name, calls))
        return made[0]

    true = signal.signal(signal.SIGINT, lambda *_: made[0].handle())
    yield make
    signal.signal(signal.SIGINT, true)


def test_no_write_is_late(
    slow: Callable[..., Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    path = tmp_path / "session"
    path.write_bytes(b"old")
    with cache(500, 512) as kv:
        calls = slow("pwrite", lambda _: True)
        with pytest.raises(KeyboardInterrupt) as caught:
            kv.save(path)
        # This file gets the descriptor of the written one.
        with (tmp_path / "other").open("w+b") as other:
            at_once = calls.n_begun, calls.n_ended
            calls.join()
            assert os.fstat(other.fileno()).st_size == 0
    assert at_once == (calls.n_begun, calls.n_ended)
    assert calls.n_ended == calls.n_begun <= 4
    assert caught.value.args == (N_INTERRUPTS,)
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["other", "session"]


def test_no_read_is_late(
    slow: Callable[..., Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    path = tmp_path / "session"
    with cache(500, 512) as saved, um.KVCache(2, 2, 32, 512) as kv, cache(500, 512, seed=1) as new:
        saved.save(path)
        data = snapshot.describe(path).data_offset
        calls = slow("preadv", lambda offset: offset >= data)
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


def test_an_interrupt_after_an_error_is_raised(
    slow: Callable[..., Slow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write fails, and interrupts arrive while the others are waited for."""
    small_chunks(monkeypatch)
    path = tmp_path / "session"
    with cache(500, 512) as kv:
        kv.save(path)
        data = snapshot.describe(path).data_offset
        another_began = threading.Event()

        def waits(offset: int) -> bool:
            if offset == data:
                assert another_began.wait(60)
                raise OSError(errno.ENOSPC, "")
            another_began.set()
            return True

        calls = slow("pwrite", waits)
        with pytest.raises(KeyboardInterrupt) as caught:
            kv.save(path)
        at_once = calls.n_begun, calls.n_ended
        calls.join()
    assert caught.value.args == (N_INTERRUPTS,)
    assert at_once == (calls.n_begun, calls.n_ended)
    assert 0 < calls.n_begun == calls.n_ended
    assert os.listdir(tmp_path) == ["session"]


def descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # it goes with its last user
@pytest.mark.parametrize("what", ["save", "map", "copy", "read_into", "verify"])
def test_an_interrupt_at_any_line_leaves_nothing(what: str, tmp_path: Path) -> None:
    path = tmp_path / "session"
    with cache(8, 16) as kv, um.KVCache(2, 2, 32, 16) as other:
        kv.save(path)

        def read() -> None:
            other.clear()
            snapshot.read_into(other, path)

        def mapped() -> None:
            with um.KVCache.restore(path, mode="map") as restored:
                restored.verify()

        calls: dict[str, Callable[[], object]] = {
            "save": lambda: kv.save(path),
            "map": mapped,
            "copy": lambda: um.KVCache.restore(path, mode="copy").close(),
            "read_into": read,
            "verify": lambda: snapshot.check(path),
        }
        calls[what]()
        whole, before = path.read_bytes(), descriptors()
        n = 0
        files = ("kv/snapshot", "base/atomic_file.py", "base/descriptors.py")
        for _ in interrupts.at_each_line(calls[what], *files):
            n += 1
            if descriptors() != before:
                gc.collect()  # a traceback and its frames hold each other
            assert descriptors() == before, n
            assert os.listdir(tmp_path) == ["session"], n
            assert path.read_bytes() == whole, n
        assert n > 20


def test_the_file_of_a_mapped_cache_may_outlive_all_modules(
    run_python: Run, tmp_path: Path
) -> None:
    path = tmp_path / "session"
    with cache(8, 16) as kv:
        kv.save(path)
    ended = run_python(
        f"""
        import builtins, sys
        import unimem as um
        with um.KVCache.restore({str(path)!r}) as kv:
            builtins.kept = sys.kept = [kv._body._snapshot]
        builtins.kept.append(builtins.kept)  # a cycle, which no reference count ends
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
