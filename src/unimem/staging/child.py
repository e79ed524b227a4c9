"""A process that runs for a moment. Imported where it is used: `subprocess` is heavy."""

from __future__ import annotations

import subprocess
from typing import Any

__all__ = ["Child"]


class Child(subprocess.Popen[bytes]):
    """A child that has ended when it is made.

    It is waited for even where its start fails after it has begun to run, as when its pipe cannot
    be read, and where an interrupt comes: `Popen` would leave it to the next that is started.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        try:
            super().__init__(*given, **options)
        finally:
            if getattr(self, "pid", None):
                self.wait()
