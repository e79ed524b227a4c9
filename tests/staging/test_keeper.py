"""Staged models that processes keep, and that nothing is left of a failure."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
from pathlib import Path

import pytest

import unimem as um
from support.files.weight_bytes import mapped_bytes
from support.processes import interrupts
from support.processes.staged_models import TINY, left
from unimem.errors import PlacementError
from unimem.staging import keeper
from unimem.staging.keeper import drop, hold
from unimem.weights.staged import Held, holders_of

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_interrupted_at_each_line_of_handing_over_nothing_is_left() -> None:
    asked = {"pages": "auto", "numa": None, "lock": False, "backing": "shm"}

    def keep() -> None:
        with hold(um.stage(TINY, backing="shm"), str(TINY), asked, []) as held:
            given.append(held)

    given: list[Held] = []
    keep()
    drop(given.pop())
    before, n = (left(), mapped_bytes()), 0
    for _ in interrupts.at_each_line(keep, "staging/keeper.py", "staging/backings.py"):
        n += 1
        while given:  # it was handed over by then, or never
            drop(given.pop())
        assert (left(), mapped_bytes()) == before, n
    drop(given.pop())
    assert n > 20


def test_it_is_kept_until_it_is_dropped(model: Path) -> None:
    asked = {"pages": "auto", "numa": None, "lock": False, "backing": "shm"}
    with hold(um.stage(model, backing="shm"), str(model), asked, []) as held:
        assert (held.source, held.asked, held.kept_by) == (str(model), asked, "command")
    assert Path(held.path).read_bytes() == model.read_bytes()
    assert held in holders_of(held.pid)
    drop(held)
    drop(held)  # twice is no error
    assert not Path(held.path).exists()


def test_a_program_is_not_ended(model: Path) -> None:
    with um.stage(model) as staged:
        (held,) = holders_of(os.getpid())
        with pytest.raises(ValueError, match="it goes with process"):
            drop(held)
        assert Path(staged.path).exists()


def test_a_failed_hand_over_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(keeper, "run_child", fail)
    staged = um.stage(model, backing="shm")
    path = staged.path
    with pytest.raises(OSError, match="no process"), hold(staged, str(model), {"lock": False}, []):
        pass
    assert staged.closed
    assert not Path(path).exists()


def test_a_keeper_that_is_killed_before_it_is_handed_over(model: Path) -> None:
    def keep() -> None:
        with hold(um.stage(model, backing="memfd"), str(model), {"lock": False}, []) as held:
            end = os.pidfd_open(held.pid)
            os.kill(held.pid, signal.SIGKILL)
            select.select([end], [], [])
            os.close(end)

    with pytest.raises(PlacementError, match="its process has ended"):
        keep()


def test_a_child_is_waited_for() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    keeper.run_child([sys.executable, "-c", "pass"])
    assert children.read_text() == before
    with pytest.raises(FileNotFoundError):
        keeper.run_child(["/no/such/program"])


@pytest.mark.parametrize("address", ["{folder}/socket", "@{folder}"])
def test_a_service_manager_is_notified(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    keeper.notify("READY=1")  # no service manager listens
    address = address.format(folder=tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        keeper.notify("READY=1")
        assert manager.recv(100) == b"READY=1"
