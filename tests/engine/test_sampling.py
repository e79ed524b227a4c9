"""Choosing tokens with the right probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

from unimem.engine.sampling import Sampling, sample


def expected(logits: NDArray[Any], temperature: float, top_k: int, top_p: float) -> NDArray[Any]:
    """Probabilities by the definition."""
    order = sorted(range(len(logits)), key=lambda t: -logits[t])[: top_k or None]
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    n_kept = 1 + int((weights.cumsum() < top_p * weights.sum()).sum())
    result: NDArray[Any] = np.zeros(len(logits))
    result[order[:n_kept]] = weights[:n_kept] ** (1 / temperature)
    result /= result.sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 5, 1.0), (2.0, 0, 0.6), (1.0, 8, 0.7), (1.0, 1, 1.0), (1.0, 99, 0.01)],
)
def test_frequencies(temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(3).standard_normal(20).astype(np.float32) * 2
    options = Sampling(temperature, top_k, top_p)
    rng, n = np.random.default_rng(0), 10000
    counts = np.bincount([sample(logits, options, rng) for _ in range(n)], minlength=20)
    probabilities = expected(logits, temperature, top_k, top_p)
    assert not counts[probabilities == 0].any()
    spread = np.sqrt(probabilities * (1 - probabilities) / n)
    assert (np.abs(counts / n - probabilities) <= 5 * spread + 1e-9).all()


@settings(deadline=None)
@given(
    st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=50),
    st.floats(1e-3, 50),
    st.integers(0, 60),
    st.floats(0.001, 1),
    st.integers(0, 2**32),
)
def test_only_what_is_left_is_chosen(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = np.array(values, np.float32)
    token = sample(logits, Sampling(temperature, top_k, top_p), np.random.default_rng(seed))
    assert 0 <= token < len(values)
    better = int((logits > logits[token]).sum())
    assert better < (top_k or len(values))
    weights = np.exp(np.sort(logits)[::-1].astype(np.float64) - float(logits.max()))
    assert weights[:better].sum() <= top_p * weights[: top_k or None].sum() * (1 + 1e-6) + 1e-300


@pytest.mark.parametrize(
    ("logits", "options"),
    [
        ([0, 3, 1, 3], Sampling()),
        ([1, 1.001, -5], Sampling(1e-300, 0)),
        ([-np.inf, 2, -np.inf], Sampling(1.0, 0)),
    ],
    ids=["greedy takes the first", "a tiny temperature is greedy", "no probability is allowed"],
)
def test_only_one_token_can_come(logits: list[float], options: Sampling) -> None:
    values = np.array(logits, np.float32)
    assert {sample(values, options, np.random.default_rng(i)) for i in range(50)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_logits_are_no_choice(value: float, temperature: float) -> None:
    logits = np.array([0, value, 1], np.float32)
    with pytest.raises(ArithmeticError, match="token 1"):
        sample(logits, Sampling(temperature), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", True)),
        pytest.param("temperature", 10**400, id="temperature-too large"),
        *(("top_p", value) for value in (0.0, 1.01, None)),
        *(("top_k", value) for value in (-1, 2.0, True)),
        *(("seed", value) for value in (-1, 0.5)),
    ],
)
def test_options_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected"):
        Sampling(**{name: value})


def test_numbers_of_numpy_are_as_python_s() -> None:
    logits = np.arange(300, dtype="float32")
    given: Any = np.float32(0.5), np.uint8(40), np.float16(0.5), np.uint8(3)
    options = Sampling(*given)
    assert options == Sampling(0.5, 40, 0.5, 3)
    assert [type(value) for value in vars(options).values()] == [float, int, float, int]
    assert sample(logits, options, np.random.default_rng(0)) > 250
