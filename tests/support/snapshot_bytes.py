"""The header of a snapshot as bytes: read, changed, and damaged."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, Literal

import pytest
import xxhash

import unimem as um
from unimem.errors import SnapshotError

KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "grow": {"grow": True},
    "ring": {"window": 24},
    "ring with spare rows": {"window": 24, "spare_rows": 5},
}

# The fields of the header by their codes, one behind the other, as docs/snapshots.md has them.
_FIELDS = (
    *(("magic", "8s"), ("version", "I"), ("header_bytes", "I"), ("file_bytes", "Q")),
    *((name, "Q") for name in ("data_offset", "lane_stride", "row_bytes", "chunk_bytes")),
    *((name, "Q") for name in ("seq_len", "next_position", "max_seq_len", "window", "spare_rows")),
    *((name, "I") for name in ("n_layers", "n_kv_heads", "head_dim", "batch", "dtype", "flags")),
    *(("alignment", "I"), ("model_bytes", "I"), ("tables_checksum", "Q"), ("header_checksum", "Q")),
)
_SIZES = [struct.calcsize(code) for _, code in _FIELDS]
# Of each field: where it begins, and its code.
FIELDS = {name: (sum(_SIZES[:i]), code) for i, (name, code) in enumerate(_FIELDS)}
HEADER_BYTES = 144
MODES: list[Literal["map", "copy"]] = ["map", "copy"]


def header(raw: bytes) -> dict[str, Any]:
    return {name: struct.unpack_from("<" + code, raw, at)[0] for name, (at, code) in FIELDS.items()}


def with_fields(raw: bytes, **fields: int) -> bytes:
    """The file with other fields, and the header's checksum right."""
    changed = bytearray(raw)
    for name, value in fields.items():
        at, code = FIELDS[name]
        struct.pack_into("<" + code, changed, at, value)
    struct.pack_into("<Q", changed, 136, xxhash.xxh3_64_intdigest(bytes(changed[:136])))
    return bytes(changed)


def with_tables(raw: bytes) -> bytes:
    """The file with the checksum of its tables right."""
    tables = raw[HEADER_BYTES : header(raw)["data_offset"]]
    return with_fields(raw, tables_checksum=xxhash.xxh3_64_intdigest(tables))


def flipped(raw: bytes, at: int, bit: int = 0) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def refused(path: Path, rule: str, **options: Any) -> SnapshotError:
    """Restore refuses the file in both modes, for this reason."""
    for mode in MODES:
        with pytest.raises(SnapshotError) as caught:
            um.KVCache.restore(path, mode=mode, **options)
        assert re.search(rule, caught.value.rule), caught.value.rule
        assert caught.value.path == str(path)
    return caught.value
