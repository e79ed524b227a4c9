"""A small server of objects like S3: ranges, ETags, conditions and parts, and faults."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest

from support.servers.listener import listening

_DELETED = b"<DeleteResult><Deleted><Key>k</Key></Deleted></DeleteResult>"
# For this run only: another run may have staged the same URL.
BUCKET = f"bucket-{os.getpid()}"
TINY_URL, TINY_PATH = f"s3://{BUCKET}/tiny.gguf", f"/{BUCKET}/tiny.gguf"
URL, PATH = "s3://bucket/a/b", "/bucket/a/b"
DATA = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8)
FAULTS = ("reset", "short", "slow", "wrong bytes", "503", "closed")


@dataclass
class ObjectServer:
    """The objects, and the faults of the server. Paths are ``/bucket/key``."""

    objects: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    headers: dict[str, dict[str, str]] = field(default_factory=dict)  # more, for HEAD of a path
    choose_fault: Callable[[str, str], str] = lambda method, path: ""  # one of FAULTS, or ""
    slow_s: float = 1.0
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path and range
    n_faults: int = 0
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    end: threading.Event = field(default_factory=threading.Event)

    def add(self, path: str, data: bytes, tag: str = "") -> None:
        """Add an object; by default with the ETag of one that was written at once."""
        self.objects[path] = data
        self.tags[path] = tag or hashlib.md5(data).hexdigest()

    def serve_other_stores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the server of gs:// and az://, too."""
        here = f"http://127.0.0.1:{self.port}"
        for name, value in {
            "GOOGLE_BASE_URL": here, "GOOGLE_SKIP_SIGNATURE": "true", "AZURE_ENDPOINT": here,
            "AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_USE_HTTP": "true",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)

    def begins(self, header: str = "") -> list[int]:
        """Return the first bytes of the ranges requested since the last call, sorted.

        A range of `header` does not count.
        """
        begins = [int(wanted.split("-")[0]) for _, _, wanted in self.asked if wanted != header]
        self.asked.clear()
        return sorted(begins)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ObjectServer

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.begin_answer(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def begin_answer(self, status: int, nbytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(nbytes))
        self.end_headers()

    def begin(self) -> tuple[str, dict[str, list[str]], str]:
        split = urlsplit(self.path)
        path = unquote(split.path)
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        with self.state.lock:
            self.state.asked.append((self.command, path, wanted))
            fault = self.state.choose_fault(self.command, path)
            self.state.n_faults += bool(fault)
        return path, parse_qs(split.query, keep_blank_values=True), fault

    def fail(self, fault: str) -> bool:
        """Commit a fault instead of an answer; False if the fault is in the answer."""
        if fault == "503":
            self.answer(503, b"<Error><Code>SlowDown</Code></Error>")
        elif fault == "slow":
            self.state.end.wait(self.state.slow_s)
            self.close_connection = True
        elif fault in ("closed", "reset") and self.command != "GET":
            self.reset()
        elif fault == "closed":
            self.close_connection = True
        else:
            return False
        return True

    def reset(self) -> None:
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def do_GET(self) -> None:
        path, _, fault = self.begin()
        if fault and self.fail(fault):
            return
        body = self.state.objects.get(path)
        if body is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": f'"{self.state.tags[path]}"'}
        headers["Last_Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
        status = 200
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found:
            first, total = int(found[1]), len(body)
            if first >= total:
                return self.answer(416)
            body, status = body[first : int(found[2]) + 1], 206
            headers["Content_Range"] = f"bytes {first}-{first + len(body) - 1}/{total}"
        if fault == "wrong bytes" and body:
            at = 7919 * len(self.state.asked) % len(body)  # another byte each time
            body = body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :]
        if fault in ("short", "reset"):
            self.begin_answer(status, len(body), headers)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            return self.reset() if fault == "reset" else None
        with suppress(ConnectionError):
            self.answer(status, body, **headers)
        return None

    def do_HEAD(self) -> None:
        path, _, fault = self.begin()
        if fault and self.fail(fault):
            return
        body = self.state.objects.get(path)
        if body is None:
            return self.answer(404)
        told = {"ETag": f'"{self.state.tags[path]}"', **self.state.headers.get(path, {})}
        return self.answer(200, body, **told)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, query, fault = self.begin()
        if fault and self.fail(fault):
            return None
        if "partNumber" in query:
            self.state.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return self.answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')
        with self.state.lock:
            if self.headers.get("If-None-Match") == "*" and path in self.state.objects:
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self.state.add(path, body)
        return self.answer(200, ETag=f'"{self.state.tags[path]}"')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, query, fault = self.begin()
        if fault and self.fail(fault):
            return None
        if "delete" in query:
            with self.state.lock:
                for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                    self.state.objects.pop(f"{path}/{key}", None)
            return self.answer(200, _DELETED)
        if "uploads" in query:
            name = f"upload{len(self.state.uploads)}"
            self.state.uploads[name] = {}
            return self.answer(
                200,
                "<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>"
                f"{name}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        parts = [data for _, data in sorted(self.state.uploads[query["uploadId"][0]].items())]
        digests = b"".join(hashlib.md5(part).digest() for part in parts)
        tag = f"{hashlib.md5(digests).hexdigest()}-{len(parts)}"
        self.state.add(path, b"".join(parts), tag)
        return self.answer(
            200,
            "<CompleteMultipartUploadResult><Location>l</Location><Bucket>b</Bucket><Key>k</Key>"
            f"<ETag>{tag}</ETag></CompleteMultipartUploadResult>".encode(),
        )

    def do_DELETE(self) -> None:
        path, _, fault = self.begin()
        if fault and self.fail(fault):
            return
        with self.state.lock:
            self.state.objects.pop(path, None)
        self.answer(204)


@contextmanager
def serving_objects(monkeypatch: pytest.MonkeyPatch, port: int = 0) -> Iterator[ObjectServer]:
    """Serve on a port of this machine, as the S3 of this process, until the end."""
    state = ObjectServer()
    with listening(type("Handler", (Handler,), {"state": state}), state.end, port) as state.port:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{state.port}", "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "s3cret", "NO_PROXY": "127.0.0.1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        yield state
