"""Headers of repacked images: every field and every row of the table is checked."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from unimem.errors import FormatError
from unimem.weights.repack.image_format import HEADER, ImageTensor, pack, parse


def reseal(raw: bytearray, **changed: int | bytes) -> bytearray:
    """Change fields of a header, and make its checksum match."""
    places = {
        **{"version": ("<I", 8), "header_bytes": ("<I", 12), "file_bytes": ("<Q", 16)},
        **{"data_offset": ("<Q", 24), "data_bytes": ("<Q", 32), "table_bytes": ("<Q", 40)},
        **{"n_tensors": ("<Q", 48), "key": ("32s", 56), "table_checksum": ("<Q", 88)},
    }
    for name, value in changed.items():
        code, at = places[name]
        struct.pack_into(code, raw, at, value)
    struct.pack_into(
        "<Q", raw, HEADER.nbytes - 8, xxhash.xxh3_64_intdigest(raw[: HEADER.nbytes - 8])
    )
    return raw


def flip(raw: bytearray, at: int) -> bytearray:
    raw[at] ^= 1
    return raw


TENSOR = ImageTensor("a", "q4_0", (32, 2), "CPU_REPACK", 0, 36, "0" * 32)
IMAGE = pack({"of": "it"}, "model.gguf", [TENSOR], 4096)
N_BYTES = len(IMAGE) + 4096


def test_a_packed_header_is_read_back() -> None:
    found = parse(IMAGE, N_BYTES, "image")
    assert (found.identity, found.model, found.tensors) == ({"of": "it"}, "model.gguf", (TENSOR,))
    assert (found.data_offset, found.data_bytes, found.file_bytes) == (4096, 4096, 8192)


@pytest.mark.parametrize(
    ("change", "nbytes", "rule"),
    [
        (lambda raw: raw[:0], 0, "does not begin with UNIMEMRP"),
        (lambda raw: flip(raw, 0), N_BYTES, "does not begin with UNIMEMRP"),
        (lambda raw: raw[:50], 50, "cut off"),
        (lambda raw: raw[:200], N_BYTES, "checksum of the table"),
        (lambda raw: raw, N_BYTES - 1, "cut off"),
        (lambda raw: raw, N_BYTES + 1, "longer than"),
        (lambda raw: reseal(raw, version=2), N_BYTES, "version 1"),
        (lambda raw: flip(raw, 33), N_BYTES, "header's checksum"),
        (lambda raw: flip(raw, HEADER.nbytes + 9), N_BYTES, "checksum of the table"),
        (lambda raw: reseal(raw, table_bytes=1 << 63), N_BYTES, "table_bytes"),
        (lambda raw: reseal(raw, data_bytes=0), N_BYTES, "data_bytes"),
        (lambda raw: reseal(raw, data_bytes=1 << 60), N_BYTES, "data_bytes"),
        (lambda raw: reseal(raw, header_bytes=105), N_BYTES, "header_bytes"),
        (lambda raw: reseal(raw, data_offset=1 << 50), N_BYTES, "data_offset"),
        (lambda raw: reseal(raw, file_bytes=1), N_BYTES, "file_bytes"),
        (lambda raw: reseal(raw, n_tensors=2), N_BYTES, "n_tensors"),
        (lambda raw: reseal(raw, key=bytes(32)), N_BYTES, "key"),
    ],
)
def test_headers_are_checked(
    change: Callable[[bytearray], bytearray], nbytes: int, rule: str
) -> None:
    with pytest.raises(FormatError, match=rule):
        parse(bytes(change(bytearray(IMAGE))), nbytes, "image")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tensors": []}, "at least one tensor"),
        ({"tensors": {}}, "tensors: list"),
        ({"model": 1}, "model: str"),
        ({"identity": []}, "identity: dict"),
        ({"more": 1}, "the keys"),
        ({"tensors": [1]}, "the keys"),
        ({"name": 1}, "name: a text"),
        ({"ne": [1]}, "2 or 3"),
        ({"ne": [1, True]}, "a size"),
        ({"ne": [1, -1]}, "a size"),
        ({"nbytes": 0}, "a size"),
        ({"nbytes": 1.0}, "a size"),
        ({"nbytes": 4097}, "bytes 0 to 4096"),
        ({"offset": 4096}, "bytes 0 to 4096"),
        ({"offset": 32}, "multiple of 64"),
        ({"offset": -64}, "multiple of 64"),
        ({"hash": "x" * 32}, "32 hexadecimal"),
        ({"hash": "0"}, "32 hexadecimal"),
        ("twice", "names that differ"),
        ("overlap", "bytes 36 to 4096"),
        ("nested", "fewer arrays and objects"),
        (b"[" * 100_000, "the table"),
        (b"\xff", "the table"),
    ],
)
def test_wrong_tables_are_refused(change: Any, expected: str) -> None:
    raw = pack({}, "", [TENSOR], 4096)
    size = struct.unpack_from("<Q", raw, 40)[0]
    table = json.loads(raw[HEADER.nbytes : HEADER.nbytes + size])
    if change == "nested":  # each list takes 64 bytes of memory
        text = b"[" + 2000 * b"[]," + b"1]"
    elif isinstance(change, bytes):
        text = change
    else:
        if change == "twice":
            table["tensors"].append(table["tensors"][0] | {"offset": 64})
        elif change == "overlap":
            table["tensors"].append(table["tensors"][0] | {"name": "b"})
        elif set(change) <= {"identity", "model", "tensors", "more"}:
            table |= change
        else:
            table["tensors"][0] |= change
        text = json.dumps(table).encode()
    offset = -(-(HEADER.nbytes + len(text)) // 4096) * 4096
    head = bytearray(raw[: HEADER.nbytes] + text)
    count = len(table["tensors"]) if isinstance(table["tensors"], list) else 1
    sizes = {"table_bytes": len(text), "data_offset": offset, "file_bytes": offset + 4096}
    sums = {"n_tensors": count, "table_checksum": xxhash.xxh3_64_intdigest(text)}
    with pytest.raises(FormatError, match=expected):
        parse(bytes(reseal(head, **sizes, **sums)), offset + 4096, "image")
