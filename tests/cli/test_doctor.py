"""`unimem doctor`: its page and its document, with and without a terminal."""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

import unimem as um
from support.project.documents import check_document
from support.terminal.screens import CONTROL, show
from unimem.system.machine import Finding

Patch = pytest.MonkeyPatch
command = importlib.import_module("unimem.cli.doctor")

# The test machine may or may not have something to change.
FINDINGS = (
    Finding("It is slow", "Because it is so.", "make it fast", "it is fast"),
    Finding("It is small", "Because it is so.", "make it large", "it is large", True),
)


@pytest.fixture
def amiss(monkeypatch: Patch) -> um.Machine:
    machine = replace(um.doctor(), findings=FINDINGS)
    monkeypatch.setattr(command, "look", lambda disk: machine)
    return machine


def test_without_a_terminal_it_is_plain_text_of_80_columns() -> None:
    code, out, err = show("doctor")
    assert (code, err) == (0, "")
    assert not CONTROL.search(out)
    long = [line for line in out.splitlines() if len(line) > 80]
    # Only an overlong path may exceed the width.
    assert [line for line in long if len(max(line.split(), key=len)) <= 60] == []
    for name in ("kernel", "cpu", "memory", "limits", "pages", "hugetlb", "numa"):
        assert re.search(f"^{name:<10}\\S", out, re.M), name
    assert f"Linux {os.uname().release}" in out
    assert "Nothing to change." in out or "To change, the greatest effect first:" in out


def test_the_document_is_the_library_s() -> None:
    code, out, err = show("doctor", "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    document, here = json.loads(out), um.doctor().to_dict()
    check_document(document)
    assert list(document) == list(here)
    for key in ("kernel", "thp", "capabilities"):
        assert document[key] == here[key]
    assert [each["what"] for each in document["findings"]] == [
        each["what"] for each in here["findings"]
    ]


def test_a_disk_is_measured_where_one_is_named(amiss: um.Machine, monkeypatch: Patch) -> None:
    measured: list[Path | None] = []

    def look(disk: Path | None) -> um.Machine:
        measured.append(disk)
        return amiss

    monkeypatch.setattr(command, "look", look)
    for given in ((), ("--disk", "/models")):
        assert show("doctor", *given).code == 0
    assert measured == [None, Path("/models")]
    assert show("doctor", "--disk", "").code == 2
    assert len(measured) == 2
    monkeypatch.undo()
    code, out, err = show("doctor", "--disk", "/nosuch")
    assert (code, out, err) == (1, "", "unimem: /nosuch: No such file or directory\n")


@pytest.mark.usefixtures("amiss")
def test_findings_do_not_change_the_exit_code() -> None:
    code, out, err = show("doctor")
    assert (code, err) == (0, "")
    assert "1. It is slow\n   Because it is so.\n   run      make it fast\n" in out
    assert "Optional:\n\n2. It is small\n" in out


def test_only_willing_terminals_get_colours(amiss: um.Machine, monkeypatch: Patch) -> None:
    screen = show("doctor", columns=80)
    assert "\x1b[2mkernel    \x1b[0mLinux" in screen.out
    assert "1. \x1b[33mIt is slow\x1b[0m" in screen.out
    assert "2. It is small" in screen.out
    assert set(re.findall(r"\x1b[^m]*m?", screen.out)) == {f"\x1b[{n}m" for n in (0, 1, 2, 33)}
    plain = show("doctor").out
    assert screen.plain == plain
    facts = screen.lines[: screen.lines.index("To change, the greatest effect first:")]
    assert [line for line in facts if len(line) > 80 and "/" not in line] == []
    assert show("doctor", columns=80, NO_COLOR="1").out == plain
    assert show("doctor", columns=80, TERM="dumb").out == plain
    document = json.loads(show("doctor", "--json", columns=80).out)
    assert [each["is_optional"] for each in document["findings"]] == [False, True]
    monkeypatch.setattr(command, "look", lambda disk: replace(amiss, findings=()))
    assert "\x1b[32mNothing to change.\x1b[0m" in show("doctor", columns=80).out
