"""The examples of README.md and of documents run as they stand, each in its own process and in an
empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from project import ROOT

# How many Python examples each has.
N_EXAMPLES = {
    **{"README.md": 3, "docs/accounting.md": 4, "docs/buffers.md": 3, "docs/kv.md": 0},
    **{"docs/measure.md": 1, "docs/paged.md": 1, "docs/placement.md": 3, "docs/snapshots.md": 1},
}
FIRST = r"weights: 0\.0/16\.0 MB \| scratch: 0\.0/1\.0 MB \| history: 1\.0/8\.0 MB\n"


def examples(name: str) -> list[str]:
    """The Python examples of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)


EXAMPLES = {f"{name}-{i}": code for name in N_EXAMPLES for i, code in enumerate(examples(name))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", EXAMPLES[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    if name == "README.md-0":  # it prints the figures of its tapes
        assert re.fullmatch(FIRST, done.stdout)


@pytest.mark.parametrize("name", N_EXAMPLES)
def test_the_documents_have_their_examples(name: str) -> None:
    assert len(examples(name)) == N_EXAMPLES[name]
