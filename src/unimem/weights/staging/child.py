"""A process that is started for a moment. Imported where it is used: `subprocess` is heavy."""

from __future__ import annotations

import subprocess
from typing import Any

__all__ = ["Child"]


class Child(subprocess.Popen[bytes]):
    """A child that is waited for even where its start fails after it has begun to run.

    `Popen` leaves such a one, as when its pipe cannot be read, to the next that is started.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        try:
            super().__init__(*given, **options)
        except BaseException:
            if getattr(self, "pid", None):
                self.wait()
            raise
