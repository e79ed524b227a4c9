"""The format of states: what is laid out is read back, and wrong headers are refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import unimem as um
from unimem.errors import SnapshotError
from unimem.kv.snapshot import describe, read_into
from unimem.kv.snapshot import format_states as fs
from unimem.kv.snapshot.format_rows import MAX_POSITION

PAGE = 4096
FACTS: dict[str, Any] = {
    "states": (um.LayerState((3, 5)), um.LayerState((7,), "bf16")),
    "every": None,
    "max_checkpoints": 2,
    "positions": (4, 9),
    "max_seq_len": 16,
    "batch": 2,
    "seq_len": 9,
    "next_position": 10,
    "alignment": PAGE,
    "chunk_bytes": PAGE,
}
BASE = 3 * PAGE
MADE = fs.new(FACTS, "tiny", np.arange(10, dtype=np.int32), "path", BASE)
HEAD = MADE._head().tobytes()


def read(head: bytes, nbytes: int = MADE.file_bytes) -> Any:
    values = fs.checked_header(head[: fs.HEADER.nbytes], nbytes, "path", BASE)
    return fs.checked_tables(values, np.frombuffer(head[fs.HEADER.nbytes :], np.uint8))


def sealed(head: bytes, **fields: int) -> bytes:
    raw, n = bytearray(head), fs.HEADER.nbytes
    for name, value in fields.items():
        struct.pack_into(fs.HEADER.codes[name], raw, fs.HEADER.offsets[name], value)
    at = fs.HEADER.offsets["tables_checksum"]
    struct.pack_into("<Q", raw, at, xxhash.xxh3_64_intdigest(raw[n:]))
    raw[:n] = fs.HEADER.seal(bytes(raw[:n]))
    return bytes(raw)


def test_states_are_read_as_they_were_laid_out() -> None:
    found = read(HEAD)
    for name, value in FACTS.items():
        assert getattr(found, name) == value, name
    assert (found.model, found.tokens.tolist(), found.base) == ("tiny", [*range(10)], BASE)
    # Each state of both streams is rounded up to 64 bytes: 2 * 15 * 4 and 2 * 7 * 2.
    assert found.state_bytes == 128 + 64
    assert found.tokens_offset == BASE + fs.HEADER.nbytes + 2 * 40 + 2 * 8 + 3 * 8
    assert [chunk.offset for chunk in found.chunks()] == [BASE + i * PAGE for i in (1, 2, 3)]
    assert [found.name_of(i) for i in (0, 2)] == ["the states", "the checkpoint of 9"]
    assert str(found) == "2 states of 192 B, 2 checkpoints"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"n_states": 0}, "n_states: expected 1 to 65536, got 0"),
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"n_checkpoints": 3}, "n_checkpoints: expected at most 2, got 3"),
        ({"max_checkpoints": 1 << 31}, "max_checkpoints: expected 0 to 2147483647"),
        ({"state_bytes": 0}, "state_bytes: expected 1 to"),
        ({"state_bytes": 256}, "state_bytes are not those of the states"),
        ({"seq_len": 11}, "seq_len: expected at most 10, got 11"),
        ({"max_seq_len": 0}, "max_seq_len: expected 1 to"),
        ({"flags": 7}, "flags: expected no bit but 2 and 4, got 7"),
        ({"alignment": 5000}, "alignment: expected a power of two"),
        ({"chunk_bytes": 5000}, "chunk_bytes: expected a multiple"),
        ({"reserved": 1}, "reserved: expected 0, got 1"),
        ({"lane_stride": 1}, "lane_stride: expected 4096, got 1"),
        ({"model_bytes": 1 << 16}, "model_bytes: expected at most 65535"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, int], rule: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        read(sealed(HEAD, **fields))
    assert caught.value.rule.startswith(rule)
    assert caught.value.offset == BASE + fs.HEADER.offsets[next(iter(fields))]


@pytest.mark.parametrize(
    ("at", "code", "value", "rule"),
    [
        (0, "<I", 3, "a state cannot be"),  # q8_0 has blocks
        (8 + 4 * 7, "<I", 1, "a state cannot be"),  # a dimension behind the last one
        (80, "<Q", 9, "expected rising positions"),
        (88, "<Q", 11, "expected rising positions"),
    ],
)
def test_a_wrong_table_is_refused(at: int, code: str, value: int, rule: str) -> None:
    raw = bytearray(HEAD)
    struct.pack_into(code, raw, fs.HEADER.nbytes + at, value)
    with pytest.raises(SnapshotError, match=rule):
        read(sealed(bytes(raw)))


def test_larger_states_than_a_cache_can_have_are_not_saved() -> None:
    with pytest.raises(ValueError, match=r"states of at most 16\.0 TiB"):
        fs.new(FACTS | {"max_checkpoints": 1 << 40}, None, None, "path")
    with pytest.raises(SnapshotError, match="cut off"):
        read(HEAD, MADE.file_bytes - 1)


def test_states_alone_have_room_for_any_tokens(tmp_path: Path) -> None:
    layers, file, most = [um.LayerState((4,))], tmp_path / "kv", MAX_POSITION
    with (
        um.KVCache(layers=layers, max_seq_len=16) as kv,
        um.KVCache(layers=layers, max_seq_len=16) as other,
    ):
        kv.reserve(17)
        kv.commit(17)
        kv.save(file)
        assert read_into(other, file).seq_len == other.seq_len == 17
        kv.reserve(most)
        kv.commit(most)
        with pytest.raises(ValueError, match=f"positions below {most}"):
            kv.save(file)
        assert describe(file).seq_len == 17
    with pytest.raises(ValueError, match=r"max_seq_len: expected at most 2\*\*32 - 1"):
        um.KVCache(layers=layers, max_seq_len=2**32)
