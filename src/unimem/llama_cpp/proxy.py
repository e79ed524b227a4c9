"""A proxy before a llama-server: completions begin with stored prefixes, and everything passes.

Whatever fails in here costs time, and the server's answer is that of a server without a proxy: what
is put into the store are the tokens and the state that the server itself wrote, together.
"""

from __future__ import annotations

import json
import os
import re
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import file_path, instance, integer, string
from unimem.errors import CapacityError, FormatError
from unimem.kv.store.store import KVStore
from unimem.kv.token_ids import n_common, token_ids
from unimem.llama_cpp.identity import model_hash
from unimem.llama_cpp.prefixes import LlamaPrefixes
from unimem.llama_cpp.server import LlamaServer
from unimem.llama_cpp.slots import ServerSlots
from unimem.llama_cpp.state import CellRows

#: The header of a response that says how many tokens were restored.
RESTORED = "Unimem-Restored-Tokens"
_COMPLETIONS = {"/completion", "/completions", "/chat/completions"}
# A fixed text shows whether two servers compute the same.
_PROBE = "The quick brown fox jumps over the lazy dog, and 1 2 3 4 5 6 7 8 9 10 are ten numbers. "
_MOST_PROBE = 48
_PREDICTED = re.compile(rb'"(?:predicted_n|tokens_predicted)": ?(\d+)')
_TAIL_BYTES = 1 << 16
_PATIENCE_SECONDS = 10
_IDLE_SECONDS = 600
_MOST_BODY, _MOST_LINE = 1 << 28, 1 << 16
_LENGTHS = {10: re.compile(r"[0-9]{1,18}"), 16: re.compile(r"[0-9a-fA-F]{1,15}")}
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"}
_HOP_BY_HOP |= {"expect"}
# JSON of others may have any shape.
_SHAPES = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_ERRORS = (OSError, CapacityError, FormatError, *_SHAPES)


@dataclass(frozen=True)
class _Known:
    """What is known of the server since it was asked last."""

    props: Any
    prefixes: LlamaPrefixes
    slots: ServerSlots
    n_streams: int


class _ServerV6(ThreadingHTTPServer):
    address_family = AF_INET6


class SlotProxy:
    """A server of HTTP that passes requests on to a llama-server, and uses a store for completions.

    Parameters
    ----------
    store : KVStore
        It stays open.
    model : path-like
        The GGUF file that the server runs.
    server : LlamaServer
        The server behind it.
    address : (str, int)
        Where to listen; port 0 takes a free one.
    options : str, optional
        As for `LlamaPrefixes`. The scales of adapters are asked for.
    log : callable
        Called with a sentence on each failure that costs time.

    Raises
    ------
    OSError
        The server does not answer, or refuses to save slots; the address is taken.
    FormatError
        The model cannot be read; the server runs another one, or computes something else than the
        store has; its states are not known.

    Attributes
    ----------
    address : (str, int)
        Where it listens.
    """

    def __init__(
        self,
        store: KVStore,
        model: str | os.PathLike[str],
        server: LlamaServer,
        address: tuple[str, int],
        *,
        options: str = "",
        log: Callable[[str], object] = print,
    ) -> None:
        self._store, self._server = (
            instance(store, "store", KVStore),
            instance(server, "server", LlamaServer),
        )
        self._options, self._log = string(options, "options"), log
        self._path, self._model = file_path(model, "model"), model_hash(model)
        self._lock = threading.Lock()
        self._known: _Known | None = None
        server.remove_remains()
        try:
            self._know()
        except (LookupError, TypeError, AttributeError) as error:
            raise FormatError(f"{server.url} answers as no llama-server does: {error!r}") from None
        proxy = self

        class Handler(_Handler):
            def handle_any(self) -> None:
                proxy._handle(self)

        try:
            self._http = (_ServerV6 if ":" in address[0] else ThreadingHTTPServer)(address, Handler)
        except OSError as error:
            where = "{}:{}".format(*address)
            raise OSError(error.errno, error.strerror, where) from None
        self.address: tuple[str, int] = self._http.server_address[:2]  # type: ignore[assignment]

    def serve(self) -> None:
        """Serve until `close`, or until an interrupt; answers that run may still be stored."""
        try:
            self._http.serve_forever(0.2)
        finally:
            self._http.server_close()
            if self._known is not None:
                self._known.slots.wait(_PATIENCE_SECONDS)

    def close(self) -> None:
        """End `serve`, which runs in another thread."""
        self._http.shutdown()

    # ---- what is behind it ----

    def _know(self) -> _Known:
        """Ask the server what it is, and what it computes if that may have changed."""
        with self._lock:
            asked, known = self._asked(), self._known
            if known is None or known.props != asked:
                self._known = None
                known = self._known = self._learn(asked)
            return known

    def _asked(self) -> list[Any]:
        """Ask the server for all that may change what it computes."""
        props = self._server.ask("/props")
        asked = [props.get("model_path"), props["total_slots"], props.get("build_info")]
        return [*asked, self._server.ask("/lora-adapters")]

    def _learn(self, asked: list[Any]) -> _Known:
        path, n_slots, _, adapters = asked
        path = str(path)
        if os.path.exists(path) and not os.path.samefile(path, self._path):
            raise FormatError(f"the server runs {path}, expected {self._path}")
        used = [adapter for adapter in adapters if adapter.get("scale")]
        options = self._options + (json.dumps(used, sort_keys=True) if used else "")
        tokens = self._server.tokenize(_PROBE)[:_MOST_PROBE]
        given = {"prompt": tokens, "n_predict": 0, "id_slot": 0, "cache_prompt": False}
        self._server.ask("/completion", given)
        saved = self._server.save(0)
        if list(saved.tokens) != tokens:
            raise FormatError("the server's slot 0 is used by others: let them use this proxy")
        prefixes = LlamaPrefixes(self._store, self._model, saved.kv, options=options)
        if not prefixes.agrees(tokens, saved.kv):
            raise FormatError(
                f"{self._server.url} computes other keys than those in the store for this model: "
                "start it as the first one (adapters, RoPE), or give --options a name for this way"
            )
        return _Known(asked, prefixes, ServerSlots(n_slots), saved.kv.n_streams)

    # ---- requests ----

    def _handle(self, client: _Handler) -> None:
        try:
            body = client.body()
        except ValueError as error:
            client.refuse(400, str(error))
            return
        path = client.path.split("?")[0].removeprefix("/v1")
        with ExitStack() as stack:
            if client.command == "POST" and (path in _COMPLETIONS or b'"lora"' in body):
                ids = None
                try:
                    request = json.loads(body)
                    if self._server.admits(client.headers):
                        ids = self._tokens(path, request)
                    if ids is not None:
                        wanted = integer(request.get("id_slot", -1), "id_slot")
                        known, slot = stack.enter_context(self._slot(ids, wanted))
                except _ERRORS as error:
                    self._log(f"a completion passes without the store: {error}")
                    ids = None
                if ids is not None:
                    self._complete(client, known, slot, ids, request)
                    return
            self._pass(client, body)

    @contextmanager
    def _slot(self, ids: NDArray[np.int32], wanted: int) -> Iterator[tuple[_Known, int]]:
        """Take a slot of the server as it is then: it may change while a slot is waited for."""
        while True:
            known = self._known or self._know()
            which = wanted % len(known.slots) if wanted >= 0 else None
            with known.slots.taken(ids, which) as slot:
                if self._know() is known:
                    yield known, slot
                    return

    def _tokens(self, path: str, request: Any) -> NDArray[np.int32] | None:
        """Return the ids of a prompt; None for requests that are passed on as they are.

        None of them are known for a request that chooses adapters, or none of them, which gets a
        slot all the same: it would be computed in one whose rows are about to be stored.
        """
        if "lora" in request:
            return np.empty(0, np.int32)
        if path not in _COMPLETIONS:
            return None
        if request.get("n", 1) != 1 or not request.get("cache_prompt", True):
            return None
        prompt = request.get("prompt")
        if path == "/chat/completions":
            parts = [part for m in request["messages"] for part in (m.get("content") or [])]
            if any(isinstance(part, dict) and part.get("type") != "text" for part in parts):
                return None
            prompt = self._server.ask("/apply-template", request)["prompt"]
        if isinstance(prompt, str):
            prompt = self._server.tokenize(prompt)
        is_list = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        return token_ids(prompt) if is_list and prompt else None

    def _complete(
        self, client: _Handler, known: _Known, slot: int, ids: NDArray[np.int32], request: Any
    ) -> None:
        held, known.slots.held[slot] = known.slots.held[slot], ids[:0]
        if not len(ids):
            self._pass(client, json.dumps(request | {"id_slot": slot}).encode())
            return
        n_known = restored = 0
        try:
            n_known = known.prefixes.longest(ids)
            restored = self._restore(known, slot, ids, n_common(held, ids))
        except _ERRORS as error:
            self._log(f"nothing was restored: {error}")
        # Rows that are moved to other positions would not be those of their tokens.
        request |= {"id_slot": slot, "cache_prompt": True, "n_cache_reuse": 0}
        tail = self._pass(client, json.dumps(request).encode(), {RESTORED: str(restored)})
        found = _PREDICTED.findall(tail or b"")
        if not found:
            return
        known.slots.begin_saving(slot, ids)
        try:
            known.slots.held[slot] = self._save(known, slot, ids, int(found[-1]), n_known)
        except _ERRORS as error:
            self._log(f"nothing was stored: {error}")

    def _restore(self, known: _Known, slot: int, ids: NDArray[np.int32], n_held: int) -> int:
        """Restore the longest prefix if it is longer than what the slot holds."""
        if known.prefixes.longest(ids[:-1]) <= n_held:
            return 0
        kv = known.prefixes.restore(ids[:-1])
        if kv is None or kv.n_tokens <= n_held:
            return 0
        n = kv.n_tokens
        self._server.restore(slot, ids[:n], kv._replace(n_streams=known.n_streams))
        return n

    def _save(
        self, known: _Known, slot: int, ids: NDArray[np.int32], n_predicted: int, n_known: int
    ) -> NDArray[np.int32]:
        """Put what is new in a slot; return the tokens that it holds."""
        n, size = len(ids) + max(n_predicted - 1, 0), self._store.chunk_tokens
        if not known.prefixes.has_ends and n // size * size <= n_known:
            return ids
        saved = self._server.save(slot)
        # Others use the slot, tokens were dropped, or adapters have changed.
        if n_common(saved.tokens, ids) < len(ids) or self._asked() != known.props:
            return ids[:0]
        kv = saved.kv
        if len(saved.tokens) < n:
            # The context was full, and answers were dropped from it: what is behind them was
            # computed with them.
            self._server.erase(slot)
            if len(kv.parts) == 1 and isinstance(cells := kv.parts[0], CellRows):
                known.prefixes.put(ids, kv._replace(parts=(cells.take(0, len(ids)),)))
            return ids[:0]
        known.prefixes.put(saved.tokens, kv, saved.checkpoints)
        return saved.tokens

    def _pass(
        self, client: _Handler, body: bytes, more: dict[str, str] | None = None
    ) -> bytes | None:
        """Pass a request on, and its response back; return the end of one that was whole and good.

        A response that ends too early ends the connection.
        """
        dropped = {*_HOP_BY_HOP, "content-length"}
        headers = {k: v for k, v in client.headers.items() if k.lower() not in dropped}
        asked = client.command, client.path, body or None, headers
        try:
            with self._server.request(*asked, wait=client.wait_for) as response:
                return client.relay(response, more or {})
        except (OSError, HTTPException) as error:
            self._log(f"{client.command} {client.path}: {error}")
            client.refuse(502, f"the llama-server behind unimem does not answer: {error}")
        except ValueError as error:
            client.refuse(400, f"the request cannot be passed on: {error}")
        return None


class _ClientGone(Exception):  # noqa: N818 - it is no error
    """The client does not send the rest of its request, or take the rest of its answer."""


class _Handler(BaseHTTPRequestHandler):
    """One request of a client."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    _has_begun = False

    def handle_any(self) -> None:
        """Answer a request."""
        raise NotImplementedError

    def handle(self) -> None:
        """Answer requests until the client goes, in whatever way."""
        with suppress(ConnectionError):
            super().handle()

    def do_any(self) -> None:
        """Answer a request, and close the connection after a failure."""
        self._has_begun = False
        try:
            self.handle_any()
        except _ClientGone:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_any  # noqa: N815

    def body(self) -> bytes:
        """Read the request's body; ValueError if it is too long, or has no known length."""
        coding = self.headers.get("Transfer-Encoding")
        if coding is None:
            return self._read(_length(self.headers.get("Content-Length", "0"), 10))
        if coding.strip().lower() != "chunked":
            raise ValueError(f"Transfer-Encoding: expected chunked, got {coding!r:.60}")
        body = bytearray()
        while n := _length(self._line().partition(";")[0], 16, len(body)):
            body += self._read(n)
            if self._line():
                raise ValueError("a chunk of the request is longer than it says")
        while self._line():  # trailers
            pass
        return bytes(body)

    def _read(self, n: int) -> bytes:
        try:
            data = self.rfile.read(n)
        except OSError:
            raise _ClientGone from None
        if len(data) < n:
            raise _ClientGone
        return data

    def _line(self) -> str:
        try:
            line = self.rfile.readline(_MOST_LINE)
        except OSError:
            raise _ClientGone from None
        if not line.endswith(b"\n"):
            raise _ClientGone
        return line.decode("latin-1").strip()

    def wait_for(self, server: socket) -> None:
        """Wait until the server answers, or the client goes: the server ends its work then, too."""
        ends = select.poll()
        ends.register(server, select.POLLIN)
        ends.register(self.connection, select.POLLRDHUP)
        if self.connection.fileno() in dict(ends.poll()):
            raise _ClientGone

    def relay(self, response: HTTPResponse, more: dict[str, str]) -> bytes | None:
        """Pass a response on as it comes; return its last bytes if it is whole and good."""
        self._has_begun = True
        self.send_response_only(response.status, response.reason)
        for name, value in (*response.getheaders(), *more.items()):
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        is_chunked = response.length is None and self.request_version != "HTTP/1.0"
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif response.length is None:
            self.send_header("Connection", "close")
        self._send(self.end_headers)
        tail = b""
        while data := response.read1(_TAIL_BYTES):
            self._send(
                self.wfile.write, b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data
            )
            tail = (tail + data)[-_TAIL_BYTES:]
        if response.length:  # the server ended too early
            self.close_connection = True
            return None
        if is_chunked:
            self._send(self.wfile.write, b"0\r\n\r\n")
        return tail if response.status == 200 else None

    @staticmethod
    def _send(send: Callable[..., object], *data: bytes) -> None:
        try:
            send(*data)
        except OSError:
            raise _ClientGone from None

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error as llama-server does, or end a response that has begun."""
        self.close_connection = True
        if self._has_begun:
            return
        kind = "unavailable_error" if status == 502 else "invalid_request_error"
        error = {"error": {"code": status, "message": message, "type": kind}}
        data = json.dumps(error).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self._send(self.end_headers)
        self._send(self.wfile.write, data)

    def log_message(self, *_: object) -> None:
        """Write nothing: the server behind it has a log."""


def _length(text: str, base: int, before: int = 0) -> int:
    """Return a length that a client writes; ValueError unless it is one of a body that fits."""
    if not _LENGTHS[base].fullmatch(text.strip()):
        raise ValueError(f"expected the length of a body, got {text!r:.60}")
    if (n := int(text, base)) + before > _MOST_BODY:
        raise ValueError(f"expected a body of at most {_MOST_BODY} bytes, got {n + before} or more")
    return n
