from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.files.llama_states import F16, Q8_0, cells, recurrent, same, state
from unimem.errors import FormatError
from unimem.llama_cpp.state import CellRows, LlamaKV, kv_to_state, state_to_kv

SEQUENCE = struct.pack("<Ii", 0xAF143CD8, 0)
CONTEXT = struct.pack("<I", 5) + b"llama"
STATES = {
    "file": state(),
    "sequence": state(head=SEQUENCE),
    "context": state(head=CONTEXT),
    "context of a hybrid model": state(cells(), recurrent(), head=CONTEXT),
    "version 3": state(cells(rotations=()), version=3),
    "transposed": state(cells(is_transposed=True)),
    "quantized and rotated": state(cells(kinds=(Q8_0, Q8_0), rotations=(64, 64))),
    "no V": state(cells(n_values=0)),
    "V of some layers": state(cells(layers=3, n_values=1)),
    "several positions of a token": state(cells(extra=True)),
    "streams": state(n_streams=4),
    "window": state(cells(), cells(5, 15, kinds=(Q8_0, F16))),
    "window in streams": state(cells(), cells(5, 15), n_streams=3, head=SEQUENCE),
    "recurrent": state(recurrent(), head=SEQUENCE),
    "hybrid": state(cells(), recurrent(), head=SEQUENCE),
    "hybrid with an index": state(cells(), recurrent(), cells(n_values=0)),
    "one token": state(cells(1)),
}


@pytest.mark.parametrize("kv", STATES.values(), ids=STATES)
def test_a_state_is_read_as_it_was_written(kv: LlamaKV) -> None:
    blob = kv_to_state(kv)
    found = state_to_kv(blob)
    assert same(found, kv) or (kv.version == 3 and same(state_to_kv(blob, version=3), kv))
    assert kv_to_state(found) == blob
    assert found.n_tokens == kv.n_tokens
    assert found.is_context == kv.head.endswith(b"llama")


def test_cells_are_read_in_the_order_of_their_positions() -> None:
    kv = state()
    (part,) = kv.parts
    assert isinstance(part, CellRows)
    order = np.random.default_rng(1).permutation(len(part.positions))
    keys, values = (
        tuple(lane._replace(rows=lane.rows[order]) for lane in lanes)
        for lanes in (part.keys, part.values)
    )
    mixed = part._replace(positions=part.positions[order], keys=keys, values=values)
    assert same(state_to_kv(kv_to_state(state(mixed))), kv)


def test_the_stream_of_a_sequence_does_not_matter() -> None:
    blob = kv_to_state(state(n_streams=3))
    moved = blob[:4] + bytes(8) + blob[4:-8]
    assert same(state_to_kv(moved), state(n_streams=3))


@pytest.mark.parametrize("version", [1, 2, 5])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(FormatError, match=f"version {version} of llama.cpp's states is not known"):
        state_to_kv(kv_to_state(state()), version=version)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\1\0\0\0",
        bytes(64),
        b"\xff" * 64,
        struct.pack("<II", 1, 0),  # no tokens
        struct.pack("<II", 0x34565344, 1) + bytes(64),  # a memory of another kind
        kv_to_state(state()) + b"\0",
        kv_to_state(state(cells()))[:8] + struct.pack("<i", -1) + kv_to_state(state())[12:],
        kv_to_state(state()).replace(struct.pack("<iQ", 1, 32), struct.pack("<iQ", 99, 32)),
    ],
)
def test_other_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(FormatError, match="the state of one sequence"):
        state_to_kv(blob)


@given(data=st.data())
def test_a_changed_state_is_refused_or_read_whole(data: Any) -> None:
    blob = bytearray(kv_to_state(data.draw(st.sampled_from(list(STATES.values())))))
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        at = data.draw(st.integers(0, min(len(blob), 400) - 1))
        blob[at] = data.draw(st.integers(0, 255))
    try:
        kv = state_to_kv(bytes(blob))
    except FormatError:
        return
    assert len(kv_to_state(kv)) == len(blob)


def test_bytes_that_can_be_read_in_many_ways_are_refused_at_once() -> None:
    """Each of these can be a part, or a tensor of the one before it."""
    either = struct.pack("<IiIII", 1, 8, 0, 0, 1024)
    small = struct.pack("<IiIIIiQiQ", 1, 8, 0, 0, 1, 0, 0, 0, 0)
    for blob in (200 * either + b"x", 2000 * small):
        with pytest.raises(FormatError, match="laid out in another way"):
            state_to_kv(blob)
