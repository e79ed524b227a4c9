"""Packing of buffers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unimem as um
from support.contracts.buffer_sets import power_of_two
from unimem.buffers.buffer_set import Spec, check_dims, pack, total_bytes


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 1 << 20), max_size=30))
def test_packed_buffers_are_aligned_and_leave_no_gap(sizes: dict[str, int]) -> None:
    offsets = pack(sizes)
    assert list(offsets) == list(sizes)
    end = 0
    # Sizes with the same power of two, up to 256, keep the given order.
    for name in sorted(sizes, key=lambda name: -power_of_two(sizes[name])):
        assert offsets[name] == end
        assert end % power_of_two(sizes[name]) == 0
        end += sizes[name]


def test_a_spec_knows_its_bytes() -> None:
    assert Spec(3, (2, 4), np.dtype("f2")).nbytes == 48
    assert Spec(None, (2, 4), np.dtype("f2")).nbytes == 16
    assert Spec(3, (), np.dtype("u8")).row_values == 1


def test_what_has_no_addresses_is_refused_with_the_largest() -> None:
    with pytest.raises(
        ValueError, match=r"buffers for these dimensions are .* \(b 92.*, a 4, \.\.\."
    ):
        total_bytes("buffers", {"a": 4, "b": 2**63})
    with pytest.raises(TypeError, match="dims: expected ModelDims, got int"):
        check_dims(3)  # type: ignore[arg-type]
    assert um.DecodeBuffers.bytes_needed(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)) > 0
