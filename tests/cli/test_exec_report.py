"""The report at a program's end: a document in a file, or a page."""

from __future__ import annotations

import json
import os
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


def test_an_ended_process_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError):
        main(2**22 + 1, str(tmp_path / "report.json"))
    assert list(tmp_path.iterdir()) == []
