"""Images with wrong fields and right checksums: refused and made anew, or used as they say."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.models.image_models import expected_bytes, only, repacked_bytes, uses_images
from support.project.tiers import examples
from unimem.weights.repack.image_cache import ImageCache
from unimem.weights.repack.image_format import ALIGN, HEADER, key_of, parse

pytestmark = uses_images

EDGES = [0, 1, 32, 63, 64, 4095, 4096, 4097, 2**31, 2**32 - 1, 2**46, 2**63, 2**64 - 1]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([*EDGES, -64, 64.0, 1e999, None, True, "", "\ud800", "\0", "x" * 5000, [], {}]),
    st.lists(st.sampled_from([*EDGES, -1, None, "a"]), max_size=4),
    st.dictionaries(st.sampled_from(["files", "a"]), st.sampled_from([[], [[]], 0]), max_size=2),
)
ROW = ["name", "type", "ne", "order", "offset", "nbytes", "hash", "more"]
WHOLE = ["identity", "model", "tensors", "more"]
# Without the magic number and both checksums, which are right.
NUMBERS = [name for name in HEADER.codes if not name.endswith(("magic", "key", "checksum"))]

Change = tuple[str, Any]


def changed(raw: bytes, changes: list[Change], row: int) -> bytes:
    """An image with some other fields; what follows from them is right."""
    old = HEADER.read(raw, "image")
    table = json.loads(raw[HEADER.nbytes :][: old["table_bytes"]])
    data = bytearray(raw[old["data_offset"] :])
    one = table["tensors"][row % len(table["tensors"])]
    fields = {name: value for name, value in changes if name in NUMBERS}
    if ("data", None) in changes:
        data[one["offset"]] ^= 1
        one["hash"] = xxhash.xxh3_128_hexdigest(data[one["offset"] :][: one["nbytes"]])
    one |= {name: value for name, value in changes if name in ROW}
    table |= {name: value for name, value in changes if name in WHOLE}
    text = json.dumps(table).encode()
    begin = -(-(HEADER.nbytes + len(text)) // ALIGN) * ALIGN
    follow = {
        "file_bytes": begin + len(data),
        "data_offset": begin,
        "table_bytes": len(text),
        "key": bytes.fromhex(key_of(table["identity"])),
        "table_checksum": xxhash.xxh3_64_intdigest(text),
    }
    most = {name: 256 ** struct.calcsize(HEADER.codes[name]) - 1 for name in fields}
    fields = {name: min(value, most[name]) for name, value in fields.items()}
    return (HEADER.pack(old | follow | fields) + text).ljust(begin, b"\0") + data


def tensors_of(raw: bytes) -> dict[str, bytes]:
    """The bytes that an image says are those of its tensors."""
    head = parse(raw, len(raw), "image")
    data = raw[head.data_offset :]
    return {one.name: data[one.offset :][: one.nbytes] for one in head.tensors}


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(NUMBERS), st.sampled_from(EDGES)),
        st.tuples(st.sampled_from([*ROW, *WHOLE]), VALUES),
        st.tuples(st.just("data"), st.none()),
    ),
    min_size=1,
    max_size=3,
)


def test_no_change_with_right_checksums_is_used_wrongly(model: Path, cache: ImageCache) -> None:
    expected = expected_bytes(model)
    repacked_bytes(model)
    path = only(cache)
    raw = path.read_bytes()

    @settings(max_examples=examples(100))
    @example([], 0)
    @example([("data", None)], 0)
    @example([("model", "\ud800")], 0)
    @example([("offset", 64)], 0)
    @example([("identity", {})], 0)
    @given(CHANGES, st.integers(0, 3))
    def search(changes: list[Change], row: int) -> None:
        path.write_bytes(image := changed(raw, changes, row))
        for one in cache.images():
            assert one.problem is None or one.model is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the image was removed
            used, found = repacked_bytes(model)
        assert found == (expected if used is None else tensors_of(image))

    search()
