"""Saving: the file is as its document says, and wrong arguments save nothing."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import unimem as um
from support.contracts.kv_model import rows_of_pages
from support.files import snapshot_bytes as sb
from support.files.snapshot_bytes import file, header, path
from support.files.snapshot_files import cache, rows, small_chunks
from unimem.kv import snapshot

__all__ = ["file", "path"]  # fixtures

pytestmark = pytest.mark.usefixtures("gives_memory_back")


def test_the_file_is_as_documented(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 1 << 16)
    page = mmap.PAGESIZE
    with cache(900, 1000, batch=3) as kv:
        kv.trim_to(700)
        kv.save(path, tokens=range(100, 1000), model="größer")
        raw = path.read_bytes()
        lane_bytes = 700 * 128
        stride = -(-lane_bytes // page) * page
        chunks = -(-stride // (1 << 16))
        tables_end = sb.HEADER_BYTES + 8 * 12 * chunks + 4 * 900 + len("größer".encode())
        data = -(-tables_end // page) * page
        assert header(raw) | {"tables_checksum": 0, "header_checksum": 0} == {
            **{"magic": b"UNIMEMKV", "version": 1, "header_bytes": sb.HEADER_BYTES},
            **{"file_bytes": data + 12 * stride, "data_offset": data, "lane_stride": stride},
            **{"row_bytes": 128, "chunk_bytes": 1 << 16, "alignment": page, "model_bytes": 8},
            **{"seq_len": 700, "next_position": 900, "max_seq_len": 1000},
            **{"window": 0, "spare_rows": 0, "dtype": 1, "flags": 6, "batch": 3},
            **{"n_layers": 2, "n_kv_heads": 2, "head_dim": 32},
            **{"tables_checksum": 0, "header_checksum": 0},
        }
        assert len(raw) == data + 12 * stride
        assert sb.with_tables(raw) == raw
        sums = np.frombuffer(raw, "<u8", 12 * chunks, sb.HEADER_BYTES)
        tokens = np.frombuffer(raw, "<i4", 900, sb.HEADER_BYTES + sums.nbytes)
        assert tokens.tolist() == list(range(100, 1000))
        assert raw[tables_end - 8 : tables_end].decode() == "größer"
        assert not any(raw[tables_end:data])
        for lane, expected in enumerate(rows(kv)):
            at = data + lane * stride
            assert raw[at : at + stride] == expected + bytes(stride - lane_bytes)
            for i in range(chunks):
                piece = raw[at + (i << 16) : at + min((i + 1) << 16, stride)]
                assert xxhash.xxh3_64_intdigest(piece) == sums[lane * chunks + i]


KINDS_IN_THE_HEADER: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"dtype": "f32"}, {"dtype": 0, "row_bytes": 256}),
    ({"dtype": "bf16"}, {"dtype": 2, "row_bytes": 128}),
    ({"dtype": "q8_0"}, {"dtype": 3, "row_bytes": 68}),
    ({"grow": True}, {"flags": 1}),
    ({"order": "head", "batch": 3}, {"flags": 8, "row_bytes": 64, "batch": 3, "n_kv_heads": 2}),
    ({"window": 8}, {"window": 8, "seq_len": 8, "next_position": 12}),
    ({"window": 8, "spare_rows": 3}, {"spare_rows": rows_of_pages(128, 11) - 8}),
]


@pytest.mark.parametrize(("options", "fields"), KINDS_IN_THE_HEADER, ids=str)
def test_the_header_tells_kinds_of_caches_apart(
    options: dict[str, Any], fields: dict[str, int], path: Path
) -> None:
    with cache(12, **options) as kv:
        kv.save(path)
    got = header(path.read_bytes())
    assert {name: got[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("dims", "options", "match"),
    [
        ((2, 64, 128, 3 << 26), {"grow": True, "dtype": "f32"}, r"most 16\.0 TiB, .* 24\.0 TiB"),
        ((1, 1, 1, 1), {"batch": 2**19 + 1}, "most 1048576 lanes .* and this cache 1048578"),
    ],
    ids=["bytes", "lanes"],
)
def test_a_cache_beyond_the_format_is_not_saved(
    dims: tuple[int, ...], options: dict[str, Any], match: str, path: Path
) -> None:
    with um.KVCache(*dims, **options) as kv, pytest.raises(ValueError, match=match):
        kv.save(path)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (range(39), ValueError, "expected the ids of all 40 tokens up to next_position, got 39"),
        (range(41), ValueError, "got 41"),
        ([True] * 40, TypeError, "expected integers, got bool"),
        ([*range(39), -1], ValueError, r"expected ids from 0 to 2\*\*31 - 1, got -1 to 38"),
    ],
)
def test_wrong_tokens_are_not_saved(
    file: Path, tokens: Any, error: type[Exception], message: str
) -> None:
    before = file.read_bytes()
    with cache(40) as kv, pytest.raises(error, match=message):
        kv.save(file, tokens=tokens)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_a_wrong_model_is_not_saved(file: Path) -> None:
    with cache(40) as kv:
        with pytest.raises(ValueError, match="expected at most 65535 bytes of UTF-8, got 65536"):
            kv.save(file, model="ä" * 32768)
        with pytest.raises(TypeError, match="model: expected a str, got bytes"):
            kv.save(file, model=b"tiny")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="path: expected the path of a file"):
            kv.save(7)  # type: ignore[arg-type]
        kv.save(file, model="ä" * 32767)
    assert snapshot.describe(file).model == "ä" * 32767
