"""`tools/fuzz.py`, where it cannot do its work; `make fuzz` runs the rest."""

from __future__ import annotations

import subprocess
import sys

from project import ROOT

TOOL = ROOT / "tools" / "fuzz.py"


def test_a_python_that_cannot_write_the_seeds_is_told() -> None:
    bare = [sys.executable, "-I", "-S"]  # without the packages that are installed
    ended = subprocess.run([*bare, str(TOOL)], check=False, capture_output=True, text=True)
    assert ended.returncode == 69
    assert ended.stderr.startswith("fuzz.py: no fuzzing: ")
    assert "numpy" in ended.stderr
    assert ended.stderr.count("\n") == 1
