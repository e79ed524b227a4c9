"""A process that runs a script until the end of a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running(script: str, *arguments: object) -> Iterator[int]:
    """Start a script that writes "ready" and then waits; kill it at the end."""
    words = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()
