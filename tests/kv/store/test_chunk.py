"""Chunks of KV: identities are the same everywhere, and each byte is checked."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from support.files import chunk_vectors
from support.files.chunk_vectors import VECTORS, make
from support.project.checkout import ROOT
from unimem.kv.store.chunk import (
    HEADER_BYTES,
    ChunkShape,
    EqualLayers,
    LayerRows,
    MixedLayers,
    chunk_keys,
    find_fault,
    find_fault_alone,
    seal,
)

PAGE = (ROOT / "docs/store.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", VECTORS)
def test_identities_are_those_of_the_page(row: str) -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    assert make()[row] == re.findall(r"[0-9a-f]{64}", line)


def test_the_bytes_of_a_chunk_are_those_of_the_page() -> None:
    sentences = re.findall(r"SHA-256 of\s+(?:its|the) file[^|]*?`[0-9a-f]{64}`", PAGE)
    assert make()["bytes of a chunk"] == [re.findall(r"[0-9a-f]{64}", s)[0] for s in sentences]


def test_processes_with_different_hash_seeds_agree() -> None:
    program = [sys.executable, *map(str, (chunk_vectors.__file__, ROOT / "src/unimem"))]
    for seed in ("1", "2"):
        done = subprocess.run(
            program,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == make()


@pytest.mark.parametrize(
    ("kind", "model", "first"),
    [
        (EqualLayers(3, 4, 64, "f16", "f16"), "m", 0),
        (EqualLayers(2, 8, 64, "f16", "f16"), "m", 0),
        (EqualLayers(2, 4, 32, "f16", "f16"), "m", 0),
        (EqualLayers(2, 4, 64, "bf16", "bf16"), "m", 0),
        (EqualLayers(2, 4, 64, "f16", "bf16"), "m", 0),
        (EqualLayers(2, 4, 64, "bf16", "f16"), "m", 0),
        (MixedLayers(2 * (LayerRows(4, 64, "f16", "f16"),)), "m", 0),
        (MixedLayers((LayerRows(4, 64, "f16", "f16"), LayerRows(4, 64, "f16", "f16", 8))), "m", 0),
        (EqualLayers(2, 4, 64, "f16", "f16", v_head_dim=32), "m", 0),
        (EqualLayers(2, 4, 64, "f16", "f16", v_head_dim=0), "m", 0),
        (EqualLayers(2, 4, 64, "f16", "f16"), "n", 0),
        (EqualLayers(2, 4, 64, "f16", "f16"), "m", 1),
    ],
)
def test_each_input_changes_all_identities(kind: Any, model: str, first: int) -> None:
    def keys(kind: Any, model: str, first: int) -> set[bytes]:
        ids = np.arange(12, dtype=np.int32)
        ids[0] = first
        return set(chunk_keys(kind, model, ids, 4))

    assert len(keys(kind, model, first)) == 3
    assert not keys(kind, model, first) & keys(EqualLayers(2, 4, 64, "f16", "f16"), "m", 0)


def test_equal_sizes_of_k_and_v_keep_the_identity() -> None:
    layer = LayerRows(4, 64, "f16", "f16", 8)
    assert layer._replace(v_head_dim=64).text == layer.text
    assert layer._replace(v_head_dim=0).text != layer.text
    equal = EqualLayers(2, 4, 64, "f16", "f16")
    assert equal._replace(v_head_dim=64).text == equal.text


CHUNK = ChunkShape(EqualLayers(1, 1, 8, "f16", "f16").groups[0], 5)
KEY = bytes(range(32))


def sealed() -> np.ndarray:
    blob = np.full(CHUNK.nbytes, 7, np.uint8)
    for lane in CHUNK.lanes(blob):
        lane[:] = np.arange(lane.size).reshape(lane.shape)
    seal(CHUNK, KEY, blob)
    return blob


def test_each_flipped_bit_is_found() -> None:
    blob = sealed()
    faults = [find_fault(CHUNK, KEY, blob), find_fault_alone(KEY, blob, {})]
    assert faults == [None, None]
    for bit in [*range(0, 8 * 128), *range(8 * HEADER_BYTES - 8, 8 * CHUNK.nbytes, 41)]:
        blob[bit // 8] ^= 1 << bit % 8
        assert find_fault(CHUNK, KEY, blob) is not None, f"bit {bit}"
        assert find_fault_alone(KEY, blob, CHUNK.rows) is not None, f"bit {bit}"
        blob[bit // 8] ^= 1 << bit % 8
    assert find_fault(CHUNK, KEY, blob) is None
    assert find_fault_alone(KEY, blob, {"n_tokens": 6}) is not None


def test_a_salt_changes_all_identities() -> None:
    kind, ids = EqualLayers(2, 4, 64, "f16", "f16"), np.arange(8, dtype=np.int32)
    found = [key for salt in (b"", b"a", b"b") for key in chunk_keys(kind, "m", ids, 4, salt)]
    assert len({*found}) == 6
    # As docs/store.md says, by another function.
    text = f"unimem.kv-chunk/1\n{kind.text}\nm".encode()
    root = hmac.new(b"a", text, "sha256").digest()
    assert found[2] == hashlib.sha256(root + ids[:4].tobytes()).digest()


def test_a_swapped_chunk_is_noticed() -> None:
    fault = find_fault(CHUNK, bytes(32), sealed())
    assert fault is not None
    assert "another chunk" in fault


def test_a_mixture_of_two_chunks_is_noticed() -> None:
    """Two writers of one place leave it, or a reader finds it beside a writer."""
    other, other_key = np.zeros(CHUNK.nbytes, np.uint8), KEY[::-1]
    seal(CHUNK, other_key, other)
    unnoticed = []
    for end in [*range(33, 97), HEADER_BYTES, HEADER_BYTES + 64]:
        for begin, rest in ((sealed(), other), (other, sealed())):
            mixed = np.concatenate([begin[:end], rest[end:]])
            if None in (find_fault(CHUNK, key, mixed) for key in (KEY, other_key)):
                unnoticed.append(end)
    assert unnoticed == []


@pytest.mark.parametrize("dims", [(16, 0), (12, 4), (4, 12)])
def test_a_chunk_of_other_heads_is_noticed(dims: tuple[int, int]) -> None:
    """The same number of bytes and the same identity, in other lanes."""
    k, v = dims
    group = EqualLayers(1, 1, k, "f16", "f16", v_head_dim=v).groups[0]
    other = ChunkShape(group, CHUNK.n_tokens)
    assert (other.nbytes, other.data_bytes) == (CHUNK.nbytes, CHUNK.data_bytes)
    assert [lane.shape for lane in other.lanes(sealed())] == [(5, 2 * k), (5, 2 * v)]
    assert find_fault(other, KEY, sealed()) == "its bytes are not those that were written"
