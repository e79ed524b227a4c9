"""Chunks of KV: identities that are the same everywhere, and bytes of which each one counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from project import ROOT
from unimem.kv.chunk_format import HEADER_BYTES, ChunkShape, Kind, chunk_keys, find_fault, seal

PAGE = (ROOT / "docs/store.md").read_text(encoding="utf-8")
# From a row of the page to what it is of.
VECTORS = {
    "2 layers, 4 heads of 64, `f16`": (Kind(2, 4, 64, "f16"), "tiny", range(8), 4),
    "2 layers, 4 heads of 64, `q8_0`": (Kind(2, 4, 64, "q8_0"), "tiny", range(8), 4),
    "32 layers, 8 heads of 128, `bf16`": (
        *(Kind(32, 8, 128, "bf16"), "modèle"),
        *([1, 15043, 29892, 2147483647], 2),
    ),
    "22 layers, 4 heads of 64, `f16`": (Kind(22, 4, 64, "f16"), "", range(256), 256),
}


@pytest.mark.parametrize("row", VECTORS)
def test_identities_are_those_of_the_page(row: str) -> None:
    kind, model, tokens, n = VECTORS[row]
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    ids = np.array(tokens, np.int32)
    found = [key.hex() for key in chunk_keys(kind, model, ids, n)]
    assert found == re.findall(r"[0-9a-f]{64}", line)


def test_processes_with_different_hash_seeds_agree() -> None:
    script = (
        "import numpy as np; from unimem.kv.chunk_format import *;"
        "print([k.hex() for k in chunk_keys(Kind(2, 4, 64, 'f16'), 'm', np.arange(8), 4)])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(re.findall(r"[0-9a-f]{64}", found.pop())) == 2


@pytest.mark.parametrize(
    ("kind", "model", "first"),
    [
        (Kind(3, 4, 64, "f16"), "m", 0),
        (Kind(2, 8, 64, "f16"), "m", 0),
        (Kind(2, 4, 32, "f16"), "m", 0),
        (Kind(2, 4, 64, "bf16"), "m", 0),
        (Kind(2, 4, 64, "f16"), "n", 0),
        (Kind(2, 4, 64, "f16"), "m", 1),
    ],
)
def test_whatever_the_bytes_depend_on_changes_all_identities(
    kind: Kind, model: str, first: int
) -> None:
    def keys(kind: Kind, model: str, first: int) -> set[bytes]:
        ids = np.arange(12, dtype=np.int32)
        ids[0] = first
        return set(chunk_keys(kind, model, ids, 4))

    assert len(keys(kind, model, first)) == 3
    assert not keys(kind, model, first) & keys(Kind(2, 4, 64, "f16"), "m", 0)


CHUNK = ChunkShape(Kind(1, 1, 8, "f16"), 5)
KEY = bytes(range(32))


def sealed() -> np.ndarray:
    blob = np.full(CHUNK.nbytes, 7, np.uint8)
    CHUNK.lanes(blob)[:] = np.arange(CHUNK.data_bytes).reshape(2, -1)
    seal(CHUNK, KEY, blob)
    return blob


def test_each_flipped_bit_is_found() -> None:
    blob = sealed()
    assert find_fault(CHUNK, KEY, blob) is None
    for bit in [*range(0, 8 * 128), *range(8 * HEADER_BYTES - 8, 8 * CHUNK.nbytes, 41)]:
        blob[bit // 8] ^= 1 << bit % 8
        assert find_fault(CHUNK, KEY, blob) is not None, f"bit {bit}"
        blob[bit // 8] ^= 1 << bit % 8
    assert find_fault(CHUNK, KEY, blob) is None


def test_another_chunk_is_found() -> None:
    fault = find_fault(CHUNK, bytes(32), sealed())
    assert fault is not None
    assert "another chunk" in fault
