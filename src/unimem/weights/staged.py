"""The models that processes of this user keep in memory, found by the notes of these processes.

There is no registry that could be wrong: a process that keeps a model has a note of it, a sealed
memfd. `unimem.staging.keeper` writes these notes.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unimem.base.descriptors import Descriptors
from unimem.errors import PlacementError
from unimem.remote.client import is_url
from unimem.system.memfds import CANNOT_LOOK, find_memfds
from unimem.system.placement import Placement
from unimem.system.process import identity
from unimem.weights.files import Version, identity_of, version_of

SCHEMA = "unimem.stage/1"
NOTE = "unimem-stage"  # the name of a note's memfd
PROCESS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_NOTES = 1 << 10  # read from one process, which may be another user's


@dataclass(frozen=True, slots=True)
class Held:
    """A model that a process keeps in memory.

    Attributes
    ----------
    path, paths : str, tuple of str
        What to open instead of the model, and all of its files.
    source : str
        The model, as an absolute path.
    versions : tuple of (str, Version)
        The files that were read, and their versions; for a repacked model, their identities.
    asked, warnings : dict, tuple of str
        The options that it was staged with, and the warnings that this gave.
    backing, granted : str, Placement
        As in `Stage`; the backing may be "page-cache".
    kept_by : {"command", "program"}
        Whether `unimem stage` started the process for this, or the process called `um.stage`.
    arrived : tuple of (int, int, int, str)
        For a model on a server that has arrived in part: file, first byte, bytes and hash of each
        piece. `nbytes` counts these pieces, and some of `paths` may not exist.
    key : str
        The `url_key` of a model on a server.
    began : int
        Start of the process in ticks since boot, since a later process may have the same number.
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
    key: str = ""

    def staleness(self) -> str | None:
        """Explain why this cannot replace the model any more; None if it can.

        No server is asked about a model from a server: staging it again does that.
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

    def has_files(self, versions: Sequence[tuple[str, Version]]) -> bool:
        """Whether it was made from exactly these files, whatever their paths."""
        return _files_of(self.versions) == _files_of(versions)

    def has_file(self, path: str) -> bool:
        """Whether it was made from the file at this path, or from it and others."""
        return _file_at(path) in _files_of(self.versions)

    def was_replaced_by(self, versions: Sequence[tuple[str, Version]]) -> bool:
        """Whether one of these files lies where the model was."""
        return _file_at(self.source) in _files_of(versions)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """Yield each file and its least size."""
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
        """Whether it is the part of a model on a server that an interrupted load has left."""
        return bool(self.arrived)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a JSON document shows."""
        shown = asdict(self)
        del shown["versions"], shown["arrived"], shown["began"], shown["key"]
        return {"schema": SCHEMA, **shown}


def _files_of(versions: Sequence[tuple[str, Version]]) -> set[tuple[int, ...]]:
    """Return device and inode of each file: its path may lead to another one by now."""
    return {version[:2] for _, version in versions}


def _file_at(path: str) -> tuple[int, ...]:
    try:
        return version_of(os.stat(path))[:2]
    except OSError:
        return ()


def holders() -> list[Held]:
    """Find the models that processes of this user keep, the oldest process first.

    PlacementError says that ``/proc`` belongs to another PID namespace, or that a process could not
    be examined.
    """
    import psutil

    proc_folder()
    return [held for pid in psutil.pids() for held in holders_of(pid)]


def holders_of(pid: int) -> list[Held]:
    """Find the models that one process keeps; none if it has ended or is another user's."""
    found = []
    try:
        with Descriptors() as fds:
            folder = fds.add(os.open, f"/proc/{pid}", PROCESS_FOLDER)
            for fd in itertools.islice(find_memfds(folder, NOTE), _MOST_NOTES):
                if (held := read_note(fd, pid, folder)) is not None:
                    found.append(held)
    except OSError as error:
        if error.errno in CANNOT_LOOK:
            raise cannot_see(error, f"whether process {pid} keeps a model") from error
    return found


def cannot_see(error: OSError, what: str) -> PlacementError:
    """Return the error that says why ``/proc`` cannot be read."""
    advice = {errno.EMFILE: ": close some, or raise 'ulimit -n'"}.get(error.errno or 0, "")
    text = f"cannot see {what}: /proc/PID cannot be read: {error.strerror}{advice}"
    return PlacementError(error.errno, text)


def proc_folder() -> str:
    """Return this process's folder in ``/proc``, or raise PlacementError if it is not there.

    Its name is the PID in the namespace that ``/proc`` was mounted in, which may be an outer one.
    """
    try:
        return f"/proc/{os.readlink('/proc/self')}"
    except OSError as error:
        raise PlacementError(
            error.errno,
            f"/proc/self: {error.strerror}: others would open a staged model there; "
            "'mount -t proc proc /proc' helps",
        ) from None


def read_note(fd: int, pid: int, folder: int) -> Held | None:
    """Read a note that this user has made, and close it; None if it is invalid.

    The owner of the memfd is the proof. The owner of the process proves nothing: a setuid program
    runs as its owner, with the descriptors that its caller gave it.
    """
    wrong = ValueError, LookupError, TypeError, AttributeError, RecursionError
    with suppress(*wrong), open(fd) as file:
        is_sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        if not is_sealed or os.fstat(fd).st_uid != os.geteuid():
            return None
        note, its = json.load(file), identity(folder)
        if note.get("program") in (None, [*its]):
            return held_from_note(pid, its[1], note)
    return None


def held_from_note(pid: int, began: int, note: dict[str, Any]) -> Held:
    """Return the model that a note describes; a note of another schema gives one of many errors."""
    if note.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    is_program = note.pop("program", None) is not None
    granted = note.pop("granted")
    nodes = {int(node): nbytes for node, nbytes in granted.pop("nodes").items()}
    folder = f"/proc/{pid}"
    return Held(
        pid,
        path=os.path.join(folder, note.pop("path")),
        paths=tuple(os.path.join(folder, path) for path in note.pop("paths")),
        versions=tuple((path, tuple(version)) for path, version in note.pop("versions")),
        granted=Placement(nodes=nodes, **granted),
        warnings=tuple(note.pop("warnings")),
        arrived=tuple(map(tuple, note.pop("arrived", ()))),
        kept_by="program" if is_program else "command",
        began=began,
        **note,
    )
