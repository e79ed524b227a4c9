"""What to do about a plan that does not fit, in the order of what it costs the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Advice"]


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, and what it is worth. Any number of threads may use it.

    Attributes
    ----------
    text : str
        A sentence.
    saves_bytes : int
        How much less of what lacks room is needed then.
    options : dict
        Keyword arguments of `plan` that change; empty where none does.
    fits : bool
        Whether the plan fits with this alone, and nothing spills.
    """

    text: str
    saves_bytes: int
    options: dict[str, Any]
    fits: bool
