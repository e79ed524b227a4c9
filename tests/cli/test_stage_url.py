"""`unimem stage`, `run` and `plan` of a model on a server, without a copy on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")
pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")

from support.processes.staged_models import TINY, read_elsewhere
from support.servers.model_server import serving
from support.servers.object_server import BUCKET, ObjectServer, serving_objects
from support.terminal.screens import Screen, show
from unimem.remote import transfers
from unimem.staging.keeper import drop
from unimem.weights.remote_files import RemoteFiles
from unimem.weights.staged import Held, holders

URL, PATH = f"s3://{BUCKET}/tiny.gguf", f"/{BUCKET}/tiny.gguf"
HEADER = "0-262143"
# Python warns about forks of processes with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    for name in ("FIRST_WAIT_S", "MOST_WAIT_S"):
        monkeypatch.setattr(transfers, name, 0.001)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(RemoteFiles, "data_threads", 1)  # so that it is known what comes first
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("UNIMEM_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    with serving_objects(monkeypatch) as state:
        state.add(PATH, TINY.read_bytes())
        yield state
        for held in kept():
            drop(held)
    # A plan remembers there what a process takes.
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if path.parent.name != "processes"] == []


def kept(url: str = URL) -> list[Held]:
    return [held for held in holders() if held.source == url]


def staged(*words: str) -> tuple[str, Screen]:
    screen = show("stage", *words)
    assert screen.code == 0, screen.err
    return screen.out.rstrip("\n"), screen


def n_ranges(store: ObjectServer) -> int:
    """Return the number of data ranges requested since the last call."""
    asked = [wanted for _, _, wanted in store.asked if wanted != HEADER]
    store.asked.clear()
    return len(asked)


def test_one_copy_for_all_calls(store: ObjectServer) -> None:
    path, first = staged(URL)
    assert read_elsewhere(path) == TINY.read_bytes()
    assert f"{URL} is staged: 1.0 MiB" in first.err
    assert n_ranges(store) == 11
    again, second = staged(URL)
    assert again == path
    assert "was staged already" in second.err
    assert n_ranges(store) == 0
    listed = json.loads(show("stage", "--list", "--json").out)
    (held,) = [each for each in listed if each["source"] == URL]
    assert (held["path"], held["current"]) == (path, True)
    assert "arrived" not in held
    assert show("stage", "--drop", URL).code == 0
    assert kept() == []


def test_a_replaced_object_is_staged_again(store: ObjectServer) -> None:
    path, _ = staged(URL)
    data = bytearray(TINY.read_bytes())
    data[-1] ^= 1
    store.add(PATH, bytes(data))
    again, screen = staged(URL)
    assert again != path
    assert f"{URL} was replaced on its server: its staged copy is dropped" in screen.err
    assert read_elsewhere(again) == data
    assert len(kept()) == 1


def test_an_interrupted_load_continues(store: ObjectServer) -> None:
    good = iter(range(6))
    store.choose_fault = lambda *_: "" if next(good, None) is not None else "503"
    failed = show("stage", URL)
    assert failed.code == 1
    assert failed.out == ""
    assert "HTTP status 503" in failed.err
    assert f"of {URL} stay in memory" in failed.err
    assert "the same command continues them" in failed.err
    (held,) = kept()
    assert "of it" in show("stage", "--list").out
    store.choose_fault = lambda *_: ""
    n_ranges(store)
    path, _ = staged(URL)
    assert read_elsewhere(path) == TINY.read_bytes()
    assert len(held.arrived) > 0
    assert n_ranges(store) == 11 - len(held.arrived)
    assert [one.path for one in kept()] == [path]


def test_leftovers_can_be_dropped(store: ObjectServer) -> None:
    good = iter(range(6))
    store.choose_fault = lambda *_: "" if next(good, None) is not None else "503"
    assert show("stage", URL).code == 1
    assert len(kept()) == 1
    assert show("stage", "--drop", URL).code == 0
    assert kept() == []


def test_an_invalid_hash(store: ObjectServer) -> None:
    store.add(PATH, TINY.read_bytes(), "0" * 32)
    failed = show("stage", URL)
    assert failed.code == 1
    assert "not those of the hash" in failed.err
    path, _ = staged(URL, "--no-verify")
    assert read_elsewhere(path) == TINY.read_bytes()


def test_another_query_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged by `?id=a` stays, and serves a new link to the same version."""
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        url = server.add(TINY)
        try:
            server.headers["ETag"] = '"a"'
            first, _ = staged(f"{url}?id=a")
            server.headers["ETag"] = '"b"'
            assert staged(f"{url}?id=b")[0] != first
            server.headers["ETag"] = '"a"'
            assert staged(f"{url}?id=a&expires=1")[0] == first
            server.headers["ETag"] = '"c"'
            assert "was replaced on its server" in staged(f"{url}?id=a")[1].err
            assert first not in [held.path for held in holders()]
        finally:
            show("stage", "--drop", url)


def test_without_an_etag_each_call_stages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        url = server.add(TINY)
        try:
            staged(f"{url}?key=s3cret")
            path, screen = staged(f"{url}?key=s3cret")
            assert f"the server does not tell whether {url} was replaced" in screen.err
            assert "s3cret" not in screen.err
            assert [held.path for held in kept(url)] == [path]
        finally:
            for held in kept(url):
                drop(held)


def test_run(store: ObjectServer) -> None:
    words = ("--ctx", "64", "-p", "Once upon", "-n", "8", "--json")
    of_file = json.loads(show("run", str(TINY), *words).out)
    store.asked.clear()
    screen = show("run", URL, *words)
    assert screen.code == 0, screen.err
    document = json.loads(screen.out)
    assert document["output"] == of_file["output"]
    assert document["model"]["files"] == [URL]
    assert document["model"]["load"] == "direct"


def test_run_refuses_unsupported_models_before_reading_data(store: ObjectServer) -> None:
    store.add(PATH, TINY.read_bytes().replace(b"llama", b"camel"))
    screen = show("run", URL, "-p", "x")
    assert screen.code == 1
    assert "architecture 'camel' is not supported" in screen.err
    assert show("run", f"s3://{BUCKET}/none.gguf", "-p", "x").code == 1
    assert n_ranges(store) == 0


def test_plan(store: ObjectServer) -> None:
    document = json.loads(show("plan", URL, "--json").out)
    assert document["facts"]["model"] == URL
    assert n_ranges(store) == 0
