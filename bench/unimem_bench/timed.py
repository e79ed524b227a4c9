"""Processes that decode and report the time of each token: `timed_side`, from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unimem_bench import llama_build

# The command `unimem`, wherever it is installed.
UNIMEM = [sys.executable, "-c", "import sys; from unimem_command import main; sys.exit(main())"]


class TimedProcessError(Exception):
    """The process has ended, for example because the kernel killed it."""


def command(kind: str, model: str | Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command of a process that decodes with "unimem" or "llama.cpp".

    `options` are those of its class in `unimem_bench.timed_side`; llama.cpp is `llama_build`'s.
    NoPeer if that is not built.
    """
    if kind == "llama.cpp":
        options = {"library": str(llama_build.library()), **options}
    script = str(Path(__file__).with_name("timed_side.py"))
    return [sys.executable, "-P", script, kind, str(model), json.dumps(dict(options))]


class TimedProcess:
    """A process that decodes and reports the time of its tokens; leaving its ``with`` ends it.

    `words` is a result of `command`, perhaps with a program before it that runs it. `facts` is what
    it reported when ready: ``load``, ``start_s`` in seconds, and ``counts`` after the prompt.
    TimedProcessError if it ends before.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        # The words of a process that ends; the file goes with it.
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
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
        """Compute `n` tokens, or as many as the time allows; TimedProcessError if it has ended.

        Returns ``ms`` of each token, and ``major_faults`` of all of them.
        """
        return self._ask({"n": n, "seconds": seconds})

    def batches(self, batches: Sequence[Sequence[int]], seconds: float) -> dict[str, Any]:
        """Compute batches of tokens in a new conversation, or as many as the time allows.

        Returns ``ms`` of each batch, ``major_faults`` of all, and ``counts`` by name.
        """
        return self._ask({"batches": batches, "seconds": seconds})

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            words = self._errors.read().split("\n")[-2:]
            raise TimedProcessError(
                f"it ended with status {status} ({words[0] or '-9 is for want of memory'})"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> TimedProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
