"""The binary interface is the one that is recorded, and a change of it is noticed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import unimem as um
from support.project import c_abi
from support.project.building import run, tool
from support.project.checkout import ROOT
from unimem._core.status import SOVERSION

INCLUDE = ROOT / "native" / "include"


@pytest.fixture(scope="module")
def recorded() -> list[str]:
    return c_abi.record_of(SOVERSION).read_text().splitlines()


def test_the_interface_is_the_recorded_one(recorded: list[str]) -> None:
    found = c_abi.describe(INCLUDE)
    assert c_abi.lost(recorded, found) == [], "programs would break: raise UM_SOVERSION"
    new = "PYTHONPATH=tests python -m support.project.c_abi --record notes what is new"
    assert found == recorded, new


def test_the_library_exports_what_is_recorded(recorded: list[str]) -> None:
    library = Path(um.get_library())
    listed = run(tool("nm"), "-D", "--defined-only", "--without-symbol-versions", library)
    exported = {line.split()[-1] for line in listed.splitlines()}
    node = f"UNIMEM_{SOVERSION}"
    functions = re.findall(r"^function [^(]*?\b(um_\w+)\(", "\n".join(recorded), re.M)
    assert exported - {node} == set(functions)
    # A program is refused by a library with another number, and not run by it.
    assert f"@@{node}" in run(tool("nm"), "-D", "--defined-only", library)
    dynamic = run(tool("readelf"), "-d", library)
    assert f"soname: [libunimem.so.{SOVERSION}]" in dynamic
    assert library.name == f"libunimem.so.{SOVERSION}"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("unimem.h", "size_t um_tape_mark(", "size_t um_tape_note("),
        ("unimem.h", "uint32_t um_grid_n_available(", "uint64_t um_grid_n_available("),
        ("unimem.h", "um_category category, um_ledger_row *out", "um_ledger_row *out"),
        ("unimem.h", "    UM_E_FULL,", "    UM_E_NEW,\n    UM_E_FULL,"),
        ("unimem.h", "    int os_errno; ", "    int64_t os_errno; "),
        ("unimem_kv.h", "n_kv_heads, head_dim, batch;", "head_dim, n_kv_heads, batch;"),
        ("unimem_formats.h", "UM_SAFETENSORS_MAX_DIMS 64", "UM_SAFETENSORS_MAX_DIMS 65"),
    ],
    ids=["renamed", "typed", "argument", "enumerator", "widened", "reordered", "constant"],
)
def test_a_change_is_noticed(
    recorded: list[str], tmp_path: Path, name: str, old: str, new: str
) -> None:
    shutil.copytree(INCLUDE, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    assert c_abi.lost(recorded, c_abi.describe(tmp_path)) != []
