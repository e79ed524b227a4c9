"""Token ids: one check of any sequence of integers, and what two sequences begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[Any]


def token_ids(tokens: Tokens, what: str = "tokens") -> NDArray[np.int32]:
    """Return a new ``int32`` array of token ids; ValueError or TypeError if they are none."""
    try:
        given = np.asarray(tokens)
    except (ValueError, OverflowError):
        raise ValueError(f"{what}: expected a sequence of integers, got {tokens!r:.60}") from None
    if given.ndim == 0:
        raise TypeError(f"{what}: expected a sequence of integers, got {tokens!r:.60}")
    if given.ndim != 1:
        raise ValueError(f"{what}: expected one dimension, got shape {given.shape}")
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"{what}: expected integers, got {given.dtype}")
    if given.size and not 0 <= given.min() <= given.max() < 2**31:
        got = f"{given.min()} to {given.max()}"
        raise ValueError(f"{what}: expected ids from 0 to 2**31 - 1, got {got}")
    return given.astype(np.int32)


def n_common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return how many first tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
