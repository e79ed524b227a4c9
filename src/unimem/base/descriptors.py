"""Open descriptors that are closed even if an interrupt or an error intervenes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from itertools import starmap
from typing import Any

from unimem.base.closing import Closing


class Descriptors(list[int], Closing):
    """Open descriptors, closed when the ``with`` or the list ends.

    A signal handler may raise between any two lines, such as between the opening of a file and the
    `try` behind it. Here, opening and closing are a single call of C each.
    """

    def add(self, opens: Callable[..., int], *given: Any) -> int:
        """Call ``opens(*given)``, keep the descriptor that it returns, and return it."""
        self.extend(starmap(opens, (given,)))
        return self[-1]

    def add_regular(self, path: str, flags: int = 0) -> int:
        """Open a regular file for reading; raise OSError for anything else."""
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        fd = self.add(os.open, path, flags | os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Expected a regular file", path)
        return fd

    # A default, since `os` may be gone at the end of the interpreter.
    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Close them. Closing twice is no error.

        Errors are ignored: the descriptor is gone in any case, and a writer that needs its data on
        the disk has synced before.
        """
        while self:
            try:
                # `any` runs through all of them in one call, since closing returns None.
                any(map(_close, map(self.pop, [-1] * len(self))))
            except OSError:
                continue

    def __del__(self) -> None:
        self.close()
