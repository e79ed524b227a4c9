"""The header of a snapshot as bytes: read, changed, and damaged."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, Literal

import pytest
import xxhash

import unimem as um
from support.files.snapshot_files import cache
from support.project.checkout import ROOT
from unimem.errors import SnapshotError

KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "grow": {"grow": True},
    "ring": {"window": 24},
    "ring with spare rows": {"window": 24, "spare_rows": 5},
    "by head": {"order": "head"},
    "growing by head": {"order": "head", "grow": True},
    "ring by head": {"order": "head", "window": 24},
}

# The offset and the code of each field of the header, from its document.
_DOCUMENT = (ROOT / "docs/snapshots.md").read_text(encoding="utf-8").split("## The format")[1]
_CODES = {"char[8]": "8s", "uint32": "I", "uint64": "Q"}
FIELDS = {
    name: (int(at), _CODES[kind])
    for at, kind, name in re.findall(r"^\| (\d+) \| (\S+) \| `(\w+)` \|", _DOCUMENT, re.M)
}
HEADER_BYTES = 144
Mode = Literal["map", "copy"]
MODES: list[Mode] = ["map", "copy"]
by_mode = pytest.mark.parametrize("mode", MODES)
by_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where to save. Import this into a test module to use it."""
    return tmp_path / "session"


@pytest.fixture
def file(path: Path) -> Path:
    """A file of 40 tokens with ids and a model. Import this into a test module to use it."""
    with cache(40) as kv:
        kv.save(path, tokens=range(40), model="tiny")
    return path


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
    """Check that restore refuses the file in both modes, with this rule."""
    for mode in MODES:
        with pytest.raises(SnapshotError) as caught:
            um.KVCache.restore(path, mode=mode, **options)
        assert re.search(rule, caught.value.rule), caught.value.rule
        assert caught.value.path == str(path)
    return caught.value
