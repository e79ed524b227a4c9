from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import unimem as um
from support.files.prefix_stores import files_of
from support.models import make
from support.servers.llama_server import FakeLlama, answer_to, fake_llama
from unimem.errors import FormatError
from unimem.llama_cpp.proxy import RESTORED, SlotProxy
from unimem.llama_cpp.server import LlamaServer
from unimem.llama_cpp.slot_file import write_slot_file

SYSTEM = "You are careful. " * 8
SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=make.TINY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir()
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "kv", ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=SIZE) as store:
        yield store


class Served:
    """A proxy that runs, its server, and what it logged."""

    def __init__(self, url: str, fake: FakeLlama, log: list[str]) -> None:
        self.url, self.fake, self.log = url, fake, log

    def ask(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, bytes, int]:
        """Return status, body and restored tokens of a response."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read(), int(response.getheader(RESTORED, "-1"))
        finally:
            connection.close()

    def send(self, *pieces: bytes) -> socket.socket:
        """Send bytes of a request, one after the other, and return the connection."""
        address = urlsplit(self.url)
        assert address.port is not None
        client = socket.create_connection((address.hostname, address.port), timeout=30)
        for piece in pieces:
            client.sendall(piece)
        return client

    def complete(self, text: str, **more: Any) -> tuple[str, int]:
        """Return an answer, and restored tokens."""
        status, data, n = self.ask("/completion", {"prompt": text, "n_predict": 4} | more)
        assert status == 200, data
        return json.loads(data)["content"], n


@contextmanager
def served(
    store: um.KVStore, model: Path, folder: Path, *, options: str = "", **knobs: Any
) -> Iterator[Served]:
    log: list[str] = []
    with fake_llama(folder, model, **knobs) as fake:
        server = LlamaServer(fake.url, folder)
        where = ("127.0.0.1", 0)
        proxy = SlotProxy(store, model, server, where, options=options, log=log.append)
        thread = threading.Thread(target=proxy.serve)
        thread.start()
        try:
            yield Served("http://{}:{}".format(*proxy.address), fake, log)
        finally:
            proxy.close()
            thread.join()


def expected(text: str, **knobs: Any) -> str:
    return answer_to({"prompt": text, "n_predict": 4}, **knobs)


def test_another_server_goes_on_from_what_one_computed(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    first, second = SYSTEM + "one", SYSTEM + "two"
    with served(store, model, folder, n_slots=1) as one:
        assert one.complete(first) == (expected(first), 0)
        # The slot has it.
        assert one.complete(first + "?") == (expected(first + "?"), 0)
        assert one.log == []
    with served(store, model, folder) as two:
        before = two.fake.n_computed
        restored = (len(SYSTEM) + 1) // SIZE * SIZE
        assert two.complete(second) == (expected(second), restored)
        assert two.fake.n_computed - before == len(second) + 1 - restored
        assert two.log == []
    assert list(folder.iterdir()) == []


def test_an_answer_is_stored_with_its_prompt(store: um.KVStore, model: Path, folder: Path) -> None:
    with served(store, model, folder) as one:
        said, _ = one.complete(SYSTEM, n_predict=40)
    with served(store, model, folder) as two:
        _, n = two.complete(SYSTEM + said + "and?")
    assert n == (len(SYSTEM) + 1 + 39) // SIZE * SIZE


@pytest.mark.parametrize("stream", [False, True])
def test_chats_pass_as_the_server_answers(
    store: um.KVStore, model: Path, folder: Path, stream: bool
) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}]
    chat: dict[str, Any] = {"messages": messages}
    chat |= {"max_tokens": 4, "stream": stream}
    with served(store, model, folder) as one:
        answers = [one.ask("/v1/chat/completions", chat) for _ in range(2)]
        assert [status for status, *_ in answers] == [200, 200]
    with served(store, model, folder) as two:
        _, data, n = two.ask("/v1/chat/completions", chat)
        body = two.fake.bodies[-1]
    events = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    text = "".join(json.loads(event).get("content", "") for event in events or [data])
    assert text == answer_to(chat)
    assert n > len(SYSTEM)
    assert body == chat | {"id_slot": body["id_slot"], "cache_prompt": True, "n_cache_reuse": 0}


def test_states_are_restored_where_they_end(store: um.KVStore, model: Path, folder: Path) -> None:
    with served(store, model, folder, has_states=True) as one:
        said, _ = one.complete(SYSTEM)
    with served(store, model, folder, has_states=True) as two:
        text = SYSTEM + said[:3]  # what the state has seen
        assert two.complete(text + "more") == (expected(text + "more"), len(text) + 1)
        assert two.complete(SYSTEM[:40])[1] == 0


def test_a_damaged_chunk_costs_time_alone(store: um.KVStore, model: Path, folder: Path) -> None:
    with served(store, model, folder) as one:
        one.complete(SYSTEM)
    for path in files_of(Path(store.folder)):
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
    with pytest.warns(um.PlacementWarning, match="removed"), served(store, model, folder) as two:
        assert two.complete(SYSTEM) == (expected(SYSTEM), 0)


def test_a_full_context_is_not_stored_as_if_it_had_all_tokens(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    text = SYSTEM[:50]
    with served(store, model, folder, n_ctx=64) as one:
        said, _ = one.complete(text, n_predict=60)
        assert said != expected(text)  # longer than the context
        kept = one.fake.slots
        assert all(not tokens or tokens[0] == 1 for tokens, _ in kept)
    with served(store, model, folder) as two:
        follows = text + said
        body = {"prompt": follows, "n_predict": 4}
        assert two.complete(follows)[0] == answer_to(body)


@pytest.mark.parametrize(
    "more",
    [
        {"cache_prompt": False},
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": 5},
    ],
)
def test_other_completions_pass_unchanged(
    store: um.KVStore, model: Path, folder: Path, more: dict[str, Any]
) -> None:
    body = {"prompt": SYSTEM, "n_predict": 4} | more
    with served(store, model, folder) as one:
        one.fake.complete = lambda body: ([97], 1)  # type: ignore[method-assign]
        status, _, n = one.ask("/completion", body)
        assert (status, n) == (200, -1)
        assert one.fake.bodies[-1] == body


def test_what_is_no_completion_passes_unchanged(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    with served(store, model, folder) as one:
        assert one.ask("/health", method="GET")[:2] == (200, b'{"status": "ok"}')
        assert one.ask("/unknown", method="GET")[0] == 404
        assert json.loads(one.ask("/v1/embeddings", {"input": "a"})[1]) == {"input": "a"}


def test_errors_of_the_server_pass(store: um.KVStore, model: Path, folder: Path) -> None:
    with served(store, model, folder) as one:
        kept = files_of(Path(store.folder))  # what the proxy knows the server by
        status, data, _ = one.ask("/completion", {"prompt": "bad"})
        assert (status, json.loads(data)["error"]["message"]) == (400, "bad")
        assert files_of(Path(store.folder)) == kept


def test_a_server_that_dies_ends_the_answer(store: um.KVStore, model: Path, folder: Path) -> None:
    with served(store, model, folder) as one:
        one.fake.dies = True
        with pytest.raises(http.client.IncompleteRead):
            one.ask("/completion", {"prompt": SYSTEM, "stream": True})
        one.fake.dies = False
        assert one.complete(SYSTEM)[0] == expected(SYSTEM)
    assert list(folder.iterdir()) == []


def test_a_server_that_is_gone_is_an_error_of_a_gateway(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    with fake_llama(folder, model) as fake:
        server = LlamaServer(fake.url, folder)
        log: list[str] = []
        proxy = SlotProxy(store, model, server, ("127.0.0.1", 0), log=log.append)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        gone = Served("http://{}:{}".format(*proxy.address), fake, log)
        status, data, _ = gone.ask("/completion", {"prompt": SYSTEM})
    finally:
        proxy.close()
        thread.join()
    assert status == 502
    assert json.loads(data)["error"]["type"] == "unavailable_error"
    assert log[0].startswith("a completion passes without the store: ")
    with pytest.raises(OSError, match="refused"):
        SlotProxy(store, model, server, ("127.0.0.1", 0))


def test_a_server_of_another_model_is_refused(
    store: um.KVStore, model: Path, folder: Path, tmp_path: Path
) -> None:
    other = make.write_model(tmp_path / "other.gguf", shape=make.TINY, seed=1)
    with fake_llama(folder, other) as fake:
        server = LlamaServer(fake.url, folder)
        with pytest.raises(FormatError, match=r"the server runs .*other.gguf, expected .*m.gguf"):
            SlotProxy(store, model, server, ("127.0.0.1", 0))


def test_a_server_that_computes_something_else_is_refused_or_has_another_name(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    with served(store, model, folder) as one:
        one.complete(SYSTEM)
    with (
        pytest.raises(FormatError, match="computes other keys"),
        served(store, model, folder, salt=1),
    ):
        pass
    with served(store, model, folder, salt=1, options="another RoPE") as two:
        assert two.complete(SYSTEM) == (expected(SYSTEM, salt=1), 0)
    with served(store, model, folder, salt=2, lora=[{"id": 0, "scale": 0.5}]) as three:
        assert three.complete(SYSTEM) == (expected(SYSTEM, salt=2), 0)
        # The server was started anew, and computes as the first one.
        three.fake.lora, three.fake.salt, three.fake.slots = [], 0, [([], [])] * 2
        assert three.complete(SYSTEM) == (expected(SYSTEM), (len(SYSTEM)) // SIZE * SIZE)


def test_completions_at_once_have_slots_of_their_own(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    texts = [f"{SYSTEM[: 40 + i]}{i}" for i in range(8)]
    found: dict[str, str] = {}
    with served(store, model, folder) as one:

        def ask(text: str) -> None:
            found[text] = one.complete(text)[0]

        threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {body["id_slot"] for body in one.fake.bodies[1:]} == {0, 1}
        assert one.complete(SYSTEM, id_slot=5)[0] == expected(SYSTEM)
        assert one.fake.bodies[-1]["id_slot"] == 1
    assert found == {text: expected(text) for text in texts}


def test_clients_of_one_slot_wait_for_each_other(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    texts = [f"{SYSTEM[: 40 + 20 * i]}{i}" for i in range(4)]
    found: dict[str, str] = {}

    def ask(one: Served, text: str) -> None:
        found[text] = one.complete(text, id_slot=0)[0]

    with served(store, model, folder) as one:
        threads = [threading.Thread(target=ask, args=(one, text)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {text: expected(text) for text in texts}
    with served(store, model, folder) as two:
        for text in texts:
            n = len(text) // SIZE * SIZE
            assert two.complete(text, id_slot=0)[0] == expected(text)
            assert two.fake.slots[0][0][:n] == [1, *map(ord, text)][:n]
    assert (one.log, two.log) == ([], [])


@pytest.mark.parametrize("adapters", [[{"id": 0, "scale": 1}], []])
@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_adapters_of_one_request_are_not_stored_for_others(
    store: um.KVStore, model: Path, folder: Path, path: str, adapters: list[Any]
) -> None:
    """The server computes what waits for a slot before it saves the slot for the proxy.

    A request that names no adapter is computed without those of the server.
    """
    begun = threading.Event()
    body = {"prompt": SYSTEM, "n_predict": 4}
    with served(store, model, folder, n_slots=1) as one:
        plain = one.fake.complete

        def complete(body: Any) -> tuple[list[int], int]:
            if "lora" in body:
                one.fake.slots[0], one.fake.salt = ([], []), 1
                try:
                    return plain(body)
                finally:
                    one.fake.salt = 0
            n_asked = one.fake.paths.count(path)
            begun.set()
            deadline = time.monotonic() + 0.5
            while one.fake.paths.count(path) == n_asked and time.monotonic() < deadline:
                time.sleep(0.01)  # the other one may wait in the server
            return plain(body)

        one.fake.complete = complete  # type: ignore[method-assign]
        first = threading.Thread(target=one.ask, args=("/completion", body))
        first.start()
        assert begun.wait(30)
        status, data, n = one.ask(path, body | {"lora": adapters})
        first.join()
        assert (status, n) == (200, -1)
        assert json.loads(data)["content"] == expected(SYSTEM, salt=1)
        assert one.fake.bodies[-1] == body | {"lora": adapters, "id_slot": 0}
    with served(store, model, folder) as two:
        assert two.complete(SYSTEM) == (expected(SYSTEM), len(SYSTEM) // SIZE * SIZE)


def test_adapters_that_change_meanwhile_are_noticed(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    found: list[tuple[str, int]] = []
    with served(store, model, folder, n_slots=1) as one:
        one.complete(SYSTEM)
        plain = one.fake.complete

        def complete(body: Any) -> tuple[list[int], int]:
            if not begun.is_set():
                begun.set()
                go_on.wait(30)
            return plain(body)

        def ask(text: str) -> None:
            found.append(one.complete(text))

        one.fake.complete = complete  # type: ignore[method-assign]
        threads = [threading.Thread(target=ask, args=(SYSTEM + "?" * 40,)) for _ in range(2)]
        threads[0].start()
        assert begun.wait(30)
        n_asked = one.fake.paths.count("/tokenize")
        threads[1].start()
        while one.fake.paths.count("/tokenize") == n_asked:
            time.sleep(0.01)
        one.fake.lora, one.fake.salt = [{"id": 0, "scale": 1}], 1
        one.fake.slots = [([], [])]
        go_on.set()
        for thread in threads:
            thread.join()
        assert found[1] == (expected(SYSTEM + "?" * 40, salt=1), 0)
    with served(store, model, folder) as two:
        assert two.complete(SYSTEM + "?" * 40)[0] == expected(SYSTEM + "?" * 40)


def test_a_client_without_the_key_learns_and_changes_nothing(
    store: um.KVStore, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(store, model, folder) as one:
        one.complete(SYSTEM)
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    body = {"prompt": [1, *map(ord, SYSTEM)], "n_predict": 4}
    with served(store, model, folder, key="secret") as two:
        before = two.fake.slots
        for headers in ({}, {"Authorization": "Bearer guess"}):
            assert two.ask("/completion", body, **headers)[::2] == (401, -1)
        assert two.fake.slots == before
        n = len(SYSTEM) // SIZE * SIZE
        assert two.ask("/completion", body, Authorization="Bearer secret")[::2] == (200, n)


# ---- requests of a stranger ----

POST = b"POST /completion HTTP/1.1\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (POST + b"Content-Length: abc\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999999\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n3b9aca00\r\n", 400),
        (POST + b"Content-Length: 2\r\n\r\n[]", 400),
        (POST + b"Content-Length: 3\r\n\r\n\xff{}", 502),
        (POST + b'Content-Length: 16\r\n\r\n{"id_slot": 0.5}', 400),
        (b"GET /\xe9 HTTP/1.1\r\n\r\n", 400),
        (b"GET /a\x01b HTTP/1.1\r\n\r\n", 400),
        (b"PATCH /health HTTP/1.1\r\n\r\n", 501),
        (b"GET /unknown HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_a_malformed_request_is_answered(
    store: um.KVStore,
    model: Path,
    folder: Path,
    request_: bytes,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served(store, model, folder) as one:
        with one.send(request_) as client:
            assert client.recv(12) == b"HTTP/1.1 %d" % status
            # It takes no more, and ends the connection by a reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert one.complete(SYSTEM) == (expected(SYSTEM), 0)
    assert capsys.readouterr().err == ""


def test_messages_of_any_shape_pass(store: um.KVStore, model: Path, folder: Path) -> None:
    with served(store, model, folder) as one:
        one.fake.complete = lambda body: ([97], 1)  # type: ignore[method-assign]
        for messages in (["a"], [{"content": 5}], {"a": 1}, None):
            body = {"messages": messages}
            assert one.ask("/v1/chat/completions", body)[0] == 200
            assert one.fake.bodies[-1] == body


@pytest.mark.parametrize("head", [b"Content-Length: 99\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_half_a_request_is_not_passed_on(
    store: um.KVStore, model: Path, folder: Path, head: bytes
) -> None:
    with served(store, model, folder) as one:
        n = len(one.fake.bodies)
        with one.send(POST + head + b"\r\n", b"2\r\n{}\r\n") as client:
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
        assert len(one.fake.bodies) == n


def test_chunks_trailers_and_expectations_of_a_client(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    body = json.dumps({"prompt": SYSTEM, "n_predict": 4}).encode()
    head = POST + b"Transfer-Encoding: Chunked\r\nExpect: 100-continue\r\n\r\n"
    pieces = [b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:])]
    with (
        served(store, model, folder) as one,
        one.send(head, *pieces, b"0\r\nTrailer: a\r\n\r\n") as client,
        client.makefile("rb") as answers,
    ):
        for line in (b"HTTP/1.1 100 Continue\r\n", b"\r\n", b"HTTP/1.1 200 OK\r\n"):
            assert answers.readline() == line
        while answers.readline() != b"\r\n":
            pass
        assert json.loads(answers.read1())["content"] == expected(SYSTEM)
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert answers.readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    body = json.dumps({"prompt": SYSTEM, "n_predict": 4, "stream": True}).encode()
    head = b"POST /completion HTTP/1.0\r\nConnection: keep-alive\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    with (
        served(store, model, folder) as one,
        one.send(head + body) as client,
        client.makefile("rb") as answer,
    ):
        _, _, events = answer.read().partition(b"\r\n\r\n")
    lines = [line for line in events.splitlines() if line]
    assert all(line.startswith(b"data: ") for line in lines)
    text = "".join(json.loads(line[6:]).get("content", "") for line in lines)
    assert text == expected(SYSTEM)


def test_a_client_that_goes_while_it_waits_frees_its_slot(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def complete(body: Any) -> tuple[list[int], int]:
        begun.set()
        go_on.wait(60)
        return [97], 1

    body = b'{"prompt": [5, 6], "id_slot": 0}'
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with served(store, model, folder) as one:
        one.fake.complete = complete  # type: ignore[method-assign]
        try:
            with one.send(request):
                assert begun.wait(30)
            with one.send(request):
                deadline = time.monotonic() + 30
                while one.fake.paths.count("/completion") < 3:
                    assert time.monotonic() < deadline, "the slot was not free"
                    time.sleep(0.01)
        finally:
            go_on.set()


def test_a_client_that_goes_in_a_stream_costs_nothing_stored(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    body = json.dumps({"prompt": SYSTEM, "n_predict": 2000, "stream": True}).encode()
    with served(store, model, folder) as one:
        one.complete(SYSTEM)
        kept = files_of(Path(store.folder))
        with one.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body) as client:
            assert client.recv(12) == b"HTTP/1.1 200"
        assert one.complete(SYSTEM + "?")[0] == expected(SYSTEM + "?")
        assert set(kept) <= set(files_of(Path(store.folder)))
    assert list(folder.iterdir()) == []


# ---- files of slots that are not those of the server ----


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def be_of_version_5(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4] + (5).to_bytes(4, "little") + data[8:])


def be_empty(path: Path) -> None:
    path.write_bytes(b"")


def replace(path: Path) -> None:
    """Replace a file by that of another conversation, as whole as the first one."""
    other = FakeLlama(path.parent, path)
    other.complete({"prompt": "Somebody else's words."})
    write_slot_file(path, *other.state(0))


@pytest.mark.parametrize("spoil", [shorten, be_of_version_5, be_empty, replace, Path.unlink])
def test_a_spoiled_file_of_a_slot_is_not_stored(
    store: um.KVStore, model: Path, folder: Path, spoil: Callable[[Path], object]
) -> None:
    with served(store, model, folder) as one:
        kept = files_of(Path(store.folder))
        one.fake.spoil = spoil
        assert one.complete(SYSTEM) == (expected(SYSTEM), 0)
    assert len(one.log) == (spoil is not replace)
    assert files_of(Path(store.folder)) == kept
    assert list(folder.iterdir()) == []


def test_a_server_that_restores_nothing_computes(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    with served(store, model, folder) as one:
        one.complete(SYSTEM)
    with served(store, model, folder) as two:
        two.fake.restore = None  # type: ignore[assignment]
        assert two.complete(SYSTEM) == (expected(SYSTEM), 0)
        assert [line.partition(":")[0] for line in two.log] == ["nothing was restored"]


def test_another_server_than_llama_s_is_refused(
    store: um.KVStore, model: Path, folder: Path
) -> None:
    with fake_llama(folder, model) as fake:
        fake.lora = 5  # type: ignore[assignment]
        with pytest.raises(FormatError, match="answers as no llama-server does"):
            SlotProxy(store, model, LlamaServer(fake.url, folder), ("127.0.0.1", 0))
