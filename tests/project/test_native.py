"""What docs/native.md shows is built and run, word for word, against an empty prefix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from building import tool
from project import ROOT
from unimem._core.status import VERSION

PAGE = ROOT / "docs" / "native.md"
# In the checkout; the others in an empty folder with the programs of the page.
IN_CHECKOUT = ("cmake --install", "examples/c")
NEEDED = ("CMakeLists.txt", "cmake", "native/include", "native/src", "native/exec", "examples")
MODEL = "src/unimem/engine/models/tiny.gguf"
FIRST = f"unimem {VERSION}: 1 token in 512 bytes\n"
# What each block of commands prints, in the order of the page.
PRINTED = ["", FIRST, FIRST, FIRST, "1000 values, 4000 bytes\n", "979\n355\n283\n"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def write_programs(folder: Path) -> None:
    """Each program begins with a comment that is the name of its file."""
    for language in ("c", "cpp", "cmake"):
        for text in blocks(language):
            name = re.match(r"(?:/\*|//|#) (\S+)", text)
            assert name is not None
            (folder / name[1]).write_text(text)
    shutil.copy(ROOT / "examples" / "cpp" / "unimem.hpp", folder)


def runs(commands: str, folder: Path, home: Path) -> str:
    """Run commands as a shell does, in a home that is empty at first."""
    python = Path(sys.executable).parent
    environment = {
        **os.environ,
        **{"HOME": str(home), "PATH": f"{python}:{os.environ['PATH']}"},
        "PKG_CONFIG_PATH": f"{home}/unimem/lib/pkgconfig",  # as the page exports it
    }
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^(--|\[).*\n", "", done.stdout, flags=re.M)  # what CMake says


@pytest.mark.slow
def test_the_page_runs_word_for_word(tmp_path: Path) -> None:
    for name in ("gcc", "g++", "cmake", "pkg-config"):
        tool(name)
    checkout, folder = tmp_path / "checkout", tmp_path / "mine"
    folder.mkdir()
    for name in (*NEEDED, MODEL):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    write_programs(folder)
    printed = []
    for commands in blocks("sh"):
        is_there = any(text in commands for text in IN_CHECKOUT)
        printed.append(runs(commands, checkout if is_there else folder, tmp_path))
    assert [text[: len(start)] for text, start in zip(printed, PRINTED, strict=True)] == PRINTED
    installed = {path.name for path in (tmp_path / "unimem").rglob("*") if path.is_file()}
    assert {"unimem.h", "libunimem.so.0", "libunimem.a", "unimem.pc"} <= installed
    static = (folder / "CMakeLists.txt").read_text().replace("0.1 REQ", "0.1 COMPONENTS static REQ")
    (folder / "CMakeLists.txt").write_text(static.replace("unimem::unimem", "unimem::static"))
    shutil.rmtree(folder / "build")
    assert runs(blocks("sh")[3], folder, tmp_path) == FIRST
    assert "libunimem" not in runs("ldd build/first", folder, tmp_path)


def test_the_page_runs_with_the_package(tmp_path: Path) -> None:
    write_programs(tmp_path)
    (commands,) = [text for text in blocks("sh") if "python -m unimem" in text]
    assert runs(commands, tmp_path, tmp_path) == FIRST
