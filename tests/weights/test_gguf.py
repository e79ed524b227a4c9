"""The GGUF reader agrees with gguf-py and with ggml, and names the rule that a file breaks."""

from __future__ import annotations

import gc
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from support.files.every_type import (
    METADATA,
    SCALARS,
    TENSOR_TYPES,
    M,
    gguf,
    tensors,
    write_every_type,
)
from support.files.weight_bytes import mapped_bytes
from support.project.checkout import ROOT
from unimem.errors import GGUFError
from unimem.weights.gguf import tensor_type
from unimem.weights.opened import Weights, open_weights


def opened(tmp_path: Path, raw: bytes) -> Weights:
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    return open_weights(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    write_every_type(path)
    return path


def plain(value: Any) -> Any:
    """Lists of what may be arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(map(plain, value)) if isinstance(value, list) else value


def test_metadata_agrees(written: Path) -> None:
    reader = gguf.GGUFReader(written)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    theirs["nested"] = METADATA["nested"][0]  # gguf-py flattens what it reads
    with open_weights(written) as w:
        assert {key: plain(value) for key, value in w.metadata.items()} == theirs
        assert list(w.metadata) == list(theirs)


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


def check_tensors(path: Path) -> int:
    """The tensors are those that gguf-py reads; how many there are."""
    reader = gguf.GGUFReader(path)
    with open_weights(path) as w:
        assert list(w.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = w.tensors[theirs.name]
            assert ours.type.upper() == theirs.tensor_type.name
            assert ours.ggml_type == theirs.tensor_type
            assert (ours.ne, ours.shape) == (tuple(theirs.shape.tolist()), ours.ne[::-1])
            assert (ours.offset, ours.nbytes) == (theirs.data_offset, theirs.n_bytes)
            array = ours.as_array()
            assert array.tobytes() == theirs.data.tobytes()
            is_bf16 = ours.type == "bf16"  # which gguf-py has as bytes
            assert array.dtype.name == ("bfloat16" if is_bf16 else theirs.data.dtype.name)
            assert array.shape == (ours.shape if is_bf16 else theirs.data.shape)
        assert w.nbytes == sum(t.n_bytes for t in reader.tensors)
        return len(w.tensors)


def test_tensors_agree(tmp_path: Path, written: Path) -> None:
    assert check_tensors(written) == len(TENSOR_TYPES) + 1
    f32 = gguf.GGMLQuantizationType.F32
    small = {f"t{i}": (np.full(i + 1, i, "float32"), f32) for i in range(5)}
    for alignment in (8, 32, 64, 4096):
        gf.write_with_gguf_py(tmp_path / "aligned.gguf", {}, small, alignment)
        assert check_tensors(tmp_path / "aligned.gguf") == 5
    old = bytearray(written.read_bytes())
    assert old[4] == 3
    old[4] = 2  # the version before
    with opened(tmp_path, bytes(old)) as w, open_weights(written) as new:
        assert list(w.metadata) == list(new.metadata)
        assert w.tensors["scalar"].as_array() == new.tensors["scalar"].as_array() == 7


def test_tensor_types_are_those_of_ggml() -> None:
    ggml = pytest.importorskip("unimem_ggml.binding", reason="ggml (extra run) has the sizes")
    for n in range(ggml.N_TYPES):
        name, block_values = ggml.type_name(n), ggml.block_size(n)
        if block_values == 0:  # removed
            with pytest.raises(ValueError, match=f"tensor type {n}"):
                tensor_type(n)
        else:
            assert tensor_type(n) == (name, block_values, ggml.type_size(n))
    # As ggml 0.26 has it (ggml-common.h): a scale of 16 bits, and two bits for each of 64 values.
    assert tensor_type(42) == ("q2_0", 64, 2 + 64 // 4)
    for n in (43, 156):
        with pytest.raises(ValueError, match=f"tensor type {n}"):
            tensor_type(n)


def test_metadata_that_gguf_py_does_not_write(tmp_path: Path) -> None:
    deep: list[gf.Part] = gf.array(gf.INT8, 1, gf.values(gf.INT8, [-1]))
    expected: list[Any] = [-1]
    for _ in range(15):
        deep, expected = gf.array(gf.ARRAY, 1, deep), [expected]
    raw, _ = gf.join(
        gf.head(0, 3),
        gf.kv("deep", gf.ARRAY, deep),
        gf.kv("no numbers", gf.ARRAY, gf.array(gf.FLOAT64, 0)),
        gf.kv("none", gf.ARRAY, gf.array(gf.ARRAY, 0)),
    )
    with opened(tmp_path, raw) as w:
        numbers = w.metadata["no numbers"]
        assert isinstance(numbers, np.ndarray)
        assert (numbers.dtype.name, numbers.size) == ("float64", 0)
        assert (plain(w.metadata["deep"]), w.metadata["none"]) == (expected, [])
    with opened(tmp_path, gf.everything()) as w:
        assert w.metadata["strings"] == ["", "a", "ö"]
        assert plain(w.metadata["nested"]) == [[1, 2], ["x"], [[]]]
        for kind in gf.CODES:
            assert w.metadata[f"value.{kind}"] == 1
            assert plain(w.metadata[f"array.{kind}"]) == [0, 1, 1]
        shapes = {name: tensor.as_array().shape for name, tensor in w.tensors.items()}
        assert shapes == {"scalar": (), "one": (68,), "empty": (0, 4), "four": (2, 1, 3, 2)}
        text = w.metadata["raw string"]  # no UTF-8, and yet it comes back
        assert isinstance(text, str)
        assert text.encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_header_longer_than_the_first_reads(tmp_path: Path) -> None:
    numbers = np.arange(1_500_000, dtype="uint32")
    strings = [f"word {i}" for i in range(20_000)]
    raw, _ = gf.with_data(
        gf.head(1, 2),
        gf.kv("numbers", gf.ARRAY, gf.array(gf.UINT32, numbers.size, numbers.tobytes())),
        gf.kv("words", gf.ARRAY, gf.array(gf.STRING, len(strings), *map(gf.string, strings))),
        gf.tensor("t", (4,), gf.F32, 0),
        nbytes=16,
    )
    with opened(tmp_path, raw) as w:
        assert np.array_equal(w.metadata["numbers"], numbers)  # type: ignore[arg-type]
        assert w.metadata["words"] == strings
        assert w.tensors["t"].as_array().tobytes() == raw[-16:]


HUGE = [2**64 - 1, 2**63, 2**62, 2**61, 100]
RULES: dict[str, tuple[str, tuple[bytes, int | None]]] = {}


def rule(name: str, text: str, file: tuple[bytes, int | None]) -> None:
    """Add a file that breaks a rule, with the offset of the error."""
    assert RULES.setdefault(name, (text, file)) == (text, file)


def one_kv(name: str, text: str, *parts: gf.Part) -> None:
    rule(name, text, gf.join(gf.head(0, 1), *parts))


def one_tensor(name: str, text: str, *parts: gf.Part) -> None:
    rule(name, text, gf.with_data(gf.head(1, 0), *parts))


def shaped(name: str, ne: tuple[int, ...], kind: int, at: int, text: str) -> None:
    """Add a tensor of a shape and type; `at` is the index of the offending number."""
    sizes: list[gf.Part] = [gf.u32(len(ne)), *map(gf.u64, ne), gf.u32(kind)]
    sizes.insert(at, M)
    one_tensor(name, text, gf.string("t"), *sizes, gf.u64(0))


OVERFLOW = "a tensor's dimensions overflow"
WHOLE_BLOCKS = "a tensor's rows are not whole blocks of its type"
PASSES = "a tensor passes the end of the file"
OVERLAP = "two tensors overlap"
LONG_STRING = "a string is longer than the rest of the file"
LONG_ARRAY = "an array is longer than the rest of the file"
LONG_KEY = "a key is longer than 65535 bytes"
NOT_BOOL = "a bool is neither 0 nor 1"
METADATA_TYPE = "unknown type of metadata"
ALIGNMENT = "general.alignment is not 8 or a multiple of it"
TRUNCATED = "the file ends inside its header"
rule("empty", TRUNCATED, gf.join(M))
rule("magic", "the file does not begin with GGUF", gf.join(M, gf.head(0, 0, magic=b"GGML")))
BIG_ENDIAN = "the file is big-endian; only little-endian files are read"
rule("big-endian", BIG_ENDIAN, gf.join(b"GGUF", M, struct.pack(">IQQ", 3, 0, 0)))
for n in (0, 1, 4, 2**32 - 1):
    file = gf.join(b"GGUF", M, gf.u32(n), bytes(16))
    rule(f"version {n}", "the version is not 2 or 3", file)
for n in HUGE:
    start = gf.head(0, 0)
    file = gf.join(start[:8], M, gf.u64(n), gf.u64(0))
    rule(f"{n} tensors", "more tensors than the file can hold", file)
    rule(f"{n} keys", "more metadata than the file can hold", gf.join(start[:16], M, gf.u64(n)))
    for kind in range(13):
        value: list[gf.Part] = [gf.u32(kind), M, gf.u64(n), bytes(8)]
        one_kv(f"array of {n} of type {kind}", LONG_ARRAY, gf.kv("k", gf.ARRAY, *value))
for n, text in ((65535, LONG_STRING), *((n, LONG_KEY) for n in (65536, 2**63, 2**64 - 1))):
    one_kv(f"key of {n} bytes", text, M, gf.u64(n), bytes(50))
KEY: list[gf.Part] = [gf.u64(3), M, b"a\xed\xa0", gf.u32(gf.UINT8), b"\0"]
one_kv("key not UTF-8", "a key is not valid UTF-8", *KEY)
KEYS: list[gf.Part] = [
    *(gf.kv(key, gf.UINT8, b"\1") for key in "ab"),
    gf.u64(1),
    M,
    b"a",
    gf.u32(gf.UINT8),
    b"\1",
]
rule("key twice", "a key occurs twice", gf.join(gf.head(0, 3), *KEYS))
for n in (13, 255, 2**31, 2**32 - 1):
    one_kv(f"type of metadata {n}", METADATA_TYPE, gf.string("k"), M, gf.u32(n), bytes(8))
one_kv("type of items", METADATA_TYPE, gf.kv("k", gf.ARRAY, M, gf.array(13, 1, bytes(8))))
one_kv("bool", NOT_BOOL, gf.kv("k", gf.BOOL, M, b"\2"))
BOOLS = gf.array(gf.BOOL, 3, b"\0\1", M, b"\xff")
one_kv("bool in an array", NOT_BOOL, gf.kv("k", gf.ARRAY, BOOLS))
for n in (5, *HUGE):
    one_kv(f"string of {n} bytes", LONG_STRING, gf.kv("k", gf.STRING, M, gf.u64(n), b"text"))
STRINGS = gf.array(gf.STRING, 2, gf.string("a"), M, gf.u64(3), b"ab")
one_kv("string in an array", LONG_STRING, gf.kv("k", gf.ARRAY, STRINGS))
DEEP: list[gf.Part] = [*gf.array(gf.ARRAY, 1) * 16, M, gf.array(gf.UINT8, 1, b"\0")]
one_kv("depth", "arrays are nested deeper than 16", gf.kv("k", gf.ARRAY, *DEEP))
INNER = gf.array(gf.UINT8, 0)
MANY: list[gf.Part] = [*gf.array(gf.ARRAY, 4097), *INNER * 4096, M, *INNER]
one_kv("arrays in arrays", "more than 4096 arrays lie in arrays", gf.kv("k", gf.ARRAY, *MANY))
for at, n in ((16, 4096), (8, 65536)):
    many, text = gf.head(0, 0) + bytes(n * 30), f"more than {n} {'keys' if at == 16 else 'tensors'}"
    rule(text, text, gf.join(many[:at], M, gf.u64(n + 1), many[at + 8 :]))
for n in (0, 1, 2, 4, 12, 33, 2**32 - 1):
    one_kv(f"alignment {n}", ALIGNMENT, gf.kv("general.alignment", gf.UINT32, M, gf.u32(n)))
WRONG_TYPE: list[gf.Part] = [gf.string("general.alignment"), M, gf.u32(gf.INT32), gf.u32(32)]
one_kv("type of the alignment", "general.alignment is not a UINT32", *WRONG_TYPE)
shaped("5 dimensions", (1, 1, 1, 1, 1), gf.F32, 0, "a tensor has more than 4 dimensions")
for ne in ((2**63,), (2**64 - 1,), (2**32, 2**31), (2**62, 2), (0, 2**63), (1, 1, 1, 2**63)):
    shaped(f"dimensions {ne}", ne, gf.F32, len(ne), OVERFLOW)
shaped("bytes of a tensor", (2**63 - 1,), gf.I64, 1, OVERFLOW)
shaped("part of a block", (48,), gf.Q8_0, 1, WHOLE_BLOCKS)
shaped("scalar of blocks", (), gf.Q8_0, 0, WHOLE_BLOCKS)
MISALIGNED = "a tensor's offset is not a multiple of the alignment"
rule("misaligned", MISALIGNED, tensors(("a", 1, 0, False), ("b", 1, 16, True)))
for n in (224, 256, 288, 2**63, 2**64 - 32):
    rule(f"offset {n}", PASSES, tensors(("a", 9, n, True)))
rule("too long", PASSES, tensors(("a", 65, 0, True)))
BEHIND = "the file goes on behind its tensors"
TENSOR = [gf.string("t"), gf.u32(1), gf.u64(9), gf.u32(gf.F32), gf.u64(0)]
for n in (68, 4096):  # the first 36 bytes are the tensor's, and up to 31 may be padding
    raw = gf.with_data(gf.head(1, 0), *TENSOR, nbytes=n)[0]
    rule(f"{n} bytes", BEHIND, (raw, len(raw) - n + 36))
rule("no tensor", BEHIND, (gf.head(0, 0) + bytes(32), 24))
GAP = "the bytes before a tensor are no tensor's"
for at, end in ((4096, 0), (0, 32)):  # before the first tensor in the data, and between two
    SPARSE = gf.tensor("b", (9,), gf.F32, 8192), gf.tensor("a", (8,), gf.F32, at)
    raw = gf.with_data(gf.head(2, 0), *SPARSE, nbytes=8256)[0]
    rule(f"gap at {end}", GAP, (raw, len(raw) - 8256 + end))
EMPTY_KEY: list[gf.Part] = [M, gf.string(""), gf.u32(gf.UINT8), b"\0"]
one_kv("empty key", "a key is empty", *EMPTY_KEY)
INSIDE = tensors(("c", 1, 64, True), ("b", 8, 128, False), ("a", 17, 0, False))
rule("overlap", OVERLAP, INSIDE)
rule("same place", OVERLAP, tensors(("a", 1, 0, False), ("b", 1, 0, True)))
FIRST, SECOND = gf.tensor("a", (1,), gf.F32, 0), gf.tensor("a", (1,), gf.F32, 32)
TWICE = gf.with_data(gf.head(2, 0), FIRST, gf.u64(1), M, b"a", *SECOND[1:])
rule("tensor twice", "a tensor's name occurs twice", TWICE)
NOT_UTF8 = "a tensor's name is not valid UTF-8"
one_tensor("tensor not UTF-8", NOT_UTF8, gf.u64(1), M, b"\xff", FIRST[1:])
LONG_NAME = "a tensor's name is longer than 65535 bytes"
one_tensor("name of a tensor", LONG_NAME, M, gf.u64(65536), bytes(50))


def test_padding_behind_the_last_tensor(tmp_path: Path) -> None:
    for nbytes in (36, 37, 64, 67):
        raw, _ = gf.with_data(gf.head(1, 0), *TENSOR, nbytes=nbytes)
        with opened(tmp_path, raw) as w:
            assert w.tensors["t"].nbytes == 36


@pytest.mark.parametrize("alignment", [8, 24, 40, 48, 4104])
def test_alignments_that_are_no_powers_of_two(tmp_path: Path, alignment: int) -> None:
    second = -(-12 // alignment) * alignment
    rows = [gf.tensor("a", (3,), gf.F32, 0), gf.tensor("b", (2,), gf.I64, second)]
    key = gf.kv("general.alignment", gf.UINT32, gf.u32(alignment))
    raw, _ = gf.with_data(gf.head(2, 1), key, *rows, nbytes=second + 16, alignment=alignment)
    with opened(tmp_path, raw) as w:
        for tensor in w.tensors.values():
            array = tensor.as_array()
            assert array.flags.aligned
            assert array.ctypes.data == tensor.address
            assert array.tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]


def test_tensors_may_begin_at_pages(tmp_path: Path) -> None:
    """A gap of less than a page is padding, whatever the alignment is."""
    rows = gf.tensor("b", (8,), gf.F32, 4064 + 4096), gf.tensor("a", (8,), gf.F32, 4064)
    raw = gf.with_data(gf.head(2, 0), *rows, nbytes=8256 - 64)[0]
    with opened(tmp_path, raw) as w:
        assert w.tensors["b"].offset - w.tensors["a"].offset == 4096


@pytest.mark.parametrize("kind", [4, 31, 43, 156, 2**32 - 1])
def test_types_that_are_not_known(tmp_path: Path, kind: int) -> None:
    """The size of such a tensor is that of the gap to the next one; others are read as ever."""
    rows = [
        gf.tensor("last", (256,), kind, 96),
        gf.tensor("known", (8,), gf.F32, 64),
        gf.tensor("first", (7, 2), kind, 0),
        gf.tensor("empty", (7, 0), kind, 0),
    ]
    raw, _ = gf.with_data(gf.head(4, 0), *rows)
    with opened(tmp_path, raw) as w:
        assert {name: tensor.nbytes for name, tensor in w.tensors.items()} == {
            "last": 160, "known": 32, "first": 64, "empty": 0,
        }  # fmt: skip
        first = w.tensors["first"]
        assert (first.type, first.ggml_type, first.shape) == (f"type_{kind}", kind, (2, 7))
        assert first.as_array().tobytes() == raw[first.offset : first.offset + 64]
        assert w.by_type() == {f"type_{kind}": 224, "f32": 32}
        assert w._parts[0].file.header.unknown_types == dict.fromkeys(  # type: ignore[union-attr]
            ("last", "first", "empty"), kind
        )
        with pytest.raises(NotImplementedError, match=f"'first' is type_{kind}, which ggml 0.26"):
            first.dequantize()
        with um.stage(tmp_path / "file.gguf") as staged, open_weights(staged.path) as there:
            assert there.content_hash() == w.content_hash()


@pytest.mark.parametrize("name", RULES)
def test_rule(tmp_path: Path, name: str) -> None:
    text, (raw, mark) = RULES[name]
    assert mark is not None
    with pytest.raises(GGUFError) as caught:
        opened(tmp_path, raw)
    error = caught.value
    path = str(tmp_path / "file.gguf")
    assert str(error) == f"{path}: {text} (at byte {mark})"
    for told in (error, pickle.loads(pickle.dumps(error))):
        assert (told.rule, told.offset, told.path) == (text, mark, path)


def test_each_rule_in_the_manual() -> None:
    manual = (ROOT / "docs" / "gguf.md").read_text()
    rules = {text for text, _ in RULES.values()} | {"the header is longer than 256 MiB"}
    assert [text for text in sorted(rules) if f"`{text}`" not in manual] == []


def test_large_file_of_holes_is_not_read(tmp_path: Path) -> None:
    entry = gf.kv("k", gf.ARRAY, gf.u32(gf.UINT8), M, gf.u64(2**38))
    raw, mark = gf.join(gf.head(0, 1), entry)
    path = tmp_path / "file.gguf"
    path.write_bytes(raw)
    os.truncate(path, 2**39)
    with pytest.raises(GGUFError, match="the header is longer than 256 MiB") as caught:
        open_weights(path)
    assert caught.value.offset == mark


def test_a_large_header_keeps_no_extra_memory(tmp_path: Path) -> None:
    """It is read in pieces of 256 KiB and 16 MiB."""
    words = gf.u32(gf.UINT8) + gf.u64(300_000) + bytes(300_000)
    raw, _ = gf.with_data(
        gf.head(1, 1),
        gf.kv("words", gf.ARRAY, words),
        gf.tensor("t", (20 << 20,), gf.I8, 0),
        nbytes=20 << 20,
    )
    gc.collect()
    before = mapped_bytes()["other"]
    with opened(tmp_path, raw) as weights:
        header = weights._parts[0].file.header
        assert np.size(weights.metadata["words"]) == 300_000  # type: ignore[arg-type]
        kept = mapped_bytes()["other"] - before
        assert header.nbytes <= kept == header.copied_bytes
        assert kept <= max(2 << 20, header.nbytes + 4096)  # a huge page, if the kernel has them
    assert mapped_bytes()["other"] == before
