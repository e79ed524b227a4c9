"""The examples of README.md and docs/placement.md run as they stand, each in its own process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def examples(name: str) -> list[str]:
    """The Python examples of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S)


EXAMPLES = examples("README.md") + examples("docs/placement.md")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[number]],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()


def test_the_first_example_prints_the_figures_of_its_tapes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[0]], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(
        r"weights: 0\.0/16\.0 MB \| scratch: 0\.0/1\.0 MB \| history: 1\.0/8\.0 MB\n", done.stdout
    )


def test_the_documents_have_their_examples() -> None:
    assert len(examples("README.md")) == 2
    assert len(examples("docs/placement.md")) == 3
