"""KV caches to which something happens in the middle of a call: another thread closes them, or the
garbage collector takes a view."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import Talk
from support.kernel.os_faults import os_faults

pytestmark = pytest.mark.usefixtures("gives_memory_back")

N_TOKENS = 40_000  # of 1 KiB, in f32: copying them takes milliseconds
KINDS: dict[str, Any] = {"fixed": {}, "growing": {"grow": True}, "ring": {"window": N_TOKENS}}


@contextmanager
def at_call(nth: int, do: Callable[[], object]) -> Iterator[list[str]]:
    """Do something in the middle of the nth system call from now on; the calls are listed."""
    calls: list[str] = []

    def fails(name: str) -> bool:
        calls.append(name)
        if len(calls) == nth:
            do()
        return False

    with os_faults() as faults, mock.patch.object(faults, "fails", fails):
        yield calls


def refused_to_close(kv: um.KVCache) -> bool:
    try:
        kv.close()
    except BufferError:
        return True
    return False


@pytest.mark.parametrize("leave", [False, True], ids=["close", "leave the with"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_thread_closes_during_a_large_append(kind: str, leave: bool) -> None:
    """Closing is refused as long as tokens are copied; leaving keeps the memory as long."""
    k = np.ones((N_TOKENS, 4, 64), "float32")
    n_seen = 0
    while n_seen == 0:  # else the append was over, or had not begun
        kv = um.KVCache(1, 4, 64, N_TOKENS, dtype="f32", pages="4k", **KINDS[kind])

        def append(kv: um.KVCache = kv) -> None:
            with contextlib.suppress(um.ClosedError):  # it was closed before
                kv.append(0, k, k)

        thread = threading.Thread(target=append)
        thread.start()
        while thread.is_alive() and refused_to_close(kv):
            assert not kv.closed
            n_seen += 1
            if leave:
                kv.__exit__(None, None, None)
        thread.join()  # which wrote to memory that was there until then, or would have crashed
        kv.close()
        assert kv.closed


USES: dict[str, Callable[[um.KVCache], Any]] = {
    "append": lambda kv: kv.append(0, *np.ones((2, 30, 4, 64), "float32")),
    "append many": lambda kv: kv.append(0, *np.ones((2, 90, 4, 64), "float32")),
    "append_all": lambda kv: kv.append_all(*np.ones((2, 2, 4, 64), "float32")),
    "reserve": lambda kv: kv.reserve(30),
}


@pytest.mark.parametrize("leave", [False, True], ids=["close", "leave the with"])
@pytest.mark.parametrize("use", USES)
def test_another_thread_closes_while_memory_is_made(use: str, leave: bool) -> None:
    """At any system call: closing is refused, and who was left says that it is closed."""
    nth, over = 0, False
    while not over:
        nth += 1
        kv = um.KVCache(2, 4, 64, 4000, grow=True, pages="4k")
        refused: list[bool] = []

        def close(kv: um.KVCache = kv, refused: list[bool] = refused) -> None:
            refused.append(refused_to_close(kv))
            if leave:
                kv.__exit__(None, None, None)

        def close_in_a_thread(close: Callable[[], None] = close) -> None:
            thread = threading.Thread(target=close)
            thread.start()
            thread.join()

        with at_call(nth, close_in_a_thread) as calls:
            try:
                USES[use](kv)
            except um.ClosedError:
                assert leave
                assert kv.closed
            else:
                assert not kv.closed
                over = len(calls) < nth
        assert refused == ([] if over else [True])
        kv.close()
    assert nth > 8


@pytest.mark.slow
@pytest.mark.parametrize("drop", ["crop", "trim_to"])
def test_a_collection_in_the_middle_of_growth_takes_a_view(drop: str) -> None:
    """Whatever memory waited for the view, none is given back that tokens are about to use."""
    nth, over = 0, False
    gc.collect()
    gc.disable()
    try:
        while not over:
            nth += 1
            with um.KVCache(2, 4, 64, 4000, dtype="f32", grow=True, pages="4k") as kv:
                talk = Talk(kv)
                talk.append(100)
                cycle: list[Any] = [kv.layer(0)]
                cycle.append(cycle)
                full = kv.capacity_bytes
                getattr(talk, drop)(8)
                assert kv.capacity_bytes == full
                del cycle
                with at_call(nth, gc.collect) as calls:
                    talk.append(150)
                    over = len(calls) < nth
                talk.check()
                gc.collect()
                talk.append(50)
                talk.check()
                talk.trim_to(8)
                assert kv.capacity_bytes < full / 2
    finally:
        gc.enable()
    assert nth > 8
