"""Print how much of each room the tests run: the end of tools/coverage.sh."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def python_counts(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield a room with its lines, lines run, branches and branches taken, for each file."""
    for path, file in json.loads((folder / "python.json").read_text())["files"].items():
        parts = Path(path).parts
        room = "/".join(parts[parts.index("unimem") : -1])
        n = file["summary"]
        counts = [n["num_statements"], n["covered_lines"], n["num_branches"], n["covered_branches"]]
        yield f"Python: {room}", counts


def native_counts(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield the same for C and Cython, over all programs and libraries."""
    lines: dict[tuple[str, int], int] = defaultdict(int)
    branches: dict[tuple[str, int, int], int] = defaultdict(int)
    for path, line in _gcov_lines(folder):
        at = path, line["line_number"]
        lines[at] += line["count"]
        # A line of Cython is many branches of C, and no test can reach most of them.
        if path.endswith(".c"):
            for i, branch in enumerate(line["branches"]):
                branches[(*at, i)] += branch["count"]
    for suffix, room in ((".c", "C"), (".pyx", "Cython")):
        run = [count > 0 for (path, _), count in lines.items() if path.endswith(suffix)]
        taken = [count > 0 for (path, *_), count in branches.items() if path.endswith(suffix)]
        yield room, [len(run), sum(run), len(taken), sum(taken)]


def _gcov_lines(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of our own files that gcov knows, with the file."""
    for data in sorted(folder.rglob("*.gcda")):
        if "/tests/" in str(data) or "/fuzz/" in str(data):
            continue
        printed = subprocess.run(
            ["gcov", "--json-format", "--stdout", "--branch-probabilities", data],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
        for document in filter(None, printed.stdout.splitlines()):
            for file in json.loads(document)["files"]:
                name = file["file"].removeprefix(f"{ROOT}/")
                if name.startswith("native/src/") or name.endswith(".pyx"):
                    yield from ((name, line) for line in file["lines"])


def main() -> int:
    """Read the counts of coverage.py and gcov, and print them by room."""
    folder = Path(sys.argv[1]).absolute()
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for room, counts in (*python_counts(folder), *native_counts(folder)):
        for name in (room, "all"):
            rows[name] = [a + b for a, b in zip(rows[name], counts, strict=True)]
    print(f"{'':28}{'lines':>8}{'run':>8}{'branches':>10}{'taken':>8}")
    for name, (lines, run, branches, taken) in sorted(
        rows.items(), key=lambda row: (row[0] == "all", row)
    ):
        share = f"{taken / branches:8.1%}" if branches else f"{'-':>8}"
        print(f"{name:28}{lines:8}{run / lines:8.1%}{branches or '-':>10}{share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
