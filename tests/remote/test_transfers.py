"""Bytes of objects: read by ranges, tried again, checked; and written whole."""

from __future__ import annotations

import errno
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest

from support.processes.forks import in_child, refuses
from support.servers.object_server import FAULTS, ObjectServer, serving_objects
from unimem.remote import client, transfers
from unimem.remote.client import Server, open_server
from unimem.remote.hashes import find_hashes
from unimem.remote.transfers import RemoteBytes, Version, read_range, read_wanted, retried
from unimem.remote.url_errors import in_own_words

pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")

URL, PATH = "s3://bucket/a/b", "/bucket/a/b"
DATA = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(client, "_STREAM_BYTES", 1)
    monkeypatch.setattr(transfers, "_LEAST_BYTES", 1000)
    with serving_objects(monkeypatch) as state:
        state.add(PATH, DATA.tobytes())
        yield state


@pytest.fixture
def server(store: ObjectServer) -> Iterator[Server]:
    opened, shown = open_server(URL)
    assert shown == URL
    yield opened
    opened.close()


def sources(store: ObjectServer, out: np.ndarray, digest: str = "") -> list[RemoteBytes]:
    version = Version(DATA.nbytes, f'"{store.tags[PATH]}"')
    return [RemoteBytes(URL, version, digest, 0, out)]


def test_ranges_come_in_parallel_and_are_checked(store: ObjectServer, server: Server) -> None:
    out, told = np.zeros_like(DATA), []
    read_wanted(
        server, sources(store, out, store.tags[PATH]), threads=3,
        progress=lambda *figures: told.append(figures),
    )  # fmt: skip
    assert np.array_equal(out, DATA)
    ranges = sorted(int(asked.split("-")[0]) for _, _, asked in store.asked)
    assert ranges == list(range(0, 300_000, 50_000))
    assert told[-1] == (300_000, 300_000)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("slow", "wrong bytes")])
def test_it_goes_on_where_it_stopped(store: ObjectServer, server: Server, fault: str) -> None:
    faults = chain([fault, fault], repeat(""))
    store.choose_fault = lambda *_: next(faults)
    out = np.zeros_like(DATA)
    read_range(server, URL, 0, out)
    assert np.array_equal(out, DATA)
    begins = [int(asked.split("-")[0]) for _, _, asked in store.asked]
    assert len(begins) == 3
    assert begins == sorted(begins)
    if fault == "short":
        assert begins == [0, 150_000, 225_000]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("503", r"HTTP status 503.*\(3 tries\)"), ("closed", r"\(3 tries\)"),
     ("slow", r"did not answer within 0\.2 s.*\(3 tries\)")],
)  # fmt: skip
def test_tries_end(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    monkeypatch.setattr(transfers, "TRIES", 3)
    monkeypatch.setattr(client, "WAIT_S", 0.2)
    store.choose_fault = lambda *_: fault
    server, _ = open_server(URL)
    with pytest.raises(OSError, match=text) as caught:
        read_range(server, URL, 0, np.zeros_like(DATA))
    assert caught.value.filename == URL
    assert "s3cret" not in str(caught.value)
    assert len(store.asked) == 3


def test_nobody_listens(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TRIES", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    server, _ = open_server(URL)
    with pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        read_range(server, URL, 0, np.zeros_like(DATA))


def test_a_server_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_objects(monkeypatch) as gone:
        server, _ = open_server(URL)
    with ExitStack() as undo:

        def pause(tries: int, stop: object) -> None:
            assert tries == 1
            back = undo.enter_context(serving_objects(monkeypatch, gone.port))
            back.add(PATH, DATA.tobytes())

        monkeypatch.setattr(transfers, "_pause", pause)
        out = np.zeros_like(DATA)
        read_range(server, URL, 0, out)
        assert np.array_equal(out, DATA)


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda s: s.objects.pop(PATH), errno.ENOENT),
        (lambda s: s.add(PATH, DATA[::-1].tobytes()), errno.ESTALE),
        (lambda s: s.add(PATH, DATA[:-1].tobytes(), s.tags[PATH]), errno.ESTALE),
    ],
)
def test_a_change_meanwhile_is_noticed(
    store: ObjectServer, server: Server, change: Callable[[ObjectServer], Any], number: int
) -> None:
    wanted = sources(store, np.zeros_like(DATA))
    answered = iter(range(100))

    def after_two(*_: str) -> str:
        if next(answered) == 2:
            change(store)
        return ""

    store.choose_fault = after_two
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is compared
        read_wanted(server, wanted, threads=1)
    assert (caught.value.errno, caught.value.filename) == (number, URL)
    assert len(store.asked) == 3, "it is not tried again"


def test_damage_on_the_way_is_healed(store: ObjectServer, server: Server) -> None:
    faults = chain(["wrong bytes", "", "wrong bytes", "", "", "", "wrong bytes"], repeat(""))
    store.choose_fault = lambda *_: next(faults)
    out = np.zeros_like(DATA)
    read_wanted(server, sources(store, out, store.tags[PATH]), threads=2)
    assert np.array_equal(out, DATA)


def test_damage_that_stays_is_an_error(store: ObjectServer, server: Server) -> None:
    store.add(PATH, DATA.tobytes(), hashlib.md5(b"other").hexdigest())
    out = np.zeros_like(DATA)
    with pytest.raises(OSError, match=r"not those of the hash.*two reads agree.*verify=False"):
        read_wanted(server, sources(store, out, store.tags[PATH]))
    read_wanted(server, sources(store, out))
    store.choose_fault = lambda *_: "wrong bytes"
    with pytest.raises(OSError, match="sends other bytes each time, from byte"):
        read_wanted(server, sources(store, out, store.tags[PATH]))


def inject(store: ObjectServer, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Read again and again while every third answer is wrong, until n were."""
    monkeypatch.setattr(client, "WAIT_S", 0.3)
    store.slow_s = 0.6
    rng = random.Random(n)
    store.choose_fault = lambda *_: rng.choice(FAULTS) if rng.random() < 0.3 else ""
    server, _ = open_server(URL)
    errors: list[OSError] = []
    while store.n_faults < n:
        out = np.zeros_like(DATA)
        try:
            read_wanted(server, sources(store, out, store.tags[PATH]), threads=8)
        except OSError as error:
            errors.append(error)
        else:
            assert np.array_equal(out, DATA)
    assert len(errors) <= store.n_faults // 10
    assert all(error.filename == URL and "s3cret" not in str(error) for error in errors)
    store.choose_fault = lambda *_: "503"
    monkeypatch.setattr(transfers, "TRIES", 2)
    with pytest.raises(OSError, match="HTTP status 503"):
        read_wanted(server, sources(store, np.zeros_like(DATA)))


@pytest.mark.parametrize("n", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_faults(store: ObjectServer, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    inject(store, monkeypatch, n)


def test_what_progress_raises_ends_it(store: ObjectServer, server: Server) -> None:
    class EnoughError(Exception):
        pass

    def progress(*_: int) -> None:
        raise EnoughError

    store.slow_s, store.choose_fault = 0.2, lambda *_: "slow"
    before = threading.active_count()
    with pytest.raises(EnoughError):
        read_wanted(server, sources(store, np.zeros_like(DATA)), threads=2, progress=progress)
    assert len(store.asked) <= 4
    assert threading.active_count() <= before + 4  # those of the server


# ---- writing ----


def test_a_condition_keeps_what_is_there(store: ObjectServer, server: Server) -> None:
    assert server.put("s3://bucket/new", b"one", create=True)
    assert not server.put("s3://bucket/new", b"two", create=True)
    assert store.objects["/bucket/new"] == b"one"
    assert server.put("s3://bucket/new", b"two")
    assert store.objects["/bucket/new"] == b"two"
    server.remove("s3://bucket/new")
    assert "/bucket/new" not in store.objects
    assert not any(method == "GET" for method, _, _ in store.asked), "nothing is listed"


def test_an_object_in_parts_is_there_at_the_end(store: ObjectServer, server: Server) -> None:
    pieces = [DATA[:100_000].data, DATA[100_000:].data]
    server.put_parts("s3://bucket/parts", iter(pieces), DATA.nbytes)
    assert store.objects["/bucket/parts"] == DATA.tobytes()

    def broken() -> Iterator[memoryview]:
        yield DATA.data
        raise OSError(errno.EIO, "lost")

    with pytest.raises(OSError, match="lost"):
        server.put_parts("s3://bucket/no", broken(), 2 * DATA.nbytes)
    assert "/bucket/no" not in store.objects


def test_a_put_is_tried_again(store: ObjectServer, server: Server) -> None:
    faults = chain(["503", "closed"], repeat(""))
    store.choose_fault = lambda *_: next(faults)
    assert retried(lambda: server.put("s3://bucket/new", b"one", create=True))
    assert len(store.asked) == 3


# ---- servers of other kinds ----


def test_what_fsspec_knows() -> None:
    pytest.importorskip("fsspec", reason="fsspec reads memory://: pip install '.[remote]'")
    server, shown = open_server("memory://box/a")
    assert server.put(shown, DATA[:5000].data, create=True)
    assert not server.put(shown, b"", create=True)
    out = np.zeros(4000, np.uint8)
    read_range(server, shown, 1000, out)
    assert np.array_equal(out, DATA[1000:5000])
    server.put_parts(shown, iter([b"ab", b"c"]), 3)
    answer = server.get(shown, 0, 3)
    assert bytes(answer.read(9)) == b"abc"
    server.remove(shown)
    with pytest.raises(FileNotFoundError, match="memory://box/a"):
        server.get(shown, 0, 1)


@pytest.mark.parametrize(
    ("url", "kind", "text"),
    [
        ("nosuch://a/b", ValueError, "expected .*s3://.*got 'nosuch://a/b'"),
        ("s3:///key", ValueError, "expected s3://bucket/key"),
        ("s3://key:s3cret@bucket/k", ValueError, "expected s3://bucket/key"),
        ("hf://me", ValueError, "expected hf://owner/repository/file"),
    ],
)
def test_urls_that_are_none(url: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        open_server(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Generic error: GET https://h/x?sig=s3cret in 3ms - HTTP error\nurl: s3cret", errno.EIO),
        ("GET https://h/x?sig=s3cret: status code: 503 Slow", errno.EIO),
        ("https://h/x?sig=s3cret: operation timed out", errno.ETIMEDOUT),
        ("https://h/x?sig=s3cret: dns error", errno.EHOSTUNREACH),
        ("https://h/x?sig=s3cret: status: 403 Forbidden", errno.EACCES),
        ("Received redirect without LOCATION", errno.EINVAL),
    ],
)
def test_texts_of_others_tell_no_secret(text: str, number: int) -> None:
    with pytest.raises(OSError, match="az://box/a") as caught, in_own_words("az://box/a", 1):
        raise RuntimeError(text)
    assert caught.value.errno == number
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("url", ["gs://bucket/a/b", "az://bucket/a/b"])
def test_stores_of_other_makers(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    here = f"http://127.0.0.1:{store.port}"
    for name, value in {
        "GOOGLE_BASE_URL": here, "GOOGLE_SKIP_SIGNATURE": "true", "AZURE_ENDPOINT": here,
        "AZURE_SKIP_SIGNATURE": "true", "AZURE_STORAGE_ACCOUNT_NAME": "account",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    server, shown = open_server(url)
    out = np.zeros_like(DATA)
    read_range(server, shown, 0, out)
    assert np.array_equal(out, DATA)
    answer = server.get(shown, 0, 1)
    assert (answer.nbytes, answer.digest) == (DATA.nbytes, ""), "their ETags are no hashes"
    with pytest.raises(FileNotFoundError, match=f"{url}.none"):
        server.get(f"{shown}.none", 0, 1)


def test_a_web_server_is_read_only(store: ObjectServer) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    server, shown = open_server(f"http://me:s3cret@127.0.0.1:{store.port}{PATH}?key=s3cret")
    out = np.zeros_like(DATA)
    read_wanted(
        server, [RemoteBytes(shown, Version(DATA.nbytes, f'"{store.tags[PATH]}"'), "", 0, out)]
    )
    assert np.array_equal(out, DATA)
    with pytest.raises(OSError, match="read-only") as caught:
        server.put(shown, b"")
    assert "s3cret" not in str(caught.value)
    server.close()


def test_a_forked_child_is_told(server: Server) -> None:
    assert in_child(lambda: refuses(lambda: server.get(URL, 0, 1), "forked child", "'spawn'"))


# ---- hashes ----


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.mark.parametrize(
    ("digest", "nbytes", "parts"),
    [
        (f'"{md5(b"")}"', 100, [[(0, 100)]]),
        ("f" * 64, 100, [[(0, 100)]]),
        (f"{md5(b'')}-1", 100, [[(0, 100)]]),
        (f"{md5(b'')}-2", 20 << 20, None),
        (f"{md5(b'')}-3", 100, []),
        ('"5f-abc"', 100, []),
        ("", 100, []),
    ],
)
def test_what_tags_are_hashes(digest: str, nbytes: int, parts: list[Any] | None) -> None:
    found = [each.parts for each in find_hashes(digest, nbytes)]
    if parts is None:  # all that it may be
        assert [(0, 10 << 20), (10 << 20, 20 << 20)] in found
        assert all(len(each) == 2 for each in found)
    else:
        assert found == parts


def test_a_hash_of_parts() -> None:
    mib = 1 << 20
    data = bytes(range(256)) * (12 * mib // 256)
    pieces = [data[i : i + 5 * mib] for i in range(0, len(data), 5 * mib)]
    digests = [hashlib.md5(piece) for piece in pieces]
    tag = f"{md5(b''.join(each.digest() for each in digests))}-3"
    first, *_ = (each for each in find_hashes(tag, len(data)) if each.part_bytes == 5 * mib)
    assert first.matches(digests)
    assert not first.matches([*digests[:2], hashlib.md5(b"")])
