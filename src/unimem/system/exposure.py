"""Whether pages of a mapped file could be taken away: by a cgroup with little room, or by others.

The kernel drops pages of files before it swaps or kills, also pages that a token needs. Those that
are used often are kept, as long as they are no more than about half of what there is for files.
"""

from __future__ import annotations

from collections.abc import Iterable

from unimem.base.text import format_bytes
from unimem.system.limits import Limit
from unimem.system.pressure import Pressure

__all__ = ["why_exposed"]

# The kernel takes from the list of pages that were used once while the other list, of pages that
# are used often, is not much longer. Twice the room keeps a model on the second one.
_ROOM_FACTOR = 2
# Of 10 seconds, the share in which some thread waited for memory: below, a machine is at ease.
_PRESSED_PERCENT = 5.0
_LEAST_BYTES = 16 << 20  # of a smaller file, what was dropped is back at once


def why_exposed(nbytes: int, found: Iterable[Limit], pressures: Iterable[Pressure]) -> str:
    """Say why pages of mapped files could be taken away.

    Parameters
    ----------
    nbytes : int
        Bytes of the files.
    found : iterable of Limit
        `limits.memory_limits()`. The memory of the machine counts by its pressure alone.
    pressures : iterable of Pressure
        `pressure.memory_pressure()`.

    Returns
    -------
    str
        A few words that a reason begins with; empty where nothing presses.

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
