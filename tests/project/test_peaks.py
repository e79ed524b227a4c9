"""No test takes much memory: ``pytest --all --peaks tests/project/data/peaks.jsonl`` notes it."""

from __future__ import annotations

import json
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
        bytearray(b"1") * (64 << 20)
    ((name, peak, taken),) = map(json.loads, file.read_text().splitlines())
    assert name == "much"
    assert 60 <= taken <= peak
