from __future__ import annotations

import pytest

from support.files.llama_states import Q8_0, cells, recurrent, state
from unimem.llama_cpp.layout import empty_cells, layout_of
from unimem.llama_cpp.state import CellRows, LlamaKV


@pytest.mark.parametrize(
    "other",
    [
        state(cells(rotations=()), version=3),
        state(cells(layers=3)),
        state(cells(kinds=(Q8_0, Q8_0))),
        state(cells(is_transposed=True)),
        state(cells(extra=True)),
        state(cells(rotations=(64, 0))),
        state(cells(n_values=0)),
        state(cells(), cells(5)),
        state(cells(), recurrent()),
    ],
)
def test_whatever_changes_the_bytes_is_in_the_layout(other: LlamaKV) -> None:
    assert layout_of(other) != layout_of(state())


def test_tokens_streams_and_head_are_not_in_the_layout() -> None:
    assert layout_of(state(cells(3, seed=1), n_streams=4, head=b"x")) == layout_of(state())


def test_empty_cells_have_the_layout() -> None:
    kv = state(cells(kinds=(Q8_0, Q8_0), extra=True, rotations=(64, 64)))
    made = empty_cells(layout_of(kv), 7)
    assert isinstance(made, CellRows)
    assert len(made.positions) == 7
    assert layout_of(state(made)) == layout_of(kv)
    assert empty_cells(layout_of(state(recurrent())), 7) is None
