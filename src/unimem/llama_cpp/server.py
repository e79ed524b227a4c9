"""A llama-server as its proxy uses it: questions in JSON, slots, and the files of slots."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import file_path, integer, string
from unimem.base.cache_folder import BudgetFolder
from unimem.base.descriptors import Descriptors
from unimem.llama_cpp.slot_file import SlotFile, read_slot_file, slot_file_bytes
from unimem.llama_cpp.state import LlamaKV

_SECONDS = 600  # a slot answers when it is free
_OURS = re.compile(r"unimem-[0-9a-f]{16}\.slot")


class LlamaServer:
    """A running llama-server.

    `url` is its address, and `folder` its ``--slot-save-path``, which lies on this machine. With
    ``LLAMA_API_KEY`` in the environment, questions have that key. ValueError refuses an address
    that is not of HTTP.
    """

    def __init__(self, url: str, folder: str | os.PathLike[str]) -> None:
        parts = urlsplit(string(url, "url"))
        others = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        if parts.scheme != "http" or not parts.hostname or others:
            raise ValueError(f"url: expected that of a llama-server, http://HOST:PORT, got {url!r}")
        self.url = url.rstrip("/")
        self._address = parts.hostname, parts.port or 80
        self._folder = Path(file_path(folder, "folder"))
        key = os.environ.get("LLAMA_API_KEY", "")
        if not key.isascii() or not key.isprintable():
            raise ValueError(f"LLAMA_API_KEY: expected printable ASCII, got {len(key)} characters")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        wait: Callable[[socket], object] | None = None,
    ) -> Iterator[HTTPResponse]:
        """Send a request, and give its response.

        OSError if the server does not answer, ValueError if the request cannot be sent.
        `wait` is called with the connection before the response is read.
        """
        with closing(HTTPConnection(*self._address, timeout=_SECONDS)) as connection:
            try:
                connection.request(method, path, body, headers)
                if wait is not None:
                    wait(connection.sock)
                response = connection.getresponse()
            except InvalidURL as error:
                raise ValueError(f"path: {error}") from None
            except HTTPException as error:
                raise ConnectionError(f"{self.url} does not answer: {error!r}") from None
            yield response

    def ask(self, path: str, question: Any = None) -> Any:
        """Return an answer in JSON. OSError has the server's words if it refuses."""
        if not string(path, "path").isprintable() or not path.startswith("/"):
            raise ValueError(f"path: expected one such as '/props', got {path!r:.60}")
        method, body = ("GET", None) if question is None else ("POST", _json(question))
        with self.request(method, path, body, self._headers) as response:
            try:
                data = response.read()
                answer = json.loads(data)
            except (ValueError, RecursionError, HTTPException) as error:
                raise ConnectionError(f"{self.url}{path}: no answer in JSON: {error!r}") from None
            if response.status != 200:
                raise ConnectionError(
                    f"{self.url}{path}: {response.status}: {data.decode()!r:.300}"
                )
            return answer

    def admits(self, headers: Message) -> bool:
        """Whether the server takes the key of a request, if questions have one."""
        if "Authorization" not in self._headers:
            return True
        keys = {name: headers[name] for name in ("Authorization", "X-Api-Key") if name in headers}
        with self.request("GET", "/props", None, keys) as response:
            return response.status != 401

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a prompt as the server makes them."""
        given = {"content": string(text, "text"), "add_special": True, "parse_special": True}
        return [int(token) for token in self.ask("/tokenize", given)["tokens"]]

    def save(self, slot: int) -> SlotFile:
        """Read a slot. FormatError if its state is not known."""
        with self._file() as path:
            self.ask(_slot(slot, "save"), {"filename": path.name})
            return read_slot_file(path)

    def restore(self, slot: int, tokens: NDArray[np.int32], kv: LlamaKV) -> None:
        """Replace a slot."""
        with self._file() as path:
            path.write_bytes(slot_file_bytes(tokens, kv))
            self.ask(_slot(slot, "restore"), {"filename": path.name})

    def erase(self, slot: int) -> None:
        """Empty a slot."""
        self.ask(_slot(slot, "erase"), {})

    def remove_remains(self) -> None:
        """Remove the files of proxies that were killed."""
        BudgetFolder(str(self._folder), _OURS).sweep(_OURS)

    @contextmanager
    def _file(self) -> Iterator[Path]:
        path = self._folder / f"unimem-{os.urandom(8).hex()}.slot"
        with Descriptors() as fds:
            # As a file of this user alone, whoever writes to it. One without a lock is a remain.
            how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            fcntl.flock(fds.add(os.open, path, *how), fcntl.LOCK_EX)
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)


def _slot(slot: int, action: str) -> str:
    return f"/slots/{integer(slot, 'slot', 0)}?action={action}"


def _json(question: Any) -> bytes:
    try:
        return json.dumps(question).encode()
    except TypeError as error:
        raise TypeError(f"question: expected what JSON can write: {error}") from None
