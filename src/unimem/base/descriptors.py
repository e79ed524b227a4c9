"""Open descriptors that are closed whatever comes in between: an interrupt, or an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import starmap
from typing import Any, Self

__all__ = ["Descriptors"]


class Descriptors(list[int]):
    """Open descriptors; leaving the ``with`` closes them, and so does the end of the list.

    A signal's handler may raise between any two lines, as between the one that opens a file and the
    `try` behind it. Opening and closing are a single call of C each, before or after which an
    interrupt comes.
    """

    def add(self, opens: Callable[..., int], *given: Any) -> int:
        """Open one more: call ``opens(*given)``, keep what it returns, and return that."""
        self.extend(starmap(opens, (given,)))
        return self[-1]

    # `os` may be gone by the end of the interpreter, and what is a default is not.
    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Close them. Twice is no error.

        What the system says of it is of no use: the descriptor is gone in any case, and who needs
        the data on the disk has asked for that before.
        """
        while self:
            try:
                # `any` runs through all of them in one call, since closing returns None.
                any(map(_close, map(self.pop, [-1] * len(self))))
            except OSError:
                continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
