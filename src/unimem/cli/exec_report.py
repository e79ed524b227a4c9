"""The report that `unimem exec --report` writes; the program that ends waits for it.

Started by the library as ``python -m unimem.cli.exec_report PID FILE``.
"""

from __future__ import annotations

import sys

from unimem.accounting.exec_table import CATEGORY
from unimem.accounting.report import report
from unimem.accounting.report_text import report_lines
from unimem.base.atomic_file import write_text
from unimem.base.text import Surface

__all__ = ["main"]


def main(pid: int, file: str) -> int:
    """Write the report of a process.

    Parameters
    ----------
    pid : int
        The process.
    file : str
        Where to: a path, or ``"-"`` for a page on standard error.
    """
    made = report(pid)
    if file == "-":
        placed = [mapping for mapping in made.mappings if mapping.category == CATEGORY]
        lines = report_lines(Surface(), made.rows, made.facts, placed)
        print("\n".join(lines), file=sys.stderr)
    else:
        write_text(file, made.to_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
