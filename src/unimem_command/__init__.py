"""The entry of the command `unimem`, which an interrupt ends silently from the start.

It is a package of its own: a module of unimem would run only after the import of unimem, which
takes some tenths of a second.
"""

from __future__ import annotations

# The part of `signal` in C: the other part imports for 5 ms, during which an interrupt would print
# a traceback.
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
        from unimem_exec import quick

        quick(sys.argv[2:])
    # Ignored interrupts stay ignored.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        # Half an import leaves nothing behind, and modules may replace an exception by another.
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    try:
        from unimem.cli import main as run
    except ModuleNotFoundError as error:
        if error.name != "unimem.cli":
            raise
        print(
            "unimem: the package 'unimem' that Python finds is another project's. This command is "
            "of unimem-llm: 'pip uninstall unimem', and install unimem-llm again",
            file=sys.stderr,
        )
        return 1
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # before the command begins, or after its end
        return _INTERRUPTED
