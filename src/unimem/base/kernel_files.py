"""Small files of the kernel, in /proc, /sys and cgroups: how they are read, and their formats."""

from __future__ import annotations

import os
import re

__all__ = [
    "is_folder",
    "list_names",
    "parse_fields",
    "parse_kib",
    "parse_list",
    "read_bytes",
    "read_fields",
    "read_number",
    "read_text",
]

_CHUNK_BYTES = 1 << 16  # the kernel writes most of these files at one read
_MOST_LISTED = 1 << 16  # more than any kernel has of nodes or CPUs


def read_bytes(path: str, folder: int | None = None) -> bytes:
    """Read a file to its end.

    Parameters
    ----------
    path : str
        The file.
    folder : int, optional
        A descriptor of the folder that a relative path begins at.

    Returns
    -------
    bytes

    Raises
    ------
    OSError
        It cannot be read.
    """
    # Without the buffers and decoders of open(): this runs before each block is made.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.read(fd, _CHUNK_BYTES)
        while more := os.read(fd, _CHUNK_BYTES):
            found += more
        return found
    finally:
        os.close(fd)


def read_text(path: str) -> str | None:
    """Read a file as text without the white space around it; None where it cannot be read."""
    try:
        return read_bytes(path).decode(errors="surrogateescape").strip()
    except OSError:
        return None


def read_number(path: str) -> int | None:
    """Read a file of one number; None where it cannot be read, or has something else, as "max"."""
    text = read_text(path)
    return int(text) if text is not None and text.isdigit() else None


def read_fields(path: str, separator: str = ":", prefix: str = "") -> dict[str, str]:
    """Read a file whose lines are names and values, as `parse_fields`; empty where it cannot be."""
    return parse_fields(read_text(path) or "", separator, prefix)


def is_folder(path: str) -> bool:
    """Whether there is such a folder, and it may be looked at."""
    return os.path.isdir(path)


def list_names(path: str) -> list[str]:
    """List what is in a folder; nothing where it cannot be read."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def parse_fields(text: str, separator: str = ":", prefix: str = "") -> dict[str, str]:
    """Parse lines of names and values.

    Parameters
    ----------
    text : str
        The lines.
    separator : str, default ":"
        What ends a name.
    prefix : str, optional
        What every name begins with, and is left out.

    Returns
    -------
    dict
        Of a name that comes again, as for each CPU, the first value.
    """
    lines = text.splitlines()
    lines.reverse()  # so that the first of a name is what stays
    return {
        name.strip().removeprefix(prefix): value.strip()
        for name, ends, value in [line.partition(separator) for line in lines]
        if ends
    }


def parse_kib(value: str | bytes | None) -> int:
    """Parse a figure such as "123 kB".

    Returns
    -------
    int
        Bytes; 0 where there is no figure.

    Examples
    --------
    >>> parse_kib("  123 kB"), parse_kib(None)
    (125952, 0)
    """
    return int(value.split(maxsplit=1)[0]) << 10 if value else 0


def parse_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's format of lists of nodes and CPUs.

    Parameters
    ----------
    text : str
        Numbers and ranges, as in "0,2-3"; may be empty.

    Returns
    -------
    tuple of int
        In ascending order, each once.

    Raises
    ------
    ValueError
        The text is no such list.

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
