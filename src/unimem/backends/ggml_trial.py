"""Trials of ggml's extra buffer types: whether one computes correctly on this machine.

A trial starts a process, which takes longer than the rest of a start. So its result is kept in the
user's cache, for the same build of ggml on a CPU with the same features.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from unimem.base.atomic_file import write_text
from unimem.base.cache_folder import cache_folder, check_own_folder

UNSOUND = 3
"""Exit status of a trial with wrong products; an error of Python is 1."""

_TRIAL_SECONDS = 60.0
# Exit statuses that show wrong kernels. Any other failure says nothing about them.
_WRONG = (
    UNSOUND,
    *(-each for each in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)),
    -signal.SIGABRT,
)
_WORDS = {"sound\n": True, "unsound\n": False}


def passes_trial(name: str, build: dict[str, Any]) -> bool:
    """Return whether products by a type are right, from an earlier trial or a new one.

    `name` is ggml's name of the type; `build` identifies the build of ggml and the CPU, in JSON.
    """
    path = _path(name, build)
    if path is not None:
        with suppress(OSError, ValueError, KeyError), open(path) as file:
            return _WORDS[file.read(16)]
    found = _try(name)
    if path is not None and found is not None:
        with suppress(OSError):
            write_text(path, next(word for word, sound in _WORDS.items() if sound == found))
    return bool(found)


def _path(name: str, build: dict[str, Any]) -> str | None:
    folder = cache_folder()
    if folder is None:
        return None
    try:
        check_own_folder(folder, create=True)
    except OSError:
        return None
    text = json.dumps({"type": name, "build": build}, sort_keys=True)
    return os.path.join(folder, f"{hashlib.sha256(text.encode()).hexdigest()}.trial")


def _try(name: str) -> bool | None:
    """Make a trial; return None if it says nothing about the kernels."""
    command = [sys.executable, "-P", "-m", "unimem.backends.ggml_trial_process", name]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode in _WRONG:
        return False
    return True if done.returncode == 0 else None
