"""Reads of objects by ranges, with retries and checks."""

from __future__ import annotations

import errno
import hashlib
import random
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest

from support.servers.object_server import DATA, FAULTS, PATH, URL, ObjectServer, serving_objects
from unimem.remote import client, transfers
from unimem.remote.client import Server, open_server
from unimem.remote.transfers import RemoteBytes, Version, read_range, read_wanted

pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")


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
def test_a_read_continues_where_it_stopped(store: ObjectServer, server: Server, fault: str) -> None:
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
def test_tries_are_limited(
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


class Clock:
    """A clock that only pauses, and the tries of a server, move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("tries", [transfers.TRIES, transfers.PATIENT_TRIES])
@pytest.mark.parametrize(
    ("error", "try_s"),
    [(ConnectionResetError(104, "?"), 0.0), (TimeoutError(110, "?"), 30.0)],
)
@pytest.mark.parametrize("how", ["retried", "read_range"])
def test_a_server_without_progress_costs_30_seconds(
    monkeypatch: pytest.MonkeyPatch, how: str, error: OSError, try_s: float, tries: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(transfers, "time", clock)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)

    class Failing(Server):
        def _get(self, *_: object) -> Any:
            clock.sleep(try_s)
            raise error

    server, out = Failing(30.0), np.zeros(1, np.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "retried": lambda: transfers.retried(lambda: server.get(URL, 0, 1), tries),
        "read_range": lambda: read_range(server, URL, 0, out, tries=tries),
    }
    with pytest.raises(OSError, match="again later"):
        calls[how]()
    assert 10 < clock.now <= 30


def test_a_failed_read_lets_go_of_its_memory(store: ObjectServer, server: Server) -> None:
    """Libraries keep their errors in circles, with the frames in whose memory they read."""
    ring: list[object] = []

    class Circular(Server):
        def _get(self, *_: object) -> Any:
            error = ConnectionResetError(104, "reset")
            error.args += (ring,)
            ring.append(error)
            raise error

    out = np.zeros(1, np.uint8)
    before = sys.getrefcount(out)
    with suppress(OSError):
        read_range(Circular(1.0), URL, 0, out, tries=1)
    assert sys.getrefcount(out) == before
    assert ring


def test_a_refused_connection(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TRIES", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    server, _ = open_server(URL)
    with pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        read_range(server, URL, 0, np.zeros_like(DATA))


def test_a_server_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_change_during_the_read_is_detected(
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


def test_damage_in_transit_is_healed(store: ObjectServer, server: Server) -> None:
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


def test_an_error_of_progress_ends_the_read(store: ObjectServer, server: Server) -> None:
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
