"""Memory pressure: how much there is, whether it endangers mapped files, and how it is announced.

The kernel drops pages of files before it swaps or kills, also pages that a token needs. Those that
are used often are kept while they are at most about half of the room for files.

Descriptors for `select.poll` announce pressure (Documentation/accounting/psi.rst,
admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst):

- PSI triggers, of the machine and of a cgroup of version 2: threads have waited for memory.
- ``memory.events`` of version 2: how often a cgroup reached its limits, or was out of memory.
- ``memory.pressure_level`` of version 1: reclaiming finds little to take.
- ``memory.usage_in_bytes`` of version 1: the use of a cgroup has passed a threshold.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from unimem.base import kernel_files
from unimem.base.text import format_bytes
from unimem.system.cgroups import Cgroup, cgroups_above
from unimem.system.limits import Limit

_MACHINE = "/proc/pressure/memory"
# The kernel reclaims pages that were used once while there are not many more that are used often.
# Twice the room keeps a model among the latter.
_ROOM_FACTOR = 2
# The share of 10 seconds in which some thread waited for memory. Less is no pressure.
_PRESSED_PERCENT = 5.0
_LEAST_BYTES = 16 << 20  # a smaller file is read again at once
# Stalled microseconds in a window of microseconds. Without CAP_SYS_RESOURCE only windows of 2 s are
# allowed.
_TRIGGERS = (b"some 50000 500000\0", b"some 100000 2000000\0")
# In version 1. At "low", only unneeded pages of files are reclaimed.
_LEVEL = "medium"
# The room that a limit should have: a share of it, at most a number of bytes.
_ROOM_SHARE, _MOST_ROOM_BYTES = 1 / 32, 64 << 20


class Pressure(NamedTuple):
    """The shares of the last 10 seconds in which work waited for memory (the kernel's PSI).

    The source is "machine" or "cgroup /a/b". Some: at least one thread waited; full: all with work.
    """

    source: str
    some_percent: float
    full_percent: float


def memory_pressure(pid: int | None = None) -> tuple[Pressure, ...]:
    """Return the memory pressure of the machine, and of a process's cgroup if it has version 2.

    Empty if the kernel does not count it: without CONFIG_PSI, or with psi=0.

    Examples
    --------
    >>> all(pressure.full_percent <= 100 for pressure in memory_pressure())
    True
    """
    found = [_pressure("machine", _MACHINE)]
    own = next(cgroups_above("", pid), None)
    # The root, which alone has no type, is the machine again. In a container, "/" may be another
    # cgroup.
    if own is not None and kernel_files.read_text(f"{own.folder}/cgroup.type") is not None:
        found.append(_pressure(f"cgroup {own.name}", f"{own.folder}/memory.pressure"))
    return tuple(pressure for pressure in found if pressure is not None)


def _pressure(source: str, path: str) -> Pressure | None:
    text = kernel_files.read_text(path) or ""
    shares = dict(re.findall(r"^(some|full) avg10=([\d.]+)", text, re.M))
    if len(shares) < 2:
        return None
    return Pressure(source, float(shares["some"]), float(shares["full"]))


def paged_in_bytes() -> int | None:
    """Return the bytes read from disks since the machine was started; None if unknown.

    Examples
    --------
    >>> before = paged_in_bytes() or 0
    >>> (paged_in_bytes() or 0) >= before
    True
    """
    # The kernel counts sectors, and writes KiB.
    paged_in = kernel_files.read_fields("/proc/vmstat", " ").get("pgpgin")
    return None if paged_in is None else int(paged_in) << 10


def why_exposed(nbytes: int, found: Iterable[Limit], pressures: Iterable[Pressure]) -> str:
    """Explain why pages of mapped files may be reclaimed; "" if they are safe.

    `found` are `limits.memory_limits()`, in which the memory of the machine counts by its pressure
    alone.

    Examples
    --------
    >>> small = Limit("cgroup /a", 1400 << 20, 100 << 20, "echo max > memory.max")
    >>> why_exposed(1170 << 20, [small], [])
    'cgroup /a has room for 1.3 GiB, and could drop pages of a mapped file'
    >>> why_exposed(500 << 20, [small], [])
    ''
    """
    if nbytes < _LEAST_BYTES:
        return ""
    for limit in found:
        if limit.name.startswith("cgroup ") and limit.room_bytes < _ROOM_FACTOR * nbytes:
            room = format_bytes(limit.room_bytes)
            return f"{limit.name} has room for {room}, and could drop pages of a mapped file"
    for pressure in pressures:
        if pressure.some_percent >= _PRESSED_PERCENT:
            source = "the machine" if pressure.source == "machine" else pressure.source
            return (
                f"threads of {source} waited for memory in {pressure.some_percent:.0f} % of the "
                "last 10 s, and pages of a mapped file could be dropped"
            )
    return ""


# ---- watches -----------------------------------------------------------------------------------


def wanted_room(limit_bytes: int) -> int:
    """Return the bytes of a limit below which memory is short.

    Examples
    --------
    >>> wanted_room(512 << 20) >> 20, wanted_room(64 << 30) >> 20
    (16, 64)
    """
    return int(min(limit_bytes * _ROOM_SHARE, _MOST_ROOM_BYTES))


class Notice(NamedTuple):
    """A message of a watch. `is_pressure` proves that memory is short, else limits have to be read.

    Its source is "machine" or "cgroup /a/b".
    """

    source: str
    text: str
    is_pressure: bool


class Watch(Protocol):
    """A descriptor, with a mask for `select.poll`, on which the kernel announces events."""

    fd: int
    mask: int
    source: str
    name: str

    def read(self) -> Notice | None:
        """Take the announced event; None if nothing has changed."""

    def close(self) -> None:
        """Close the descriptors. Closing twice is no error."""


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
    """A PSI trigger, which exists while its file is open."""

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
    """The counts of ``memory.events``, which only increase."""

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
        # Reading files reaches limits as well, and makes room by itself.
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
    """Open every watch that announces a shortage of memory to this process.

    They are of the machine, of the process's own cgroup, and of those above that limit memory; the
    caller closes them. The texts name those that cannot be opened, and why: mostly permissions.
    """
    watches: list[Watch] = []
    refusals: list[str] = []
    try:
        for source, name, make in _candidates():
            try:
                watches.append(make())
            except FileNotFoundError:
                continue  # this kernel or cgroup lacks it
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
