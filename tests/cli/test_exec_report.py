"""The report at a program's end: a document in a file, or a page."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from unimem.cli.exec_report import main


def test_a_document_or_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(os.getpid(), str(file)) == 0
    assert json.loads(file.read_text())["facts"]["pid"] == os.getpid()
    assert capsys.readouterr() == ("", "")
    assert main(os.getpid(), "-") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"process   {os.getpid()} ")


def test_a_report_that_cannot_be_made_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(2**22 + 1, str(tmp_path / "report.json")) == 1
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.startswith("unimem: ")
    file = tmp_path / "gone" / "report.json"
    assert main(os.getpid(), str(file)) == 1
    assert capsys.readouterr() == ("", f"unimem: {file}: No such file or directory\n")


@pytest.mark.parametrize("file", ["-", "/nowhere/report.json"])
def test_a_standard_error_that_takes_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(os.getpid(), file) == 1
        monkeypatch.undo()
        with suppress(OSError):  # closing it would write the rest
            full.close()


def test_no_page_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(os.getpid(), "-") == 0
    assert capsys.readouterr().out == ""
