"""Small files of the kernel, in /proc, /sys and cgroups, and their formats."""

from __future__ import annotations

import os
import re

_CHUNK_BYTES = 1 << 16  # the kernel writes most of these files at one read
_MOST_LISTED = 1 << 16  # more than any kernel has of nodes or CPUs


def read_bytes(path: str, folder: int | None = None) -> bytes:
    """Read a file to its end; a relative path begins at the descriptor `folder`."""
    # Without the buffers and decoders of open(), since this runs before each block is made.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.read(fd, _CHUNK_BYTES)
        while more := os.read(fd, _CHUNK_BYTES):
            found += more
        return found
    finally:
        os.close(fd)


def read_text(path: str) -> str | None:
    """Read a file as text without surrounding white space; None if it cannot be read."""
    try:
        return read_bytes(path).decode(errors="surrogateescape").strip()
    except OSError:
        return None


def read_number(path: str) -> int | None:
    """Read a file of one number; None if it cannot be read, or holds a word such as "max"."""
    text = read_text(path)
    return int(text) if text is not None and text.isdigit() else None


def read_fields(path: str, separator: str = ":", prefix: str = "") -> dict[str, str]:
    """Read a file of lines with names and values, as `parse_fields`; empty if it cannot be read."""
    return parse_fields(read_text(path) or "", separator, prefix)


def is_folder(path: str) -> bool:
    """Whether a folder exists and is accessible."""
    return os.path.isdir(path)


def list_names(path: str) -> list[str]:
    """List the names in a folder; none if it cannot be read."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def parse_fields(text: str, separator: str = ":", prefix: str = "") -> dict[str, str]:
    """Parse lines of ``name separator value``; of a repeated name, the first value counts.

    Names lose a `prefix` that they begin with.
    """
    lines = text.splitlines()
    lines.reverse()  # so that the first value of a name stays
    return {
        name.strip().removeprefix(prefix): value.strip()
        for name, ends, value in [line.partition(separator) for line in lines]
        if ends
    }


def parse_kib(value: str | bytes | None) -> int:
    """Parse a figure such as "123 kB" into bytes; 0 without a figure.

    Examples
    --------
    >>> parse_kib("  123 kB"), parse_kib(None)
    (125952, 0)
    """
    return int(value.split(maxsplit=1)[0]) << 10 if value else 0


def parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's lists of nodes and CPUs into ascending numbers.

    Raises
    ------
    ValueError
        The text is not such a list.

    Examples
    --------
    >>> parse_list("0,2-3")
    (0, 2, 3)
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not first <= last < _MOST_LISTED:
            raise ValueError(
                f"expected a list of numbers and ascending ranges below {_MOST_LISTED}, "
                f'like "0,2-3", got {text!r}'
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
