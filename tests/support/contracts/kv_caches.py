"""KV caches of every kind, and what their tests do beside calling them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

import unimem as um
from support.kernel.os_faults import OsFaults, os_faults
from unimem._core.status import ledger

PLAIN = ("fixed", "tape", "grow")
KINDS = (*PLAIN, "ring")


@contextmanager
def cache(kind: str, *dims: int, pages: Any = "4k", **options: Any) -> Iterator[um.KVCache]:
    """Make a cache of these layers, heads, head_dim and tokens, which are a ring's window."""
    if kind == "tape":
        with um.Tape(1 << 26, pages=pages) as tape:
            tape.take_bytes(1000)
            yield um.KVCache(*dims, tape=tape, **options)
        return
    if kind == "grow":
        options["grow"] = True
    elif kind == "ring":
        options["window"] = dims[-1]
    with um.KVCache(*dims, pages=pages, **options) as kv:
        yield kv


# What needs room for one more token.
ONE_MORE: dict[str, Callable[[um.KVCache], Any]] = {
    "append": lambda kv: kv.append(0, *np.zeros((2, 1, kv.n_kv_heads, kv.head_dim), "f4")),
    "append_all": lambda kv: kv.append_all(
        *np.zeros((2, kv.n_layers, kv.n_kv_heads, kv.head_dim), "f4")
    ),
    "reserve": lambda kv: kv.reserve(1),
}


def drop_here(held: list[Any]) -> None:
    held.clear()


def drop_in_a_thread(held: list[Any]) -> None:
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


def drop_in_a_collection(held: list[Any]) -> None:
    cycle: list[Any] = [*held]
    cycle.append(cycle)
    held.clear()
    del cycle
    gc.collect()


@contextmanager
def meanwhile(do: Callable[[], object], n_threads: int = 2) -> Iterator[None]:
    """Let other threads do something again and again; what they raise is raised at the end."""
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            do()

    with ThreadPoolExecutor(n_threads) as pool:
        doing = [pool.submit(again) for _ in range(n_threads)]
        try:
            yield
        finally:
            over.set()
    for each in doing:
        each.result()


def each_call_fails(call: Callable[[], Any]) -> Iterator[tuple[OsFaults, Any]]:
    """Call again and again, and fail the first, the second and so on system call.

    Gives the faults and what was raised, or what was returned when no call was left to fail.
    """
    with os_faults() as faults:
        outcome: Any = MemoryError()
        nth = 0
        while isinstance(outcome, Exception):
            nth += 1
            faults.arm(nth)
            try:
                outcome = call()
            except (MemoryError, OSError, um.PlacementError) as error:
                assert faults.failed
                outcome = error
            finally:
                faults.disarm()
            yield faults, outcome


def check_that_making_it_may_fail(make: Callable[[], Any], *calls: str) -> Any:
    """Whichever system call of a constructor fails leaves nothing; what is made at last."""
    before, failed = ledger()["history"]["mapped_bytes"], set()
    for faults, outcome in each_call_fails(make):
        if isinstance(outcome, Exception):
            failed.add(faults.failed)
            assert ledger()["history"]["mapped_bytes"] == before
    assert failed >= {"mmap", *calls}
    return outcome
