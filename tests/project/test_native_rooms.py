"""The rooms of the C core: includes run one way, and name the folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from support.project.checkout import ROOT

SOURCES = ROOT / "native" / "src"
# The folders that a folder may include beside itself, from the ground up.
BELOW: dict[str, set[str]] = {
    "base": set(),
    "os": {"base"},
    "block": {"base", "os"},
    "tape": {"base", "os"},
    "formats": {"base", "os"},
    "values": {"base", "os"},
    "kv": {"base", "os", "values"},
    "pieces": {"base", "os"},
}
PUBLIC = {path.name for path in (ROOT / "native" / "include").glob("*.h")}
# What exec shares with the core: numbers, and no code.
OF_EXEC = {"exec.h", "os/kernel.h"}


def includes(folder: Path) -> Iterator[tuple[str, str]]:
    """The files of a folder, each with the headers of ours that it includes."""
    for path in sorted(folder.rglob("*.[ch]")):
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            yield str(path.relative_to(folder)), name


def test_a_folder_includes_those_below() -> None:
    wrong = []
    for file, name in includes(SOURCES):
        if name not in PUBLIC:
            own, target = file.partition("/")[0], name.partition("/")[0]
            if target not in BELOW[own] | {own} or not (SOURCES / name).is_file():
                wrong.append((file, name))
    assert wrong == []


def test_every_folder_is_known() -> None:
    assert {path.name for path in SOURCES.iterdir()} == set(BELOW)
    assert len(list(includes(SOURCES))) > 100


def test_exec_takes_only_the_numbers_of_the_kernel() -> None:
    assert {name for _, name in includes(ROOT / "native" / "exec")} == OF_EXEC


# ---- names ----

GUARDS_AND_TESTS = re.compile(r"UM_\w+_H|UM_TEST_WITH_HOOKS")


def public_names() -> set[str]:
    headers = "".join((ROOT / "native" / "include" / name).read_text() for name in sorted(PUBLIC))
    return set(re.findall(r"\b[uU][mM]_\w+", headers))


def test_internal_names_have_two_underscores() -> None:
    public, wrong = public_names(), set()
    for folder in ("src", "exec"):
        for path in (ROOT / "native" / folder).rglob("*.[ch]"):
            text = re.sub(r"\w+##", "", path.read_text())  # names that a macro puts together
            names = set(re.findall(r"\b(?:um|UM)_(?!_)\w+", text))
            wrong |= {name for name in names - public if not GUARDS_AND_TESTS.fullmatch(name)}
    assert wrong == set()


def test_functions_of_the_core_are_public_internal_or_static() -> None:
    public, wrong = public_names(), []
    defined = re.compile(
        r"^(?!.*\bstatic |typedef|return|INLINE|else)\w[\w *]*?\b(\w+)\([^;]*\{$", re.M
    )
    found = 0
    for path in sorted(SOURCES.rglob("*.c")):
        for name in re.findall(defined, path.read_text()):
            found += 1
            if name not in public and not name.startswith("um__"):
                wrong.append((path.name, name))
    assert found > 200
    assert [pair for pair in wrong if not pair[1].isupper()] == []
