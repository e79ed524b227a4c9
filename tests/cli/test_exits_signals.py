"""Signals that end a command."""

# ruff: noqa: F811 - fixtures that are imported, and asked for by their names

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs typer: pip install '.[run]'")

from support.processes.staged_models import leaves_nothing, model, stale  # noqa: F401
from support.processes.warm_python import start
from support.terminal.screens import run_anew, run_command

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture(scope="module", autouse=True)
def _commands_can_be_run() -> None:
    start()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_command_ended_by_a_signal_leaves_nothing(number: signal.Signals, model: Path) -> None:
    script = f"""
import os, sys
from contextlib import contextmanager
from unimem.cli import main, terminal
@contextmanager
def updates(what):
    yield lambda *now: os.kill(os.getpid(), {number})
terminal.updates = updates
sys.exit(main(["stage", "--backing", "shm", {str(model)!r}]))
"""
    assert run_command(code=script) == (128 + number, "", "")
    assert not list(stale())


def test_a_command_keeps_ignored_signals_ignored(model: Path) -> None:
    """A command under nohup starts like this."""
    script = f"""
import os, signal, sys
from unimem.cli import main, terminal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
show = terminal.show
terminal.show = lambda text: [os.kill(os.getpid(), signal.SIGHUP), show(text)]
sys.exit(main(["inspect", {str(model)!r}]))
"""
    ended = run_command(code=script)
    assert (ended.code, ended.err) == (0, "")
    assert "fingerprint" in ended.out


# Interrupts the process during an import, as Ctrl-C may.
INTERRUPTED = """
import _signal, importlib.abc, os, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "MODULE":
            os.kill(os.getpid(), _signal.SIGINT)
sys.meta_path.insert(0, Finder())
BEFORE
from unimem_command import main
sys.argv = ["unimem", "plan"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", [
    pytest.param("signal", marks=pytest.mark.uncounted),
    "unimem", "unimem.cli.plan",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("unimem._core.block", "typer")),
])  # fmt: skip
def test_an_interrupt_during_imports_ends_a_command_quietly(module: str) -> None:
    script = INTERRUPTED.replace("MODULE", module).replace("BEFORE", "")
    assert run_anew(code=script) == (130, "", "")


# Interrupts the process as soon as it installs the default interrupt handler.
AT_THE_HANDOVER = """
set_handler = _signal.signal
def interrupt(number, handler):
    set_handler(number, handler)
    if handler is _signal.default_int_handler:
        os.kill(os.getpid(), _signal.SIGINT)
_signal.signal = interrupt
"""


def test_an_interrupt_before_the_command_begins_ends_it_quietly() -> None:
    script = INTERRUPTED.replace("MODULE", "none").replace("BEFORE", AT_THE_HANDOVER)
    assert run_anew(code=script) == (130, "", "")


def test_ignored_interrupts_end_nothing() -> None:
    ignore = "_signal.signal(_signal.SIGINT, _signal.SIG_IGN)"
    script = INTERRUPTED.replace("MODULE", "unimem").replace("BEFORE", ignore)
    ended = run_anew(code=script)
    assert (ended.code, ended.err) == (0, "")
    assert "Fits: " in ended.out
