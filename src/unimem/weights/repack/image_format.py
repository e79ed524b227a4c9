"""The format of repacked images: packing a header, and reading one with every field checked.

``docs/images.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn

import xxhash

from unimem.errors import FormatError

__all__ = [
    "ALIGN",
    "HEADER_BYTES",
    "ImageHeader",
    "ImageTensor",
    "image_bytes",
    "is_image",
    "key_of",
    "pack",
    "parse",
]

_MAGIC = b"UNIMEMRP"
VERSION = 1
ALIGN = 4096
"""Of the data, and of the file's end: what mappings and reads past the page cache need."""
_MOST_TABLE_BYTES = 64 << 20

_TENSOR_ALIGN = 64
_MOST_BYTES = 1 << 46  # of address space there are 47 bits
_FIELDS = (
    ("magic", "8s"),
    ("version", "I"),
    ("header_bytes", "I"),
    ("file_bytes", "Q"),
    ("data_offset", "Q"),
    ("data_bytes", "Q"),
    ("table_bytes", "Q"),
    ("n_tensors", "Q"),
    ("key", "32s"),
    ("table_checksum", "Q"),
    ("header_checksum", "Q"),
)
_HEADER = struct.Struct("<" + "".join(code for _, code in _FIELDS))
HEADER_BYTES = _HEADER.size
_OFFSETS = {
    name: struct.calcsize("<" + "".join(code for _, code in _FIELDS[:i]))
    for i, (name, _) in enumerate(_FIELDS)
}


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """One tensor of an image.

    Attributes
    ----------
    name, type : str
        As in the model's file.
    ne : tuple of int
        Shape in ggml's order.
    order : str
        The buffer type that wrote it, as ggml calls it.
    offset : int
        Where it begins, counted from the beginning of the data.
    nbytes : int
        Bytes in this order.
    hash : str
        XXH3 of 128 bits of these bytes, in hexadecimal.
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

    Attributes
    ----------
    key : str
        SHA-256 of `identity` in its canonical form, in hexadecimal.
    identity : dict
        What the bytes are of and for: see `unimem.weights.repack.image_identity`.
    model : str
        The model's first file when the image was made, as an absolute path: for people.
    tensors : tuple of ImageTensor
        By their offsets.
    data_offset, data_bytes, file_bytes : int
        Where the data begins, its bytes, and those of the file.
    """

    key: str
    identity: dict[str, Any] = field(repr=False)
    model: str
    tensors: tuple[ImageTensor, ...] = field(repr=False)
    data_offset: int
    data_bytes: int
    file_bytes: int


def key_of(identity: dict[str, Any]) -> str:
    """Return SHA-256 of an identity: of JSON with sorted keys and no blanks."""
    return hashlib.sha256(_canonical(identity)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def is_image(head: bytes) -> bool:
    """Tell whether a file that begins so is meant as an image."""
    return head[: len(_MAGIC)] == _MAGIC


def image_bytes(data_offset: int, data_bytes: int) -> int:
    """Return the bytes of a file whose data begins there."""
    return data_offset + _round_up(data_bytes)


def _round_up(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _table(identity: dict[str, Any], model: str, tensors: Sequence[ImageTensor]) -> bytes:
    """Return the table of an image; hashes of tensors do not change its length."""
    rows = [asdict(tensor) for tensor in tensors]
    return _canonical({"identity": identity, "model": model, "tensors": rows})


def pack(
    identity: dict[str, Any], model: str, tensors: Sequence[ImageTensor], data_bytes: int
) -> bytes:
    """Return all that is in front of the data of an image.

    Parameters
    ----------
    identity, model, tensors, data_bytes
        As in `ImageHeader`.

    Returns
    -------
    bytes
        Whole pages: as many as the data begins at.

    Raises
    ------
    ValueError
        A table of more bytes than an image can have.
    """
    table = _table(identity, model, tensors)
    if len(table) > _MOST_TABLE_BYTES:
        raise ValueError(
            f"expected a table of at most {_MOST_TABLE_BYTES} bytes, got {len(table)}: the model "
            "has too many tensors for an image"
        )
    data_offset = _round_up(HEADER_BYTES + len(table))
    head = _HEADER.pack(
        _MAGIC,
        VERSION,
        HEADER_BYTES,
        data_offset + _round_up(data_bytes),
        data_offset,
        data_bytes,
        len(table),
        len(tensors),
        bytes.fromhex(key_of(identity)),
        xxhash.xxh3_64_intdigest(table),
        0,
    )
    head = head[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head[:-8]))
    return (head + table).ljust(data_offset, b"\0")


def parse(head: bytes, file_bytes: int, path: str) -> ImageHeader:
    """Read what is in front of the data of an image, and check every field.

    Parameters
    ----------
    head : bytes
        The beginning of the file: of its `HEADER_BYTES` and its table all that there is.
    file_bytes : int
        Bytes of the file.
    path : str
        The file, for errors.

    Returns
    -------
    ImageHeader
        Every tensor is inside of the data, and the data inside of the file.

    Raises
    ------
    FormatError
        The file is no image, of another version, damaged, cut off or too long.
    """

    def refuse(rule: str, name: str | None = None) -> NoReturn:
        raise FormatError(rule, None if name is None else _OFFSETS[name], path)

    if not is_image(head):
        refuse("this is no repacked image: it does not begin with UNIMEMRP", "magic")
    if len(head) < HEADER_BYTES:
        raise FormatError(f"the image is cut off: it has {len(head)} bytes", len(head), path)
    values = dict(zip((name for name, _ in _FIELDS), _HEADER.unpack_from(head), strict=True))
    # Before the checksum, since another version may have another header.
    if values["version"] != VERSION:
        refuse(f"expected an image of version {VERSION}, got {values['version']}", "version")
    if xxhash.xxh3_64_intdigest(head[: HEADER_BYTES - 8]) != values["header_checksum"]:
        refuse("the checksum of the header does not match", "header_checksum")
    _check_sizes(values, file_bytes, path)
    table, data_bytes = values["table_bytes"], values["data_bytes"]
    text = head[HEADER_BYTES : HEADER_BYTES + table]
    if len(text) < table or xxhash.xxh3_64_intdigest(text) != values["table_checksum"]:
        refuse("the checksum of the table does not match", "table_checksum")
    try:
        identity, model, tensors = _parse_table(text, data_bytes)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the table: {error}", HEADER_BYTES, path) from None
    if len(tensors) != values["n_tensors"]:
        refuse(f"n_tensors: expected {len(tensors)}, got {values['n_tensors']}", "n_tensors")
    if key_of(identity) != values["key"].hex():
        refuse("the key is not that of the identity", "key")
    return ImageHeader(
        values["key"].hex(),
        identity,
        model,
        tensors,
        values["data_offset"],
        data_bytes,
        file_bytes,
    )


def _check_sizes(values: dict[str, Any], file_bytes: int, path: str) -> None:
    """Check where things are, and that the file is as long as it says."""

    def check(name: str, low: int, high: int) -> None:
        if not low <= values[name] <= high:
            expected = f"{low}" if low == high else f"{low} to {high}"
            rule = f"{name}: expected {expected}, got {values[name]}"
            raise FormatError(rule, _OFFSETS[name], path)

    check("table_bytes", 1, _MOST_TABLE_BYTES)
    check("data_bytes", 1, _MOST_BYTES)
    check("header_bytes", HEADER_BYTES, HEADER_BYTES)
    begin = _round_up(HEADER_BYTES + values["table_bytes"])
    end = begin + _round_up(values["data_bytes"])
    check("data_offset", begin, begin)
    check("file_bytes", end, end)
    if file_bytes != end:
        how = "cut off" if file_bytes < end else "too long"
        rule = f"the image is {how}: expected {end} bytes, got {file_bytes}"
        raise FormatError(rule, min(file_bytes, end), path)


def _parse_table(text: bytes, data_bytes: int) -> tuple[dict[str, Any], str, tuple[Any, ...]]:
    """Read the table; ValueError says what is wrong with it."""
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
