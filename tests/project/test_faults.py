"""Each system call of each operation fails once, and nothing is lost."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from support.project.checkout import ROOT

sys.path.insert(0, str(ROOT / "tools" / "faults"))
import faults

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler builds the shim")


# `make faults` tries all operations and all errors.
SOME = ("Block", "KVCache", "Snapshot", "KVStore", "ledger")


def test_the_tests_of_surroundings_are_there() -> None:
    page = (ROOT / "docs" / "hardening.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", page)
    assert len(named) > 20
    for path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


@pytest.mark.slow
def test_each_call_fails_once(tmp_path: Path) -> None:
    rows = faults.sweep(tmp_path, ["--rounds", "1", *SOME])
    assert {name for name in SOME if any(name in row["operation"] for row in rows)} == {*SOME}
    for row in rows:
        assert row["losses"] == [], row["operation"]
    assert sum(row["outcomes"].get("error", 0) for row in rows) > 200
