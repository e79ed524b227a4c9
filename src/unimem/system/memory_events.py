"""What tells a process that memory gets short, as descriptors for `select.poll`.

The kernel has these (Documentation/accounting/psi.rst, admin-guide/cgroup-v2.rst and
cgroup-v1/memory.rst):

- PSI triggers, of the machine and of a cgroup of version 2: threads have waited for memory.
- ``memory.events`` of version 2: how often a cgroup met its limits, or was out of memory.
- ``memory.pressure_level`` of version 1: reclaiming finds little that it can take.
- ``memory.usage_in_bytes`` of version 1: the use of a cgroup has passed a threshold.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from unimem.base import kernel_files
from unimem.system.cgroups import Cgroup, cgroups_above

__all__ = ["Notice", "Watch", "open_watches", "wanted_room"]

_MACHINE = "/proc/pressure/memory"
# Stalled microseconds in a window of so many. Who lacks CAP_SYS_RESOURCE may ask for windows of 2 s
# alone, which the kernel looks at every 2 s.
_TRIGGERS = (b"some 50000 500000\0", b"some 100000 2000000\0")
# Of version 1. At "low", pages of files are reclaimed that nobody misses.
_LEVEL = "medium"
# The room that a limit shall have: this share of it, and at most so many bytes.
_ROOM_SHARE, _MOST_ROOM_BYTES = 1 / 32, 64 << 20


def wanted_room(limit_bytes: int) -> int:
    """Return the bytes of a limit below which memory is short.

    Examples
    --------
    >>> wanted_room(512 << 20) >> 20, wanted_room(64 << 30) >> 20
    (16, 64)
    """
    return int(min(limit_bytes * _ROOM_SHARE, _MOST_ROOM_BYTES))


class Notice(NamedTuple):
    """What a watch has told.

    Attributes
    ----------
    source : str
        Of what: "machine", or "cgroup /a/b".
    text : str
        What happened.
    is_pressure : bool
        Whether that alone says that memory is short. Else limits and their room say.
    """

    source: str
    text: str
    is_pressure: bool


class Watch(Protocol):
    """Something that the kernel tells of a descriptor.

    Attributes
    ----------
    fd, mask : int
        For `select.poll`.
    source, name : str
        Of what, and what it is.
    """

    fd: int
    mask: int
    source: str
    name: str

    def read(self) -> Notice | None:
        """Take what was told; None where that was nothing."""

    def close(self) -> None:
        """Give the descriptors back. Twice is no error."""


class _OpenFiles:
    """The descriptors of a watch."""

    def __init__(self, source: str, name: str) -> None:
        self.source, self.name = source, name
        self._fds: list[int] = []

    def _open(self, path: str, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC)
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


class _Trigger(_OpenFiles):
    """A PSI trigger, which is there as long as its file is open."""

    mask = select.POLLPRI

    def __init__(self, source: str, path: str) -> None:
        super().__init__(source, os.path.basename(path) if source != "machine" else path)
        self.fd = self._open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            try:
                os.write(self.fd, _TRIGGERS[0])
            except OSError:
                os.write(self.fd, _TRIGGERS[1])
        except BaseException:
            self.close()
            raise

    def read(self) -> Notice | None:
        return Notice(self.source, "threads waited for memory (PSI)", True)


class _Counts(_OpenFiles):
    """``memory.events``, whose counts go up."""

    mask = select.POLLPRI

    def __init__(self, source: str, path: str) -> None:
        super().__init__(source, os.path.basename(path))
        self.fd = self._open(path, os.O_RDONLY)
        self._counts = self._read()

    def _read(self) -> dict[str, int]:
        text = os.pread(self.fd, 4096, 0).decode(errors="replace")
        return {name: int(count) for name, count in kernel_files.parse_fields(text, " ").items()}

    def read(self) -> Notice | None:
        before, self._counts = self._counts, self._read()
        more = {name: n - before.get(name, 0) for name, n in self._counts.items()}
        told = [f"{name} +{n}" for name, n in sorted(more.items()) if n > 0]
        if not told:
            return None
        # Files that are read meet a limit as well, and make room by themselves.
        is_pressure = any(more.get(name, 0) > 0 for name in ("oom", "oom_kill"))
        return Notice(self.source, f"{self.name}: {', '.join(told)}", is_pressure)


class _Registered(_OpenFiles):
    """An eventfd that a cgroup of version 1 writes to: see ``cgroup.event_control``."""

    mask = select.POLLIN

    def __init__(self, cgroup: Cgroup, file: str, what: str, *, is_pressure: bool) -> None:
        super().__init__(f"cgroup {cgroup.name}", f"{file} ({what})")
        self._notice = Notice(self.source, f"{file}: {what}", is_pressure)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fds.append(self.fd)
        try:
            of = self._open(f"{cgroup.folder}/{file}", os.O_RDONLY)
            control = self._open(f"{cgroup.folder}/cgroup.event_control", os.O_WRONLY)
            os.write(control, f"{self.fd} {of} {what}".encode())
        except BaseException:
            self.close()
            raise

    def read(self) -> Notice | None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return self._notice


def open_watches() -> tuple[list[Watch], list[str]]:
    """Open all that tells this process of memory that gets short.

    Returns
    -------
    watches : list of Watch
        To be closed by the caller. Of the machine, of the process's own cgroup, and of those above
        that have a limit on memory.
    refusals : list of str
        What there is and cannot be used, and why: mostly its permissions.
    """
    watches: list[Watch] = []
    refusals: list[str] = []
    try:
        for source, name, make in _candidates():
            try:
                watches.append(make())
            except FileNotFoundError:
                continue  # this kernel, or this cgroup, has none
            except OSError as error:
                refusals.append(f"{source}: {name}: {error.strerror}")
    except BaseException:
        for watch in watches:
            watch.close()
        raise
    return watches, refusals


_Made = tuple[str, str, Callable[[], Watch]]  # source, name, and what opens it


def _candidates() -> Iterator[_Made]:
    yield "machine", _MACHINE, partial(_Trigger, "machine", _MACHINE)
    for number, cgroup in enumerate(cgroups_above("memory")):
        limit = cgroup.read_limit("memory.limit_in_bytes", "memory.max", "memory.high")
        if number == 0 or limit is not None:
            yield from _of_cgroup(cgroup, None if limit is None else limit[0])


def _of_cgroup(cgroup: Cgroup, limit: int | None) -> Iterator[_Made]:
    source = f"cgroup {cgroup.name}"
    if cgroup.version == 2:
        for name, kind in (("memory.pressure", _Trigger), ("memory.events", _Counts)):
            yield source, name, partial(kind, source, f"{cgroup.folder}/{name}")
        return
    name = "memory.pressure_level"
    yield source, name, partial(_Registered, cgroup, name, _LEVEL, is_pressure=True)
    if limit is not None:
        name, what = "memory.usage_in_bytes", str(limit - wanted_room(limit))
        yield source, name, partial(_Registered, cgroup, name, what, is_pressure=False)
