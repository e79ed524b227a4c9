"""`unimem metrics`: served until a signal, or written once."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from support.processes.running import running
from support.terminal.screens import show, start_command
from unimem.accounting.prometheus import FAMILIES
from unimem.base.install_hint import install_hint
from unimem.cli.processes import ModelProcess, Processes

pytest.importorskip(
    "prometheus_client", reason="metrics need prometheus_client: pip install '.[metrics]'"
)

command = importlib.import_module("unimem.cli.metrics")


def test_a_file_for_the_textfile_collector(tmp_path: Path) -> None:
    path = tmp_path / "unimem.prom"
    with running() as pid:
        assert show("metrics", pid, "--textfile", path) == (0, "", "")
    text = path.read_text()
    assert f'unimem_process_up{{pid="{pid}"}} 1.0\n' in text
    assert f'category="libraries",device="host",pid="{pid}",process="python' in text
    assert "llamacpp" not in text
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_it_serves_until_a_signal() -> None:
    with running() as pid, start_command("metrics", pid, "--port", 0) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
        with urllib.request.urlopen(address) as answer:
            text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert f'unimem_process_up{{pid="{pid}"}} 1.0' in text
    assert set(re.findall(r"^(unimem_\w+)", text, re.M)) <= set(FAMILIES)


def test_without_pids_all_processes_with_a_model_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = ModelProcess(7, "a", "a", (), True, 1, 1)
    seen = Mock(side_effect=[Processes((one,), 0), Processes((), 0)])
    now = [100.0]
    monkeypatch.setattr(command, "find", seen)
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    found = command._WithModels()
    assert [found.pids(), found.pids()] == [[7], [7]]
    now[0] += command._FIND_SECONDS
    assert found.pids() == []
    assert seen.call_count == 2


def test_a_taken_port() -> None:
    from prometheus_client import start_http_server

    server, _ = start_http_server(0, addr="127.0.0.1")
    try:
        port = server.server_port
        screen = show("metrics", os.getpid(), "--port", port)
    finally:
        server.shutdown()
        server.server_close()
    assert screen == (1, "", f"unimem: 127.0.0.1:{port}: Address already in use\n")


def test_no_such_process() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    screen = show("metrics", process.pid)
    assert (screen.code, screen.out) == (1, "")
    assert f"There is no process {process.pid} here" in screen.err


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec

    def find_spec(name: str, *more: Any) -> Any:
        return None if name == "prometheus_client" else there(name, *more)

    monkeypatch.setattr(command, "find_spec", find_spec)
    assert show("metrics") == (
        1, "", f"unimem: metrics need prometheus_client: {install_hint('metrics')}\n"
    )  # fmt: skip
