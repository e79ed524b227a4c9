"""Files that suites measure with: made once, in the folder that all passes share.

Headers are written here rather than by gguf-py, so that a suite runs without it, and fast.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# Numbers of GGUF, for values and for tensors' types.
UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9
FLOAT16, Q8_0 = 1, 8
ALIGNMENT = 64
PIECE_BYTES = 64 << 10  # of a file that is written like a download


class TensorEntry(NamedTuple):
    """A tensor's entry in a GGUF header."""

    name: str  # in ggml's words, as ``blk.0.attn_q.weight``
    ne: tuple[int, ...]  # its dimensions in the order of ggml, the row's first
    ggml_type: int  # the number of its type
    nbytes: int  # of its data


def made_once(path: Path, write: Callable[[Path], object]) -> Path:
    """Return `path`; if it is missing, `write` makes it under another name first.

    So a file is whole or missing, even after a run was killed, or if two runs make it at once.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            write(unfinished)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def string(content: bytes) -> bytes:
    """Encode a string as GGUF does."""
    return struct.pack("<Q", len(content)) + content


def text(key: str, value: str) -> bytes:
    """Encode a key with a string."""
    return string(key.encode()) + struct.pack("<I", STRING) + string(value.encode())


def number(key: str, value: int) -> bytes:
    """Encode a key with an unsigned number."""
    return string(key.encode()) + struct.pack("<II", UINT32, value)


def array(key: str, kind: int, n: int, items: bytes) -> bytes:
    """Encode a key with an array of `n` values that are already encoded."""
    return string(key.encode()) + struct.pack("<IIQ", ARRAY, kind, n) + items


def gguf_header(metadata: Sequence[bytes], tensors: Sequence[TensorEntry]) -> bytes:
    """Return everything before the data of a GGUF file, padded to `ALIGNMENT`.

    `metadata` has keys with values, as `text`, `number` and `array` encode them;
    ``general.alignment`` is added. Tensors are in the order of their data, each at the next
    multiple of `ALIGNMENT`.
    """
    pieces = [*metadata, number("general.alignment", ALIGNMENT)]
    count = struct.pack("<IQQ", 3, len(tensors), len(pieces))
    offset = 0
    for name, ne, ggml_type, nbytes in tensors:
        pieces.append(string(name.encode()) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne))
        pieces.append(struct.pack("<IQ", ggml_type, offset))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    header = b"".join([b"GGUF", count, *pieces])
    return header + bytes(-len(header) % ALIGNMENT)


@contextmanager
def downloaded(model: Path, label: str = "written") -> Iterator[Path]:
    """Yield a copy that was written in small pieces, and is in the page cache as that left it."""
    path = model.with_stem(f"{model.stem}-{os.getpid()}-{label}")
    try:
        with open(model, "rb", buffering=0) as source, open(path, "wb", buffering=0) as out:
            while piece := source.read(PIECE_BYTES):
                out.write(piece)
            os.fsync(out.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)
