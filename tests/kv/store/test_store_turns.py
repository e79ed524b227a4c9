"""Stores and saved sessions under threads: pairs of all public calls, and cancelled ones."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

import unimem as um
from support.files.prefix_stores import MODEL, TOKENS, bytes_of, cache, opened, shm
from support.processes.at_once import at_once
from unimem.kv import snapshot

__all__ = ["shm"]  # a fixture

SECONDS = 100  # for calls that end at once


def restore(store: um.KVStore, kv: um.KVCache) -> None:
    with cache() as out:
        n = store.restore_into(out, TOKENS, model=MODEL)
        assert bytes_of(out, n) == bytes_of(kv, n)


# Every public name of a store.
CALLS: dict[str, Callable[[um.KVStore, um.KVCache], object]] = {
    "__exit__": lambda store, _: store.__exit__(),
    "__repr__": lambda store, _: repr(store),
    "close": lambda store, _: store.close(),
    "closed": lambda store, _: store.closed,
    "give_back": lambda store, _: store.give_back(),
    "granted": lambda store, _: store.granted,
    "longest": lambda store, kv: store.longest(TOKENS, model=MODEL, kv=kv),
    "put": lambda store, kv: store.put(kv, TOKENS, model=MODEL),
    "restore_into": restore,
    "stat": lambda store, _: store.stat(),
}


def call_of(work: Sequence[Callable[[], object]], i: int) -> None:
    work[i]()


def test_every_public_name_is_in_the_table() -> None:
    names = {name for name in vars(um.KVStore) if not name.startswith("_")}
    assert names | {"__exit__", "__repr__"} == set(CALLS)


@pytest.mark.parametrize("tier", ["ram_bytes", "disk_bytes"])
def test_pairs_of_calls_at_once_lose_nothing(tmp_path: Path, shm: Path, tier: str) -> None:
    calls = sorted(set(CALLS) - {"close", "__exit__"})  # no other thread may use a store meanwhile

    with opened(tmp_path / "s", **{"ram_bytes": 0, "disk_bytes": 0, tier: 1 << 20}) as store:
        for pair in itertools.combinations_with_replacement(calls, 2):
            with cache(45) as one, cache(45) as other:
                work = [partial(CALLS[pair[0]], store, one), partial(CALLS[pair[1]], store, other)]
                for _ in range(3):
                    at_once(2, partial(call_of, work))
                assert store.put(one, TOKENS, model=MODEL) == 40, pair
                assert store.longest(TOKENS, model=MODEL, kv=one) == 40, pair
                restore(store, one)
        assert store.stat().damaged_chunks == 0


def test_closing_a_store_twice_at_once_is_no_error(tmp_path: Path, shm: Path) -> None:
    for _ in range(10):
        with opened(tmp_path / "s", ram_bytes=1 << 20) as store:
            at_once(2, lambda i: (store.close, store.__exit__)[i]())
    assert list(shm.iterdir()) == []


def test_a_server_of_asyncio_may_cancel_a_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of a cancelled task goes on to its end."""
    begun, go, put, fsync = threading.Event(), threading.Event(), [], os.fsync

    def wait_first(fd: int) -> None:
        begun.set()
        assert go.wait(SECONDS)
        fsync(fd)

    async def serve(store: um.KVStore, kv: um.KVCache) -> int:
        work = lambda: put.append(store.put(kv, TOKENS, model=MODEL))  # noqa: E731
        cancelled = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.to_thread(begun.wait, SECONDS)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        found = await asyncio.to_thread(store.longest, TOKENS, model=MODEL, kv=kv)
        go.set()
        return found

    monkeypatch.setattr(os, "fsync", wait_first)
    with opened(tmp_path / "s") as store, cache(45) as kv:
        assert asyncio.run(serve(store, kv)) == 0  # it ends with its threads
        assert put == [40]
        restore(store, kv)


def test_saved_sessions_are_whole_while_others_save(tmp_path: Path) -> None:
    path = tmp_path / "talk"
    with cache(45, 1) as one, cache(45, 2) as other:
        sessions = {bytes_of(kv, 45): kv for kv in (one, other)}
        one.save(path)

        def work(i: int) -> None:
            for _ in range(5):
                if i < 2:
                    (one, other)[i].save(path)
                    assert snapshot.describe(path).seq_len == 45
                else:
                    with um.KVCache.restore(path, mode=("map", "copy")[i % 2], verify=True) as kv:
                        assert bytes_of(kv, 45) in sessions

        at_once(4, work)
    assert [each.name for each in tmp_path.iterdir()] == ["talk"]
