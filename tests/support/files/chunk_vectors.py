"""Identities and bytes of chunks, as the page on the store has them.

As a program it prints them. It imports only modules of unimem that need no compiled one, so it runs
wherever Python, NumPy and xxhash do. Its argument is the folder of the package.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

# For each row of the page: the fields of `EqualLayers` (or a list of fields of `LayerRows`), the
# model, the tokens, and the tokens of a chunk.
VECTORS: dict[str, tuple[Any, str, list[int], int]] = {
    "2 layers, 4 heads of 64, `f16`": ((2, 4, 64, "f16", "f16"), "tiny", list(range(8)), 4),
    "2 layers, 4 heads of 64, `q8_0`": ((2, 4, 64, "q8_0", "q8_0"), "tiny", list(range(8)), 4),
    "32 layers, 8 heads of 128, `bf16`": (
        (32, 8, 128, "bf16", "bf16"),
        "modèle",
        [1, 15043, 29892, 2147483647],
        2,
    ),
    "22 layers, 4 heads of 64, `f16`": ((22, 4, 64, "f16", "f16"), "", list(range(256)), 256),
    "2 layers, 4 heads of 64, of V 32, `f16`": (
        (2, 4, 64, "f16", "f16", "none", 32),
        "tiny",
        list(range(8)),
        4,
    ),
    "all tokens with 1 head of 576 and no V, the rows of layer 0": (
        [(1, 576, "f16", "f16", None, None, 0), (1, 576, "f16", "f16", None, 0, 0)],
        "tiny",
        list(range(8)),
        4,
    ),
    "2 layers, 4 heads of 64, K `q8_0`, V `q4_0`": (
        (2, 4, 64, "q8_0", "q4_0"),
        "tiny",
        list(range(8)),
        4,
    ),
    "a window of 6, all tokens, the rows of layer 0": (
        [
            (4, 64, "f16", "f16", 6),
            (2, 128, "q8_0", "q8_0"),
            (4, 64, "f16", "f16", 6, 0),
        ],
        "tiny",
        list(range(8)),
        4,
    ),
}


def lanes_of(chunk: Any) -> Any:
    """Return a chunk whose byte i of the data is i modulo 251, before it is sealed."""
    import numpy as np

    blob: Any = np.zeros(chunk.nbytes, np.uint8)
    first = 0
    for lane in chunk.lanes(blob):
        lane[:] = np.arange(first, first + lane.size).reshape(lane.shape) % 251
        first += lane.size
    return blob


def make() -> dict[str, list[str]]:
    """Return the identities of each row, and the hash of a chunk's bytes."""
    import numpy as np

    from unimem.kv.store.chunk import (
        ChunkShape,
        EqualLayers,
        LayerRows,
        MixedLayers,
        chunk_keys,
        seal,
    )

    found: dict[str, list[str]] = {}
    hashes = []
    for row, (given, model, ids, n) in VECTORS.items():
        kind: Any = (
            MixedLayers(tuple(LayerRows(*layer) for layer in given))
            if isinstance(given, list)
            else EqualLayers(*given)
        )
        keys = list(chunk_keys(kind, model, np.array(ids, np.int32), n))
        found[row] = [group.key(key).hex() for key in keys for group in kind.groups]
        chunk = ChunkShape(kind.groups[-1], n)
        blob = lanes_of(chunk)
        seal(chunk, kind.groups[-1].key(keys[0]), blob)
        hashes.append(hashlib.sha256(blob.tobytes()).hexdigest())
    return found | {"bytes of a chunk": [hashes[0], *hashes[-2:]]}


# Values and bytes of a block of each KV type, in the order of their numbers.
BLOCKS = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "iq4_nl": (32, 18),
}


def row_bytes_of(n_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Return the bytes of one token's K or V in one layer."""
    n_values, nbytes = BLOCKS[dtype]
    return n_kv_heads * head_dim // n_values * nbytes


def copy_hashed(data: Any, out: Any = None, n_zeros: int = 0) -> bytes:
    """Copy and hash as the library in C does."""
    import xxhash

    if out is not None:
        out[:] = data
    return xxhash.xxh3_128(bytes(data) + bytes(n_zeros)).digest()


def main() -> None:
    """Run without compiled modules, which another machine need not have."""
    import types

    for name in ("unimem", "unimem.kv", "unimem.kv.snapshot"):
        package = types.ModuleType(name)
        package.__path__ = [sys.argv[1] + name.removeprefix("unimem").replace(".", "/")]
        sys.modules[name] = package
    stand_in = types.ModuleType("unimem.kv.types")
    stand_in.__dict__.update(
        KV_TYPES=tuple(BLOCKS),
        DType=str,
        block_values=lambda name: BLOCKS[name][0],
        round_up=lambda n, step: -(-n // step) * step,
        row_bytes_of=row_bytes_of,
    )
    sys.modules["unimem.kv.types"] = stand_in
    hashing = types.ModuleType("unimem._core.hashing")
    hashing.__dict__.update(copy_hashed=copy_hashed)
    sys.modules["unimem._core.hashing"] = hashing
    print(json.dumps(make()))


if __name__ == "__main__":
    main()
