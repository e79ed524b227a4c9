"""Choosing the next token from the logits."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sampling:
    """Checked options of `Decoder.generate`, as Python's numbers.

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
        made: dict[str, Any] = {
            "temperature": _number(self.temperature),
            "top_p": _number(self.top_p),
            "top_k": count(self.top_k, "top_k"),
            "seed": None if self.seed is None else count(self.seed, "seed"),
        }
        if not 0 <= made["temperature"] < math.inf:
            raise ValueError(
                f"temperature: expected a number from 0 on, got {self.temperature!r:.60}"
            )
        if not 0 < made["top_p"] <= 1:
            raise ValueError(f"top_p: expected a number above 0 and up to 1, got {self.top_p!r}")
        vars(self).update(made)


def _number(value: Any) -> float:
    """Return a number as a `float`, and NaN for one that is too large, and for anything else."""
    kinds = (int, float, np.integer, np.floating)
    if isinstance(value, kinds) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return math.nan


def count(value: Any, name: str) -> int:
    """Return an integer from 0 on, or NumPy's, as an `int`; raise ValueError for anything else."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: expected an integer from 0 on, got {value!r:.60}")
    return int(value)


def sample(logits: NDArray[Any], options: Sampling, rng: np.random.Generator | None) -> int:
    """Choose a token id: the top k, of these the top p, then by chance at the temperature.

    The order is llama.cpp's. Without `rng`, which temperature 0 does not need, the likeliest token
    is chosen.

    Raises
    ------
    ArithmeticError
        The likeliest token's logit is not finite.
    """
    best = int(logits.argmax())  # finds the first NaN, too
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
    # Dividing by a tiny temperature may give minus infinity: that token is never chosen.
    with np.errstate(over="ignore"):
        sums = np.cumsum(np.exp(gaps / options.temperature))
    chosen = np.searchsorted(sums, rng.random() * sums[-1], side="right")
    return int(tokens[min(int(chosen), len(tokens) - 1)])


def check_finite(logits: NDArray[Any], best: int) -> None:
    """Raise `ArithmeticError` unless the likeliest token's logit is finite."""
    if not math.isfinite(logits[best]):
        raise ArithmeticError(
            f"the logit of token {best} is {logits[best]}: the weights are damaged, or the model "
            "does not work with this KV type"
        )
