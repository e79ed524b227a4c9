"""Staging from a server: straight into shared memory, and on from where a load was broken off."""

# ruff: noqa: F811 - fixtures that are imported, and asked for by their names

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.processes.staged_models import (
    TINY,
    indexed,  # noqa: F401
    left,
    may_mount,
    read_elsewhere,
    split,  # noqa: F401
)
from support.servers.model_server import serving
from support.servers.object_server import BUCKET, ObjectServer, serving_objects
from unimem.remote import transfers
from unimem.staging import keeper
from unimem.staging.keeper import drop
from unimem.staging.unfinished import find_unfinished
from unimem.weights.remote_files import RemoteFiles
from unimem.weights.staged import Held, holders

pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")

URL, PATH = f"s3://{BUCKET}/tiny.gguf", f"/{BUCKET}/tiny.gguf"
RUN_CHILD = keeper.run_child
PIECE = 100_000
N_PIECES = -(-TINY.stat().st_size // PIECE)
HEADER = "0-262143"

pytestmark = pytest.mark.usefixtures("nothing_is_left")
needs_mount = pytest.mark.skipif(not may_mount(), reason="this process may not mount a tmpfs")


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """What is left of a stage; connections may stay open for the next request."""

    def ours() -> tuple[list[str], list[str], set[str]]:
        gc.collect()
        fds, stale, children = left()
        return [fd for fd in fds if not fd.startswith(("socket:", "anon_inode:"))], stale, children

    before = ours()
    yield
    assert ours() == before


@pytest.fixture(params=[pytest.param("tmpfs", marks=needs_mount), "memfd", "shm"])
def backing(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(transfers, "MOST_WAIT_S", 0.002)
    monkeypatch.setattr(transfers, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(RemoteFiles, "data_threads", 1)  # so that it is known what comes first
    with serving_objects(monkeypatch) as state:
        state.add(PATH, TINY.read_bytes())
        yield state
        for held in find_unfinished(URL):
            drop(held)


def begins(store: ObjectServer) -> list[int]:
    """First bytes of the ranges that were asked for since the last time, without headers."""
    asked = [int(wanted.split("-")[0]) for _, _, wanted in store.asked if wanted != HEADER]
    store.asked.clear()
    return sorted(asked)


def broken_off(store: ObjectServer, **options: Any) -> Held | None:
    """Stage while the server fails after four ranges; what is kept of it, if anything."""
    good = iter(range(5))
    store.choose_fault = lambda *_: "" if next(good, None) is not None else "503"
    with pytest.raises(OSError, match="503"):
        um.stage(URL, **options)
    store.choose_fault = lambda *_: ""
    return next(iter(find_unfinished(URL)), None)


def test_it_goes_from_the_server_to_shared_memory(store: ObjectServer, backing: Any) -> None:
    told: list[tuple[int, int]] = []
    with um.stage(URL, backing=backing, progress=lambda *n: told.append(n)) as staged:
        assert (staged.source, staged.backing) == (URL, backing)
        assert read_elsewhere(staged.path) == TINY.read_bytes()
        assert os.stat(staged.path).st_mode & 0o777 == 0o400
        assert staged.granted.resident_bytes >= staged.nbytes == TINY.stat().st_size
        (held,) = (held for held in holders() if held.path == staged.path)
        assert (held.source, held.staleness()) == (URL, None)
    assert begins(store) == list(range(0, N_PIECES * PIECE, PIECE))
    assert told[-1] == (TINY.stat().st_size,) * 2


def test_models_of_several_files(store: ObjectServer, split: list[Path], indexed: Path) -> None:
    for path in (*split, *indexed.parent.glob("model*")):
        store.add(f"/{BUCKET}/{path.name}", path.read_bytes())
    for path, url in ((split[0], f"s3://{BUCKET}/{split[1].name}"),
                      (indexed, f"s3://{BUCKET}/{indexed.name}")):  # fmt: skip
        with (
            um.stage(url) as staged,
            um.open_weights(staged.path) as there,
            um.open_weights(path) as here,
        ):
            assert there.content_hash() == here.content_hash()
            assert len(there.files) == len(here.files)


def test_a_name_of_the_web_leads_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        for escaped, name in (("a%20b.gguf", "a b.gguf"), ("%2e%2e%2Fx.gguf", "%2e%2e%2Fx.gguf"),
                              ("", "model")):  # fmt: skip
            server.files[f"/m/{escaped}"] = TINY.read_bytes()
            with um.stage(f"{server.url}/m/{escaped}", backing="shm") as staged:
                assert os.path.basename(staged.path) == name
                assert read_elsewhere(staged.path) == TINY.read_bytes()


def test_wrong_bytes_are_noticed_in_the_shared_memory(store: ObjectServer) -> None:
    store.add(PATH, TINY.read_bytes(), "0" * 32)
    with pytest.raises(OSError, match="not those of the hash"):
        um.stage(URL)
    with um.stage(URL, verify=False) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()


def test_what_is_refused(store: ObjectServer) -> None:
    with pytest.raises(ValueError, match=r"repack=True: s3://.*stage it first"):
        um.stage(URL, repack=True)
    with pytest.raises(ValueError, match="verify: expected False or True"):
        um.stage(URL, verify=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume: expected False or True"):
        um.stage(URL, resume="no")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no such file"):
        um.stage(f"s3://{BUCKET}/none.gguf", resume=True)
    assert begins(store) == []


# ---- broken off ----


def test_without_resume_nothing_is_left(store: ObjectServer, backing: Any) -> None:
    assert broken_off(store, backing=backing) is None


def test_the_next_call_asks_for_the_rest(store: ObjectServer, backing: Any) -> None:
    held = broken_off(store, backing=backing, resume=True)
    assert held is not None
    assert [row[:3] for row in held.arrived] == [(0, i * PIECE, PIECE) for i in range(4)]
    assert held.nbytes == 4 * PIECE
    assert held.staleness() == "only a part of it has come"
    there = {first for _, first, _, _ in held.arrived}
    begins(store)
    with um.stage(URL, backing=backing, resume=True) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()
        assert begins(store) == sorted(set(range(0, N_PIECES * PIECE, PIECE)) - there)
        assert find_unfinished(URL) == []


@pytest.mark.slow
def test_it_may_be_broken_off_again_and_again(store: ObjectServer) -> None:
    n_there = 0
    while N_PIECES - n_there > 4:  # as many as come before the server fails
        held = broken_off(store, resume=True)
        assert held is not None
        assert find_unfinished(URL) == [held], "what was taken over is not kept twice"
        assert len(held.arrived) > n_there
        n_there = len(held.arrived)
    with um.stage(URL, resume=True) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()


@pytest.mark.slow
def test_a_file_behind_the_one_that_was_broken_off(
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


def test_an_interrupt_is_gone_on_from(store: ObjectServer) -> None:
    def interrupt(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    store.slow_s = 0.2
    good = iter(range(5))
    store.choose_fault = lambda *_: "" if next(good, None) is not None else "slow"
    with pytest.raises(KeyboardInterrupt):
        um.stage(URL, resume=True, progress=interrupt)
    store.choose_fault = lambda *_: ""
    (held,) = find_unfinished(URL)
    begins(store)
    with um.stage(URL, resume=True):
        assert len(begins(store)) == N_PIECES - len(held.arrived)


def test_who_hands_it_over_is_not_what_keeps_it(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dropped it meanwhile would end this program."""
    seen: list[Held] = []

    def run_and_look(*given: Any, **options: Any) -> None:
        seen.extend(find_unfinished(URL))
        RUN_CHILD(*given, **options)
        seen.extend(find_unfinished(URL))

    monkeypatch.setattr(keeper, "run_child", run_and_look)
    held = broken_off(store, resume=True)
    assert held is not None
    assert held.pid != os.getpid()
    assert seen == []


def test_another_version_begins_anew(store: ObjectServer) -> None:
    assert broken_off(store, resume=True)
    data = bytearray(TINY.read_bytes())
    data[-1] ^= 1
    store.add(PATH, bytes(data))
    begins(store)
    with um.stage(URL, resume=True) as staged:
        assert read_elsewhere(staged.path) == bytes(data)
        assert len(begins(store)) == N_PIECES
        assert find_unfinished(URL) == []


def test_pieces_that_are_not_what_they_were_are_asked_for_again(store: ObjectServer) -> None:
    held = broken_off(store, resume=True, backing="shm")
    assert held is not None
    with open(held.path, "r+b") as file:
        file.seek(held.arrived[0][1])
        file.write(b"\0" * 16)
    begins(store)
    with um.stage(URL, resume=True) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()
        assert held.arrived[0][1] in begins(store)


@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_what_is_of_no_use_is_not_kept(store: ObjectServer, change: str) -> None:
    answered = iter(range(10**6))

    def later(*_: str) -> str:
        if next(answered) == 5:
            if change == "gone":
                del store.objects[PATH]
            else:
                store.add(PATH, TINY.read_bytes()[::-1])
        return ""

    store.choose_fault = later
    with pytest.raises(OSError, match=r"replaced|no such file") as caught:
        um.stage(URL, resume=True)
    assert caught.value.errno in (errno.ESTALE, errno.ENOENT)
    assert find_unfinished(URL) == []


def test_a_server_that_tells_no_version_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(transfers, "MOST_WAIT_S", 0.002)
    with serving() as server:
        url = server.add(TINY)

        def progress(*_: int) -> None:
            server.statuses["/tiny.gguf"] = 503

        monkeypatch.setattr(transfers, "PIECE_BYTES", PIECE)
        monkeypatch.setattr(RemoteFiles, "data_threads", 1)
        original = transfers.read_range

        def slowly(*given: Any) -> None:
            original(*given)
            progress()

        monkeypatch.setattr(transfers, "read_range", slowly)
        with pytest.raises(OSError, match="503"):
            um.stage(url, resume=True)
        assert find_unfinished(url) == []
