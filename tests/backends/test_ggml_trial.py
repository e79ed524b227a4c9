"""Trials of ggml's buffer types: one for each build, remembered if it says something."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from unimem.backends import ggml_trial


@pytest.mark.parametrize(
    ("code", "is_sound", "is_kept"),
    [(0, True, True), (3, False, True), (-signal.SIGILL, False, True), (1, False, False),
     (-signal.SIGKILL, False, False)],
)  # fmt: skip
def test_a_trial_is_made_once_a_build(
    code: int, is_sound: bool, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    trials: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        trials.append(command[-1])
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        assert ggml_trial.passes_trial("AMX", {"libraries": "1"}) == is_sound
    assert len(trials) == (1 if is_kept else 2)
    for path in (tmp_path / "cache").iterdir():
        path.write_text("")  # an empty file is no result: try again
    ggml_trial.passes_trial("AMX", {"libraries": "1"})
    ggml_trial.passes_trial("AMX", {"libraries": "2"})
    (tmp_path / "cache").chmod(0o777)
    ggml_trial.passes_trial("AMX", {"libraries": "2"})  # a writable folder is not trusted
    assert len(trials) == (4 if is_kept else 5)
