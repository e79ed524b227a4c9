"""A server of one object, and the client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers.object_server import DATA, PATH, URL, ObjectServer, serving_objects
from unimem.remote import client, transfers
from unimem.remote.client import Server, open_server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")
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
