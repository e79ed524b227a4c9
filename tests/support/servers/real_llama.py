"""The Python that has llama.cpp's real server and binding, as ``tools/llama_env.py`` makes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.project.checkout import ROOT


def python_with(module: str) -> str:
    """Return a Python that has a module; skip without one."""
    python = os.environ.get("LLAMA_PYTHON", str(ROOT / "build/llama/bin/python"))
    command = [python, "-c", f"import importlib.util as u; assert u.find_spec({module!r})"]
    if not Path(python).exists() or subprocess.run(command, check=False).returncode:
        pytest.skip(
            f"{module}: 'python tools/llama_env.py build/llama' builds it, or LLAMA_PYTHON "
            "names another"
        )
    return python
