"""The format of caches whose layers differ: headers and tables that contradict themselves."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import unimem as um
from unimem.errors import SnapshotError
from unimem.kv import snapshot
from unimem.kv.snapshot import format_layers as fl

HEADS: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 32, "v_head_dim": 32, "dtype": "f16"}
LAYERS = (um.LayerKV(**HEADS), um.LayerKV(**HEADS, window=4), um.LayerKV(**HEADS, share_of=0))
PARTS, LAYER_ROWS = fl.HEADER.nbytes, fl.HEADER.nbytes + 2 * 16


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file of two parts."""
    path = tmp_path_factory.mktemp("layers") / "session"
    with um.KVCache(layers=LAYERS, max_seq_len=16, pages="4k") as kv:
        for layer in range(2):
            kv.append(layer, *np.ones((2, 6, 2, 32), "f4"))
        kv.save(path, tokens=range(6), model="tiny")
    return path.read_bytes()


def sealed(raw: bytearray, **fields: int) -> bytes:
    """The file with other fields, and the first header's checksums right."""
    for name, value in fields.items():
        struct.pack_into(fl.HEADER.codes[name], raw, fl.HEADER.offsets[name], value)
    begin = struct.unpack_from("<Q", raw, fl.HEADER.offsets["data_offset"])[0]
    tables = xxhash.xxh3_64_intdigest(raw[fl.HEADER.nbytes : max(begin, fl.HEADER.nbytes)])
    struct.pack_into("<Q", raw, fl.HEADER.offsets["tables_checksum"], tables)
    raw[: fl.HEADER.nbytes] = fl.HEADER.seal(bytes(raw[: fl.HEADER.nbytes]))
    return bytes(raw)


def put(code: str, at: int, value: int) -> Callable[[bytearray], bytes]:
    def change(raw: bytearray) -> bytes:
        struct.pack_into(code, raw, at, value)
        return sealed(raw)

    return change


def field(**fields: int) -> Callable[[bytearray], bytes]:
    return lambda raw: sealed(raw, **fields)


def test_a_file_is_read_as_it_was_saved(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(whole)
    assert fl.is_head(whole[:12])
    assert not fl.is_head(whole[:11])
    found: Any = snapshot.check(tmp_path / "file")
    assert found.layers == LAYERS
    assert (found.n_layers, found.seq_len, found.model) == (3, 6, "tiny")
    assert [part.seq_len for part in found.parts] == [6, 4]
    assert str(found).startswith("3 layers, 6 tokens, ")


DAMAGE: dict[str, tuple[Callable[[bytearray], bytes], str]] = {
    "no layers": (field(n_layers=0), "n_layers: expected 1 to 65536, got 0"),
    "more parts than layers": (field(n_parts=4), "n_parts: expected 1 to 3, got 4"),
    "another size of the header": (field(header_bytes=64), "header_bytes: expected 56, got 64"),
    "a longer file": (lambda raw: bytes(raw) + b"\0", "longer than it should be"),
    "a shorter file": (lambda raw: bytes(raw[:-1]), "is cut off"),
    "parts inside the tables": (field(data_offset=60), "data_offset: expected it behind"),
    "a flipped bit of a table": (
        lambda raw: bytes(raw[:60]) + b"\xff" + bytes(raw[61:]),
        "checksum of the tables",
    ),
    "a part somewhere else": (put("<Q", PARTS, 8192), "part 0: expected it at byte 4096"),
    "parts that end early": (put("<Q", PARTS + 24, 4096), "file_bytes: expected"),
    "a layer of no part": (put("<I", LAYER_ROWS, 2), "layer 0: there is no such part"),
    "a layer that shares itself": (put("<I", LAYER_ROWS + 20, 2), "layer 2: there is no such"),
    "layers of other parts": (put("<I", LAYER_ROWS + 8, 0), "the layers are not those of"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_contradicts_itself_is_refused(kind: str, whole: bytes, tmp_path: Path) -> None:
    change, rule = DAMAGE[kind]
    (tmp_path / "file").write_bytes(change(bytearray(whole)))
    with pytest.raises(SnapshotError) as caught:
        snapshot.describe(tmp_path / "file")
    assert rule in caught.value.rule
    assert caught.value.rule.endswith("take another copy of it or save anew")
