"""Integers that users give, Python's and NumPy's."""

from __future__ import annotations

import operator
from typing import SupportsIndex

__all__ = ["integer"]


def integer(value: SupportsIndex) -> int:
    """Return an integer as an `int`.

    Parameters
    ----------
    value : int, or what has ``__index__``
        Such as ``numpy.int64(64)``.

    Returns
    -------
    int

    Raises
    ------
    TypeError
        It is not an integer, or it is a bool, which nobody means as one.
    """
    if isinstance(value, bool):
        raise TypeError(f"expected an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer, got {value!r:.60}") from None
