"""Searching for the largest number that fits."""

from __future__ import annotations

from collections.abc import Callable


def find_largest(
    most: int, is_good: Callable[[int], bool], *, least: int = 0, asked: int = 0
) -> int:
    """Find the largest good number, by bisection.

    Parameters
    ----------
    most : int
        The largest number to try.
    is_good : callable
        Says whether a number is good. All numbers below a good one are good, too.
    least : int, default 0
        The result if no number above it is good. It is not tried.
    asked : int, default 0
        A number that is the result if it is above `most` and good.

    Examples
    --------
    >>> find_largest(4096, lambda n: n * n <= 1000)
    31
    """
    if asked > most and is_good(asked):
        return asked
    if most > least and is_good(most):
        return most
    low, high = least, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle - 1)
    return low
