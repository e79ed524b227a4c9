"""Notes on stored chunks: what they are of, how often they were read, and whether they must stay.

They are attributes of the chunks' files (``user.unimem``), so that they end with them. A file
system without attributes keeps chunks all the same, but no pins.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from typing import Any

_NOTE, _PIN, _HITS = "user.unimem", "user.unimem.pin", "user.unimem.hits"
#: The end of a pin without a time to live, in nanoseconds since 1970.
FOR_EVER = (1 << 63) - 1


def write_note(fd: int, note: dict[str, Any]) -> None:
    """Note what a new file is of, and when it was made, if the file system keeps notes."""
    text = json.dumps(note | {"made": int(time.time())}, separators=(",", ":"))
    with suppress(OSError):
        os.setxattr(fd, _NOTE, text.encode())


def read_note(file: int | str) -> dict[str, Any]:
    """Return what a file is of; nothing if there is no note, or a damaged one."""
    try:
        found = json.loads(_read(file, _NOTE))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def add_hit(file: int | str) -> None:
    """Count a read; of two at once, one may not count."""
    with suppress(OSError):
        os.setxattr(file, _HITS, b"%d" % (hits_of(file) + 1))


def hits_of(file: int | str) -> int:
    """Return how often a chunk was read."""
    return _number(_read(file, _HITS)) or 0


def pin(file: int | str, until_ns: int | None) -> None:
    """Keep a chunk from making room until a time; None ends that.

    It raises OSError if the file system keeps no attributes of files.
    """
    try:
        if until_ns is not None:
            os.setxattr(file, _PIN, b"%d" % until_ns)
            return
        with suppress(FileNotFoundError):
            os.removexattr(file, _PIN)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return
        if error.errno != errno.ENOTSUP:
            raise
        what = "the file system keeps no attributes of files (user xattr), and so no pins"
        raise OSError(error.errno, f"{what}: expected a local disk") from None


def pinned_until(file: int | str) -> int | None:
    """Return the end of a chunk's pin, in nanoseconds since 1970; None if it has none now."""
    until = _number(_read(file, _PIN))
    return until if until is not None and until > time.time_ns() else None


def _read(file: int | str, name: str) -> bytes:
    try:
        return os.getxattr(file, name)
    except OSError:
        return b""


def _number(text: bytes) -> int | None:
    try:
        number = int(text)
    except ValueError:
        return None
    return number if 0 <= number <= FOR_EVER else None
