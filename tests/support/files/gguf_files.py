"""GGUF files for the tests: byte by byte, and by gguf-py.

A file written by hand is a list of parts; `MARK` among them says where the field lies that breaks a
rule.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

MARK = "mark"
Part: TypeAlias = Union[bytes, str, list["Part"]]  # noqa: UP007 - it refers to itself

# The numbers of the types of metadata, with the struct code of those that have a fixed size.
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
CODES = dict(
    zip(
        (UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, UINT64, INT64, FLOAT64),
        "BbHhIif?Qqd",
        strict=True,
    )
)
F32, F16, Q8_0, I8, I64 = 0, 1, 8, 24, 27


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: bytes | str) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def values(kind: int, items: Iterable[Any]) -> bytes:
    return b"".join(struct.pack("<" + CODES[kind], item) for item in items)


def head(n_tensors: int, n_kv: int, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + u32(version) + u64(n_tensors) + u64(n_kv)


def kv(key: bytes | str, kind: int, *value: Part) -> list[Part]:
    return [string(key), u32(kind), *value]


def array(kind: int, n: int, *items: Part) -> list[Part]:
    return [u32(kind), u64(n), *items]


def tensor(name: bytes | str, ne: tuple[int, ...], kind: int, offset: int) -> list[Part]:
    return [string(name), u32(len(ne)), *map(u64, ne), u32(kind), u64(offset)]


def join(*parts: Part) -> tuple[bytes, int | None]:
    """The bytes of the parts, and where `MARK` stands among them."""
    out = bytearray()
    mark = None
    pending = list(reversed(parts))
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(reversed(part))
        elif isinstance(part, str):
            mark = len(out)
        else:
            out += part
    return bytes(out), mark


def with_data(*parts: Part, nbytes: int = 256, alignment: int = 32) -> tuple[bytes, int | None]:
    """As `join`, with the padding and `nbytes` of data behind the header."""
    raw, mark = join(*parts)
    data = bytes(i % 251 for i in range(nbytes))
    return raw + bytes(-len(raw) % alignment) + data, mark


def everything() -> bytes:
    """A small file with every type of metadata, nested arrays, and tensors of 0 to 4 dimensions."""
    entries: list[list[Part]] = [
        kv("general.architecture", STRING, string("none")),
        kv("general.alignment", UINT32, u32(64)),
        kv("strings", ARRAY, array(STRING, 3, *map(string, ("", "a", "ö")))),
        kv("raw string", STRING, string(b"\xff\xfe")),
        kv(
            "nested",
            ARRAY,
            array(
                ARRAY,
                3,
                array(UINT16, 2, values(UINT16, (1, 2))),
                array(STRING, 1, string("x")),
                array(ARRAY, 1, array(FLOAT32, 0)),
            ),
        ),
    ]
    for kind in CODES:
        entries.append(kv(f"value.{kind}", kind, values(kind, [1])))
        entries.append(kv(f"array.{kind}", ARRAY, array(kind, 3, values(kind, (0, 1, 1)))))
    tensors = [
        tensor("scalar", (), F32, 0),
        tensor("one", (64,), Q8_0, 64),
        tensor("empty", (4, 0), F32, 192),
        tensor("four", (2, 3, 1, 2), F16, 192),
    ]
    return with_data(head(len(tensors), len(entries)), *entries, *tensors, alignment=64)[0]


def write_with_gguf_py(
    path: Path,
    metadata: dict[str, tuple[Any, Any]],
    tensors: dict[str, tuple[NDArray[Any], Any]],
    alignment: int | None = None,
) -> None:
    """A file by gguf-py: `metadata` maps a key to a value and its GGUFValueType (of an array: of
    its items), `tensors` a name to an array (of bytes, for blocks) and its GGMLQuantizationType.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "none")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (value, kind) in metadata.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_bytes(nbytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def split(
    path: Path, most_tensors: int, *, no_tensor_first: bool = False, stem: str | None = None
) -> list[Path]:
    """Split a model as llama.cpp's gguf-split does, with ``--split-max-tensors``.

    The first part has all metadata, and with `no_tensor_first` no tensors; every part has the keys
    of the split. Parts lie beside the model, or are called `stem`, and are aligned to 32 bytes.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = [
        b"".join(part.tobytes() for part in field.parts)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    ]
    tensors = list(reader.tensors)
    groups = [tensors[i : i + most_tensors] for i in range(0, len(tensors), most_tensors)]
    if no_tensor_first:
        groups.insert(0, [])
    paths = []
    for i, group in enumerate(groups):
        name = f"{stem or path.stem}-{i + 1:05}-of-{len(groups):05}.gguf"
        entries: list[Part] = [*(metadata if i == 0 else [])]
        entries += [
            kv("split.no", UINT16, values(UINT16, [i])),
            kv("split.count", UINT16, values(UINT16, [len(groups)])),
            kv("split.tensors.count", INT32, values(INT32, [len(tensors)])),
        ]
        rows, data = [], b""
        for t in group:
            rows.append(tensor(t.name, tuple(map(int, t.shape)), int(t.tensor_type), len(data)))
            data += t.data.tobytes()
            data += bytes(-len(data) % 32)
        raw, _ = join(head(len(group), len(entries)), *entries, *rows)
        paths.append(path.with_name(name))
        paths[-1].write_bytes(raw + bytes(-len(raw) % 32) + data)
    return paths
