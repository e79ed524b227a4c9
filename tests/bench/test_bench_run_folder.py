"""Folders of runs: they go with the run, and those of killed runs with the next one."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from unimem_bench.run_folder import run_folder

Patch = pytest.MonkeyPatch
RUN = """
import sys, time
from unimem_bench.run_folder import run_folder
with run_folder() as folder:
    (folder / "model.gguf").write_bytes(b"GGUF")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def other_run() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child, Path(child.stdout.readline().strip())
        finally:
            child.kill()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_folder_goes_with_its_run(error: type[BaseException] | None, parent: Path) -> None:
    with suppress(KeyboardInterrupt), run_folder() as folder:
        assert folder.parent == parent
        (folder / "file").touch()
        if error is not None:
            raise error
    assert list(parent.iterdir()) == []


def test_the_next_run_removes_the_folder_of_a_killed_one(parent: Path) -> None:
    with other_run() as (child, left):
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert (left / "model.gguf").exists()
    with run_folder() as folder:
        assert list(parent.iterdir()) == [folder]


def test_the_folder_of_a_run_that_goes_on_stays(parent: Path) -> None:
    with other_run() as (_, theirs), run_folder() as ours:
        assert (theirs / "model.gguf").exists()
        assert set(parent.iterdir()) == {ours, theirs}


def test_what_is_no_folder_of_a_run_stays(parent: Path) -> None:
    elsewhere = parent / "mine"
    elsewhere.mkdir()
    (parent / "unimem-bench-file").touch()
    (parent / "unimem-bench-link").symlink_to(elsewhere)
    before = set(parent.iterdir())
    with run_folder() as folder:
        assert set(parent.iterdir()) == {*before, folder}


def test_a_folder_that_is_taken_before_it_is_locked_is_not_used(monkeypatch: Patch) -> None:
    made: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_lose(**options: str) -> str:
        made.append(Path(make(**options)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with run_folder() as folder:
        assert folder == made[1]
        assert folder.is_dir()
