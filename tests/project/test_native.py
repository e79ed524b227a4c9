"""Programs and commands of docs/native.md run word for word with an empty prefix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.project.building import tool
from support.project.checkout import ROOT
from support.project.native_page import (
    FIRST,
    IN_CHECKOUT,
    MODEL,
    PRINTED,
    blocks,
    runs,
    write_programs,
)

NEEDED = ("CMakeLists.txt", "cmake", "native/include", "native/src", "native/exec", "examples")


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
