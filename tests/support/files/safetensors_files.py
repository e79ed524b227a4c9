"""Safetensors files for the tests: what the library writes, and what it does not.

In the text of a header, a ``'`` stands for a quote, and a ``^`` says where the field lies that
breaks a rule.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping

# The bits of a value, by dtype.
BITS = {
    **{"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8},
    **{"F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32},
    **{"C64": 64, "F64": 64, "I64": 64, "U64": 64},
}

Shape = tuple[int, ...]


def file(header: str | bytes, data: int | bytes = b"", *, length: int | None = None) -> bytes:
    """The length of the header (or another that is claimed), the header, and data (or zeros)."""
    raw = header.encode() if isinstance(header, str) else header
    head = struct.pack("<Q", len(raw) if length is None else length)
    return head + raw + (bytes(data) if isinstance(data, int) else data)


def marked(header: str, data: int = 0) -> tuple[bytes, int]:
    """The file of such a text and so much data, and where its mark stands."""
    before, mark, after = header.replace("'", '"').partition("^")
    assert mark
    return file(before + after, data), 8 + len(before.encode())


def nbytes_of(dtype: str, shape: Shape) -> int:
    return math.prod(shape) * BITS[dtype] // 8


def data_of(nbytes: int) -> bytes:
    return bytes(i % 251 for i in range(nbytes))


def write(
    tensors: Mapping[str, tuple[str, Shape]],
    metadata: Mapping[str, str] | None = None,
    *,
    pad: int | None = None,
    ascii_only: bool = False,
) -> bytes:
    """A file of tensors of a dtype and shape each, one behind the other.

    `pad` spaces follow the header; by default, data begins at a multiple of 8.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    return file(text + b" " * (-len(text) % 8 if pad is None else pad), data_of(at))


def everything(*, pad: int | None = None) -> bytes:
    """A small file with every dtype, dimensions of every kind, escapes and metadata."""
    tensors: dict[str, tuple[str, Shape]] = {
        f"t.{dtype}": (dtype, (2, 1, 4)) for dtype in reversed(BITS)
    }
    tensors |= {"scalar": ("F32", ()), "empty": ("BF16", (3, 0, 5)), "half bytes": ("F4", (2, 3))}
    tensors['größer \\ "than" ASCII \U0001f600\n'] = ("U8", (3,))
    metadata = {"format": "np", "": "", "ü\t\0": "\U0001f600 / \\"}
    return write(tensors, metadata, pad=pad, ascii_only=True)
