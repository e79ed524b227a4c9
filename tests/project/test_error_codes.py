"""Code decides by `status` and `detail` of a um_error: its `what` is for people."""

from __future__ import annotations

import re

import pytest

from support.project.checkout import ROOT

FOLDERS = ("src", "native/src", "native/exec", "native/tests", "bench", "examples")
SUFFIXES = (".c", ".h", ".cpp", ".hpp", ".cu", ".py", ".pyx", ".pxd")
WHAT = r"(?:\.|->)what\b"
# Comparisons with `what`, by an operator, by a function of C, or of a copy that was decoded first.
COMPARED = [
    re.compile(rf"{WHAT}(?:\.decode\(\))?\s*(?:(?:==|!=)(?! NULL)|\bin\b|\bnot in\b)"),
    re.compile(rf"(?:==|!=|\bin\b)\s*[\w.\->\[\]()]*{WHAT}(?!\s*=[^=])"),
    re.compile(rf"\b(?:str\w*cmp|strstr|memcmp)\([^;]*{WHAT}"),
    re.compile(rf"{WHAT}(?:\.decode\(\))?\.(?:startswith|endswith|find|index)\("),
]
# The name that Cython modules give a copy of it.
COPY_COMPARED = re.compile(r"\bwhat (?:==|!=) b?\"")
# Tests of C compare the text with that of a table of rules, or show that the call is named in it.
SHOWN_TO_PEOPLE = {
    "native/tests/blocks.h",
    "native/tests/fault_os.c",
    "native/tests/test.h",
    "native/tests/test_pages.c",
    "native/tests/test_placement.c",
    "native/tests/test_tape.c",
}


def compared(text: str, suffix: str) -> list[str]:
    patterns = [*COMPARED, COPY_COMPARED] if suffix == ".pyx" else COMPARED
    return [found[0] for pattern in patterns for found in pattern.finditer(text)]


def test_no_code_compares_what() -> None:
    users = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and (found := compared(path.read_text(), path.suffix)):
                users[str(path.relative_to(ROOT))] = found
    assert {name: found for name, found in users.items() if name not in SHOWN_TO_PEOPLE} == {}


@pytest.mark.parametrize(
    "line",
    [
        'if err.what == b"rows":',
        'if strcmp(err.what, "rows") == 0:',
        'if (strcmp(err->what, "overwritten") == 0) {',
        'if "rows" in err.what.decode():',
        'if err.what.startswith(b"the range"):',
        'if what == "frozen":',
        "good = text != error.what;",
    ],
)
def test_a_comparison_is_found(line: str) -> None:
    assert compared(line, ".pyx")


@pytest.mark.parametrize(
    "line",
    [
        'raise ValueError(f"{subject}: {err.what.decode()}")',
        'err->what = "rows";',
        "if err.detail == um.UM_KV_ROWS:",
        "(um_error){.status = status, .what = what}",
    ],
)
def test_other_uses_are_allowed(line: str) -> None:
    assert not compared(line, ".pyx")
