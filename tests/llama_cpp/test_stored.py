from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.llama_states import cells, recurrent, state
from support.files.prefix_stores import cache
from unimem.kv.store.chunk import HEADER_BYTES
from unimem.llama_cpp.prefixes import HEAD_BYTES, LlamaPrefixes
from unimem.llama_cpp.stored import stored_prefixes

IDS = [7 * i % 101 for i in range(20)]


def test_prefixes_are_listed_by_their_last_chunk(tmp_path: Path) -> None:
    kv, hybrid = state(), state(cells(), recurrent())
    other = [*IDS[:8], *range(12)]
    with um.KVStore(tmp_path, ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=8) as store:
        assert stored_prefixes(store) == []
        (tmp_path / ("0" * 64 + ".kv")).write_bytes(bytes(5000))
        with cache(16) as ours:
            store.put(ours, IDS[:16], model="m")
        prefixes = LlamaPrefixes(store, "m", kv, options="o")
        prefixes.put(IDS, kv)
        prefixes.put(other, kv)
        LlamaPrefixes(store, "n", hybrid).put(IDS, hybrid)
        LlamaPrefixes(store, "n", hybrid).agrees([1], hybrid)
        of_m, of_n = stored_prefixes(store, model="m"), stored_prefixes(store, model="n")
        assert len(stored_prefixes(store)) == 3
    assert sorted(list(found.tokens) for found in of_m) == sorted([IDS[:16], other[:16]])
    assert {(found.model, found.options, found.layout) for found in of_m} == {
        ("m", "o", prefixes.layout)
    }
    assert [list(found.tokens) for found in of_n] == [IDS]  # it is restored at an end alone
    assert len({found.key for found in (*of_m, *of_n)}) == 3
    assert all(found.nbytes > 0 and found.used > 0 for found in of_m)


FACTS: dict[str, Any] = {"model": "m", "options": "", "layout": "{}", "chunk_tokens": "8"}


@pytest.mark.parametrize(
    "facts",
    [
        *(FACTS | {"model": 5}, {"model": "m"}, FACTS | {"options": float("nan")}, [1]),
        *(FACTS | {"chunk_tokens": size} for size in ("many", "3", "-1", 8)),
    ],
)
def test_what_is_no_chunk_is_left_out(tmp_path: Path, facts: Any) -> None:
    packed = zlib.compress(json.dumps(facts).encode())
    head = b"UNIMEMLLrows" + struct.pack("<IIQ32sI", 0, 4, 100, bytes(32), len(packed)) + packed
    chunk = bytes(HEADER_BYTES) + head.ljust(HEAD_BYTES, b"\0") + bytes(100)
    with um.KVStore(tmp_path, ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=8) as store:
        (tmp_path / ("0" * 64 + ".kv")).write_bytes(chunk)
        os.mkfifo(tmp_path / ("1" * 64 + ".kv"))
        (tmp_path / ("2" * 64 + ".kv")).symlink_to("/dev/zero")
        assert stored_prefixes(store) == []
