"""The report of `unimem exec --report`, for which the ending program waits.

The library starts it as ``python -m unimem.cli.exec_report PID FILE``.
"""

from __future__ import annotations

import sys

from unimem.accounting.report import report
from unimem.accounting.report_text import report_lines
from unimem.base.atomic_file import write_text
from unimem.base.text import Surface


def main(pid: int, file: str) -> int:
    """Write the report of a process to a path, or for "-" as a page on standard error."""
    made = report(pid)
    if file == "-":
        placed = [each for each in made.mappings if "is_stalled" in (each.requested or {})]
        lines = report_lines(Surface(), made.rows, made.facts, placed)
        print("\n".join(lines), file=sys.stderr)
    else:
        write_text(file, made.to_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
