"""Processes that keep staged models: small ones, for commands that end, and programs themselves.

Each has a note of what it keeps, a sealed memfd, which `unimem.weights.staged` reads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn, Protocol

from unimem.base import kernel_files
from unimem.base.descriptors import Descriptors
from unimem.errors import PlacementError
from unimem.staging.backings import Folder, Memfd, Place, sweep
from unimem.system.placement import Lock, Placement
from unimem.system.process import identity
from unimem.weights.files import Version
from unimem.weights.staged import NOTE, PROCESS_FOLDER, SCHEMA, Held, cannot_see, held_from_note

_HOLDER = os.path.join(os.path.dirname(__file__), "keeper_process.py")
_PATIENCE_SECONDS = 10
# One second for a process that is about to listen; another user's might never listen.
_TRIES = 100


class _Staged(Protocol):
    """The members of `Stage` that this module needs."""

    nbytes: int
    granted: Placement
    _names: tuple[str, ...]
    _first: str
    _versions: tuple[tuple[str, Version], ...]
    _key: str
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
    """Give a staged model to a process of its own, which keeps it after the ``with``.

    If anything fails before, the process ends and nothing is left. The stage is closed either way.
    `source` is an absolute path; `asked` are the options and `warnings` the warnings of staging.
    PlacementError says that the process could not lock it, OSError that it could not be started.
    """
    with stage:
        place = stage._opened()
        stage._note.leave()  # the new process writes its own
        # Pages of a pool never leave RAM: locking them would only use up the user's limit.
        is_to_lock = stage.granted.locked_bytes > 0 and stage.backing != "hugetlb"
        lock = asked["lock"] if is_to_lock else False
        with Descriptors() as fds:
            for name in stage._names:
                fds.add(place.open, name)
            with _started(_note_of(stage, source, asked, warnings), fds, lock, place) as held:
                place.leave()
                yield held


def show(stage: _Staged, source: str, asked: dict[str, Any]) -> None:
    """Write into the note of a stage that this process keeps it; `source`, `asked` as for `hold`.

    A forked child has a copy of the descriptor, and does not count as a keeper.
    """
    with Descriptors() as fds:
        program = identity(fds.add(os.open, "/proc/self", PROCESS_FOLDER))
    with open(stage._note.create(NOTE), "w") as file:
        json.dump(_note_of(stage, source, asked, ()) | {"program": program}, file)
    stage._note.seal()


def _note_of(
    stage: _Staged, source: str, asked: dict[str, Any], warnings: Sequence[str]
) -> dict[str, Any]:
    place = stage._opened()
    return _new_note(
        stage.granted,
        path=place.path(stage._first),
        paths=[place.path(name) for name in stage._names],
        source=source,
        versions=list(stage._versions),
        key=stage._key,
        asked=asked,
        backing=stage.backing,
        nbytes=stage.nbytes,
        warnings=list(warnings),
    )


def _new_note(granted: Placement, **fields: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, "granted": asdict(granted), "warnings": [], **fields}


@contextmanager
def hold_files(
    source: str, versions: Sequence[tuple[str, Version]], granted: Placement, asked: dict[str, Any]
) -> Iterator[Held]:
    """Have a process map and lock files in the page cache, as `hold`."""
    note = _new_note(
        granted,
        path=source,
        paths=[path for path, _ in versions],
        source=source,
        versions=versions,
        asked=asked,
        backing="page-cache",
        nbytes=sum(version[2] for _, version in versions),
    )
    with Descriptors() as fds:
        for path, _ in versions:
            fds.add(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
        with _started(note, fds, asked["lock"]) as held:
            yield held


class Arrived(NamedTuple):
    """The part of a model on a server that an interrupted load leaves, with fields of `Held`."""

    names: Sequence[str]  # of its files in their place
    source: str
    key: str
    versions: Sequence[tuple[str, Version]]
    asked: dict[str, Any]
    backing: str
    pieces: Sequence[tuple[int, int, int, str]]


@contextmanager
def hold_unfinished(place: Place, arrived: Arrived) -> Iterator[Held]:
    """Give the part of a model that has arrived to a process of its own, as `hold`.

    The place is not sealed: the next load takes the pieces out of it.
    """
    nbytes = sum(n for _, _, n, _ in arrived.pieces)
    note = _new_note(
        Placement("4k", 0, nbytes, 0, 0, 0, nbytes),
        path=place.path(arrived.names[0]),
        paths=[place.path(name) for name in arrived.names],
        source=arrived.source,
        key=arrived.key,
        versions=list(arrived.versions),
        asked=arrived.asked,
        backing=arrived.backing,
        nbytes=nbytes,
        arrived=list(arrived.pieces),
    )
    with _started(note, Descriptors(), False, place) as held:
        place.leave()
        yield held


@contextmanager
def _started(
    note: dict[str, Any], fds: Descriptors, lock: Lock, place: Place | None = None
) -> Iterator[Held]:
    """Start a process that keeps a place, and maps and locks `fds`, which are closed here."""
    import socket
    from subprocess import DEVNULL

    text = json.dumps(note).encode()
    kept = -1 if place is None else place.fd
    ours, its = socket.socketpair()
    with ours:
        memory = Memfd()
        try:
            # The new process writes the note. If this process ever had it, this process would look
            # like the keeper, and `drop` would end it.
            os.close(memory.create(NOTE))
            folder = kept if isinstance(place, Folder) else -1
            command = [sys.executable, "-I", "-S", _HOLDER]
            numbers = [its.fileno(), memory.fd, str(lock), folder, *fds]
            # It forks a child that does the work, whose end the socket reports.
            run_child(
                command + list(map(str, numbers)),
                pass_fds=[memory.fd, its.fileno(), *fds, *([kept] if kept >= 0 else [])],
                cwd="/",
                **dict.fromkeys(("stdin", "stdout", "stderr"), DEVNULL),
            )
        finally:
            its.close()
            memory.leave()
            fds.close()
        code, said = "", ""
        with suppress(ConnectionError):  # it may have sent a reason before it ended
            ours.sendall(len(text).to_bytes(8, "little") + text)
        with suppress(ConnectionError):
            code, _, said = ours.recv(256).decode().partition(" ")
        if code != "0":
            raise PlacementError(
                int(code or 0), f"keeping {note['source']}: {said or 'its process has ended'}"
            )
        with Descriptors() as its_folder:
            began = identity(its_folder.add(os.open, f"/proc/{said}", PROCESS_FOLDER))[1]
        yield held_from_note(int(said), began, json.loads(text))
        try:
            ours.sendall(b"keep")
        except ConnectionError:  # killed meanwhile; as a broken pipe it would be passed over
            raise PlacementError(0, f"keeping {note['source']}: its process has ended") from None


def run_child(command: Sequence[str], **options: Any) -> None:
    """Start a process that ends soon, and wait for it.

    It is waited for even after an interrupt, or if `Popen` fails after the process has begun to
    run: `Popen` alone would leave it a zombie until the next start.
    """
    import subprocess  # which is heavy

    child: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)

    def wait() -> None:
        if getattr(child, "pid", None):
            child.wait()

    try:
        try:
            subprocess.Popen.__init__(child, command, **options)
        finally:
            wait()
    finally:  # an interrupt may have come before the first wait
        wait()


def drop(held: Held) -> None:
    """End the process that keeps a model, and wait until it is gone.

    Processes that have the model open or mapped keep it. A program that called `um.stage` is not
    ended (ValueError), nor a process that cannot be identified as the keeper (PlacementError).
    """
    import select

    if held.kept_by == "program":
        raise ValueError(f"{held.path}: it goes with process {held.pid}, which has staged it")
    with suppress(ProcessLookupError, FileNotFoundError), Descriptors() as fds:
        fd = _open_keeper(held, fds)
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not select.select([fd], [], [], _PATIENCE_SECONDS)[0]:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [])
    sweep()


def _open_keeper(held: Held, fds: Descriptors) -> int:
    """Return a descriptor of the process that keeps a model; ProcessLookupError if it has ended."""
    try:
        folder = fds.add(os.open, f"/proc/{held.pid}", PROCESS_FOLDER)
        fd = fds.add(os.pidfd_open, _local_pid(held.pid))
        # Another process may have its number by now.
        is_its = identity(folder)[1] == held.began
    except (ProcessLookupError, FileNotFoundError):
        raise
    except OSError as error:
        what = f"whether process {held.pid} still keeps {held.path}"
        raise cannot_see(error, what) from error
    if not is_its:
        raise ProcessLookupError(errno.ESRCH, "its process has ended", held.path)
    return fd


def catch_signals() -> tuple[int, int]:
    """Leave the signals that end a command to `wait_for`; return a pipe that has a byte of each.

    They are blocked in this thread, but others may get them until the new program begins.
    """
    woken, wakes = os.pipe2(os.O_NONBLOCK)  # and the new program has it
    signal.set_wakeup_fd(wakes)
    for number in (ends := {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    return woken, wakes


def wait_for(
    held: Held, links: Sequence[str], signals: tuple[int, int], *, is_ours: bool
) -> NoReturn:
    """Become a small process that stays while a model is kept, and counts as a reader of it.

    SIGTERM, SIGINT or SIGHUP end it with 0, and with `is_ours` the model and its links, too. It
    ends with 1 if the model's keeper ends by itself. `signals` are those of `catch_signals`.
    ProcessLookupError says that the keeper has ended.
    """
    with Descriptors() as fds:
        keeper = _open_keeper(held, fds)
        for path in held.paths:
            os.set_inheritable(fds.add(os.open, path, os.O_RDONLY), True)
        os.set_inheritable(keeper, True)
        numbers = map(str, (keeper, int(is_ours), *signals))
        os.execv(sys.executable, [sys.executable, "-I", "-S", _HOLDER, "wait", *numbers, *links])


def notify(state: str) -> None:
    """Tell the service manager that started this process a state, as ``READY=1``; else nothing.

    The protocol is that of systemd's sd_notify(3): a datagram to the socket in ``NOTIFY_SOCKET``.
    """
    import socket

    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.sendto(state.encode(), re.sub("^@", "\0", address))


def _local_pid(pid: int) -> int:
    """Return the ID of a process in this PID namespace; /proc may show an outer one."""
    depth = len(_pids_by_namespace("self"))
    return _pids_by_namespace(str(pid))[depth - 1]


def _pids_by_namespace(pid: str) -> list[int]:
    status = kernel_files.read_bytes(f"/proc/{pid}/status").decode(errors="replace")
    return [int(number) for number in kernel_files.parse_fields(status)["NSpid"].split()]


@contextmanager
def exclude_others(source: str, waiting: Callable[[int], None]) -> Iterator[None]:
    """Wait until no other command of this user stages this model, an absolute path.

    `waiting` is called with the process that this one waits for.
    """
    import socket

    # Any process that may read the model file could hold a lock on it for ever. The name of a
    # socket goes with its process, and the kernel says which user listens.
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
    """Wait until a socket is closed; False if it is another user's."""
    import socket

    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.setblocking(False)
        try:
            theirs.connect(name)
        except OSError:  # gone, not listening yet, or its queue is full
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
