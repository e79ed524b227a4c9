"""The programs and commands of docs/native.md, which run word for word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.project.checkout import ROOT
from unimem._core.status import VERSION

PAGE = ROOT / "docs" / "native.md"
FIRST = f"unimem {VERSION}: 1 token in 512 bytes\n"
# Commands with these words run in the checkout, all others in a folder with the page's programs.
IN_CHECKOUT = ("cmake --install", "examples/c")
MODEL = "src/unimem/engine/models/tiny.gguf"
# The output of each block of commands, in the order of the page.
PRINTED = ["", FIRST, FIRST, FIRST, "1000 values, 4000 bytes\n", "979\n355\n283\n"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def write_programs(folder: Path) -> None:
    """Write the programs of the page; the first comment of each names its file."""
    for language in ("c", "cpp", "cmake"):
        for text in blocks(language):
            name = re.match(r"(?:/\*|//|#) (\S+)", text)
            assert name is not None
            (folder / name[1]).write_text(text)
    shutil.copy(ROOT / "examples" / "cpp" / "unimem.hpp", folder)


def runs(commands: str, folder: Path, home: Path, python: str = sys.executable) -> str:
    """Run commands in a shell with a home folder of its own and a Python that has unimem."""
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "PKG_CONFIG_PATH": f"{home}/unimem/lib/pkgconfig",  # as the page exports it
    }
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # its unimem is its own
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^(--|\[).*\n", "", done.stdout, flags=re.M)  # output of CMake
