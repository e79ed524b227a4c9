"""The format of repacked images: packing a header, and reading one with every field checked.

``docs/images.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import xxhash

from unimem.base.binary_header import BinaryHeader
from unimem.errors import FormatError

ALIGN = 4096
"""Of the data and of the file's end, for mappings and for reads past the page cache."""
_MOST_TABLE_BYTES = 64 << 20
# The least text for each array and object of a large table, which take 64 bytes of memory.
_NESTED_BYTES = 16

_TENSOR_ALIGN = 64
_MOST_BYTES = 1 << 46  # the address space has 47 bits
HEADER = BinaryHeader(
    """
    8s magic; I version header_bytes;
    Q file_bytes data_offset data_bytes table_bytes n_tensors; 32s key;
    Q table_checksum header_checksum
    """,
    b"UNIMEMRP",
    "repacked image",
)


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """One tensor of an image.

    `name` and `type` are as in the model's file, and `ne` is the shape in ggml's order. `order` is
    the buffer type that wrote it, by ggml's name. `offset` counts from the beginning of the data,
    `nbytes` are the bytes in this order, and `hash` is their XXH3 (128 bits) in hexadecimal.
    """

    name: str
    type: str
    ne: tuple[int, ...]
    order: str
    offset: int
    nbytes: int
    hash: str


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What the header of an image says.

    `key` is the SHA-256 of `identity` in its canonical form, in hexadecimal; the identity is all
    that the bytes depend on (see `image_identity`). `model` is the absolute path of the model's
    first file when the image was made, for people. `tensors` have the order of their offsets.
    """

    key: str
    identity: dict[str, Any] = field(repr=False)
    model: str
    tensors: tuple[ImageTensor, ...] = field(repr=False)
    data_offset: int
    data_bytes: int
    file_bytes: int


def key_of(identity: dict[str, Any]) -> str:
    """Return the SHA-256 of an identity as JSON with sorted keys and no blanks."""
    return hashlib.sha256(_canonical(identity)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def is_image(head: bytes) -> bool:
    """Whether a file that begins with these bytes is meant as an image."""
    return HEADER.is_magic(head)


def image_bytes(data_offset: int, data_bytes: int) -> int:
    """Return the bytes of a file whose data begins at `data_offset`."""
    return data_offset + _round_up(data_bytes)


def _round_up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def pack(
    identity: dict[str, Any], model: str, tensors: Sequence[ImageTensor], data_bytes: int
) -> bytes:
    """Return the header and the table of an image in whole pages; hashes do not change the length.

    It raises ValueError if the table has more bytes than an image can have.
    """
    rows = [asdict(tensor) for tensor in tensors]
    table = _canonical({"identity": identity, "model": model, "tensors": rows})
    if len(table) > _MOST_TABLE_BYTES:
        raise ValueError(
            f"expected a table of at most {_MOST_TABLE_BYTES} bytes, got {len(table)}: the model "
            "has too many tensors for an image"
        )
    data_offset = _round_up(HEADER.nbytes + len(table))
    values = {
        "file_bytes": image_bytes(data_offset, data_bytes),
        "data_offset": data_offset,
        "data_bytes": data_bytes,
        "table_bytes": len(table),
        "n_tensors": len(tensors),
        "key": bytes.fromhex(key_of(identity)),
        "table_checksum": xxhash.xxh3_64_intdigest(table),
    }
    return (HEADER.pack(values) + table).ljust(data_offset, b"\0")


def parse(head: bytes, file_bytes: int, path: str) -> ImageHeader:
    """Read the header and the table of an image, and check every field.

    `head` is the beginning of the file, with as much of header and table as there is. In the
    result, every tensor is inside the data, and the data inside the file. It raises FormatError if
    the file is no image, of another version, damaged, cut off or too long.
    """
    values = HEADER.read(head, path)
    values.check_range("table_bytes", 1, _MOST_TABLE_BYTES)
    values.check_range("data_bytes", 1, _MOST_BYTES)
    begin, data_bytes = _round_up(HEADER.nbytes + values["table_bytes"]), values["data_bytes"]
    end = image_bytes(begin, data_bytes)
    values.check_exact(header_bytes=HEADER.nbytes, data_offset=begin, file_bytes=end)
    values.check_file(file_bytes)
    text = head[HEADER.nbytes : HEADER.nbytes + values["table_bytes"]]
    values.check_tables(text, "table_checksum")
    try:
        identity, model, tensors = _parse_table(text, data_bytes)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the table: {error}", HEADER.nbytes, path) from None
    values.check_exact(n_tensors=len(tensors))
    key = values["key"].hex()
    if key_of(identity) != key:
        values.refuse("key", "the key is not that of the identity")
    return ImageHeader(key, identity, model, tensors, begin, data_bytes, file_bytes)


def _parse_table(text: bytes, data_bytes: int) -> tuple[dict[str, Any], str, tuple[Any, ...]]:
    """Read the table; raise ValueError for the first rule that it breaks."""
    n_nested, most = text.count(b"[") + text.count(b"{"), 1000 + len(text) // _NESTED_BYTES
    _expect(n_nested <= most, f"fewer arrays and objects than {most}", n_nested)
    found = json.loads(text.decode())
    _expect(isinstance(found, dict), "an object", found)
    names = {"identity": dict, "model": str, "tensors": list}
    _expect(set(found) == set(names), f"the keys {sorted(names)}", sorted(found))
    for name, kind in names.items():
        _expect(isinstance(found[name], kind), f"{name}: {kind.__name__}", found[name])
    end, tensors, seen = 0, [], set()
    for row in found["tensors"]:
        tensor = _parse_tensor(row)
        _expect(tensor.name not in seen, "names that differ", tensor.name)
        seen.add(tensor.name)
        inside = tensor.offset >= end and tensor.offset + tensor.nbytes <= data_bytes
        _expect(
            inside, f"{tensor.name}: bytes {end} to {data_bytes}", (tensor.offset, tensor.nbytes)
        )
        end = tensor.offset + tensor.nbytes
        tensors.append(tensor)
    _expect(bool(tensors), "at least one tensor", 0)
    return found["identity"], found["model"], tuple(tensors)


def _parse_tensor(row: Any) -> ImageTensor:
    names = {each.name for each in fields(ImageTensor)}
    _expect(isinstance(row, dict) and set(row) == names, f"the keys {sorted(names)}", row)
    for name in ("name", "type", "order", "hash"):
        _expect(isinstance(row[name], str), f"{name}: a text", row[name])
    _expect(isinstance(row["ne"], list) and len(row["ne"]) in (2, 3), "ne: 2 or 3", row["ne"])
    for n in (*row["ne"], row["nbytes"]):
        _expect(type(n) is int and 0 < n <= _MOST_BYTES, "a size of at least 1", n)
    at = row["offset"]
    is_offset = type(at) is int and 0 <= at <= _MOST_BYTES and at % _TENSOR_ALIGN == 0
    _expect(is_offset, f"offset: a multiple of {_TENSOR_ALIGN}", at)
    is_hash = len(row["hash"]) == 32 and set(row["hash"]) <= set("0123456789abcdef")
    _expect(is_hash, "hash: 32 hexadecimal digits", row["hash"])
    return ImageTensor(**row | {"ne": tuple(row["ne"])})


def _expect(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"expected {expected}, got {got!r:.60}")
