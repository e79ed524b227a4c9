"""The README's examples run as they stand, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)


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


def test_the_readme_has_its_two_examples() -> None:
    assert len(EXAMPLES) == 2
