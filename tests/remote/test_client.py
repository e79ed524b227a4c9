"""Servers of each kind: reading, writing, and URLs that are refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import chain, repeat

import numpy as np
import pytest

from support.processes.forks import in_child, refuses
from support.servers.object_server import DATA, PATH, URL, ObjectServer
from unimem.remote.client import Server, open_server
from unimem.remote.transfers import RemoteBytes, Version, read_range, read_wanted, retried


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


def test_the_fallback_of_fsspec() -> None:
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
def test_invalid_urls(url: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        open_server(url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/a/b", "az://bucket/a/b"])
def test_stores_of_other_makers(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    store.serve_other_stores(monkeypatch)
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
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


def test_a_forked_child_is_refused(server: Server) -> None:
    assert in_child(lambda: refuses(lambda: server.get(URL, 0, 1), "forked child", "'spawn'"))
