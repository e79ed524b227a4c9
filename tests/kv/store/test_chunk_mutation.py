"""Chunks with wrong fields and right checksums: each is a miss, or restored as it says."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.files.prefix_stores import CHUNK, MODEL, TOKENS, bytes_of, cache, files_of, opened
from support.project.tiers import examples
from unimem._core.hashing import copy_hashed
from unimem.kv.store.chunk import _HEADER, HEADER_BYTES

EDGES = [0, 1, 4095, 4096, 4097, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
NUMBERS = [name for name, code in _HEADER.codes.items() if code in ("<I", "<Q")]
NAMES = st.sampled_from([*NUMBERS, "magic", "key", "data", "zeros", "cut", "grow"])


def changed(raw: bytes, changes: list[tuple[str, int]]) -> bytes:
    """A chunk with some other fields, and the hash of its data right."""
    fields: dict[str, Any] = dict(zip(_HEADER.codes, _HEADER._struct.unpack_from(raw), strict=True))
    data = bytearray(raw[HEADER_BYTES:])
    n = fields["data_bytes"]
    for name, value in changes:
        if name in NUMBERS:
            most = 256 ** struct.calcsize(_HEADER.codes[name]) - 1
            fields[name] = min(value, most)
        elif name in ("magic", "key"):
            fields[name] = bytes([fields[name][0] ^ 1]) + fields[name][1:]
        elif name == "data":
            data[value % n] ^= 1
        elif name == "zeros" and n < len(data):
            data[n] ^= 1
    digest = copy_hashed(bytes(data[:n]), None, len(data) - n)
    fields["hash"] = bytes(a ^ b for a, b in zip(digest, fields["key"], strict=False))
    image = _HEADER.pack(fields).ljust(HEADER_BYTES, b"\0") + data
    names = [name for name, _ in changes]
    return image[: -1 if "cut" in names else None] + b"\0" * ("grow" in names)


def test_no_change_with_a_right_hash_is_restored_wrongly(tmp_path: Path) -> None:
    q8: dict[str, Any] = {"dtype": "q8_0"}  # with zeros behind the data
    with opened(tmp_path) as store, cache(45, **q8) as kv, cache(**q8) as out:
        tokens = TOKENS[:CHUNK]
        store.put(kv, tokens, model=MODEL)
        (path,) = files_of(tmp_path)
        raw = path.read_bytes()
        assert changed(raw, []) == raw

        @settings(max_examples=examples(200))
        @example([("data", 0)])
        @given(st.lists(st.tuples(NAMES, st.sampled_from(EDGES)), max_size=3))
        def search(changes: list[tuple[str, int]]) -> None:
            image = changed(raw, changes)
            path.write_bytes(image)
            out.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the chunk was removed
                n = store.restore_into(out, tokens, model=MODEL)
            assert n == out.seq_len
            assert n in (0, CHUNK)
            if n:
                assert image[HEADER_BYTES:].startswith(bytes_of(out, n))

        search()
