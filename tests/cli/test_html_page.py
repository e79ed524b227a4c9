"""`unimem report --html`: one file, also from a watch, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from support.processes.running import running
from support.terminal.html_pages import HtmlPage
from support.terminal.screens import show, start_command


def test_a_page_of_a_process(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("what was there")
    with running() as pid:
        assert show("report", pid, "--html", path) == (0, "", "")
    page = HtmlPage(path.read_text())
    assert f"process {pid}" in page.text
    assert "by unimem" in page.text
    assert {"Limits", "How it is placed"} <= set(page.texts)
    assert page.table("memory", "in RAM", "high water").column("in RAM")["total"] != 0
    assert [each.name for each in tmp_path.iterdir()] == ["a.html"]


def test_a_watch_ends_with_a_page_of_the_growth(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    options = ("--watch", "--interval", 0.1, "--json", "--html", path)
    with running() as pid, start_command("report", pid, *options) as process:
        assert process.stdout is not None
        n_reports = 0
        while n_reports < 2:  # reading memory has a share of a core, and is not done each time
            n_reports += json.loads(process.stdout.readline())["report_age_seconds"] == 0
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode == 130
    page = HtmlPage(path.read_text())
    assert "svg" in page.tags
    assert page.table("growth").foot[0][0] == "total"
    assert [each.name for each in tmp_path.iterdir()] == ["a.html"]


def test_a_watch_with_an_unwritable_page_is_refused_first(tmp_path: Path) -> None:
    path = tmp_path / "none" / "a.html"
    screen = show("report", os.getpid(), "--watch", "--html", path)
    assert (screen.code, screen.out) == (1, "")
    assert "none/a.html: No such file or directory" in screen.err


def test_a_missing_process_has_no_page(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    with subprocess.Popen(["true"]) as process:
        pass
    for more in ([], ["--watch"]):
        screen = show("report", process.pid, "--html", path, *more)
        assert (screen.code, screen.out) == (1, "")
        assert "There is no process" in screen.err
    assert list(tmp_path.iterdir()) == []
