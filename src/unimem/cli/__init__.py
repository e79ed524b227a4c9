"""The command `unimem`: one file per command, and here their common frame.

A command raises the errors of the library; `main` turns them into a sentence and an exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unimem.cli.exits import DOES_NOT_FIT, FAILED, INTERRUPTED, OK, Ended, fail, sentence

if TYPE_CHECKING:
    import typer

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words behind the program's name; by default those of this process.

    Returns
    -------
    int
        The exit code: 0, 1 for a bad file or a failure, 2 for wrong usage, 3 for a model that does
        not fit, 130 for an interrupt, 129 and 143 for SIGHUP and SIGTERM. The reason is written to
        standard error.
    """
    if sys.stdout is None:
        return fail("standard output is closed: there is nowhere to write to", FAILED)
    # A terminal that lacks a character shows a question mark for it.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    with warnings.catch_warnings(), _signals_as_interrupts() as received:
        warnings.showwarning = _show_warning
        code = _run(arguments)
    if code == INTERRUPTED and received:
        code = 128 + received[0]
    try:
        sys.stdout.flush()
    except OSError as error:
        # Otherwise Python would try again to write the rest when it ends, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A program that closes a pipe, such as `head`, needs no message.
        if code == OK and not isinstance(error, BrokenPipeError):
            return fail(f"standard output: {error.strerror}", FAILED)
        code = code or FAILED
    return code


@contextmanager
def _signals_as_interrupts() -> Iterator[list[int]]:
    """Turn SIGHUP and SIGTERM into interrupts, which clean up; yield those received."""
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # a second one would end the clean-up
        received.append(number)
        raise Ended

    # Signals that are ignored (nohup) or handled are left alone.
    ours = [
        number
        for number in (signal.SIGHUP, signal.SIGTERM)
        if signal.getsignal(number) == signal.SIG_DFL
        and threading.current_thread() is threading.main_thread()
    ]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        _app()(arguments, prog_name="unimem")
    except SystemExit as end:
        # typer always ends so.
        return end.code if isinstance(end.code, int) else OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError as error:
        return fail(sentence(error) or "there is not enough memory", DOES_NOT_FIT)
    except (OSError, ValueError, RuntimeError, ArithmeticError, BufferError, ImportError) as error:
        return fail(sentence(error), FAILED, getattr(error, "__notes__", ()))
    return OK


def _app() -> typer.Typer:
    """Collect the commands. A new one is a file of this folder, its test, and a name here.

    Another package adds a command by an entry point of the group ``unimem.commands``, as
    ``unimem_bench`` does.
    """
    from importlib.metadata import entry_points

    import typer

    from unimem.cli.cache import cache
    from unimem.cli.chat import chat
    from unimem.cli.command import Command
    from unimem.cli.doctor import doctor
    from unimem.cli.exec import exec_
    from unimem.cli.inspect import inspect
    from unimem.cli.metrics import metrics
    from unimem.cli.plan import plan
    from unimem.cli.program import program
    from unimem.cli.report import report
    from unimem.cli.run import run
    from unimem.cli.serve_slots import serve_slots
    from unimem.cli.stage import stage
    from unimem.cli.store import store

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(program)
    for own in (
        run,
        chat,
        plan,
        report,
        metrics,
        inspect,
        doctor,
        stage,
        cache,
        store,
        serve_slots,
    ):
        app.command(cls=Command)(own)
    # Words behind the program's name belong to the program.
    behind = {"allow_interspersed_args": False}
    app.command("exec", cls=Command, context_settings=behind)(exec_)
    for command in entry_points(group="unimem.commands"):
        app.command(command.name, cls=Command)(command.load())
    return app


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    fail(f"warning: {message}", OK)
