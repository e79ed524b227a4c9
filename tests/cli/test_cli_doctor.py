"""`unimem doctor`, as a user has it: in a process of its own, with and without a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

import unimem as um

MAIN = "import sys; from unimem.cli import main; sys.exit(main())"
# The machine that the tests run on may have nothing to change, or something.
INVENTED = f"""
import importlib, dataclasses
from unimem.system.machine import Finding
import unimem.cli.doctor
real = unimem.doctor()
findings = (
    Finding("It is slow", "Because it is so.", "make it fast", "it is fast"),
    Finding("It is small", "Because it is so.", "make it large", "it is large", True),
)[SLICE]
command = importlib.import_module("unimem.cli.doctor")
command.look = lambda: dataclasses.replace(real, findings=findings)
{MAIN}
"""
AMISS = INVENTED.replace("SLICE", ":")
WELL = INVENTED.replace("SLICE", ":0")


def start(*arguments: str, code: str = MAIN, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, "doctor", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, encoding="utf-8", **options)


def run(*arguments: str, **options: Any) -> tuple[int, str, str]:
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def on_terminal(*arguments: str, code: str = MAIN, **environment: str) -> tuple[int, str]:
    """Run with a terminal as standard output and standard error; give what it shows."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"} | environment
    env = {name: value for name, value in env.items() if name != "NO_COLOR" or environment}
    shown = b""
    with start(*arguments, code=code, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        with suppress(OSError):  # EIO: the other side was closed
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
    return process.returncode, shown.decode()


def test_without_a_terminal_it_is_plain_text_of_80_columns() -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    long = [line for line in out.splitlines() if len(line) > 80]
    # Only a path that no line can hold may be longer.
    assert [line for line in long if len(max(line.split(), key=len)) <= 60] == []
    for name in ("kernel", "cpu", "memory", "limits", "pages", "hugetlb", "numa"):
        assert re.search(f"^{name:<10}\\S", out, re.M), name
    assert f"Linux {os.uname().release}" in out
    assert "Nothing to change." in out or "To change, the greatest effect first:" in out


def test_the_document_is_that_of_the_library() -> None:
    code, out, err = run("--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    document = json.loads(out)
    assert document["schema"] == "unimem.doctor/1"
    here = um.doctor().to_dict()
    assert list(document) == list(here)
    for key in ("kernel", "thp", "capabilities"):
        assert document[key] == here[key]
    assert [finding["what"] for finding in document["findings"]] == [
        finding["what"] for finding in here["findings"]
    ]


def test_findings_do_not_change_the_exit_code() -> None:
    code, out, err = run(code=AMISS)
    assert (code, err) == (0, "")
    assert "1. It is slow\n   Because it is so.\n   run      make it fast\n" in out
    assert "Optional:\n\n2. It is small\n" in out


def test_a_terminal_shows_colours() -> None:
    code, shown = on_terminal(code=AMISS)
    assert code == 0
    assert "\x1b[2mkernel    \x1b[0mLinux" in shown
    assert "1. \x1b[33mIt is slow\x1b[0m" in shown
    assert "2. It is small" in shown
    assert set(re.findall(r"\x1b[^m]*m?", shown)) == {f"\x1b[{code}m" for code in (0, 1, 2, 33)}
    code, shown = on_terminal(code=WELL)
    assert code == 0
    assert "\x1b[32mNothing to change.\x1b[0m" in shown


def test_lines_on_a_terminal_keep_80_columns() -> None:
    _, shown = on_terminal(code=AMISS)
    lines = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
    facts = lines[: lines.index("To change, the greatest effect first:")]
    assert [line for line in facts if len(line) > 80 and "/" not in line] == []


def test_colours_do_not_change_the_text() -> None:
    _, shown = on_terminal(code=AMISS)
    _, out, _ = run(code=AMISS)

    def steady(text: str) -> str:
        # Free memory differs from moment to moment.
        return re.sub(r"\d+\.\d [KMGT]iB", "SIZE", " ".join(text.split()))

    assert steady(re.sub(r"\x1b\[\d+m", "", shown)) == steady(out)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_shows_none_where_it_shall_not(environment: dict[str, str]) -> None:
    code, shown = on_terminal(code=AMISS, **environment)
    assert code == 0
    assert "\x1b" not in shown


def test_the_document_on_a_terminal_has_no_colours() -> None:
    code, shown = on_terminal("--json", code=AMISS)
    assert code == 0
    assert "\x1b" not in shown
    assert [f["is_optional"] for f in json.loads(shown)["findings"]] == [False, True]


def test_help_names_the_command() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "--json" in out
    assert "docs/doctor.md" in out


def test_wrong_usage_ends_with_2() -> None:
    code, out, err = run("--yaml")
    assert (code, out) == (2, "")
    assert "--yaml" in err
