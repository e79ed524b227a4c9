"""Sizes of memory as people give them: bytes, ``"8G"``, or a share of what is allowed."""

from __future__ import annotations

import re
from typing import Protocol

from unimem.base.arguments import integer
from unimem.base.text import parse_bytes
from unimem.system import limits
from unimem.system.limits import Limit

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


class LimitFacts(Protocol):
    """The limits on memory: those of the module `limits`, or of a plan's machine."""

    def memory_limits(self) -> tuple[Limit, ...]:
        """Return every limit on memory."""


def parse_size(value: object, name: str, facts: LimitFacts = limits) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    value : int or str
        Bytes; a text such as ``"8G"`` or ``"512M"``; or ``"50%"`` of the least limit on memory.
    name : str
        The argument, for messages.
    facts : LimitFacts, optional
        The limits, by default those on this process.

    Raises
    ------
    TypeError, ValueError
        It is not a size above 0, or above 100 %.

    Examples
    --------
    >>> parse_size("1.5k", "budget"), parse_size(100, "budget")
    (1536, 100)
    """
    expected = f"{name}: expected bytes, a size such as '8G', or a share such as '50%'"
    if not isinstance(value, str):
        try:
            return integer(value, name, 1)
        except TypeError:
            raise TypeError(f"{expected}, got {value!r:.60}") from None
    share = _SHARE.fullmatch(value.strip())
    try:
        if share is None:
            nbytes = parse_bytes(value)
        elif (percent := float(share[1])) <= 100:
            whole = min(limit.limit_bytes for limit in facts.memory_limits())
            nbytes = int(whole * percent / 100)
        else:
            raise ValueError("more than all")
    except ValueError:
        raise ValueError(f"{expected}, got {value!r:.60}") from None
    if nbytes < 1:
        raise ValueError(f"{expected}, above 0, got {value!r:.60}")
    return nbytes
