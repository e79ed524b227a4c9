"""Processes listed by `unimem report`."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from support.processes.running import running
from unimem.cli import processes
from unimem.cli.processes import Processes

Patch = pytest.MonkeyPatch
SHOW = "from unimem.accounting.published import publish; publish()"


def test_processes_are_found_by_their_models(holder: tuple[int, Path]) -> None:
    pid, path = holder
    found = {each.pid: each for each in processes.find().found}
    assert (found[pid].models, found[pid].has_ledger) == ((str(path),), False)
    assert 0 < found[pid].pss_bytes <= found[pid].rss_bytes
    assert os.getpid() not in found


def test_a_process_is_found_by_its_ledger() -> None:
    with running(SHOW) as pid:
        found = {each.pid: each for each in processes.find().found}
    assert (found[pid].models, found[pid].has_ledger) == ((), True)


def test_processes_that_end_or_hide_are_left_out(monkeypatch: Patch) -> None:
    errors = [ProcessLookupError("gone"), PermissionError("no"), ValueError("a thread")]
    monkeypatch.setattr(processes, "_others", lambda: iter((1, 2, 3)))
    monkeypatch.setattr(processes, "read_process", Mock(side_effect=errors))
    assert processes.find() == Processes((), 1)
