"""Objects that are closed at the end of a ``with``."""

from __future__ import annotations

from typing import Self


class Closing:
    """A base of classes whose `close` ends a ``with``; `_check_open` may refuse its beginning."""

    def close(self) -> None:
        """Close it. Twice is no error."""
        raise NotImplementedError

    def _check_open(self) -> object:
        """Raise ClosedError if it is closed."""

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
