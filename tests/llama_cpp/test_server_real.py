"""Slots of the real llama-server go through a store, and are refused where they do not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.things import MODEL
from support.project.tools import load_tool
from support.servers.real_llama import python_with
from unimem.errors import FormatError
from unimem.llama_cpp import (
    LlamaPrefixes,
    LlamaServer,
    SlotProxy,
    kv_to_state,
    model_hash,
    read_slot_file,
    write_slot_file,
)

pytestmark = pytest.mark.slow

CHUNK = 16
PROMPT = "Once upon a time there was a little girl named Lily. " * 6
Started = Callable[..., LlamaServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """A function that starts a server with more parameters, in a process of its own."""
    python, tool = python_with("xllamacpp"), load_tool("llama_server")
    with ExitStack() as undo:

        def start(**params: Any) -> LlamaServer:
            given = {"n_ctx": 1024, "n_parallel": 2, "threads": 1} | params
            running = tool.running(python, MODEL, tmp_path, **given)
            return LlamaServer(undo.enter_context(running).url, tmp_path)

        yield start


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    folder = tmp_path / "store"
    with um.KVStore(folder, ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=CHUNK) as store:
        yield store


def ask(server: LlamaServer, prompt: list[int]) -> tuple[str, int]:
    """What slot 0 answers, and the tokens of the prompt that it computed."""
    given = {"prompt": prompt, "n_predict": 16, "temperature": 0, "id_slot": 0}
    answer = server.ask("/completion", given)
    return answer["content"], answer["timings"]["prompt_n"]


def test_another_server_goes_on_from_the_store(start: Started, store: um.KVStore) -> None:
    # Chunks end where the parts end that llama.cpp computes, so that it rounds alike.
    first, second = start(n_ubatch=CHUNK), start(n_ubatch=CHUNK)
    prompt = first.tokenize(PROMPT)
    text, n_computed = ask(first, prompt)
    assert n_computed == len(prompt)
    saved = first.save(0)
    prefixes = LlamaPrefixes(store, model_hash(MODEL), saved.kv)
    assert prefixes.put(saved.tokens, saved.kv) == len(saved.tokens) // CHUNK * CHUNK
    found = prefixes.restore(prompt[:-1])
    assert found is not None
    kv = found._replace(n_streams=saved.kv.n_streams)
    assert kv.n_tokens == (len(prompt) - 1) // CHUNK * CHUNK
    second.restore(0, np.array(prompt[: kv.n_tokens], "i4"), kv)
    assert ask(second, prompt) == (text, len(prompt) - kv.n_tokens)
    assert kv_to_state(second.save(0).kv) == kv_to_state(saved.kv)
    assert LlamaPrefixes(store, "another model", saved.kv).restore(prompt) is None


@pytest.mark.parametrize(
    "types",
    [
        {"cache_type_k": "GGML_TYPE_Q8_0"},
        {"flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_DISABLED"},
    ],
    ids=["q8_0", "transposed"],
)
def test_a_server_with_other_caches_takes_nothing(
    start: Started, store: um.KVStore, types: dict[str, Any]
) -> None:
    first, other = start(), start(**types)
    prompt = first.tokenize(PROMPT)
    ask(first, prompt)
    saved = first.save(0)
    LlamaPrefixes(store, "model", saved.kv).put(saved.tokens, saved.kv)
    text, _ = ask(other, prompt)
    assert LlamaPrefixes(store, "model", other.save(0).kv).restore(prompt) is None
    with pytest.raises(ConnectionError, match="400"):
        other.restore(0, saved.tokens, saved.kv)
    other.erase(0)
    assert ask(other, prompt)[0] == text


def test_another_version_is_refused(start: Started, tmp_path: Path) -> None:
    server = start()
    prompt = server.tokenize(PROMPT)
    ask(server, prompt)
    saved = server.save(0)
    with pytest.raises(ConnectionError, match="400"):
        server.restore(1, saved.tokens, saved.kv._replace(version=3))
    write_slot_file(tmp_path / "slot", saved.tokens, saved.kv)
    data = bytearray((tmp_path / "slot").read_bytes())
    data[4:8] = (5).to_bytes(4, "little")
    (tmp_path / "slot").write_bytes(data)
    with pytest.raises(FormatError, match="version 5"):
        read_slot_file(tmp_path / "slot")


def test_proxies_before_two_servers_share_what_is_computed(
    start: Started, store: um.KVStore
) -> None:
    answers = []
    for _ in range(2):
        proxy = SlotProxy(store, MODEL, server := start(), ("127.0.0.1", 0))
        thread = threading.Thread(target=proxy.serve)
        thread.start()
        try:
            through = LlamaServer("http://{}:{}".format(*proxy.address), ".")
            answers.append(ask(through, server.tokenize(PROMPT)))
        finally:
            proxy.close()
            thread.join()
    (text, n_first), (again, n_second) = answers
    assert (text, n_second < CHUNK < n_first) == (again, True)
