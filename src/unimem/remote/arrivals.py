"""The pieces of files on servers that have arrived, for loads that continue interrupted ones.

A piece is identified by its file, the file's version and the range. It is used only if its bytes
have the hash that was noted when they arrived.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate (linux/falloc.h)


class Piece(NamedTuple):
    """A range of a file on a server."""

    path: str  # the URL as it is shown
    file_bytes: int
    tag: str  # the ETag of the file
    first: int
    nbytes: int


class Arrivals:
    """The pieces that have arrived, each with a hash. Any number of threads may use it.

    They lie in their place in memory, or in files that an earlier load has left.
    """

    def __init__(self) -> None:
        self._hashes: dict[Piece, bytes] = {}
        self._left: dict[Piece, list[tuple[int, bytes]]] = {}

    def note(self, piece: Piece, rows: NDArray[np.uint8]) -> None:
        """Note that a piece has arrived; `rows` are its bytes."""
        self._hashes[piece] = xxhash.xxh3_128_digest(rows.data)

    def add_left(self, piece: Piece, digest: bytes, fd: int) -> None:
        """Note that a piece lies at its offset in a file, which is open for reading and writing.

        `recall` gives its memory there back.
        """
        self._left.setdefault(piece, []).append((fd, digest))

    def recall(self, piece: Piece, rows: NDArray[np.uint8]) -> bool:
        """Bring back a piece; whether its bytes are there and have the noted hash.

        `rows` is the memory where it lies, or goes; undefined if the piece has not arrived.
        """
        noted = self._hashes.get(piece)
        if noted is not None and xxhash.xxh3_128_digest(rows.data) == noted:
            return True
        for fd, digest in self._left.get(piece, ()):
            if _read(fd, piece.first, rows) and xxhash.xxh3_128_digest(rows.data) == digest:
                give_back(fd, piece.first, piece.nbytes)
                self._hashes[piece] = digest
                return True
        return False

    def __bool__(self) -> bool:
        return bool(self._hashes or self._left)

    def __iter__(self) -> Iterator[tuple[Piece, bytes]]:
        """Yield the pieces that have arrived or were recalled, with their hashes."""
        return iter(list(self._hashes.items()))


def _read(fd: int, first: int, rows: NDArray[np.uint8]) -> bool:
    """Read bytes of a file; False if it ends before them, or cannot be read."""
    rest = rows.data
    while rest:
        try:
            n = os.preadv(fd, [rest], first)
        except OSError:
            return False
        if n == 0:
            return False
        rest, first = rest[n:], first + n
    return True


def give_back(fd: int, first: int, nbytes: int) -> None:
    """Give back the memory of a range of a file in shared memory; partial pages stay."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    # If the kernel cannot, the memory goes with the file.
    libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, first, nbytes)
