"""A process that runs a script until the end of a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WAIT = """
import sys
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(script: str = "", *arguments: object) -> Iterator[int]:
    """Start a script that waits at its end, or writes "ready" earlier; kill it at the end."""
    words = [sys.executable, "-c", script + WAIT, *map(str, arguments)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()
