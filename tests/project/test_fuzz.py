"""`tools/fuzz.py` names what it lacks, and keeps its figures; `make fuzz` runs the rest."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.project.checkout import ROOT

TOOL = ROOT / "tools" / "fuzz.py"
CORPUS = ROOT / "native" / "fuzz" / "corpus"
IN_PYTHON = ("snapshot", "ledger", "note", "process", "image", "index")


@pytest.fixture(scope="module")
def tools() -> Iterator[Any]:
    """Import the fuzzing tools by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOL.parent))
        yield importlib.import_module


def test_a_python_without_numpy_cannot_fuzz() -> None:
    bare = [sys.executable, "-I", "-S"]  # without the packages that are installed
    ended = subprocess.run([*bare, str(TOOL)], check=False, capture_output=True, text=True)
    assert ended.returncode == 69
    assert ended.stderr.startswith("fuzz.py: no fuzzing: ")
    assert "numpy" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_unknown_target_is_refused() -> None:
    command = [sys.executable, str(TOOL), "gguf", "mp3"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "no target mp3: there are gguf, safetensors" in ended.stderr


def test_all_targets_are_known_by_the_same_names(tools: Any) -> None:
    fuzz, seeds = tools("fuzz"), tools("fuzz_seeds")
    assert tuple(tools("fuzz_python").TARGETS) == fuzz.IN_PYTHON == IN_PYTHON
    assert tuple(seeds.TARGETS) == (*fuzz.IN_C, *fuzz.IN_PYTHON)
    assert {path.name for path in CORPUS.iterdir()} == set(seeds.TARGETS)


@pytest.mark.parametrize("name", IN_PYTHON)
def test_inputs_that_are_kept_are_read_or_refused(name: str, tools: Any) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert tools("fuzz_python").replay(name, (file.read_bytes() for file in files)) > 0


def test_runs_are_added_to_the_page_and_summed(tools: Any) -> None:
    fuzz = tools("fuzz")
    page = "<!-- sums -->\n<!-- end -->\n<!-- runs -->\n\n|head|\n<!-- end -->\nrest\n"
    for executions in (1_000_000, 500):
        made = [fuzz.Figures("gguf", fuzz.FENCES, executions, 10, 7)]
        made.append(fuzz.Figures("index", fuzz.ATHERIS, 30, 10, 5))
        page = fuzz.record(page, made, "2026-01-02", "abcd1234")
    assert "| 2026-01-02 | abcd1234 | gguf | fences | 1,000,000 | 10 | 100,000 | 7 |\n" in page
    assert page.count("| 2026-01-02 |") == 4
    for row in (
        "gguf | 1,000,500 | 7",
        "index | 60 | 5",
        "all in C | 1,000,500 |",
        "all | 1,000,560 |",
    ):
        assert page.count(f"| {row} |") == 1
    assert page.endswith("<!-- end -->\nrest\n")
