"""Turns of phrase that a reader has to read twice are rare.

At 3c583c30, before they were forbidden, this command counted 516::

    git grep -ioE '\\b(so many|...|shall)\\b' 3c583c30 -- src native docs bench tools tests \\
        README.md ':!bench/results' ':!tests/project/data' ':!tests/upgrades' \\
        ':!native/fuzz/corpus' | wc -l
"""

from __future__ import annotations

import re
from pathlib import Path

from support.project.checkout import ROOT

FORBIDDEN = ("so many", "of which", "what of", "there is none", "it is none", "is told", "shall")
COUNT_BEFORE = 516
FOLDERS = ("src", "native", "docs", "bench", "tools", "tests")
DATA = ("bench/results", "tests/project/data", "tests/upgrades", "native/fuzz/corpus")
TEXT = set(".c .cmake .cu .h .json .md .pxd .py .pyi .pyx .sh .toml .txt .yml".split())


def texts() -> list[Path]:
    found = [ROOT / "README.md"]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.suffix in TEXT)
    kept_out = tuple(f"{ROOT / folder}/" for folder in DATA)
    return [path for path in found if not str(path).startswith(kept_out) and path != Path(__file__)]


def test_forbidden_turns_of_phrase_are_rare() -> None:
    pattern = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for _ in pattern.findall(line)
    ]
    assert len(found) <= 0.05 * COUNT_BEFORE, "\n".join(found)
