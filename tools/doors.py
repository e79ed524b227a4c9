"""Write the table of doors to other engines into docs/engines.md, from what was recorded of each.

    python tools/doors.py [--check]

Each ``bench/results/doors/NAME.json`` is written by the command that it names, which runs the
engine: the table has its rows, and its figures stay in the file. ``--check`` changes nothing, and
fails if the page is not what the files say.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from recorded import renew

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs/engines.md", ROOT / "bench/results/doors"
BEGIN, END = "<!-- doors: tools/doors.py -->\n", "<!-- /doors -->"
HEADS = ("door", "version", "what ran", "date", "result", "command")
RAN = ("real engine", "contract", "not run")
RESULTS = ("passed", "failed: ", "missed: ")


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a door's record; ValueError if it is not as specified."""
    found = []
    for row in record["rows"]:
        date.fromisoformat(row["date"])
        result = row["result"]
        if row["ran"] not in RAN or not result.startswith(RESULTS):
            raise ValueError(f"expected one of {RAN} and {RESULTS}, got {row}")
        if (row["ran"] == "not run") != result.startswith("missed"):
            raise ValueError(f"a row that was not run is missed, and no other one: {row}")
        door = f"{record['door']}, `{record['module']}`"
        what = f"{row['ran']}: {row['what']}"
        cells = (door, row["version"], what, row["date"], result, f"`{record['command']}`")
        found.append(tuple(cell.replace("|", "/").replace("\n", " ") for cell in cells))
    return found


def table(folder: Path = RECORDS) -> str:
    """Return the table of all records of a folder."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    lines = [HEADS, ("---",) * len(HEADS), *(row for record in records for row in rows(record))]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Renew the page, or compare it."""
    page = PAGE.read_text()
    renewed = renew(page, BEGIN, table(), END)
    if "--check" not in sys.argv:
        PAGE.write_text(renewed)
    elif page != renewed:
        sys.exit("docs/engines.md is not what bench/results/doors says: python tools/doors.py")


if __name__ == "__main__":
    main()
