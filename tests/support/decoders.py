"""What tests do with decoders. Who imports it is skipped where gguf or ggml is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.system.ggml", reason="the engine needs ggml: pip install '.[run]'", exc_type=ImportError
)

import unimem as um
from models.make import TINY, Shape
from unimem.engine import Decoder

# Heads are whole blocks of q8_0, and contexts are long.
WIDE_HEADS = Shape(
    hidden=64, layers=2, heads=4, kv_heads=4, inner=128, vocab=TINY.vocab, ctx=2000, head_dim=64
)


def tokens(n: int, seed: int = 0, first: int = 0, vocab: int = TINY.vocab) -> list[int]:
    """A prompt of any n tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(first, vocab, n)]


def greedy(decoder: Decoder, n: int) -> list[int]:
    return [decoder.generate_next_token() for _ in range(n)]


def logits_of(decoder: Decoder, prompt: list[int], n: int) -> tuple[list[int], NDArray[Any]]:
    """The n tokens that follow a prompt, and the logits that each was chosen by."""
    chosen, rows = [], []
    decoder.prefill(prompt)
    for _ in range(n):
        rows.append(decoder.logits.copy())
        chosen.append(decoder.generate_next_token())
    return chosen, np.array(rows)


def append_foreign(decoder: Decoder, n: int) -> None:
    """Append n tokens to its cache that it did not compute."""
    kv = decoder.kv
    rows = np.zeros((n, kv.n_kv_heads, kv.head_dim), "float32")
    for layer in range(kv.n_layers):
        kv.append(layer, rows, rows)


@contextmanager
def interrupted(owner: Any, name: str, n: int = 1, *, before: bool = False) -> Iterator[None]:
    """Interrupt what is called here, behind the nth call of a function, or before that call."""
    call, calls = getattr(owner, name), count(1)

    def interrupt(*arguments: Any) -> None:
        is_nth = next(calls) == n
        if not (is_nth and before):
            call(*arguments)
        if is_nth:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


def sizes(of: um.Plan | um.Report) -> dict[str, int]:
    """Bytes by category."""
    return {row.category: row.nbytes for row in of.rows}
