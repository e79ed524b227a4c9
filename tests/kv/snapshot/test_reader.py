"""Reading snapshots: saved caches are restored, and errors name the fault of a file."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unimem as um
from support.files import snapshot_bytes as sb
from support.files.snapshot_bytes import Mode, by_kind, by_mode, file, header, path, refused
from support.files.snapshot_files import append, cache, rows, small_chunks
from support.processes.warm_python import run_script
from support.project.checkout import ROOT
from unimem.errors import SnapshotError
from unimem.kv import snapshot

__all__ = ["file", "path"]

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file of 40 tokens with ids and a model."""
    path = tmp_path_factory.mktemp("snapshot") / "session"
    with cache(40) as kv:
        kv.save(path, tokens=range(40), model="tiny")
    return path.read_bytes()


# ---- restored caches ----


@by_mode
@by_kind
@pytest.mark.parametrize(("dtype", "batch"), [("f32", 1), ("f16", 3), ("bf16", 1), ("q8_0", 3)])
def test_a_saved_cache_is_restored(
    kind: str, batch: int, dtype: str, mode: Mode, path: Path
) -> None:
    with cache(50, batch=batch, dtype=dtype, **sb.KINDS[kind]) as kv:
        for n in (64, 13):  # trimmed tokens are not saved, and positions stay
            kv.trim_to(n)
            kv.save(path, tokens=range(50), model="tiny")
            assert snapshot.describe(path).seq_len == kv.seq_len <= n
            restored = um.KVCache.restore(
                path, mode=mode, tokens=range(60), model="tiny", verify=True
            )
            with restored:
                for name in """
                    n_layers n_kv_heads head_dim max_seq_len batch dtype window seq_len
                    next_position
                """.split():
                    assert getattr(restored, name) == getattr(kv, name)
                # A mapped cache continues in memory that grows.
                assert restored.grow == (kv.grow or (mode == "map" and kv.window is None))
                assert restored.n_rows == kv.n_rows or kv.window is None
                assert rows(restored) == rows(kv) != []
                with kv.copy() as goes_on:
                    for one in (goes_on, restored):
                        append(one, 9, seed=1)
                    assert (restored.seq_len, restored.next_position) == (goes_on.seq_len, 59)
                    assert rows(restored) == rows(goes_on)


@by_mode
@by_kind
@pytest.mark.parametrize("position", [0, 50])
def test_an_empty_cache_comes_back(position: int, kind: str, mode: Mode, path: Path) -> None:
    with cache(position, **sb.KINDS[kind]) as kv:
        kv.trim_to(0)
        kv.save(path, tokens=range(position))
        with um.KVCache.restore(path, mode=mode, tokens=range(position), verify=True) as restored:
            assert (restored.seq_len, restored.next_position) == (0, position)
            append(restored, 3)
            assert (restored.seq_len, restored.next_position) == (3, position + 3)


@by_mode
def test_lanes_of_several_chunks_are_restored(
    mode: Mode, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    with cache(500, 512, dtype="f32", batch=2) as kv:
        kv.save(path)
        assert len(snapshot.describe(path).checksums) == 8 * 32
        with um.KVCache.restore(path, mode=mode, verify=True) as restored:
            assert rows(restored) == rows(kv)


def test_a_restored_cache_is_saved_again(file: Path, tmp_path: Path) -> None:
    with um.KVCache.restore(file) as mapped:
        append(mapped, 5, seed=2)
        mapped.save(file)  # over the file that it is mapped from
        with um.KVCache.restore(file, mode="copy") as again:
            assert rows(again) == rows(mapped)
            assert again.seq_len == 45


def test_writes_to_a_mapped_cache_do_not_change_the_file(file: Path) -> None:
    before = file.read_bytes()
    with um.KVCache.restore(file) as mapped:
        for layer in range(2):
            for array in mapped.layer(layer):
                array[:] = 0
        assert not any(any(lane) for lane in rows(mapped))
        mapped.verify()
    assert file.read_bytes() == before


@by_mode
def test_trimmed_and_cut_caches_come_back(mode: Mode, path: Path) -> None:
    """A cache cut by its budget, an endless ring, and a cache that keeps its first tokens."""
    with cache(10, 2**32 - 1, budget_bytes=1 << 16) as kv:
        kv.save(path)
        assert snapshot.describe(path).max_seq_len == kv.n_rows == 128
        with um.KVCache.restore(path, mode=mode) as restored:
            assert (restored.max_seq_len, restored.seq_len) == (128, 10)
            assert rows(restored) == rows(kv)
    with um.KVCache(2, 64, 128, 2**32 - 1, window=8, dtype="f32") as kv:
        append(kv, 20)
        kv.save(path)
        with um.KVCache.restore(path, mode=mode) as restored:
            assert (restored.max_seq_len, restored.window) == (2**32 - 1, 8)
            assert rows(restored) == rows(kv)
    with cache(40) as kv:
        kv.trim_to(5, keep_first=3)
        kv.save(path)
        assert "8 tokens up to position 39," in str(snapshot.describe(path))
        with um.KVCache.restore(path, mode=mode) as restored:
            assert rows(restored) == rows(kv)


def test_wrong_options_of_restore_are_named(file: Path) -> None:
    with um.KVCache.restore(file, mode="copy", pages="4k") as kv:
        assert kv.granted.pages == "4k"
    with pytest.raises(ValueError, match="pages, lock not accepted with mode='map'"):
        um.KVCache.restore(file, pages="4k", lock=True)
    with pytest.raises(ValueError, match="mode: expected one of map, copy, got 'read'"):
        um.KVCache.restore(file, mode="read")  # type: ignore[arg-type]
    accepted = "mode, tokens, model, verify, pages, numa, lock, warm, strict"
    for mode, name in itertools.product(sb.MODES, ("foo", "budget_bytes", "grow")):
        with pytest.raises(TypeError, match=rf"expected {accepted}; got {name}$"):
            um.KVCache.restore(file, mode=mode, **{name: 1})  # type: ignore[arg-type]


# ---- the format ----


def test_a_description_has_all_facts(file: Path, whole: bytes) -> None:
    assert file.read_bytes() == whole  # equal caches make equal files
    facts = snapshot.describe(file)
    assert (facts.path, facts.model, facts.dtype, facts.window) == (str(file), "tiny", "f16", None)
    assert facts.tokens is not None
    assert facts.tokens.dtype == np.int32
    assert facts.tokens.tolist() == list(range(40))
    assert not facts.tokens.flags.writeable
    assert facts.file_bytes == file.stat().st_size
    assert str(facts) == (
        "2 layers of 2 heads of 32 f16; 40 tokens up to position 39, at most 64; model 'tiny'; "
        "with token ids; 36.0 KiB"
    )
    with cache(40, window=16, batch=2) as kv:
        kv.save(file)
    assert str(snapshot.describe(file)) == (
        "2 layers of 2 heads of 32 f16, 2 streams; 16 tokens up to position 39, window of 16; "
        "no model named; without token ids; 36.0 KiB"
    )
    with cache(40, order="head") as kv:
        kv.save(file)
    assert str(snapshot.describe(file)).startswith("2 layers of 2 heads of 32 f16, rows by head; ")


def test_the_example_of_the_document_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/snapshots.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.S)
    done = run_script(example, folder=tmp_path, strict=True)
    assert done.stderr == ""
    assert done.stdout == (
        "5 tokens restored, the next is at position 5\n"
        "2 layers of 4 heads of 64 f16; 5 tokens up to position 4, at most 256; model 'tiny'; "
        "with token ids; 20.0 KiB\n"
    )


def test_check_reads_all_and_returns_the_description(file: Path) -> None:
    assert str(snapshot.check(file)) == str(snapshot.describe(file))
    raw = file.read_bytes()
    file.write_bytes(sb.flipped(raw, len(raw) - 1))
    assert snapshot.describe(file).seq_len == 40
    with pytest.raises(SnapshotError, match="checksum does not match in v of layer 1") as caught:
        snapshot.check(file)
    assert caught.value.path == str(file)
    file.write_bytes(sb.flipped(raw, 50))
    with pytest.raises(SnapshotError, match="the header's checksum"):
        snapshot.check(file)
    with cache(0) as kv:
        kv.save(file)
    assert snapshot.check(file).seq_len == 0


# ---- tokens and model ----


def test_another_model_is_refused(file: Path) -> None:
    big = "expected a snapshot of model 'big', got one of "
    error = refused(file, f"{big}model 'tiny'", model="big")
    assert file.read_bytes()[error.offset :].startswith(b"tiny\0")
    with cache(3) as kv:
        kv.save(file)
    refused(file, f"{big}no model", model="big")
    refused(file, "got a snapshot without token ids", tokens=range(40))


@pytest.mark.parametrize(
    ("tokens", "at"),
    [([*range(39)], 39), ([], 0), ([0, 1, 2, 4], 3), ([*range(20), 7, *range(21, 100)], 20)],
    ids=str,
)
def test_tokens_without_the_same_beginning_are_refused(
    file: Path, tokens: list[int], at: int
) -> None:
    rule = rf"its 40 tokens are no prefix of the {len(tokens)} given, from token {at} on"
    error = refused(file, rule, tokens=tokens)
    assert error.offset is not None
    assert np.frombuffer(file.read_bytes(), "<i4", 1, error.offset) == at


@pytest.mark.parametrize("model", [None, "tiny"])
@pytest.mark.parametrize("tokens", [None, range(40), np.arange(50, dtype=np.uint64)])
def test_tokens_and_model_are_compared_only_on_request(
    file: Path, model: str | None, tokens: Any
) -> None:
    with um.KVCache.restore(file, model=model, tokens=tokens) as kv:
        assert kv.seq_len == 40


# ---- damaged files ----


def test_every_flipped_byte_before_the_data_is_found(file: Path) -> None:
    raw = file.read_bytes()
    with file.open("r+b", buffering=0) as target:
        for at in range(header(raw)["data_offset"]):
            os.pwrite(target.fileno(), bytes([raw[at] ^ 1 << at % 8]), at)
            with pytest.raises(SnapshotError):
                snapshot.describe(file)
            os.pwrite(target.fileno(), raw[at : at + 1], at)
    assert file.read_bytes() == raw


def test_checks_of_the_data_find_a_flipped_bit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    with cache(40) as kv:  # two chunks a lane, the second mostly padding
        kv.save(path)
    raw = path.read_bytes()
    data, stride = header(raw)["data_offset"], header(raw)["lane_stride"]
    for at in range(data, len(raw), 1021):
        path.write_bytes(sb.flipped(raw, at, at % 8))
        lane, chunk = (at - data) // stride, (at - data) // 4096 * 4096 + data
        where = f"checksum does not match in {'kv'[lane % 2]} of layer {lane // 2}; "
        assert refused(path, where, verify=True).offset == chunk
        with pytest.raises(SnapshotError, match=where):
            um.KVCache.restore(path, mode="copy")
        with um.KVCache.restore(path) as mapped, pytest.raises(SnapshotError, match=where):
            mapped.verify()
    with um.KVCache.restore(path, mode="copy", verify=False) as unchecked:
        assert unchecked.seq_len == 40
    with cache(40, window=16) as kv:  # a ring is checked when it is read
        kv.save(path)
    path.write_bytes(sb.flipped(path.read_bytes(), data))
    refused(path, "checksum does not match in k of layer 0")


def test_a_file_of_another_length_is_refused(file: Path) -> None:
    raw = file.read_bytes()
    data, whole = header(raw)["data_offset"], len(raw)
    for n in (1, 7, 8, 9, 100, sb.HEADER_BYTES - 1):
        file.write_bytes(raw[:n])
        assert refused(file, rf"cut off inside its header: it has {n} bytes").offset == n
    for n in (sb.HEADER_BYTES, data - 1, data, data + 5000, whole - 1):
        file.write_bytes(raw[:n])
        assert refused(file, f"is cut off: it has {n} of {whole} bytes").offset == n
    file.write_bytes(raw + b"\0")
    rule = f"longer than it should be: {whole + 1} bytes, not {whole}"
    assert refused(file, rule).offset == whole


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"GGUF" + bytes(1000), b"UNIMEMKX" + bytes(1000)])
def test_another_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)
    assert refused(tmp_path / "file", "no snapshot of unimem").offset == 0


def test_errors_are_complete_and_can_be_pickled(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    error = refused(file, "is cut off")
    assert isinstance(error, um.FormatError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is um.SnapshotError
    assert str(again) == str(error)
    assert str(error) == (
        f"{file}: the file is cut off: it has 36863 of 36864 bytes; the file is damaged, take "
        "another copy of it or save anew (at byte 36863)"
    )


def test_another_version_is_refused_first(file: Path) -> None:
    raw = file.read_bytes()
    for version, rule in (
        (4, "version 4 is newer than this unimem, which reads versions 1 to 3: update"),
        (0, "expected version 1, got 0"),
    ):
        file.write_bytes(raw[:8] + struct.pack("<I", version) + raw[12:])
        assert refused(file, rule).offset == 8


# Impossible fields in a header with a right checksum, by the field that the error names.
MOST = 2**32 - 1
NONSENSE: dict[str, list[dict[str, int]]] = {
    "header_bytes": [{"header_bytes": 145}],
    "file_bytes": [{"file_bytes": 2**64 - 1}],
    "data_offset": [
        {"data_offset": 2**63},
        {"data_offset": 0},
        {"next_position": 2**62 - 1},
        {"alignment": 8192},
        {"model_bytes": 65535},
    ],
    "lane_stride": [{"lane_stride": 4096}],
    "row_bytes": [
        {"row_bytes": 127},
        {"n_kv_heads": 3},
        {"dtype": 0},
        {"flags": 14},
        {"head_dim": MOST, "n_kv_heads": MOST},
    ],
    "chunk_bytes": [{"chunk_bytes": 0}, {"chunk_bytes": 5000}, {"chunk_bytes": 128 << 20}],
    "seq_len": [
        {"seq_len": 41},
        {"seq_len": 65, "next_position": 65},
        {"seq_len": 2**64 - 1},
        {"next_position": 39},
        {"window": 16},
    ],
    "next_position": [{"next_position": 2**62}],
    "max_seq_len": [
        {"max_seq_len": 0},
        {"max_seq_len": 2**32},
        {"max_seq_len": 2**62},
        {"window": 64, "max_seq_len": 2**32},
    ],
    "window": [{"window": 65}, {"window": 64, "flags": 7}],
    "spare_rows": [{"spare_rows": 1}, *({"window": 64, "spare_rows": 2**n} for n in (61, 36))],
    "n_layers": [{"n_layers": 0}, {"n_layers": MOST}, {"batch": MOST, "n_layers": MOST}],
    "batch": [{"batch": 0}],
    "n_kv_heads": [{"n_kv_heads": 0}],
    "head_dim": [
        {"head_dim": 0},
        {"head_dim": 33, "dtype": 3},
        {"flags": 38},
        *({"head_dim": dim, "flags": 22} for dim in (32 | 32 << 16, 16 << 16)),
    ],
    "dtype": [
        {"dtype": 9},
        {"dtype": 3 | 4 << 16},
        {"dtype": 1 | 10 << 16},
        {"dtype": 9 | 2 << 16},
    ],
    "flags": [{"flags": 64 + 6}, {"flags": 128}],
    "model_bytes": [{"flags": 4}, {"model_bytes": 65536}],
    "alignment": [{"alignment": 2048}, {"alignment": 12288}, {"alignment": 2 << 20}],
}


@pytest.mark.parametrize("named", NONSENSE)
def test_each_impossible_field_is_named(named: str, file: Path) -> None:
    raw = file.read_bytes()
    for values in NONSENSE[named]:
        file.write_bytes(sb.with_fields(raw, **values))
        with pytest.raises(SnapshotError) as caught:
            snapshot.describe(file)
        assert caught.value.rule.startswith(f"{named}: expected "), values
        assert caught.value.offset == sb.FIELDS[named][0]


@given(
    fields=st.dictionaries(
        st.sampled_from(sorted(set(sb.FIELDS) - {"magic", "header_checksum"})),
        st.sampled_from([0, 1, 2, 3, 31, 4096, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]),
        min_size=1,
        max_size=4,
    ),
    change=st.integers(-2, 2),
)
@settings(deadline=None)
def test_no_header_makes_the_reader_take_much_memory(
    fields: dict[str, int], change: int, whole: bytes
) -> None:
    """Even if the header's checksum is right, as in a malicious file."""
    values = {}
    for name, value in fields.items():
        bits = 8 * struct.calcsize(sb.FIELDS[name][1])
        values[name] = (value + change * (value > 1)) % (1 << bits)
    with tempfile.NamedTemporaryFile() as file:
        file.write(sb.with_fields(whole, **values))
        file.flush()
        tracemalloc.start()
        try:
            with contextlib.suppress(SnapshotError):
                assert snapshot.describe(file.name).file_bytes == len(whole)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 20 * len(whole)


def test_wrong_token_ids_and_names_are_refused(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    tokens = sb.HEADER_BYTES + 8 * 4
    name = tokens + 4 * 40
    assert raw[name : name + 4] == b"tiny"
    file.write_bytes(sb.with_tables(bytes(raw[: name + 2] + b"\xff" + raw[name + 3 :])))
    assert refused(file, "the model's name is not valid UTF-8").offset == name + 2
    raw[tokens + 4 * 7 : tokens + 4 * 8] = struct.pack("<i", -5)
    file.write_bytes(sb.with_tables(bytes(raw)))
    assert refused(file, "the id of a token is negative").offset == tokens + 4 * 7
