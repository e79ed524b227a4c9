"""Choosing the next token from the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sampling", "sample"]


@dataclass(frozen=True)
class Sampling:
    """How to choose; checked when it is made.

    Parameters
    ----------
    temperature : float
        0 takes the likeliest token; above, the lower the more likely tokens are preferred.
    top_k : int
        Choose among so many of the likeliest tokens; 0 for all.
    top_p : float
        Of these, choose among the fewest whose probabilities sum up to at least `top_p`.
    seed : int or None
        Same seed, same choices; None for other ones each time.

    Raises
    ------
    ValueError
        An option is out of range, or no number.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: expected a number from 0 on, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number above 0 and up to 1, got {self.top_p!r}")
        for name, count in (("top_k", self.top_k), ("seed", self.seed)):
            if name == "seed" and count is None:
                continue
            if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 0:
                raise ValueError(f"{name}: expected an integer from 0 on, got {count!r}")


def _is_number(value: Any) -> bool:
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool)


def sample(logits: NDArray[Any], options: Sampling, rng: np.random.Generator | None) -> int:
    """Choose a token: the top k, of these the top p, then by chance at the temperature.

    The order is llama.cpp's.

    Parameters
    ----------
    logits : ndarray
        float32 [vocab].
    options : Sampling
        How to choose.
    rng : numpy.random.Generator or None
        Chance; not needed at temperature 0.

    Returns
    -------
    int
        A token id.

    Raises
    ------
    ArithmeticError
        The likeliest token's logit is not a finite number.
    """
    best = int(logits.argmax())  # the first NaN, where there is one
    check_finite(logits, best)
    if options.temperature == 0 or rng is None:
        return best
    n = len(logits)
    k = options.top_k if 0 < options.top_k < n else n
    tokens = np.argpartition(logits, n - k)[n - k :]
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
    gaps = logits[tokens].astype(np.float64) - float(logits[best])
    if options.top_p < 1:
        sums = np.cumsum(np.exp(gaps))
        keep = int(np.searchsorted(sums, options.top_p * sums[-1])) + 1
        tokens, gaps = tokens[:keep], gaps[:keep]
    # A gap over a tiny temperature is minus infinity: that token is never chosen.
    with np.errstate(over="ignore"):
        sums = np.cumsum(np.exp(gaps / options.temperature))
    chosen = np.searchsorted(sums, rng.random() * sums[-1], side="right")
    return int(tokens[min(int(chosen), len(tokens) - 1)])


def check_finite(logits: NDArray[Any], best: int) -> None:
    """Raise `ArithmeticError` where the likeliest token's logit is not a finite number."""
    if not math.isfinite(logits[best]):
        raise ArithmeticError(
            f"the logit of token {best} is {logits[best]}: the weights are damaged, or the model "
            "does not work with this KV type"
        )
