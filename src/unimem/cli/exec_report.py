"""The report of `unimem exec --report`, for which the ending program waits.

The library starts it as ``python -m unimem.cli.exec_report PID FILE``.
"""

from __future__ import annotations

import sys

from unimem.accounting.report import report
from unimem.accounting.report_text import report_lines
from unimem.base.atomic_file import write_text
from unimem.base.text import Surface
from unimem.cli.exits import FAILED, OK, fail, sentence


def main(pid: int, file: str) -> int:
    """Write the report of a process to a path, or for "-" as a page on standard error.

    Returns
    -------
    int
        The exit code: 1 if it cannot be made or written, and standard error says why.
    """
    try:
        _write(pid, file)
    except (OSError, ValueError) as error:
        return fail(sentence(error), FAILED)
    return OK


def _write(pid: int, file: str) -> None:
    made = report(pid)
    if file != "-":
        write_text(file, made.to_json() + "\n")
    elif sys.stderr is not None:
        placed = [each for each in made.mappings if "is_stalled" in (each.requested or {})]
        lines = report_lines(Surface(), made.rows, made.facts, placed)
        print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
