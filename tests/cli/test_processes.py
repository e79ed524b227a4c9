"""Processes listed by `unimem report`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import unimem as um
from support.processes.running import running
from unimem.cli import processes
from unimem.cli.processes import Processes

jsonschema = pytest.importorskip("jsonschema", reason="for documents: pip install '.[test]'")


Patch = pytest.MonkeyPatch


MODEL = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"


HOLD = """
import sys, unimem as um
with um.open_weights(sys.argv[1], load="map") as weights:
    weights.warm()
    print("ready", flush=True)
    sys.stdin.read()
"""


SHOW = """
import sys
from unimem.accounting.published import publish
publish()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    path = Path(shutil.copy(MODEL, tmp_path_factory.mktemp("held") / "held.gguf"))
    with running(HOLD, path) as pid:
        yield pid, path


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
