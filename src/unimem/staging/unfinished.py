"""The parts of models that interrupted loads from servers leave in shared memory.

A small process keeps each part, as it does a staged model, with a note of the pieces and of their
hashes. The next load makes a place of its own, moves the pieces there, and asks the server for the
rest only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from unimem.base.kernel_files import read_text
from unimem.remote.arrivals import Arrivals, Piece, give_back
from unimem.staging.backings import Place
from unimem.staging.keeper import Arrived, drop, hold_unfinished
from unimem.weights.files import Version
from unimem.weights.remote_files import RemoteFiles
from unimem.weights.staged import Held, holders

# After these errors the part is useless: the file is gone, or another one.
_USELESS = (errno.ESTALE, errno.ENOENT)


def find_unfinished(source: str) -> list[Held]:
    """Find the parts that processes of this user keep of a model, by its shown URL."""
    return [held for held in holders() if held.is_unfinished and held.source == source]


class Unfinished:
    """The parts that earlier loads of one model have left. For one thread.

    `source` is the shown URL of `model`, which stays open, and `versions` are its files and their
    versions. The attribute `arrivals` has the pieces that have arrived.
    """

    def __init__(
        self, model: RemoteFiles, source: str, versions: Sequence[tuple[str, Version]]
    ) -> None:
        self.arrivals = Arrivals()
        self._model, self._source, self._versions = model, source, tuple(versions)
        self._opened = ExitStack()
        self._left: list[tuple[Held, set[Piece]]] = []

    def __enter__(self) -> Self:
        """Open the parts that were left; drop those of another version of the model."""
        for held in find_unfinished(self._source):
            if held.versions == self._versions:
                self._left.append((held, self._open(held)))
            elif held.key == self._model.key:  # otherwise it may be that of another file
                drop(held)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drop the parts that are used up; all of them if the model is staged."""
        self._opened.close()
        there = {piece for piece, _ in self.arrivals}
        for held, pieces in self._left:
            if kind is None or pieces <= there:
                drop(held)

    def _open(self, held: Held) -> set[Piece]:
        fds: dict[int, int] = {}
        for number in {number for number, _, _, _ in held.arrived}:
            with suppress(OSError):  # its process has just ended
                path = held.paths[number]
                os.chmod(path, 0o600)
                fds[number] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                self._opened.callback(os.close, fds[number])
        pieces = set()
        for number, first, nbytes, digest in held.arrived:
            path = self._versions[number][0]
            piece = Piece(path, *self._model.known_version(path), first, nbytes)
            pieces.add(piece)
            if number in fds:
                self.arrivals.add_left(piece, bytes.fromhex(digest), fds[number])
        return pieces

    @property
    def room_bytes(self) -> int:
        """Bytes that become free as pieces are moved: those charged to this process's cgroup."""
        ours = read_text("/proc/self/cgroup")
        return sum(
            held.nbytes
            for held, _ in self._left
            if ours is not None and read_text(f"/proc/{held.pid}/cgroup") == ours
        )

    def keep(
        self, place: Place, backing: str, names: Sequence[str], asked: dict[str, Any], error: object
    ) -> None:
        """Have a process keep the pieces that have arrived in a place, unless they are useless.

        `backing`, `names` and `asked` are those of `Arrived`; `error` has interrupted the load.
        """
        # Pages of a pool are scarce, and without versions no later load could use the pieces.
        useless = isinstance(error, MemoryError) or getattr(error, "errno", None) in _USELESS
        known = all(version[-1] for _, version in self._versions)
        if useless or not known or backing == "hugetlb":
            return
        numbers = {path: i for i, (path, _) in enumerate(self._versions)}
        pieces = [
            (numbers[piece.path], piece.first, piece.nbytes, digest.hex())
            for piece, digest in self.arrivals
        ]
        if not pieces:
            return
        with suppress(OSError):  # then nothing is left
            for number, name in enumerate(names):
                self._give_back_gaps(place, name, [row[1:3] for row in pieces if row[0] == number])
            arrived = Arrived(
                names, self._source, self._model.key, self._versions, asked, backing, pieces
            )
            with hold_unfinished(place, arrived):
                pass

    def _give_back_gaps(self, place: Place, name: str, ranges: list[tuple[int, int]]) -> None:
        """Give back the memory between complete pieces."""
        try:
            fd = os.open(os.path.join("/proc/self", place.path(name)), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it does not exist yet, or is complete and read-only
            return
        try:
            at = 0
            for first, nbytes in [*sorted(ranges), (os.fstat(fd).st_size, 0)]:
                if at < first:
                    give_back(fd, at, first - at)
                at = first + nbytes
        finally:
            os.close(fd)
