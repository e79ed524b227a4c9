"""The interpreters that we start: no code is imported from the current folder."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from support.project.checkout import ROOT
from support.terminal.screens import run_anew
from unimem.backends import ggml_trial

STARTS = re.compile(r"\bsubprocess\.(?:run|Popen|c)|\bos\.(?:exec|spawn|posix_spawn|system|popen)")


def test_every_interpreter_is_kept_from_the_current_folder() -> None:
    started, options = set(), {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        started |= {path.name} if STARTS.search(text) else set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.List) and node.elts:
                words = [ast.unparse(word) for word in node.elts]
                if words[0] == "sys.executable":
                    options[path.name] = words[1]
    assert options == {
        "backings.py": "'-I'",
        "chat.py": "'-P'",
        "ggml_trial.py": "'-P'",
        "keeper.py": "'-I'",
        "new_process.py": "'-P'",
    }
    assert started == {*options, "__init__.py"}, "unimem_exec becomes the user's program"
    spawned = re.findall(r"\bwords\[\] = \{(.*)\}", (ROOT / "native/exec/hooks.c").read_text())
    assert spawned == ['program, "-P", "-m", "unimem.cli.exec_report", pid, file, NULL']


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the current folder one with modules that leave a file."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "random", "ctypes", "typing"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(here)
    return tmp_path / "ran"


def test_a_report_at_the_end_runs_no_code_of_the_current_folder(
    hostile: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    done = run_anew("exec", "--report", file, "--", "/bin/true", code=MAIN)
    assert (done.code, done.err) == (0, "")
    assert "facts" in json.loads(file.read_text())
    assert not hostile.exists()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_trial_runs_no_code_of_the_current_folder(hostile: Path) -> None:
    ggml_trial._try("AMX")
    assert not hostile.exists()


# The test itself starts the command with the current folder first among its paths.
MAIN = "import sys; sys.path.remove(''); from unimem_command import main; sys.exit(main())"
