"""Identities and bytes of chunks, as the page on the store has them.

As a program it prints them, made by the modules of unimem that need no compiled one: so it runs
wherever Python, NumPy and xxhash do. Its argument is the folder of the package.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

# From a row of the page to what it is of: layers, heads and their dim, type; model, tokens, and
# tokens of a chunk.
VECTORS: dict[str, tuple[tuple[int, int, int, str], str, list[int], int]] = {
    "2 layers, 4 heads of 64, `f16`": ((2, 4, 64, "f16"), "tiny", list(range(8)), 4),
    "2 layers, 4 heads of 64, `q8_0`": ((2, 4, 64, "q8_0"), "tiny", list(range(8)), 4),
    "32 layers, 8 heads of 128, `bf16`": (
        *((32, 8, 128, "bf16"), "modèle"),
        *([1, 15043, 29892, 2147483647], 2),
    ),
    "22 layers, 4 heads of 64, `f16`": ((22, 4, 64, "f16"), "", list(range(256)), 256),
}


def make() -> dict[str, list[str]]:
    """Return the identities of each row, and the hash of a chunk's bytes."""
    import numpy as np

    from unimem.kv.chunk_format import ChunkShape, Kind, chunk_keys, seal

    found = {
        row: [key.hex() for key in chunk_keys(Kind(*kind), model, np.array(ids, np.int32), n)]
        for row, (kind, model, ids, n) in VECTORS.items()
    }
    chunk = ChunkShape(Kind(2, 4, 64, "f16"), 4)
    blob: Any = np.zeros(chunk.nbytes, np.uint8)
    chunk.lanes(blob)[:] = np.arange(chunk.data_bytes, dtype=np.uint64).reshape(4, -1) % 251
    seal(chunk, bytes.fromhex(found["2 layers, 4 heads of 64, `f16`"][0]), blob)
    return found | {"bytes of a chunk": [hashlib.sha256(blob.tobytes()).hexdigest()]}


def main() -> None:
    """Run without the packages themselves, whose import loads compiled modules."""
    import types

    for name in ("unimem", "unimem.kv"):
        package = types.ModuleType(name)
        package.__path__ = [sys.argv[1] + name.removeprefix("unimem").replace(".", "/")]
        sys.modules[name] = package
    print(json.dumps(make()))


if __name__ == "__main__":
    main()
