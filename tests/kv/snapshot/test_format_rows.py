"""The format of rows, without a file: the places of its parts, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unimem.errors import SnapshotError
from unimem.kv.snapshot import format_rows as sf

PAGE, MIB = 4096, 1 << 20
FACTS: dict[str, Any] = {
    **{"n_layers": 1, "n_kv_heads": 1, "head_dim": 1, "v_head_dim": 1, "max_seq_len": 9000},
    **{"batch": 1, "dtype": "f16", "v_dtype": "f16", "rotate": False, "window": None},
    **{"spare_rows": 0, "trimmed": False, "grow": False, "order": "token"},
    **{"seq_len": 1100, "next_position": 1100},
    **{"alignment": PAGE, "chunk_bytes": MIB},
}
TABLES = sf.HEADER.nbytes + 8 * 2  # with a checksum of K, and one of V


def test_data_begins_on_the_first_page_behind_the_tables() -> None:
    for n, pages in ((PAGE - TABLES, 1), (PAGE - TABLES + 1, 2)):
        found = sf.new(FACTS, "m" * n, None, "-")
        assert (found.data_offset, found.file_bytes) == (pages * PAGE, (pages + 2) * PAGE)
    ids = np.arange(1100, dtype=np.int32)
    found = sf.new(FACTS, None, ids, "-")
    assert TABLES + ids.nbytes > PAGE
    assert (found.data_offset, found.file_bytes) == (2 * PAGE, 4 * PAGE)


def test_lanes_of_v_may_differ_from_lanes_of_k() -> None:
    facts = FACTS | {"v_head_dim": 3, "v_dtype": "f32", "n_layers": 2, "chunk_bytes": 2 * PAGE}
    found = sf.new(facts, None, None, "-")
    assert [found.lane_bytes(part) for part in ("k", "v")] == [2 * 1100, 12 * 1100]
    begin = PAGE
    of_v = [(begin + PAGE, 2 * PAGE, 0), (begin + 3 * PAGE, 13200 - 2 * PAGE, 4 * PAGE - 13200)]
    chunks = [(begin, 2200, PAGE - 2200), *of_v]
    chunks += [(offset + 5 * PAGE, nbytes, padding) for offset, nbytes, padding in chunks]
    assert [(one.offset, one.nbytes, one.padding) for one in found.chunks()] == chunks


@pytest.mark.parametrize("name", ["alignment", "chunk_bytes"])
def test_limits_of_the_header_are_exact(name: str) -> None:
    most = {"alignment": sf.MAX_ALIGNMENT, "chunk_bytes": sf.MAX_CHUNK_BYTES}[name]
    for value in (most, 2 * most):
        sizes = {"chunk_bytes": max(FACTS["chunk_bytes"], value), name: value}
        made = sf.new(FACTS | sizes, None, None, "-")
        head = made._head()[: sf.HEADER.nbytes].tobytes()
        if value == most:
            assert sf.checked_header(head, made.file_bytes, "-")[name] == most
        else:
            with pytest.raises(SnapshotError, match=name):
                sf.checked_header(head, made.file_bytes, "-")
