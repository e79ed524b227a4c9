"""Staged models, and the processes that keep them: small ones, for commands that end, and programs.

There is no registry that could be wrong: each of these processes has a note of what it keeps, a
sealed memfd.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from unimem.base import kernel_files
from unimem.base.descriptors import Descriptors
from unimem.errors import PlacementError
from unimem.remote.client import is_url
from unimem.staging.backings import Folder, Memfd, Place, proc_folder, sweep
from unimem.system.memfds import CANNOT_LOOK, find_memfds
from unimem.system.placement import Lock, Placement
from unimem.system.process import identity
from unimem.weights.files import Version, identity_of

__all__ = [
    "Held",
    "drop",
    "exclude_others",
    "hold",
    "hold_files",
    "hold_unfinished",
    "holders",
    "holders_of",
    "show",
]

SCHEMA = "unimem.stage/1"

_NOTE = "unimem-stage"
_MOST_NOTES = 1 << 10  # of a process are read: it may be another user's
_HOLDER = os.path.join(os.path.dirname(__file__), "keeper_process.py")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PATIENCE_SECONDS = 10
# A second for one that is about to listen, and no more: it may be another user's that never does.
_TRIES = 100


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
        The files that were read, and what they were then; of a repacked model, their identities.
    asked : dict
        The options that it was staged with.
    backing : str
        Of `Stage`, or "page-cache".
    nbytes : int
        Bytes of the files.
    granted : Placement
        Of `Stage`.
    warnings : tuple of str
        What was said of it then: what it was not given.
    kept_by : {"command", "program"}
        Whether `unimem stage` has started the process for this, or the process called `um.stage`.
    arrived : tuple of (int, int, int, str)
        Of a model on a server of which only a part has come: the file, the first byte, bytes and
        hash of each piece. `nbytes` are theirs, and `paths` do not all exist.
    began : int
        When the process began, in ticks since the boot: a later one of its number has another.
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
    warnings: tuple[str, ...]
    kept_by: Literal["command", "program"] = "command"
    arrived: tuple[tuple[int, int, int, str], ...] = ()
    began: int = 0

    def staleness(self) -> str | None:
        """Say why it can no longer stand for the model; None while it can.

        Of a model on a server, nobody asks the server: who stages it again does.
        """
        if self.is_unfinished:
            return "only a part of it has come"
        try:
            for original, version in self.versions:
                if is_url(original):
                    continue
                if identity_of(os.stat(original))[: len(version)] != version:
                    return f"{original} was written to or replaced"
            for path, nbytes in self._sizes():
                if os.stat(path).st_size < nbytes:
                    return f"{path} was cut off"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """Give the files, and the bytes that each has at least."""
        if self.is_repacked:
            yield self.paths[0], self.nbytes
            return
        # A file of hugetlb pages ends with a whole page.
        for path, (_, version) in zip(self.paths, self.versions, strict=True):
            yield path, version[2]

    @property
    def is_repacked(self) -> bool:
        """Whether it is a repacked image of the model, beside links to the model's files."""
        return bool(self.asked.get("repack"))

    @property
    def is_unfinished(self) -> bool:
        """Whether it is what has come of a model on a server when its load was broken off."""
        return bool(self.arrived)

    def to_dict(self) -> dict[str, Any]:
        """Return what a JSON document shows of it."""
        shown = asdict(self)
        del shown["versions"], shown["arrived"], shown["began"]
        return {"schema": SCHEMA, **shown}


def holders() -> list[Held]:
    """Find the models that processes of this user keep, the oldest process first.

    Raises
    ------
    PlacementError
        The ``/proc`` that is mounted here is of processes that this one has nothing to do with, or
        a process could not be looked at.
    """
    import psutil

    proc_folder()
    return [held for pid in psutil.pids() for held in holders_of(pid)]


def holders_of(pid: int) -> list[Held]:
    """Find the models that one process keeps; none where it has ended, or is another user's.

    Raises
    ------
    PlacementError
        This process lacks what it takes to look.
    """
    found = []
    try:
        with Descriptors() as fds:
            folder = fds.add(os.open, f"/proc/{pid}", _FOLDER)
            for fd in itertools.islice(find_memfds(folder, _NOTE), _MOST_NOTES):
                if (held := _read_note(fd, pid, folder)) is not None:
                    found.append(held)
    except OSError as error:
        if error.errno in CANNOT_LOOK:
            raise _unseen(error, f"whether process {pid} keeps a model") from error
    return found


def _unseen(error: OSError, what: str) -> PlacementError:
    advice = {errno.EMFILE: ": close some, or raise 'ulimit -n'"}.get(error.errno or 0, "")
    text = f"cannot see {what}: /proc/PID cannot be read: {error.strerror}{advice}"
    return PlacementError(error.errno, text)


class _Staged(Protocol):
    """What is asked of a `Stage`, which knows more than this file."""

    nbytes: int
    granted: Placement
    _names: tuple[str, ...]
    _first: str
    _versions: tuple[tuple[str, Version], ...]
    _note: Memfd

    @property
    def backing(self) -> str: ...

    def _opened(self) -> Place: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> None: ...


@contextmanager
def hold(
    stage: _Staged, source: str, asked: dict[str, Any], warnings: Sequence[str]
) -> Iterator[Held]:
    """Give a staged model to a process of its own.

    The process keeps it from the end of the ``with`` on. Whatever goes wrong until then, it ends,
    and nothing is left; the stage is closed either way.

    Parameters
    ----------
    stage : Stage
        Of this process.
    source : str
        The model, as an absolute path.
    asked : dict
        The options that it was staged with, for those who look for it.
    warnings : sequence of str
        The warnings that this gave.

    Raises
    ------
    PlacementError
        The process could not lock it.
    OSError
        The process could not be started.
    """
    with stage:
        place = stage._opened()
        stage._note.leave()  # that of the new process takes its place
        # Pages of a pool never leave RAM: locking them would only take from the user's limit.
        is_to_lock = stage.granted.locked_bytes > 0 and stage.backing != "hugetlb"
        lock = asked["lock"] if is_to_lock else False
        is_folder = isinstance(place, Folder)
        with Descriptors() as fds:
            for name in stage._names:
                fds.add(place.open, name)
            note = _note_of(stage, source, asked, warnings)
            with _started(note, fds, lock, place.fd, is_folder=is_folder) as held:
                place.leave()
                yield held


def show(stage: _Staged, source: str, asked: dict[str, Any]) -> None:
    """Say in the note of a stage that this process keeps it.

    A forked child, which has a copy of the descriptor, keeps nothing by it.

    Parameters
    ----------
    stage, source, asked
        As for `hold`.

    Raises
    ------
    OSError
        The system gives no memory for the note.
    """
    with Descriptors() as fds:
        program = identity(fds.add(os.open, "/proc/self", _FOLDER))
    _write_note(stage._note, _note_of(stage, source, asked, ()) | {"program": program})


def _note_of(
    stage: _Staged, source: str, asked: dict[str, Any], warnings: Sequence[str]
) -> dict[str, Any]:
    place = stage._opened()
    return {
        "schema": SCHEMA,
        "path": place.path(stage._first),
        "paths": [place.path(name) for name in stage._names],
        "source": source,
        "versions": [
            (path if is_url(path) else os.path.abspath(path), version)
            for path, version in stage._versions
        ],
        "asked": asked,
        "backing": stage.backing,
        "nbytes": stage.nbytes,
        "granted": asdict(stage.granted),
        "warnings": list(warnings),
    }


@contextmanager
def hold_files(
    source: str,
    versions: Sequence[tuple[str, Version]],
    granted: Placement,
    asked: dict[str, Any],
) -> Iterator[Held]:
    """Have a process map and lock files in the page cache, as `hold`."""
    note = {
        "schema": SCHEMA,
        "path": source,
        "paths": [path for path, _ in versions],
        "source": source,
        "versions": versions,
        "asked": asked,
        "backing": "page-cache",
        "nbytes": sum(version[2] for _, version in versions),
        "granted": asdict(granted),
        "warnings": [],
    }
    with Descriptors() as fds:
        for path, _ in versions:
            fds.add(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        with _started(note, fds, asked["lock"]) as held:
            yield held


@contextmanager
def hold_unfinished(
    place: Place,
    backing: str,
    names: Sequence[str],
    source: str,
    versions: Sequence[tuple[str, Version]],
    asked: dict[str, Any],
    arrived: Sequence[tuple[int, int, int, str]],
) -> Iterator[Held]:
    """Give what has come of a model on a server to a process of its own, as `hold`.

    Parameters
    ----------
    place : Place
        Where it lies. It is not sealed: who goes on takes the pieces out of it.
    backing, names, source, versions, asked, arrived
        As of `Held`; the names are of its files in the place.

    Raises
    ------
    PlacementError, OSError
        The process could not be started.
    """
    nbytes = sum(n for _, _, n, _ in arrived)
    note = {
        "schema": SCHEMA,
        "path": place.path(names[0]),
        "paths": [place.path(name) for name in names],
        "source": source,
        "versions": list(versions),
        "asked": asked,
        "backing": backing,
        "nbytes": nbytes,
        "granted": asdict(Placement("4k", 0, nbytes, 0, 0, 0, nbytes)),
        "warnings": [],
        "arrived": list(arrived),
    }
    with _started(
        note, Descriptors(), False, place.fd, is_folder=isinstance(place, Folder)
    ) as held:
        place.leave()
        yield held


@contextmanager
def _started(
    note: dict[str, Any], fds: Descriptors, lock: Lock, kept: int = -1, *, is_folder: bool = False
) -> Iterator[Held]:
    """Start a process that keeps `kept`, and maps and locks `fds`, which are closed here."""
    import socket
    from subprocess import DEVNULL

    from unimem.staging.child import Child

    text = json.dumps(note).encode()
    ours, its = socket.socketpair()
    with ours:
        memory = Memfd()
        try:
            # It writes the note. One that this process had, if only for a moment, would show this
            # one as what keeps the model, and whoever drops that would end it.
            os.close(memory.create(_NOTE))
            passed = [memory.fd, its.fileno(), *fds, *([kept] if kept >= 0 else [])]
            # It leaves the work to a child, whose end the socket tells.
            Child(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    _HOLDER,
                    str(its.fileno()),
                    str(memory.fd),
                    str(lock),
                    str(kept if is_folder else -1),
                    *map(str, fds),
                ],
                pass_fds=passed,
                cwd="/",
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
            )
        finally:
            its.close()
            memory.leave()
            fds.close()
        code, said = "", ""
        with suppress(ConnectionError):  # it may have said why before it ended
            ours.sendall(len(text).to_bytes(8, "little") + text)
        with suppress(ConnectionError):
            code, _, said = ours.recv(256).decode().partition(" ")
        if code != "0":
            raise PlacementError(
                int(code or 0), f"keeping {note['source']}: {said or 'its process has ended'}"
            )
        with Descriptors() as its_folder:
            began = identity(its_folder.add(os.open, f"/proc/{said}", _FOLDER))[1]
        yield _held(int(said), began, json.loads(text))
        ours.sendall(b"keep")


def drop(held: Held) -> None:
    """End the process that keeps a model, and wait until it is gone.

    Processes that have the model open or mapped keep what they have.

    Raises
    ------
    ValueError
        The process is a program that called `um.stage`, and is not ours to end.
    PlacementError
        It cannot be seen whether the process is still the one that keeps it. It was not ended.
    """
    import select

    if held.kept_by == "program":
        raise ValueError(f"{held.path}: it goes with process {held.pid}, which has staged it")
    with suppress(ProcessLookupError, FileNotFoundError), Descriptors() as fds:
        try:
            folder = fds.add(os.open, f"/proc/{held.pid}", _FOLDER)
            fd = fds.add(os.pidfd_open, _local_pid(held.pid))
            # Another process may have its number by now.
            is_its = identity(folder)[1] == held.began
        except (ProcessLookupError, FileNotFoundError):
            raise
        except OSError as error:
            raise _unseen(error, f"whether process {held.pid} still keeps {held.path}") from error
        if is_its:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            if not select.select([fd], [], [], _PATIENCE_SECONDS)[0]:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                select.select([fd], [], [])
    sweep()


def _local_pid(pid: int) -> int:
    """Return the ID of a process in this PID namespace; /proc may be of an outer one."""
    depth = len(_pids_by_namespace("self"))
    return _pids_by_namespace(str(pid))[depth - 1]


def _pids_by_namespace(pid: str) -> list[int]:
    status = kernel_files.read_bytes(f"/proc/{pid}/status").decode(errors="replace")
    return [int(number) for number in kernel_files.parse_fields(status)["NSpid"].split()]


@contextmanager
def exclude_others(source: str, waiting: Callable[[int], None]) -> Iterator[None]:
    """Wait until no other command of this user stages this model.

    Parameters
    ----------
    source : str
        The model, as an absolute path.
    waiting : callable
        Called with the process that it has to wait for.
    """
    import socket

    # Not a lock of the model file: any process that may read it could hold the lock for ever. The
    # name of a socket goes with its process, and the kernel tells the user of the listener.
    key = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
    name = f"\0unimem-stage-{os.geteuid()}-{key}"
    with socket.socket(socket.AF_UNIX) as mine:
        for _ in range(_TRIES):
            with suppress(OSError):
                mine.bind(name)
                mine.listen()
                break
            if not _wait_for(name, waiting):
                break
        yield


def _wait_for(name: str, waiting: Callable[[int], None]) -> bool:
    """Wait until a socket is closed; False where it is another user's."""
    import socket

    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.setblocking(False)
        try:
            theirs.connect(name)
        except OSError:  # gone already, not listening yet, or its queue is full
            time.sleep(0.01)
            return True
        theirs.setblocking(True)
        credentials = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("iII", credentials)
        if uid != os.geteuid():
            return False
        waiting(pid)
        with suppress(ConnectionResetError):
            theirs.recv(1)
        return True


# ---- the note -----------------------------------------------------------------------------------


def _write_note(memory: Memfd, note: dict[str, Any]) -> None:
    with open(memory.create(_NOTE), "w") as file:
        json.dump(note, file)
    memory.seal()


def _read_note(fd: int, pid: int, folder: int) -> Held | None:
    """Read a note that this user has made, and close it; None for one that says nothing.

    Whose memory it is, is the proof. Of a process it can be none: a setuid program runs as its
    owner, with the descriptors that its caller gave it.
    """
    wrong = ValueError, LookupError, TypeError, AttributeError, RecursionError
    with suppress(*wrong), open(fd) as file:
        is_sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        if not is_sealed or os.fstat(fd).st_uid != os.geteuid():
            return None
        note, its = json.load(file), identity(folder)
        if note.get("program") in (None, [*its]):
            return _held(pid, its[1], note)
    return None


def _held(pid: int, began: int, found: dict[str, Any]) -> Held:
    if found.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    is_program = found.pop("program", None) is not None
    granted = found.pop("granted")
    nodes = {int(node): nbytes for node, nbytes in granted.pop("nodes").items()}
    folder = f"/proc/{pid}"
    return Held(
        pid,
        path=os.path.join(folder, found.pop("path")),
        paths=tuple(os.path.join(folder, path) for path in found.pop("paths")),
        versions=tuple((path, tuple(version)) for path, version in found.pop("versions")),
        granted=Placement(nodes=nodes, **granted),
        warnings=tuple(found.pop("warnings")),
        arrived=tuple(map(tuple, found.pop("arrived", ()))),
        kept_by="program" if is_program else "command",
        began=began,
        **found,
    )
