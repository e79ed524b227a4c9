"""Where a snapshot is read from: an open file, or an object on a server."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unimem.base.descriptors import Descriptors
from unimem.errors import SnapshotError
from unimem.remote.client import Server, is_url, open_server
from unimem.remote.transfers import Version, read_range, retried


class SnapshotBytes(Protocol):
    """The bytes of a snapshot. Any number of threads may read.

    `path` is its name in errors, and `nbytes` its size when it was opened.
    """

    path: str
    nbytes: int

    def read(self, out: NDArray[np.uint8], offset: int) -> None:
        """Fill memory from a byte on; raise OSError, or SnapshotError if it became shorter."""


class LocalSnapshot:
    """An open file, which the caller closes."""

    def __init__(self, fd: int, path: str, nbytes: int) -> None:
        self.fd, self.path, self.nbytes = fd, path, nbytes

    def read(self, out: NDArray[np.uint8], offset: int) -> None:
        """Fill memory from a byte on."""
        rest = out.data
        while rest:
            try:
                n = os.preadv(self.fd, [rest], offset)
            except OSError as error:
                number = error.errno or errno.EIO
                raise OSError(number, os.strerror(number), self.path) from error
            if n == 0:
                raise SnapshotError("the file became shorter while it was read", offset, self.path)
            rest, offset = rest[n:], offset + n


class RemoteSnapshot:
    """An object on a server, which must not change."""

    def __init__(self, server: Server, path: str) -> None:
        def ask() -> Version:
            answer = server.get(path, 0, 1)
            answer.close()
            return Version(answer.nbytes, answer.tag)

        self._server, self.path = server, path
        self._version = retried(ask)
        self.nbytes = self._version.nbytes

    def read(self, out: NDArray[np.uint8], offset: int) -> None:
        """Fill memory from a byte on."""
        read_range(self._server, self.path, offset, out, self._version)


@contextmanager
def open_source(path: str) -> Iterator[LocalSnapshot | RemoteSnapshot]:
    """Open a path or a URL for reading."""
    if is_url(path):
        server, shown = open_server(path)
        try:
            yield RemoteSnapshot(server, shown)
        finally:
            server.close()
        return
    with Descriptors() as fds:
        fd = fds.add_regular(path)
        yield LocalSnapshot(fd, path, os.fstat(fd).st_size)
