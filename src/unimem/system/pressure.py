"""How short of memory a machine is: what the kernel counts of waiting and of reading pages."""

from __future__ import annotations

import re
from typing import NamedTuple

from unimem.base import kernel_files
from unimem.system.cgroups import cgroups_above

__all__ = ["Pressure", "memory_pressure", "paged_in_bytes"]

_MACHINE = "/proc/pressure/memory"


class Pressure(NamedTuple):
    """Shares of the last 10 seconds in which work waited for memory (the kernel's PSI).

    Attributes
    ----------
    source : str
        Whose: "machine", or "cgroup /a/b".
    some_percent, full_percent : float
        Time in which at least one thread waited, and in which all threads with work did.
    """

    source: str
    some_percent: float
    full_percent: float


def memory_pressure(pid: int | None = None) -> tuple[Pressure, ...]:
    """Return the memory pressure on a process.

    Parameters
    ----------
    pid : int, optional
        Its number; by default this process.

    Returns
    -------
    tuple of Pressure
        Of the machine, and of the process's own cgroup where it is in one of version 2. Empty
        where the kernel counts none: without CONFIG_PSI, or started with psi=0.

    Examples
    --------
    >>> all(pressure.full_percent <= 100 for pressure in memory_pressure())
    True
    """
    found = [_pressure("machine", _MACHINE)]
    own = next(cgroups_above("", pid), None)
    # The root, which alone has no type, is the machine once more; in a container, what is at "/"
    # may be another one.
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
    """Return the bytes read from disks since the machine was started; None where not counted.

    Examples
    --------
    >>> before = paged_in_bytes() or 0
    >>> (paged_in_bytes() or 0) >= before
    True
    """
    # The kernel counts sectors, and writes KiB.
    paged_in = kernel_files.read_fields("/proc/vmstat", " ").get("pgpgin")
    return None if paged_in is None else int(paged_in) << 10
