"""No test takes much memory. The record is made by::

PYTEST_ADDOPTS=--peaks=$PWD/build/peaks.jsonl make test-all
sort build/peaks.jsonl > tests/project/data/peaks.jsonl
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.project import peaks

MOST_MIB = 2048
LARGE_MIB = 500
# Tests that take more than this, which may be no more than they need.
LARGE: set[str] = set()
RECORD = Path(__file__).parent / "data/peaks.jsonl"


@pytest.mark.skipif(not RECORD.exists(), reason="no run with --peaks is recorded")
def test_few_tests_take_much_memory() -> None:
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert [name for name, peak, _ in lines if peak > MOST_MIB] == []
    assert {name for name, _, taken in lines if taken > LARGE_MIB} == LARGE


def test_a_test_is_noted_if_it_takes_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "NOTED_MIB", 32)
    file = tmp_path / "peaks"
    with peaks.noted("little", file):
        pass
    with peaks.noted("much", file):
        bytearray(b"1") * (300 << 20)
    large = bytearray(b"1") * (300 << 20)
    with peaks.noted("a child of a large process", file):
        subprocess.run(["true"], check=True)
    del large
    ((name, peak, taken),) = map(json.loads, file.read_text().splitlines())
    assert name == "much"
    assert 290 <= taken <= peak


@pytest.mark.slow
def test_workers_note_tests_where_the_environment_asks_for_it(tmp_path: Path) -> None:
    file, test = tmp_path / "peaks", test_a_test_is_noted_if_it_takes_much.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", f"{__file__}::{test}"]
    subprocess.run(command, env=os.environ | {"PYTEST_ADDOPTS": f"--peaks={file}"}, check=True)
    assert test in file.read_text()
