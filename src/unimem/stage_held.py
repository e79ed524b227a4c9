"""Staged models that small processes keep, for commands that end.

There is no registry that could be wrong: a holder's own command line says what it keeps.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from unimem.errors import PlacementError
from unimem.model_file import Version, version_of
from unimem.placement import Lock, Placement
from unimem.stage import Stage
from unimem.stage_places import Folder, sweep

__all__ = ["Held", "drop", "hold", "hold_files", "holders"]

SCHEMA = "unimem.stage/1"

_HOLDER = os.path.join(os.path.dirname(__file__), "stage_holder.py")
_PATIENCE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Held:
    """A model that a process keeps in memory.

    Attributes
    ----------
    pid : int
        The process.
    path : str
        What to open instead of the model.
    paths : tuple of str
        All of its files.
    source : str
        The model, as an absolute path.
    versions : tuple of (str, Version)
        The files that were read, and what they were then.
    asked : dict
        The options of the command.
    backing : str
        Of `Stage`, or "page-cache".
    nbytes : int
        Bytes of the files.
    granted : Placement
        Of `Stage`.
    """

    pid: int
    path: str
    paths: tuple[str, ...]
    source: str
    versions: tuple[tuple[str, Version], ...]
    asked: dict[str, Any]
    backing: str
    nbytes: int
    granted: Placement

    def is_current(self) -> bool:
        """Whether the files are still what was read."""
        try:
            return all(version_of(os.stat(path)) == version for path, version in self.versions)
        except OSError:
            return False

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON document shows of it."""
        shown = asdict(self)
        del shown["versions"]
        return {"schema": SCHEMA, **shown}


def holders() -> list[Held]:
    """Find the models that processes of this user keep, the oldest first."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    return [held for pid in pids if (held := _read(pid)) is not None]


def hold(stage: Stage, source: str, asked: dict[str, Any]) -> Held:
    """Give a staged model to a process of its own. The stage is closed then, whatever happens.

    Parameters
    ----------
    stage : Stage
        Of this process.
    source : str
        The model, as an absolute path.
    asked : dict
        The options that it was staged with, for those who look for it.

    Raises
    ------
    PlacementError
        The process could not lock it.
    OSError
        The process could not be started. Nothing is left then.
    """
    with stage:
        place = stage._opened()
        fds = [place.open(name) for name in stage._names] if stage.granted.locked_bytes else []
        try:
            held = _start(
                {
                    "path": place.path(stage._first),
                    "paths": [place.path(name) for name in stage._names],
                    "source": source,
                    "versions": stage._versions,
                    "asked": asked,
                    "backing": stage.backing,
                    "nbytes": stage.nbytes,
                    "granted": asdict(stage.granted),
                },
                asked["lock"],
                place.folder if isinstance(place, Folder) else "",
                fds,
                [place.fd],
            )
        finally:
            for fd in fds:
                os.close(fd)
        place.leave()
    return held


def hold_files(
    source: str,
    versions: Sequence[tuple[str, Version]],
    granted: Placement,
    asked: dict[str, Any],
) -> Held:
    """Have a process lock files in the page cache. Raises as `hold`."""
    fds: list[int] = []
    try:
        for path, _ in versions:
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        description = {
            "path": source,
            "paths": [path for path, _ in versions],
            "source": source,
            "versions": versions,
            "asked": asked,
            "backing": "page-cache",
            "nbytes": sum(os.fstat(fd).st_size for fd in fds),
            "granted": asdict(granted),
        }
        return _start(description, asked["lock"], "", fds, [])
    finally:
        for fd in fds:
            os.close(fd)


def _start(
    description: dict[str, Any], lock: Lock, folder: str, lock_fds: list[int], kept: list[int]
) -> Held:
    ours, its = socket.socketpair()
    with ours:
        with its:
            command = [
                *(sys.executable, "-I", "-S", _HOLDER),
                json.dumps({"schema": SCHEMA, **description}),
                *(str(its.fileno()), str(lock), folder, *map(str, lock_fds)),
            ]
            process = subprocess.Popen(
                command,
                pass_fds=[its.fileno(), *lock_fds, *kept],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        # It leaves the work to a child, whose end this socket tells.
        process.wait()
        code, _, text = ours.recv(256).decode().partition(" ")
        held = _read(int(text)) if code == "0" else None
        if held is None:
            raise PlacementError(
                int(code or 0),
                f"keeping {description['source']}: {text or 'its process has ended'}",
            )
        ours.sendall(b"keep")
        ours.recv(1)  # until it has closed its end, and has nothing but what it keeps
    return held


def drop(held: Held) -> None:
    """End the process that keeps a model, and wait until it is gone.

    Who has the model open or mapped keeps what it has.
    """
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(held.pid)
        try:
            # Another process may have its number by now.
            if _read(held.pid) == held:
                signal.pidfd_send_signal(fd, signal.SIGTERM)
                if not select.select([fd], [], [], _PATIENCE_SECONDS)[0]:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    select.select([fd], [], [])
        finally:
            os.close(fd)
    sweep()


def _read(pid: int) -> Held | None:
    """Read what a process keeps; None for one that keeps nothing, or is not this user's."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = os.fsdecode(file.read()).split("\0")
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid() or len(arguments) < 5:
            return None
        if os.path.basename(arguments[3]) != os.path.basename(_HOLDER):
            return None
        return _held(pid, json.loads(arguments[4]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _held(pid: int, found: dict[str, Any]) -> Held | None:
    if found.pop("schema") != SCHEMA:
        return None
    granted = found.pop("granted")
    nodes = {int(node): nbytes for node, nbytes in granted.pop("nodes").items()}
    folder = f"/proc/{pid}"
    return Held(
        pid,
        path=os.path.join(folder, found.pop("path")),
        paths=tuple(os.path.join(folder, path) for path in found.pop("paths")),
        versions=tuple((path, tuple(version)) for path, version in found.pop("versions")),
        granted=Placement(nodes=nodes, **granted),
        **found,
    )
