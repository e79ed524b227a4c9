"""Helpers for decoders. Without gguf or ggml, modules that import this are skipped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install '.[run]'",
    exc_type=ImportError,
)

import unimem as um
from support.models.make import TINY, Shape
from unimem.engine import Decoder
from unimem.planning import repack_gain

# Heads are whole blocks of q8_0, and contexts are long.
WIDE_HEADS = Shape(
    hidden=64, layers=2, heads=4, kv_heads=4, inner=128, vocab=TINY.vocab, ctx=2000, head_dim=64
)


@pytest.fixture(scope="module", autouse=True)
def small_models_gain() -> Iterator[None]:
    """Have `auto` repack small models in modules that import this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack_gain, "_LEAST_BYTES", 0)
        patch.setattr(repack_gain, "_LEAST_SHARE", 0.0)
        yield


def tokens(n: int, seed: int = 0, first: int = 0, vocab: int = TINY.vocab) -> list[int]:
    """A prompt of any n tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(first, vocab, n)]


def greedy(decoder: Decoder, n: int) -> list[int]:
    return [decoder.generate_next_token() for _ in range(n)]


def logits_of(decoder: Decoder, prompt: list[int], n: int) -> tuple[list[int], NDArray[Any]]:
    """Return the n tokens after a prompt, and the logits that each was chosen by."""
    chosen, rows = [], []
    decoder.prefill(prompt)
    for _ in range(n):
        rows.append(decoder.logits.copy())
        chosen.append(decoder.generate_next_token())
    return chosen, np.array(rows)


def append_foreign(decoder: Decoder, n: int) -> None:
    """Append n tokens that it did not compute to its cache."""
    kv = decoder.kv
    rows = np.zeros((n, kv.n_kv_heads, kv.head_dim), "float32")
    for layer in range(kv.n_layers):
        kv.append(layer, rows, rows)


class Computation(NamedTuple):
    """The arguments of `ggml.compute_address`."""

    graph: int
    plan: int
    n_threads: int
    is_over: int | None
    deadline: int


@contextmanager
def computing_by(
    decoder: Decoder, compute: Callable[[Callable[[], int], Computation], int]
) -> Iterator[None]:
    """Have it compute by a function, which gets the true computation and its arguments.

    The function returns the status. Its exceptions are lost.
    """
    forward = decoder._forward
    address = forward.compute_address
    pointer = ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_int, pointer, pointer)
    call = kind(address)
    ours = kind(lambda *given: compute(lambda: call(*given), Computation(*given)))
    forward.compute_address = ctypes.cast(ours, ctypes.c_void_p).value or 0
    try:
        yield
    finally:
        forward.compute_address = address


@contextmanager
def interrupted(
    decoder: Decoder, n: int = 1, *, raised: type[BaseException] = KeyboardInterrupt
) -> Iterator[None]:
    """Simulate SIGINT while the nth graph is computed."""
    interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p).value or 0
    calls = count(2)

    def compute(call: Callable[[], int], _given: Computation) -> int:
        if next(calls) == n:
            decoder._forward.compute_address = interrupt
        return call()

    with computing_by(decoder, compute):
        if n == 1:
            decoder._forward.compute_address = interrupt
        with pytest.raises(raised):
            yield


def sizes(of: um.Plan | um.Report) -> dict[str, int]:
    """Bytes by category."""
    return {row.category: row.nbytes for row in of.rows}
