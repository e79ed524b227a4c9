"""`unimem serve-slots`: its start and its end; tests/llama_cpp has the proxy's."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.models import make
from support.servers.llama_server import answer_to, fake_llama

CODE = "import sys; from unimem.cli import main; sys.exit(main())"


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_proxy_serves_until_it_is_ended(address: str, tmp_path: Path) -> None:
    if address == "::1" and not has_ipv6():
        pytest.skip("this machine has no address ::1")
    model = make.write_model(tmp_path / "m.gguf", shape=make.TINY)
    with fake_llama(tmp_path, model) as fake:
        words = ["serve-slots", fake.url, "--store", tmp_path / "kv", "--model", model]
        words += ["--slot-save-path", tmp_path, "--port", "0"]
        words += ["--disk-bytes", "64M", "--address", address]
        with subprocess.Popen(
            [sys.executable, "-c", CODE, *map(str, words)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.split()[1].rstrip(",")
            assert line == f"serving {url}, before {fake.url}\n"
            body = {"prompt": "hello", "n_predict": 3}
            request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
            with urllib.request.urlopen(request) as response:
                assert json.load(response)["content"] == answer_to(body)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 143
    assert list(tmp_path.glob("*.slot")) == []


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--chunk-tokens 0", "--chunk-tokens': expected a whole number from 1 to"),
        ("--model https://a/m.gguf", "--model': expected a file of this machine, got 'https://a/m"),
        ("--model=", "--model': expected the path of a model, got ''"),
        ("--slot-save-path=", "--slot-save-path: expected a folder, got ''"),
        ("--port -1", "--port': expected a whole number from 0 to 65535"),
        ("--disk-bytes 0", "--ram-bytes, --disk-bytes: expected one that is not 0"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, words: str, match: str) -> None:
    from support.terminal.screens import show

    given = ["--store", tmp_path, "--model", "m", "--slot-save-path", tmp_path, *words.split()]
    code, _, err = show("serve-slots", "http://127.0.0.1:1", *map(str, given))
    assert (code, match in " ".join(err.split())) == (2, True), err


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    from support.terminal.screens import show

    model = make.write_model(tmp_path / "m.gguf", shape=make.TINY)
    words = ["--store", tmp_path / "kv", "--model", model, "--slot-save-path", tmp_path]
    code, _, err = show("serve-slots", "http://127.0.0.1:1", *map(str, words))
    assert code == 1
    assert "refused" in err
    assert show("serve-slots", "ftp://a", *map(str, words))[0] == 1


def test_a_taken_address_is_named(tmp_path: Path) -> None:
    from support.terminal.screens import show

    model = make.write_model(tmp_path / "m.gguf", shape=make.TINY)
    with fake_llama(tmp_path, model) as fake:
        port = fake.url.rpartition(":")[2]
        words = ["--store", tmp_path / "kv", "--model", model, "--slot-save-path", tmp_path]
        code, _, err = show("serve-slots", fake.url, *map(str, words), "--port", port)
    assert (code, err) == (1, f"unimem: 127.0.0.1:{port}: Address already in use\n")
