"""Interrupted loads from a server: the next one continues."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.processes.staged_models import TINY, read_elsewhere
from support.servers.model_server import serving
from support.servers.object_server import BUCKET, TINY_PATH, TINY_URL, ObjectServer
from unimem.remote import transfers
from unimem.staging import keeper
from unimem.staging.keeper import drop
from unimem.staging.unfinished import find_unfinished
from unimem.weights.staged import Held

PIECE = 100_000
N_PIECES = -(-TINY.stat().st_size // PIECE)
HEADER = "0-262143"

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def break_off(store: ObjectServer, **options: Any) -> list[Held]:
    """Stage while the server fails after four ranges, and return what is kept of it."""
    good = iter(range(5))
    store.choose_fault = lambda *_: "" if next(good, None) is not None else "503"
    with pytest.raises(OSError, match="503"):
        um.stage(TINY_URL, **options)
    store.choose_fault = lambda *_: ""
    return find_unfinished(TINY_URL)


def test_without_resume_nothing_is_left(store: ObjectServer, backing: Any) -> None:
    assert break_off(store, backing=backing) == []


def test_the_next_call_asks_for_the_rest(store: ObjectServer, backing: Any) -> None:
    (held,) = break_off(store, backing=backing, resume=True)
    assert [row[:3] for row in held.arrived] == [(0, i * PIECE, PIECE) for i in range(4)]
    assert held.nbytes == 4 * PIECE
    assert held.staleness() == "only a part of it has come"
    there = {first for _, first, _, _ in held.arrived}
    store.begins(HEADER)
    with um.stage(TINY_URL, backing=backing, resume=True) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()
        assert store.begins(HEADER) == sorted(set(range(0, N_PIECES * PIECE, PIECE)) - there)
        assert find_unfinished(TINY_URL) == []


@pytest.mark.slow
def test_a_load_may_be_interrupted_repeatedly(store: ObjectServer) -> None:
    n_there = 0
    while N_PIECES - n_there > 4:  # as many as come before the server fails
        (held,) = break_off(store, resume=True)
        assert find_unfinished(TINY_URL) == [held], "what was taken over is not kept twice"
        assert len(held.arrived) > n_there
        n_there = len(held.arrived)
    with um.stage(TINY_URL, resume=True) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()


@pytest.mark.slow
def test_complete_files_are_not_requested_again(
    store: ObjectServer, split: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in split:
        store.add(f"/{BUCKET}/{path.name}", path.read_bytes())
    url = f"s3://{BUCKET}/{split[0].name}"
    last = f"/{BUCKET}/{split[-1].name}"
    size = split[-1].stat().st_size
    data_of_last = [0]

    def fault(_: str, path: str) -> str:
        data_of_last[0] += path == last
        return "503" if data_of_last[0] > 1 else ""  # the first is its header

    store.choose_fault = fault
    with pytest.raises(OSError, match="503"):
        um.stage(url, resume=True)
    try:
        (held,) = find_unfinished(url)
        assert {number for number, *_ in held.arrived} == set(range(len(split) - 1))
        store.choose_fault = lambda *_: ""
        store.asked.clear()
        with um.stage(url, resume=True) as staged, um.open_weights(staged.path) as there:
            assert len(there.files) == len(split)
        data = [path for _, path, wanted in store.asked if wanted != HEADER]
        assert data == [last] * -(-size // PIECE), "files that were whole are not read again"
    finally:
        for held in find_unfinished(url):
            drop(held)


def test_a_load_continues_after_an_interrupt(store: ObjectServer) -> None:
    def interrupt(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    store.slow_s = 0.2
    good = iter(range(5))
    store.choose_fault = lambda *_: "" if next(good, None) is not None else "slow"
    with pytest.raises(KeyboardInterrupt):
        um.stage(TINY_URL, resume=True, progress=interrupt)
    store.choose_fault = lambda *_: ""
    (held,) = find_unfinished(TINY_URL)
    store.begins(HEADER)
    with um.stage(TINY_URL, resume=True):
        assert len(store.begins(HEADER)) == N_PIECES - len(held.arrived)


def test_the_sender_never_looks_like_the_keeper(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, `drop` in another process would end this program."""
    seen: list[Held] = []
    run_child = keeper.run_child

    def run_and_look(*given: Any, **options: Any) -> None:
        seen.extend(find_unfinished(TINY_URL))
        run_child(*given, **options)
        seen.extend(find_unfinished(TINY_URL))

    monkeypatch.setattr(keeper, "run_child", run_and_look)
    (held,) = break_off(store, resume=True)
    assert held.pid != os.getpid()
    assert seen == []


def test_another_version_begins_anew(store: ObjectServer) -> None:
    break_off(store, resume=True)
    data = bytearray(TINY.read_bytes())
    data[-1] ^= 1
    store.add(TINY_PATH, bytes(data))
    store.begins(HEADER)
    with um.stage(TINY_URL, resume=True) as staged:
        assert read_elsewhere(staged.path) == bytes(data)
        assert len(store.begins(HEADER)) == N_PIECES
        assert find_unfinished(TINY_URL) == []


def test_changed_pieces_are_requested_again(store: ObjectServer) -> None:
    (held,) = break_off(store, resume=True, backing="shm")
    with open(held.path, "r+b") as file:
        file.seek(held.arrived[0][1])
        file.write(b"\0" * 16)
    store.begins(HEADER)
    with um.stage(TINY_URL, resume=True) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()
        assert held.arrived[0][1] in store.begins(HEADER)


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_useless_pieces_are_not_kept(store: ObjectServer, change: str) -> None:
    answered = iter(range(10**6))

    def later(*_: str) -> str:
        if next(answered) == 5:
            if change == "gone":
                del store.objects[TINY_PATH]
            else:
                store.add(TINY_PATH, TINY.read_bytes()[::-1])
        return ""

    store.choose_fault = later
    with pytest.raises(OSError, match=r"replaced|no such file") as caught:
        um.stage(TINY_URL, resume=True)
    assert caught.value.errno in (errno.ESTALE, errno.ENOENT)
    assert find_unfinished(TINY_URL) == []


@pytest.mark.usefixtures("store")  # for its small pieces and short waits
def test_without_a_version_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    read_range = transfers.read_range
    with serving() as server:
        url = server.add(TINY)

        def read_and_fail(*given: Any) -> None:
            read_range(*given)
            server.statuses["/tiny.gguf"] = 503

        monkeypatch.setattr(transfers, "read_range", read_and_fail)
        with pytest.raises(OSError, match="503"):
            um.stage(url, resume=True)
        assert find_unfinished(url) == []
