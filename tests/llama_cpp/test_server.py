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


@pytest.mark.parametrize("key", ["secret\r", "sécret"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", key)
    with pytest.raises(ValueError, match="LLAMA_API_KEY: expected printable ASCII") as error:
        LlamaServer("http://127.0.0.1:1", tmp_path).ask("/props")
    assert "cret" not in str(error.value)


def test_files_of_killed_proxies_are_removed(fake: FakeLlama, tmp_path: Path) -> None:
    """Those of a killed one with the number of this process, too: containers repeat it."""
    fake.complete({"prompt": [5, 6, 7], "n_predict": 1})
    server = LlamaServer(fake.url, tmp_path)
    made: list[Path] = []

    def start_another(path: Path) -> None:
        LlamaServer(fake.url, tmp_path).remove_remains()
        made.extend(tmp_path.iterdir())

    fake.spoil = start_another
    assert server.save(0).tokens.tolist() == [5, 6, 7]
    assert len(made) == 1
    for path in (*made, tmp_path / "slot"):
        path.write_bytes(b"")
    server.remove_remains()
    assert list(tmp_path.iterdir()) == [tmp_path / "slot"]


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "https://a", "http://a/v1", "http://",
                                 "http://a/?x=1", "http://a#b", "http://me@a"])  # fmt: skip
def test_another_address_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        LlamaServer(url, tmp_path)


def test_a_silent_address_is_an_error(tmp_path: Path) -> None:
    server = LlamaServer("http://127.0.0.1:1", tmp_path)
    with pytest.raises(OSError, match="refused"):
        server.restore(0, np.empty(0, np.int32), FakeLlama(tmp_path, tmp_path).state(0)[1])
