"""The state that all tests begin from, and the list of skipped tests at the end of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from typing import Any
from unittest.mock import Mock

import pytest

import conftest
from support.project import tiers
from support.project.checkout import ROOT

# Begins as all tests do, then prints its state and the exit codes of children with signals.
BEGIN = """
import json, os, resource, signal, subprocess, sys
from support.kernel import known_state
known_state.begin()
ended = {}
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    kill = f"import os, signal; os.kill(os.getpid(), {number}); print('goes on')"
    child = subprocess.run([sys.executable, "-S", "-c", kill], capture_output=True)
    ended[number.name] = [child.returncode, child.stdout.decode()]
print(json.dumps({
    "ended": ended,
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
    "umask": os.umask(0),
    "environment": dict(os.environ),
}))
"""
# A background job of a script, as in `nohup make test &`, ignores interrupts.
IN_THE_BACKGROUND = "trap '' INT HUP TERM; umask 077; ulimit -S -l 0; exec \"$@\""


def test_tests_begin_alike_in_the_background() -> None:
    strange = {"TERM": "dumb", "LC_ALL": "C", "NO_COLOR": "1", "UNIMEM_CACHE": "/nowhere"}
    done = subprocess.run(
        ["sh", "-c", IN_THE_BACKGROUND, "sh", sys.executable, "-S", "-c", BEGIN],
        env=os.environ | strange | {"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ended"] == {"SIGINT": [-2, ""], "SIGHUP": [-1, ""], "SIGTERM": [-15, ""]}
    assert found["blocked"] == 0
    soft, hard = found["memlock"]
    assert soft == hard
    assert found["umask"] == 0o022
    variables = found["environment"]
    assert (variables["TERM"], variables["LC_ALL"]) == ("xterm", "C.UTF-8")
    assert variables["UNIMEM_CACHE"] == "off"
    assert "NO_COLOR" not in variables


def test_skipped_tests_are_listed_once_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = [
        Mock(nodeid=f"tests/{name}", longrepr=("tests/a.py", 1, f"Skipped: {reason}"))
        for name, reason in (
            ("b.py::one", "needs a GPU"),
            ("a.py::two", "needs root"),
            ("b.py::two", "needs a GPU"),
            ("a.py::last", "needs a GPU"),
        )
    ]
    reporter = Mock()
    reporter.getreports.side_effect = lambda kind: skipped if kind == "skipped" else []
    monkeypatch.setattr(tiers, "everything", True)
    conftest.pytest_terminal_summary(reporter)
    assert [call.args[0] for call in reporter.write_line.call_args_list] == [
        "needs a GPU: tests/b.py::one and 2 more",
        "needs root: tests/a.py::two",
    ]
    # pytest's own list of them has a line for each place.
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "-r" not in options["addopts"]
