"""Work in several threads ends before the call returns, even if interrupted at any line."""

from __future__ import annotations

import errno
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress

import pytest

from support.processes import interrupts
from unimem.base import threads


def test_no_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_TICK_SECONDS", 0.001)
    begun: list[None] = []
    done: list[None] = []
    stopped = threading.Event()

    def work() -> None:
        begun.append(None)
        stopped.wait(60)
        time.sleep(0.002)  # it does not end at once
        done.append(None)

    def fail() -> None:
        raise ValueError

    def run() -> None:
        stopped.clear()
        with suppress(ValueError):
            threads.run_in_threads(2, work, stop=stopped.set, tick=fail)

    for _ in interrupts.at_each_line(run, "base/threads.py"):
        assert len(begun) == len(done)
    assert len(begun) == len(done) > 2


def test_the_last_of_several_interrupts_is_raised_at_the_end() -> None:
    asked: list[None] = []

    def holds() -> bool:
        asked.append(None)
        if len(asked) < 4:
            raise KeyboardInterrupt(len(asked))
        return len(asked) == 6

    with pytest.raises(KeyboardInterrupt) as caught:
        threads.wait_until(holds)
    assert caught.value.args == (3,)
    assert len(asked) == 6


def test_a_failed_thread_start_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[None] = []

    def start(work: Callable[[], None], given: tuple[()]) -> int:
        if ended:
            raise RuntimeError("can't start new thread")
        ended.append(None)
        return start_new_thread(work, given)

    monkeypatch.setattr(threads, "start_new_thread", start)
    with pytest.raises(
        OSError, match=r"can't start new thread: 'ulimit -u', or pids\.max"
    ) as caught:
        threads.run_in_threads(2, lambda: None, stop=lambda: None, tick=lambda: None)
    assert caught.value.errno == errno.EAGAIN
