"""The process that keeps a model: it maps the files, imports little, and ends with its sender."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

import unimem as um
from support.processes.staged_models import TINY
from unimem.staging import keeper_process
from unimem.staging.keeper import catch_signals, drop, hold, wait_for
from unimem.staging.readers import find_readers

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


def test_it_maps_the_files_and_little_else() -> None:
    with hold(um.stage(TINY, backing="memfd"), str(TINY), {"lock": False}, ["told"]) as held:
        maps = Path(f"/proc/{held.pid}/maps").read_text()
    try:
        assert f"memfd:{TINY.name}" in maps
        assert "unimem" not in maps.replace("memfd:unimem", "")
        assert held.warnings == ("told",)
        assert os.getsid(held.pid) != os.getsid(0)
    finally:
        drop(held)
    assert not os.path.exists(held.path)


def test_it_ends_if_nothing_is_handed_over() -> None:
    ours, its = socket.socketpair()
    note = os.memfd_create("note", os.MFD_ALLOW_SEALING)
    with ours, its:
        ours.sendall((5).to_bytes(8, "little") + b"part")
        ours.shutdown(socket.SHUT_WR)
        keeper_process._keep(its.fileno(), note, "False", [])
        assert ours.recv(100) == b"32 the command that started it has ended"
    os.close(note)


def test_a_folder_that_moved_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    moved = folder.rename(tmp_path / "moved")
    keeper_process._remove(fd)
    os.close(fd)
    assert not moved.exists()


@pytest.mark.parametrize(
    ("is_ours", "ends", "code"),
    [(True, signal.SIGTERM, 0), (False, signal.SIGINT, 0), (True, None, 1)],
)
def test_waiting_in_the_foreground(
    is_ours: bool, ends: int | None, code: int, tmp_path: Path
) -> None:
    with hold(um.stage(TINY, backing="shm"), str(TINY), {"lock": False}, []) as held:
        pass
    link = tmp_path / "link"
    link.symlink_to(held.path)
    child = os.fork()
    if child == 0:
        with suppress(Exception):  # it returns only if it fails
            wait_for(held, [str(link)], catch_signals(), is_ours=is_ours)
        os._exit(99)
    try:
        # It keeps the files open from its first moment on, and takes signals from then on.
        while child not in find_readers([held])[0].pids:
            time.sleep(0.01)
        os.kill(held.pid if ends is None else child, ends or signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        assert os.path.exists(held.path) != (is_ours or ends is None)
        assert link.is_symlink() == (not is_ours or ends is None)
    finally:
        drop(held)
