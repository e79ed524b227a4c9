"""Compilers and other build tools for tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


def run(*command: str | Path) -> str:
    """Run a program that must succeed, and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
