"""How every command ends: its exit codes, the signals that end it, and its last words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from unimem.base.text import escape

# Usage errors end with 2, by typer.
OK, FAILED, DOES_NOT_FIT, READS_FROM_DISK, AT_LEAST, INTERRUPTED = 0, 1, 3, 4, 5, 130


class Ended(KeyboardInterrupt):
    """SIGHUP or SIGTERM, which end a command as Ctrl-C does, and one that Ctrl-C does not."""


def sentence(error: BaseException) -> str:
    """Return what an error says, with the path first."""
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{where}{error.strerror}"
    return str(error)


def fail(text: str, code: int, notes: Sequence[str] = ()) -> int:
    """Say something on standard error, if that takes it, and return the exit code."""
    if sys.stderr is not None:
        with suppress(OSError):  # such as of a closed terminal
            for line in (f"unimem: {text}", *notes):
                print(escape(line), file=sys.stderr)
    return code
