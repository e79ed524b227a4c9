"""Processes that decode and say what each token took: `unimem_bench.timed_side`, from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["UNIMEM", "TimedProcess", "TimedProcessError", "command"]

# The command, whatever the folder is called that it is installed in.
UNIMEM = [sys.executable, "-c", "import sys; from unimem_command import main; sys.exit(main())"]


class TimedProcessError(Exception):
    """The process has ended, as by the kernel's hand."""


def command(kind: str, model: str | Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command of a process that decodes.

    Parameters
    ----------
    kind : {"unimem", "llama.cpp"}
        The library.
    model : str or Path
        The model's file.
    options : mapping
        Of the side, as its class in `unimem_bench.timed_side` takes them.
    """
    script = str(Path(__file__).with_name("timed_side.py"))
    return [sys.executable, "-P", script, kind, str(model), json.dumps(dict(options))]


class TimedProcess:
    """A process that decodes, and answers what its tokens took; leave its ``with`` to end it.

    Parameters
    ----------
    words : sequence of str
        As `command` gives them, with what runs them before that.
    environment : mapping of str to str
        More variables for it.

    Attributes
    ----------
    facts : dict
        What it said when it was ready: ``load``, and ``start_s`` in seconds.

    Raises
    ------
    TimedProcessError
        If it ends before it is ready.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"UNIMEM_CACHE": "off"} | dict(environment or {}),
        )
        self.pid = self._process.pid
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def tokens(self, n: int, seconds: float) -> dict[str, Any]:
        """Have it compute so many tokens, or as many as the time allows.

        Returns
        -------
        dict
            ``ms`` of each token, and ``major_faults`` of all of them.

        Raises
        ------
        TimedProcessError
            If it has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps({"n": n, "seconds": seconds}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise TimedProcessError(
                f"it ended with status {status}; -9 is the kernel's, for want of memory"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> TimedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
