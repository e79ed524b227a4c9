"""A server with the interface of llama-server, whose rows show which tokens they were made of.

The row of a token depends on all tokens before it, as a model's does, and an answer on all rows: a
wrong row gives another text. A character is a token.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np

from support.servers.listener import listening
from unimem.llama_cpp.slot_file import read_slot_file, slot_file_bytes
from unimem.llama_cpp.state import CellRows, LlamaKV, Part, Recurrent, StateLane

Rows = list[bytes]


def _row(tokens: list[int], salt: int) -> bytes:
    seed = zlib.crc32(np.array(tokens, "<i4").tobytes()) + salt
    return np.random.default_rng(seed).standard_normal(16).astype("f2").tobytes()


class FakeLlama:
    """What the server has, and knobs of tests.

    `salt` changes what it computes, `has_states` adds a recurrent state, `dies` ends answers early,
    `lora` are adapters, `spoil` is called with each file of a slot, and `key` is asked for.
    """

    def __init__(self, folder: Path, model: Path, **knobs: Any) -> None:
        self.folder, self.model = folder, model
        self.n_slots, self.n_ctx, self.salt = 2, 4000, 0
        self.has_states = self.dies = False
        self.lora: list[dict[str, float]] = []
        self.spoil: Callable[[Path], object] = id
        self.key = ""
        vars(self).update(knobs)
        self.slots: list[tuple[list[int], Rows]] = [([], []) for _ in range(self.n_slots)]
        self.n_computed = 0
        self.bodies: list[Any] = []  # of completions
        self.paths: list[str] = []
        self.url = ""

    def complete(self, body: Any) -> tuple[list[int], int]:
        """Compute an answer; return its tokens, and how many of the prompt's were computed."""
        prompt = body.get("prompt")
        if "messages" in body:
            prompt = template(body["messages"])
        ids = tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        slot = body.get("id_slot", 0) % self.n_slots
        tokens, rows = self.slots[slot] if body.get("cache_prompt", True) else ([], [])
        same = [a == b for a, b in zip(tokens, ids, strict=False)]
        n = same.index(False) if False in same else len(tokens)
        n = 0 if self.has_states and n < len(tokens) else min(n, len(ids) - 1)
        tokens, rows = ids[:n], rows[:n]
        said: list[int] = []
        for token in ids[n:]:
            self._append(tokens, rows, token)
        for i in range(max(1, body.get("n_predict", body.get("max_tokens", 4)))):
            if i:
                self._append(tokens, rows, said[-1])
            said.append(97 + zlib.crc32(b"".join(rows)) % 26)
        self.n_computed += len(ids) - n
        self.slots[slot] = tokens, rows
        return said, len(ids) - n

    def _append(self, tokens: list[int], rows: Rows, token: int) -> None:
        if len(tokens) == self.n_ctx:  # the second quarter is dropped
            first, end = self.n_ctx // 4, self.n_ctx // 2
            del tokens[first:end], rows[first:end]
        tokens.append(token)
        rows.append(_row(tokens, self.salt))

    def state(self, slot: int) -> tuple[np.ndarray, LlamaKV]:
        """Return a slot as its file has it."""
        tokens, rows = self.slots[slot]
        data = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 32)
        lanes = (StateLane(1, data),)
        cells = CellRows(np.arange(len(rows), dtype=np.int32), None, False, (0, 0), lanes, lanes)
        parts: tuple[Part, ...] = (cells,)
        if self.has_states:
            lane = StateLane(0, data[-1:])
            parts += (Recurrent(len(rows) - 1, 1, (lane, lane)),)
        return np.array(tokens, np.int32), LlamaKV(4, b"", self.n_slots, parts)

    def restore(self, slot: int, path: Path) -> None:
        """Take a slot from its file."""
        saved = read_slot_file(path)
        assert saved.kv.n_streams == self.n_slots
        cells = saved.kv.parts[0]
        assert isinstance(cells, CellRows)
        rows = [row.tobytes() for row in cells.keys[0].rows]
        self.slots[slot] = saved.tokens.tolist(), rows


def template(messages: list[Any]) -> str:
    """Return the prompt of a chat."""
    return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<a>"


def tokenize(text: str) -> list[int]:
    """Return the ids of a text."""
    return [1, *map(ord, text)]


def answer_to(body: Any, **knobs: Any) -> str:
    """Return what a server that has nothing in its slots says."""
    fake = FakeLlama(Path(), Path(), **knobs)
    return "".join(map(chr, fake.complete(body)[0]))


class _Handler(BaseHTTPRequestHandler):
    """What the server answers."""

    protocol_version = "HTTP/1.1"
    fake: FakeLlama
    turn: threading.Lock

    def do_GET(self) -> None:
        self.fake.paths.append(self.path)
        answers = {
            "/props": {"total_slots": self.fake.n_slots, "model_path": str(self.fake.model)},
            "/lora-adapters": self.fake.lora,
            "/health": {"status": "ok"},
        }
        found = answers.get(self.path)
        if self.has_key():
            self.answer(404 if found is None else 200, found)

    def has_key(self) -> bool:
        """Whether a request has the key; refuse one that lacks it."""
        has_key = self.headers.get("Authorization") == f"Bearer {self.fake.key}"
        if self.fake.key and not has_key:
            self.answer(401, {"error": {"code": 401, "message": "Invalid API Key"}})
        return has_key or not self.fake.key

    def do_POST(self) -> None:
        self.fake.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        path, _, query = self.path.partition("?")
        if not self.has_key():
            return
        with self.turn:
            if path == "/tokenize":
                self.answer(200, {"tokens": tokenize(body["content"])})
            elif path == "/apply-template":
                self.answer(200, {"prompt": template(body["messages"])})
            elif path.startswith("/slots/"):
                self.slot(int(path.rpartition("/")[2]), query, body)
            elif path.endswith(("completion", "completions", "infill")):
                self.fake.bodies.append(body)
                self.complete(body)
            else:
                self.answer(200, body)

    def slot(self, slot: int, query: str, body: Any) -> None:
        if query == "action=erase":
            self.fake.slots[slot] = [], []
        elif query == "action=save":
            path = self.fake.folder / body["filename"]
            path.write_bytes(slot_file_bytes(*self.fake.state(slot)))  # in place, as llama.cpp
            self.fake.spoil(path)
        else:
            self.fake.restore(slot, self.fake.folder / body["filename"])
        self.answer(200, {})

    def complete(self, body: Any) -> None:
        is_good = isinstance(body, dict) and type(body.get("id_slot", 0)) is int
        if not is_good or body.get("prompt") == "bad":
            self.answer(400, {"error": {"code": 400, "message": "bad"}})
            return
        said, n = self.fake.complete(body)
        timings = {"timings": {"prompt_n": n, "predicted_n": len(said)}}
        if not body.get("stream"):
            self.answer(200, {"content": "".join(map(chr, said))} | timings)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = [{"content": chr(token)} for token in said] + [timings]
        for event in events[: 2 if self.fake.dies else None]:
            data = f"data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()
        if self.fake.dies:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def answer(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_llama(folder: Path, model: Path, **knobs: Any) -> Iterator[FakeLlama]:
    """Run a server in a thread."""
    fake = FakeLlama(folder, model, **knobs)
    handler = type("Handler", (_Handler,), {"fake": fake, "turn": threading.Lock()})
    with listening(handler, threading.Event()) as port:
        fake.url = f"http://127.0.0.1:{port}"
        yield fake
