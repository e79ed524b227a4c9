"""Where the command `unimem` begins, which an interrupt ends without a word from the first on.

This is a package of its own, since unimem is imported before anything in it runs, and that takes
some tenths of a second.
"""

from __future__ import annotations

# Of `signal` the part in C: the other imports for 5 ms, in which an interrupt had its traceback.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> int:
    """Run the command line; see `unimem.cli.main`.

    Returns
    -------
    int
        The exit code.
    """
    if sys.argv[1:2] == ["exec"]:
        from unimem_command.launch import quick

        quick(sys.argv[2:])
    # Where somebody ignores interrupts, it stays so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        # Half an import leaves nothing behind, and modules may make another error of an exception.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from unimem.cli import main as run

    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # before the command begins, or after its end
        return _INTERRUPTED
