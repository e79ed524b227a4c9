"""The GGUF reader agrees with gguf-py and with ggml, and names the rule that a file breaks."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_files as gf
from every_type import (
    METADATA,
    SCALARS,
    TENSOR_TYPES,
    M,
    gguf,
    tensors,
    write_every_type,
)
from project import ROOT
from unimem._core.gguf import tensor_type
from unimem._core.status import counters, ledger
from unimem.errors import GGUFError
from unimem.weights.opened import Weights, open_weights


def opened(tmp_path: Path, raw: bytes) -> Weights:
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return open_weights(path)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        ours = ours.tolist()
    return bool(ours == theirs)


# ---- agreement with gguf-py ----


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    write_every_type(path)
    return path


def test_metadata_agrees(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    with open_weights(written) as w:
        theirs = [key for key in reader.fields if not key.startswith("GGUF.")]
        assert list(w.metadata) == theirs
        for key in theirs:
            if key == "nested":  # gguf-py flattens what it reads
                nested: Any = w.metadata[key]
                assert [part.tolist() for part in nested] == METADATA[key][0]
            else:
                assert same(w.metadata[key], reader.fields[key].contents()), key


def test_types_of_values(written: Path) -> None:
    with open_weights(written) as w:
        for key, (value, _) in SCALARS.items():
            assert type(w.metadata[key]) is type(value)
        for key, dtype in {"u8[]": "uint8", "i64[]": "int64", "true[]": "bool"}.items():
            numbers = w.metadata[key]
            assert isinstance(numbers, np.ndarray)
            assert numbers.dtype == dtype
            assert not numbers.flags.writeable
        assert isinstance(w.metadata["text[]"], list)


def test_tensors_agree(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    with open_weights(written) as w:
        assert list(w.tensors) == [t.name for t in reader.tensors]
        assert len(w.tensors) == len(TENSOR_TYPES) + 1
        for theirs in reader.tensors:
            ours = w.tensors[theirs.name]
            assert ours.type.upper() == theirs.tensor_type.name
            assert ours.ggml_type == theirs.tensor_type
            assert ours.ne == tuple(theirs.shape.tolist())
            assert ours.shape == ours.ne[::-1]
            assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
            array = ours.as_array()
            assert array.tobytes() == theirs.data.tobytes()
            if ours.type == "bf16":
                assert array.dtype.name == "bfloat16"
                assert array.shape == ours.shape
            else:
                assert array.dtype == theirs.data.dtype
                assert array.shape == theirs.data.shape
        assert w.nbytes == sum(t.n_bytes for t in reader.tensors)


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment_agrees(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "file.gguf"
    f32 = gguf.GGMLQuantizationType.F32
    tensors = {f"t{i}": (np.full(i + 1, i, "float32"), f32) for i in range(5)}
    gf.write_with_gguf_py(path, {}, tensors, alignment)
    with open_weights(path) as w:
        for theirs in gguf.GGUFReader(path).tensors:
            ours = w.tensors[theirs.name]
            assert ours.offset == theirs.data_offset
            assert ours.offset % alignment == 0
            assert np.array_equal(ours.as_array(), theirs.data)


def test_version_2_reads_as_version_3(tmp_path: Path, written: Path) -> None:
    raw = bytearray(written.read_bytes())
    assert raw[4] == 3
    raw[4] = 2
    with opened(tmp_path, bytes(raw)) as old, open_weights(written) as new:
        assert list(old.metadata) == list(new.metadata)
        assert old.tensors["scalar"].as_array() == new.tensors["scalar"].as_array() == 7


def test_tensor_types_are_those_of_ggml() -> None:
    ggml = pytest.importorskip("ggml", reason="ggml-python (extra run) has the sizes")
    for number in range(ggml.GGML_TYPE_COUNT):
        block_values = ggml.ggml_blck_size(number)
        if block_values == 0:  # removed
            with pytest.raises(ValueError, match=f"tensor type {number}"):
                tensor_type(number)
        else:
            assert tensor_type(number) == (
                ggml.ggml_type_name(number).decode(),
                block_values,
                ggml.ggml_type_size(number),
            )
    with pytest.raises(ValueError, match="tensor type"):
        tensor_type(ggml.GGML_TYPE_COUNT)


# ---- what gguf-py does not write ----


def test_nested_arrays_empty_and_deep(tmp_path: Path) -> None:
    deep: list[gf.Part] = gf.array(gf.INT8, 1, gf.values(gf.INT8, [-1]))
    for _ in range(15):
        deep = gf.array(gf.ARRAY, 1, deep)
    raw, _ = gf.join(
        gf.head(0, 3),
        gf.kv("deep", gf.ARRAY, deep),
        gf.kv("no numbers", gf.ARRAY, gf.array(gf.FLOAT64, 0)),
        gf.kv("none", gf.ARRAY, gf.array(gf.ARRAY, 0)),
    )
    with opened(tmp_path, raw) as w:
        value: Any = w.metadata["deep"]
        for _ in range(15):
            assert len(value) == 1
            value = value[0]
        assert value.tolist() == [-1]
        numbers = w.metadata["no numbers"]
        assert isinstance(numbers, np.ndarray)
        assert numbers.dtype == "float64"
        assert numbers.size == 0
        assert w.metadata["none"] == []


def test_everything_by_hand(tmp_path: Path) -> None:
    with opened(tmp_path, gf.everything()) as w:
        assert w.metadata["strings"] == ["", "a", "ö"]
        mixed: Any = w.metadata["nested"]
        assert mixed[0].tolist() == [1, 2]
        assert mixed[1] == ["x"]
        assert [part.tolist() for part in mixed[2]] == [[]]
        for kind in gf.CODES:
            assert w.metadata[f"value.{kind}"] == 1
            assert same(w.metadata[f"array.{kind}"], [0, 1, 1])
        assert w.tensors["scalar"].as_array().shape == ()
        assert w.tensors["empty"].as_array().shape == (0, 4)
        assert w.tensors["four"].as_array().shape == (2, 1, 3, 2)


def test_strings_that_are_not_utf8_come_back(tmp_path: Path) -> None:
    with opened(tmp_path, gf.everything()) as w:
        text = w.metadata["raw string"]
        assert isinstance(text, str)
        assert text.encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_header_longer_than_the_first_reads(tmp_path: Path) -> None:
    numbers = np.arange(1_500_000, dtype="uint32")
    strings = [f"word {i}" for i in range(200_000)]
    raw, _ = gf.with_data(
        gf.head(1, 2),
        gf.kv("numbers", gf.ARRAY, gf.array(gf.UINT32, numbers.size, numbers.tobytes())),
        gf.kv("words", gf.ARRAY, gf.array(gf.STRING, len(strings), *map(gf.string, strings))),
        gf.tensor("t", (4,), gf.F32, 0),
    )
    with opened(tmp_path, raw) as w:
        assert same(w.metadata["numbers"], numbers.tolist())
        assert w.metadata["words"] == strings
        assert w.tensors["t"].as_array().tobytes() == raw[-256:-240]


# ---- rules ----

HUGE = [2**64 - 1, 2**63, 2**62, 2**61, 100]


def one_kv(*parts: gf.Part) -> tuple[bytes, int | None]:
    return gf.join(gf.head(0, 1), *parts)


def one_tensor(*parts: gf.Part) -> tuple[bytes, int | None]:
    return gf.with_data(gf.head(1, 0), *parts)


RULES: list[tuple[str, str, tuple[bytes, int | None]]] = [
    ("empty", "the file ends inside its header", gf.join(M)),
    ("magic", "the file does not begin with GGUF", gf.join(M, gf.head(0, 0, magic=b"GGML"))),
    (
        "big-endian",
        "the file is big-endian; only little-endian files are read",
        gf.join(b"GGUF", M, struct.pack(">IQQ", 3, 0, 0)),
    ),
    *[
        (
            f"version {version}",
            "the version is not 2 or 3",
            gf.join(b"GGUF", M, gf.u32(version), gf.u64(0), gf.u64(0)),
        )
        for version in (0, 1, 4, 2**32 - 1)
    ],
    *[
        (
            f"{n} tensors",
            "more tensors than the file can hold",
            gf.join(b"GGUF", gf.u32(3), M, gf.u64(n), gf.u64(0)),
        )
        for n in HUGE
    ],
    *[
        (
            f"{n} keys",
            "more metadata than the file can hold",
            gf.join(b"GGUF", gf.u32(3), gf.u64(0), M, gf.u64(n)),
        )
        for n in HUGE
    ],
    *[
        (
            f"key of {n} bytes",
            "a key is longer than 65535 bytes"
            if n > 65535
            else "a string is longer than the rest of the file",
            one_kv(M, gf.u64(n), bytes(50)),
        )
        for n in (65535, 65536, 2**63, 2**64 - 1)
    ],
    (
        "key not UTF-8",
        "a key is not valid UTF-8",
        one_kv(gf.u64(3), M, b"a\xed\xa0", gf.u32(gf.UINT8), b"\0"),
    ),
    (
        "key twice",
        "a key occurs twice",
        gf.join(
            gf.head(0, 3),
            gf.kv("a", gf.UINT8, b"\1"),
            gf.kv("b", gf.UINT8, b"\1"),
            gf.u64(1),
            M,
            b"a",
            gf.u32(gf.UINT8),
            b"\1",
        ),
    ),
    *[
        (
            f"type of metadata {kind}",
            "unknown type of metadata",
            one_kv(gf.string("k"), M, gf.u32(kind), bytes(8)),
        )
        for kind in (13, 255, 2**31, 2**32 - 1)
    ],
    (
        "type of items",
        "unknown type of metadata",
        one_kv(gf.string("k"), gf.u32(gf.ARRAY), M, gf.array(13, 1, bytes(8))),
    ),
    ("bool", "a bool is neither 0 nor 1", one_kv(gf.kv("k", gf.BOOL, M, b"\2"))),
    (
        "bool in an array",
        "a bool is neither 0 nor 1",
        one_kv(gf.kv("k", gf.ARRAY, gf.array(gf.BOOL, 3, b"\0\1", M, b"\xff"))),
    ),
    *[
        (
            f"string of {n} bytes",
            "a string is longer than the rest of the file",
            one_kv(gf.kv("k", gf.STRING, M, gf.u64(n), b"text")),
        )
        for n in (5, *HUGE)
    ],
    (
        "string in an array",
        "a string is longer than the rest of the file",
        one_kv(gf.kv("k", gf.ARRAY, gf.array(gf.STRING, 2, gf.string("a"), M, gf.u64(3), b"ab"))),
    ),
    *[
        (
            f"array of {n} of type {kind}",
            "an array is longer than the rest of the file",
            one_kv(gf.kv("k", gf.ARRAY, gf.u32(kind), M, gf.u64(n), bytes(8))),
        )
        for n in HUGE
        for kind in range(13)
    ],
    (
        "depth",
        "arrays are nested deeper than 16",
        one_kv(
            gf.kv("k", gf.ARRAY, gf.array(gf.ARRAY, 1) * 16, M, gf.array(gf.UINT8, 1, b"\0")),
        ),
    ),
    *[
        (
            f"alignment {alignment}",
            "general.alignment is not a power of two of at least 8",
            one_kv(gf.kv("general.alignment", gf.UINT32, M, gf.u32(alignment))),
        )
        for alignment in (0, 1, 2, 4, 24, 2**32 - 1)
    ],
    (
        "type of the alignment",
        "general.alignment is not a UINT32",
        one_kv(gf.string("general.alignment"), M, gf.u32(gf.INT32), gf.u32(32)),
    ),
    (
        "5 dimensions",
        "a tensor has more than 4 dimensions",
        one_tensor(gf.string("t"), M, gf.u32(5), bytes(52)),
    ),
    *[
        (
            f"dimensions {ne}",
            "a tensor's dimensions overflow",
            one_tensor(
                gf.string("t"),
                gf.u32(len(ne)),
                *[gf.u64(n) for n in ne[:-1]],
                M,
                gf.u64(ne[-1]),
                gf.u32(gf.F32),
                gf.u64(0),
            ),
        )
        for ne in ((2**63,), (2**64 - 1,), (2**32, 2**31), (2**62, 2), (0, 2**63), (1, 1, 1, 2**63))
    ],
    (
        "bytes of a tensor",
        "a tensor's dimensions overflow",
        one_tensor(gf.string("t"), gf.u32(1), M, gf.u64(2**63 - 1), gf.u32(gf.I64), gf.u64(0)),
    ),
    *[
        (
            f"type of a tensor {kind}",
            "unknown type of a tensor" if kind > 41 else "a tensor's type was removed from ggml",
            one_tensor(gf.string("t"), gf.u32(1), gf.u64(256), M, gf.u32(kind), gf.u64(0)),
        )
        for kind in (4, 5, 31, 32, 33, 36, 37, 38, 42, 1000, 2**31, 2**32 - 1)
    ],
    (
        "part of a block",
        "a tensor's rows are not whole blocks of its type",
        one_tensor(gf.string("t"), gf.u32(1), M, gf.u64(48), gf.u32(gf.Q8_0), gf.u64(0)),
    ),
    (
        "scalar of blocks",
        "a tensor's rows are not whole blocks of its type",
        one_tensor(gf.string("t"), M, gf.u32(0), gf.u32(gf.Q8_0), gf.u64(0)),
    ),
    (
        "misaligned",
        "a tensor's offset is not a multiple of the alignment",
        tensors(("a", 1, 0, False), ("b", 1, 16, True)),
    ),
    *[
        (
            f"offset {offset}",
            "a tensor passes the end of the file",
            tensors(("a", 9, offset, True)),
        )
        for offset in (224, 256, 288, 2**63, 2**64 - 32)
    ],
    ("too long", "a tensor passes the end of the file", tensors(("a", 65, 0, True))),
    (
        "overlap",
        "two tensors overlap",
        tensors(("c", 1, 64, True), ("b", 8, 128, False), ("a", 17, 0, False)),
    ),
    ("same place", "two tensors overlap", tensors(("a", 1, 32, False), ("b", 1, 32, True))),
    (
        "tensor twice",
        "a tensor's name occurs twice",
        gf.with_data(
            gf.head(2, 0),
            gf.tensor("a", (1,), gf.F32, 0),
            gf.u64(1),
            M,
            gf.tensor("a", (1,), gf.F32, 32)[0][8:],
            *gf.tensor("a", (1,), gf.F32, 32)[1:],
        ),
    ),
    (
        "tensor not UTF-8",
        "a tensor's name is not valid UTF-8",
        one_tensor(gf.u64(1), M, b"\xff", gf.tensor("", (1,), gf.F32, 0)[1:]),
    ),
    (
        "name of a tensor",
        "a tensor's name is longer than 65535 bytes",
        one_tensor(M, gf.u64(65536), bytes(50)),
    ),
]


@pytest.mark.parametrize(("rule", "file"), [pytest.param(r, f, id=name) for name, r, f in RULES])
def test_rule(tmp_path: Path, rule: str, file: tuple[bytes, int | None]) -> None:
    raw, mark = file
    assert mark is not None
    with pytest.raises(GGUFError) as caught:
        opened(tmp_path, raw)
    error = caught.value
    assert (error.rule, error.offset) == (rule, mark)
    assert error.path == str(tmp_path / "file.gguf")
    assert str(error) == f"{error.path}: {rule} (at byte {mark})"
    again = pickle.loads(pickle.dumps(error))
    assert (again.rule, again.offset, again.path) == (rule, mark, error.path)


def test_each_rule_in_the_manual() -> None:
    manual = (ROOT / "docs" / "gguf.md").read_text()
    rules = {rule for _, rule, _ in RULES} | {"the header is longer than 256 MiB"}
    assert [rule for rule in sorted(rules) if f"`{rule}`" not in manual] == []


def test_file_cut_anywhere(tmp_path: Path) -> None:
    raw = gf.everything()
    with opened(tmp_path, raw) as w:
        header_nbytes = max(t.offset for t in w.tensors.values()) - 192
    for n in range(header_nbytes - 64):
        with pytest.raises(GGUFError) as caught:
            opened(tmp_path, raw[:n])
        assert caught.value.offset is not None
        assert caught.value.offset <= n
    for n in range(header_nbytes, len(raw) - 256 + 216, 7):
        with pytest.raises(GGUFError, match="a tensor passes the end of the file"):
            opened(tmp_path, raw[:n])


def test_large_file_of_holes_is_not_read(tmp_path: Path) -> None:
    raw, mark = one_kv(gf.kv("k", gf.ARRAY, gf.u32(gf.UINT8), M, gf.u64(2**38)))
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    os.truncate(path, 2**39)
    with pytest.raises(GGUFError, match="the header is longer than 256 MiB") as caught:
        open_weights(path)
    assert caught.value.offset == mark


# ---- memory ----


def many_keys(n: int) -> bytes:
    """As many keys as fit into a file: the tables are largest in proportion."""
    return gf.join(gf.head(0, n), *[gf.kv(f"{i:x}", gf.UINT8, b"\0") for i in range(n)])[0]


def many_tensors(n: int) -> bytes:
    return gf.with_data(gf.head(n, 0), *[gf.tensor(f"{i:x}", (0,), 0, 0) for i in range(n)])[0]


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(many_keys(200_000), id="keys"),
        pytest.param(many_keys(200_000)[:-1], id="keys, cut"),
        pytest.param(many_tensors(100_000), id="tensors"),
        pytest.param(gf.head(2**60, 2**60), id="counts"),
        pytest.param(gf.head(0, 10**6) + bytes(14 * 10**6), id="count that fits, of nothing"),
        pytest.param(gf.everything(), id="everything"),
    ],
)
def test_memory_is_a_small_multiple_of_the_file(tmp_path: Path, raw: bytes) -> None:
    gc.collect()  # what other tests left lying
    before, mapped = counters(), ledger()["other"]["mapped_bytes"]
    with contextlib.suppress(GGUFError):
        opened(tmp_path, raw).close()
    allocated = counters()["allocated_bytes"] - before["allocated_bytes"]
    assert allocated <= 10 * len(raw) + 4096
    assert ledger()["other"]["mapped_bytes"] == mapped


def test_of_a_large_header_no_more_is_kept_than_it_has(tmp_path: Path) -> None:
    """It is read in pieces of 256 KiB and 16 MiB."""
    words = gf.u32(gf.UINT8) + gf.u64(300_000) + bytes(300_000)
    raw, _ = gf.join(gf.head(0, 1), gf.kv("words", gf.ARRAY, words))
    gc.collect()
    before = ledger()["other"]["mapped_bytes"]
    with opened(tmp_path, raw + bytes(20 << 20)) as weights:
        assert np.size(weights.metadata["words"]) == 300_000  # type: ignore[arg-type]
        kept = ledger()["other"]["mapped_bytes"] - before
        assert len(raw) <= kept == weights._parts[0].file.header.copied_bytes
        assert kept <= max(2 << 20, len(raw) + 4096)  # a huge page, where the kernel has them
    assert ledger()["other"]["mapped_bytes"] == before


def test_many_long_names_that_differ_late(tmp_path: Path) -> None:
    n = 20_000
    names = [f"{'x' * 400}{i:06}" for i in range(n)]
    raw, _ = gf.join(
        gf.head(0, n + 1),
        *[gf.kv(name, gf.UINT8, b"\0") for name in names],
        gf.u64(len(names[0])),
        M,
        names[0].encode(),
        gf.u32(gf.UINT8),
        b"\0",
    )
    with pytest.raises(GGUFError, match="a key occurs twice"):
        opened(tmp_path, raw)
