"""The widths of a graph: what matrices make of a token."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import unimem as um
from unimem.planning.widths import Widths, widths_of, widths_of_dims


class Contents(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def by_type(self) -> dict[str, int]:
        return {}


class Shaped(NamedTuple):
    ne: tuple[int, ...]


TENSORS = {
    "token_embd.weight": (8, 100),
    "position_embd.weight": (8, 4096),  # a row of it
    "output.weight": (8, 100),
    "head.weight": (8, 3),
    "blk.0.attn_q.weight": (8, 16),
    "blk.0.attn_k_b.weight": (4, 5, 2),  # for each head
    "blk.0.attn_norm.weight": (8,),
    "blk.1.ffn_up_exps.weight": (8, 32, 6),  # of which two are used
    "blk.1.ffn_gate_inp.weight": (8, 6),
    "conv.weight": (3, 8, 10),  # lays 24 inputs out
}
KEYS: dict[str, Any] = {
    "embedding_length": 8,
    "expert_used_count": 2,
    "attention.head_count": 2,
    "attention.key_length": 8,
}


def of(keys: dict[str, Any], tensors: dict[str, tuple[int, ...]] = TENSORS) -> Widths | None:
    metadata = {f"new.{name}": value for name, value in keys.items() if value is not None}
    shaped = {name: Shaped(ne) for name, ne in tensors.items()}
    return widths_of(Contents({"general.architecture": "new"} | metadata, shaped))


def test_each_matrix_counts_as_it_is_used() -> None:
    assert of(KEYS) == Widths(8, 70, 8 + 3 + 34, 2, 16)
    more = {"attention.head_count": [2, 0, 3], "attention.indexer.head_count": 4}
    found = of(KEYS | more | {"hyper_connection.count": 5})
    assert found == Widths(8, 70, 45, 3, 24, 4, 5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"embedding_length": None}, Widths(8, 70, 45, 2, 16)),  # as its embeddings are wide
        ({"expert_used_count": 99}, Widths(8, 6 * 32 + 6, 45, 2, 16)),
        ({"attention.head_count": 0}, Widths(8, 70, 45)),
        ({"attention.head_count": "two"}, None),
        ({"embedding_length": -1}, None),
        ({"embedding_length": 2**31}, None),
    ],
)
def test_files_that_say_less_or_lie(keys: dict[str, Any], expected: Widths | None) -> None:
    assert of(KEYS | keys) == expected
    assert of({}, {}) is None


def test_dimensions_have_widths() -> None:
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    assert widths_of_dims(dims) == Widths(64, 64 + 2 * 32 + 2 * 64 + 2 * 172, 0, 8, 64)
    plan = um.plan(dims, engine="llama.cpp", machine={"memory": "1G"})
    assert plan["compute"].nbytes > 4 << 20
