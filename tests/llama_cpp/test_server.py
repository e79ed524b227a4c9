from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.servers.llama_server import FakeLlama, fake_llama
from unimem.llama_cpp.server import LlamaServer


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeLlama]:
    with fake_llama(tmp_path, tmp_path / "model") as fake:
        yield fake


def test_slots_are_saved_restored_and_erased(fake: FakeLlama, tmp_path: Path) -> None:
    server = LlamaServer(fake.url + "/", tmp_path)
    assert server.tokenize("ab") == [1, 97, 98]
    server.ask("/completion", {"prompt": [5, 6, 7], "n_predict": 1, "id_slot": 1})
    saved = server.save(1)
    assert saved.tokens.tolist() == [5, 6, 7]
    server.restore(0, saved.tokens, saved.kv)
    assert fake.slots[0] == fake.slots[1]
    server.erase(1)
    assert fake.slots[1] == ([], [])
    assert list(tmp_path.iterdir()) == []


def test_the_server_s_words_are_in_errors(fake: FakeLlama, tmp_path: Path) -> None:
    server = LlamaServer(fake.url, tmp_path)
    with pytest.raises(ConnectionError, match=r"/completion: 400: .*bad"):
        server.ask("/completion", {"prompt": "bad"})
    with pytest.raises(ConnectionError, match="404"):
        server.ask("/unknown")


def test_a_key_is_sent(fake: FakeLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "secret")
    assert LlamaServer(fake.url, tmp_path)._headers["Authorization"] == "Bearer secret"


def test_files_of_killed_proxies_are_removed(tmp_path: Path) -> None:
    kept = [tmp_path / "unimem-1-0.slot", tmp_path / "slot", tmp_path / "unimem-x-0.slot"]
    gone = tmp_path / "unimem-4194999-3.slot"  # no process has this number
    for path in (*kept, gone):
        path.write_bytes(b"")
    LlamaServer("http://127.0.0.1:1", tmp_path).remove_remains()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "https://a", "http://a/v1", "http://"])
def test_another_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        LlamaServer(url, tmp_path)


def test_a_silent_address_is_an_error(tmp_path: Path) -> None:
    server = LlamaServer("http://127.0.0.1:1", tmp_path)
    with pytest.raises(OSError, match="refused"):
        server.restore(0, np.empty(0, np.int32), FakeLlama(tmp_path, tmp_path).state(0)[1])
