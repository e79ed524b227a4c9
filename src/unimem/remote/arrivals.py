"""What has come of files on servers, so that a load that was broken off goes on where it was.

A piece is known by its file, the file's version and the range, and believed only where the bytes
have the hash that was noted when they came.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

__all__ = ["Arrivals", "Piece", "give_back"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate (linux/falloc.h)


class Piece(NamedTuple):
    """A range of a file on a server.

    Attributes
    ----------
    path : str
        The URL as it is shown.
    file_bytes : int
        Size of the whole file.
    tag : str
        Its ETag.
    first, nbytes : int
        The range.
    """

    path: str
    file_bytes: int
    tag: str
    first: int
    nbytes: int


class Arrivals:
    """Pieces of files that have come, each with a hash. Any number of threads may use it.

    They lie where they came to, or in files that a load before this one has left.
    """

    def __init__(self) -> None:
        self._hashes: dict[Piece, bytes] = {}
        self._left: dict[Piece, list[tuple[int, bytes]]] = {}

    def note(self, piece: Piece, rows: NDArray[np.uint8]) -> None:
        """Say that a piece has come.

        Parameters
        ----------
        piece : Piece
            Which one.
        rows : numpy.ndarray
            ``uint8``: its bytes.
        """
        self._hashes[piece] = xxhash.xxh3_128_digest(rows.data)

    def add_left(self, piece: Piece, digest: bytes, fd: int) -> None:
        """Say that a piece lies at its own place in a file, which is open for reading and writing.

        Once it was recalled, its memory there is given back.
        """
        self._left.setdefault(piece, []).append((fd, digest))

    def recall(self, piece: Piece, rows: NDArray[np.uint8]) -> bool:
        """Bring back a piece that has come before.

        Parameters
        ----------
        piece : Piece
            Which one.
        rows : numpy.ndarray
            ``uint8``: where it is, or goes; undefined where it has not come.

        Returns
        -------
        bool
            Whether the bytes are there and have the hash that was noted.
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
        """Give the pieces that have come, or were recalled, and their hashes."""
        return iter(list(self._hashes.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of these pieces."""
        return sum(piece.nbytes for piece, _ in self)


def _read(fd: int, first: int, rows: NDArray[np.uint8]) -> bool:
    """Read bytes of a file; False where it ends before them, or cannot be read."""
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
    """Give back the memory of a range of a file in shared memory; parts of pages stay."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    # Where a kernel cannot, all of it goes with the file.
    libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, first, nbytes)
