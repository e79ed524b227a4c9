"""What of a request is not as it was asked for: one line while a model is loaded, or all of it."""

from __future__ import annotations

import re
import warnings
from typing import Any, Self

from unimem.base.text import format_bytes, shorten
from unimem.errors import PlacementWarning
from unimem.planning.result import Plan

__all__ = ["Fallbacks"]

_COLUMNS = 120
_BEFORE, _BEHIND = "unimem: warning: ", " (--verbose says more)"
# How warnings name what was asked for and is not so.
_OPTION = re.compile(r"\b(?:pages|numa|lock)=(?:'[^']*'|True)")


class Fallbacks:
    """Holds back the warnings of placement, and makes one line of them.

    Parameters
    ----------
    verbose : bool
        Whether they are shown as they come instead.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._held: list[str] = []
        self._show: Any = None

    def __enter__(self) -> Self:
        if not self._verbose:
            self._show, warnings.showwarning = warnings.showwarning, self._hold
        return self

    def __exit__(self, *_: object) -> None:
        if self._show is not None:
            warnings.showwarning, self._show = self._show, None

    def _hold(self, message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, PlacementWarning):
            self._held.append(str(message))
        else:
            self._show(message, category, *where, **more)

    def tell(self, plan: Plan) -> None:
        """Say what was held back, and what the plan foresees; hold nothing from now on."""
        self.__exit__()
        if self._held or (plan.verdict == "reads from disk" and not self._verbose):
            warnings.showwarning(PlacementWarning(_line(plan, self._held)), PlacementWarning, "", 0)


def _line(plan: Plan, held: list[str]) -> str:
    """Say it by the plan, which knows the limits; what that did not foresee by what was held."""
    missed = [
        f"{check.name} has {format_bytes(check.available_bytes)} of "
        f"{format_bytes(check.needed_bytes)}"
        for check in plan.checks
        if not (check.fits or check.is_hard)
    ]
    reads = plan.verdict == "reads from disk"
    if not (missed or reads):
        missed = list(dict.fromkeys(_OPTION.findall(" ".join(held))))
    parts = [f"not as asked for: {', '.join(missed)}"] if missed else []
    if reads:
        again = format_bytes(plan.spilled_bytes)
        parts.insert(0, f"{again} of the model are read from disk with every token")
    text = "; ".join(parts) or held[0].partition(": ")[0]
    return shorten(text, _COLUMNS - len(_BEFORE) - len(_BEHIND)) + _BEHIND
