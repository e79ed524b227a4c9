"""A small HTTP server of model files, which counts requests and misbehaves on demand."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from support.servers.listener import listening


@dataclass
class ModelServer:
    """The files and habits of the server, and the requests it got. Paths begin with a slash."""

    files: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    statuses: dict[str, int] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # more, for each answer
    lost_bytes: int = 0  # of each answer, at its end
    silent: bool = False  # no answer before the end
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    tokens: list[str | None] = field(default_factory=list)  # authorizations of the requests
    sent_bytes: int = 0  # without heads
    url: str = ""
    end: threading.Event = field(default_factory=threading.Event)

    def add(self, *paths: Path, folder: str = "/") -> str:
        """Serve these files, and return the URL of the first."""
        for path in paths:
            self.files[folder + path.name] = path.read_bytes()
        return self.url + folder + paths[0].name


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    state: ModelServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        state = self.state
        path = self.path.partition("?")[0]
        wanted = self.headers.get("Range", "")
        state.asked.append((self.command, self.path, wanted.removeprefix("bytes=")))
        state.tokens.append(self.headers.get("Authorization"))
        if state.silent:
            state.end.wait()
            self.close_connection = True
            return
        status = state.statuses.get(path, 404 if path not in state.files else 200)
        headers = dict(state.headers)
        body = state.files.get(path, b"") if status == 200 else b""
        if path in state.redirects:
            status, body, headers["Location"] = 302, b"", state.redirects[path]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if status == 200 and found and state.has_ranges:
            first, total = int(found[1]), len(body)
            body = body[first : int(found[2]) + 1]
            status = 206
            headers.setdefault("Content-Range", f"bytes {first}-{first + len(body) - 1}/{total}")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.close_connection = state.lost_bytes > 0
        body = body[: len(body) - state.lost_bytes]
        if self.command == "GET":
            with suppress(ConnectionError):  # a client may hang up
                for at in range(0, len(body), 1 << 16):
                    piece = body[at : at + (1 << 16)]
                    state.sent_bytes += len(piece)  # before the client can have it
                    self.wfile.write(piece)


@contextmanager
def serving() -> Iterator[ModelServer]:
    """Serve on a port of this machine, in a thread, until the end."""
    state = ModelServer()
    with listening(type("Handler", (_Handler,), {"state": state}), state.end) as port:
        state.url = f"http://127.0.0.1:{port}"
        yield state
