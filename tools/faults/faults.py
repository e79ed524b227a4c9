"""Make every system call fail once in every operation: `make faults`.

It prints a table; ``--page`` puts it into ``docs/hardening.md``. Ends with status 1 if something
was lost. The tests run a part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from recorded import put

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "tests" / "support" / "kernel" / "shim" / "fail_call.c"
SWEEP = Path(__file__).parent / "sweep.py"
PAGE = ROOT / "docs" / "hardening.md"
BEGIN, END = "<!-- made by make faults -->\n", "<!-- end of the faults -->"
N_NAMED = 5
# Neither malloc nor the interpreter maps memory, so any new mapping is unimem's. All threads share
# the heap.
QUIET = {
    "PYTHONMALLOC": "malloc",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def build(folder: Path) -> Path:
    """Compile the library that is preloaded."""
    library = folder / "fail_call.so"
    command = ["cc", "-std=c17", "-O2", "-shared", "-fPIC", "-fno-builtin", "-w"]
    subprocess.run([*command, "-o", library, SHIM, "-ldl"], check=True)
    return library


def sweep(folder: Path, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run the operations in a process of their own, with arguments of ``sweep.py``.

    They write a few MiB into `folder`. Returns a row for each operation.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / name) for name in ("tests", "bench", "tools")]
    paths += [path for path in [os.environ.get("PYTHONPATH")] if path]
    more = {"LD_PRELOAD": str(build(folder)), "PYTHONPATH": os.pathsep.join(paths)}
    more |= {"UNIMEM_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(SWEEP), "--dir", str(folder), *arguments],
        env=os.environ | QUIET | more,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows in Markdown."""
    lines = [
        "| operation | calls | of these | failed | an error | a warning | no effect | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    total: Counter[str] = Counter()
    for row in rows:
        if "skipped" in row:
            lines.append(f"| {row['operation']} | not run: {row['skipped']} | | | | | | |")
            continue
        calls, found = Counter(row["calls"]), Counter(row["outcomes"])
        named = ", ".join(f"{n} {name}" for name, n in calls.most_common(N_NAMED))
        more = ", ..." if len(calls) > N_NAMED else ""
        found["failed"] = found["error"] + found["warning"] + found["none"]
        found["calls"], found["lost"] = calls.total(), len(row["losses"])
        total += found
        lines.append(_line(row["operation"], named + more, found))
    return "\n".join([*lines, _line("all", "", total)]) + "\n"


def _line(name: str, named: str, found: Counter[str]) -> str:
    cells = [name, f"{found['calls']}", named]
    cells += [f"{found[key]:,}" for key in ("failed", "error", "warning", "none", "lost")]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Let every call fail once in every operation.")
    parser.add_argument("--page", action="store_true", help="put the table into the document")
    parser.add_argument("--dir", type=Path, default=ROOT / "build" / "faults")
    parser.add_argument("names", nargs="*", help="words of operations; by default all")
    given = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rows = sweep(given.dir, given.names)
    text = table(rows)
    print(text, end="")
    if given.page:
        put(PAGE, BEGIN, text, END)
    losses = [f"{row['operation']}: {loss}" for row in rows for loss in row.get("losses", ())]
    print(*losses, sep="\n", file=sys.stderr)
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
