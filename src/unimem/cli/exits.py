"""How every command ends: its exit codes, and the signals that end it."""

from __future__ import annotations

# Usage errors end with 2, by typer.
OK, FAILED, DOES_NOT_FIT, READS_FROM_DISK, AT_LEAST, INTERRUPTED = 0, 1, 3, 4, 5, 130


class Ended(KeyboardInterrupt):
    """SIGHUP or SIGTERM, which end a command as Ctrl-C does, and one that Ctrl-C does not."""
