"""The safetensors reader agrees with the format's library, and names the rule a file breaks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import unimem as um
from support.files import safetensors_files as sf
from support.files.mutations import file_of
from support.project.checkout import ROOT
from unimem.errors import SafetensorsError
from unimem.weights.safetensors import SafetensorsHeader

MANUAL = (ROOT / "docs" / "safetensors.md").read_text()


@pytest.fixture(scope="module")
def reference() -> Any:
    return pytest.importorskip(
        "safetensors", reason="safetensors (extra test) is the other side of the comparison"
    )


def header_of(raw: bytes, path: str = "model.safetensors") -> SafetensorsHeader:
    with file_of(raw) as (fd, _):
        return SafetensorsHeader(fd, len(raw), path)


@contextmanager
def opened(tmp_path: Path, raw: bytes) -> Iterator[um.Weights]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with um.open_weights(path) as w:
        yield w


def check_same(raw: bytes, reference: Any) -> int:
    """The header says of a file what the library says; how many tensors there are."""
    header = header_of(raw)
    theirs = dict(reference.deserialize(raw))
    names = header.tensor_names()
    assert set(names) == set(theirs)
    for name, i in names.items():
        ne, kind, _, offset, nbytes = header.tensor(i)
        assert kind.upper() == theirs[name]["dtype"]
        assert list(ne[::-1]) == theirs[name]["shape"]
        assert raw[offset : offset + nbytes] == theirs[name]["data"]
    return len(names)


def test_dtypes_are_those_of_the_library(reference: Any) -> None:
    with pytest.raises(reference.SafetensorError) as caught:
        reference.deserialize(sf.marked("{'t':{'dtype':^'X'}}")[0])
    assert set(re.findall("`([A-Z0-9_]+)`", str(caught.value))) - {"X"} == set(sf.BITS)


NUMPY = ["float64", "float32", "float16", "int64", "uint64", "int32", "uint32", "int16", "uint16"]
NUMPY += ["int8", "uint8", "bool", "complex64"]


def test_files_of_the_numpy_writer(tmp_path: Path, reference: Any) -> None:
    from safetensors.numpy import save

    arrays: dict[str, Any] = {name: np.arange(30).reshape(5, 3, 2).astype(name) for name in NUMPY}
    arrays |= {"scalar": np.array(7, np.float32), "empty": np.zeros((3, 0), np.int16)}
    arrays |= {"größer \U0001f600": np.ones(3, np.uint8), "": np.ones(1, np.int8)}
    metadata = {"format": "np", "note": 'a "quote"\n\U0001f600'}
    raw = save(arrays, metadata)
    assert check_same(raw, reference) == len(arrays)
    with opened(tmp_path, raw) as w:
        assert dict(w.metadata) == metadata
        assert w.nbytes == sum(array.nbytes for array in arrays.values())
        for name, array in arrays.items():
            ours = w.tensors[name].as_array()
            assert (ours.dtype, ours.shape) == (array.dtype, array.shape)
            assert ours.tobytes() == array.tobytes()
            assert (ours.flags.aligned, ours.flags.writeable) == (True, False)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F4"])
@pytest.mark.parametrize("n", [33, 64])
def test_as_many_dimensions_as_numpy_has(tmp_path: Path, dtype: str, n: int) -> None:
    for pad in (0, 1, 2, 3):  # aligned, and not
        raw = sf.write({"t": (dtype, (1,) * (n - 1) + (2,))}, pad=pad)
        with opened(tmp_path, raw) as w:
            assert w.tensors["t"].as_array().ndim == n


TORCH = {
    **{"bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"},
    **{"float8_e8m0fnu": "f8_e8m0", "float8_e4m3fnuz": "f8_e4m3fnuz"},
    "float8_e5m2fnuz": "f8_e5m2fnuz",
}


@pytest.mark.slow
def test_files_of_the_torch_writer(tmp_path: Path, reference: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch has the types that NumPy has not")
    from safetensors.torch import save

    data = torch.arange(24, dtype=torch.uint8)
    tensors = {name: data.clone().view(getattr(torch, name)).reshape(3, -1) for name in TORCH}
    tensors["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    raw = save(tensors)
    assert check_same(raw, reference) == len(tensors)
    with opened(tmp_path, raw) as w:
        for name, kind in TORCH.items():
            array = w.tensors[name].as_array()
            assert (w.tensors[name].type, array.dtype.name) == (kind, name)
            assert array.shape == tuple(tensors[name].shape)
            assert array.tobytes() == bytes(range(24))


def test_no_tensors(reference: Any) -> None:
    null = '{"__metadata__": null }'
    for text in ("{}", '{"__metadata__":{}}', null, "{ } \n\t\r ", "{}     "):
        raw = sf.file(text)
        assert check_same(raw, reference) == 0
        header = header_of(raw)
        assert (header.nbytes, header.data_offset) == (len(raw), len(raw))
        assert header.keys() == header.tensor_names() == {}
        assert header.by_type() == {}


def test_any_order(reference: Any) -> None:
    """Fields and tensors may have any order, with spaces wherever JSON has them."""
    text = """{ "b" : {"data_offsets" : [ 2 , 6 ], "shape":[\t], "dtype":"F32"} ,
    "empty":{"shape":[0],"dtype":"I64","data_offsets":[2,2]},
    "a":{"dtype":"U8","data_offsets":[0,2],"shape":[2\r\n]},"__metadata__" : { "k" : "v" } } """
    raw = sf.file(text, 6)
    assert check_same(raw, reference) == 3
    header = header_of(raw)
    assert list(header.tensor_names()) == ["b", "empty", "a"]
    assert header.keys() == {"k": 0}


def test_header(reference: Any) -> None:
    raw = sf.everything()
    assert check_same(raw, reference) == len(sf.BITS) + 4
    header = header_of(raw)
    assert header.nbytes == header.data_offset == 8 + int.from_bytes(raw[:8], "little")
    assert header.keys() == {"format": 0, "": 1, "ü\t\0": 2}
    assert [header.value(i) for i in range(3)] == ["np", "", "\U0001f600 / \\"]
    assert header.raw_value(0) == b"str\0np"
    assert header.raw_value(2) == b"str\0\xf0\x9f\x98\x80 / \\"
    names = header.tensor_names()
    assert header.tensor(names["scalar"])[:3] == ((), "f32", 0)
    assert header.tensor(names["empty"])[:3] == ((5, 0, 3), "bf16", 30)
    assert header.tensor(names["half bytes"])[0::2] == ((3, 2), None, 3)
    assert sum(nbytes for _, nbytes, _ in header.by_type().values()) == len(raw) - header.nbytes
    assert header.by_type()["f4"][1] == 4 + 3
    for what in (header.value, header.raw_value, header.tensor):
        for index in (-1, 100):
            with pytest.raises(IndexError, match=f"{index} of"):
                what(index)
    # Longer than the first read, and than the file.
    tensors = {f"model.layers.{i}.weight": ("F16", (1, i % 3)) for i in range(3000)}
    large = sf.write(tensors, {"long": "x" * 100_000 + "\n"})
    assert check_same(large, reference) == 3000
    assert header_of(large).value(0) == "x" * 100_000 + "\n"
    with file_of(raw) as (fd, path), pytest.raises(OSError, match=f"shorter.*{path}"):
        SafetensorsHeader(fd, len(raw) + 1, path)


def test_ggml_types() -> None:
    from unimem.weights.gguf import tensor_type

    header = header_of(sf.everything())
    found = {kind: number for _, kind, number, *_ in map(header.tensor, range(len(sf.BITS)))}
    assert set(found) == {dtype.lower() for dtype in sf.BITS}
    numbers = {kind: number for kind, number in found.items() if number is not None}
    assert sorted(numbers) == ["bf16", "f16", "f32", "f64", "i16", "i32", "i64", "i8"]
    for kind, number in numbers.items():
        assert tensor_type(number) == (kind, 1, sf.BITS[kind.upper()] // 8)


def test_fingerprint() -> None:
    raw = sf.write({"t": ("U8", (8,))}, {"k": "v"})
    found = header_of(raw).fingerprint()
    assert re.fullmatch("[0-9a-f]{32}", found)
    assert header_of(raw[:-1] + b"x").fingerprint() == found
    other_shape = sf.write({"t": ("U8", (9,))}, {"k": "v"})
    unpadded = sf.write({"t": ("U8", (8,))}, {"k": "v"}, pad=0)
    changes = (raw.replace(b'"k"', b'"K"'), raw.replace(b'"U8"', b'"I8"'), other_shape, unpadded)
    for changed in changes:
        assert header_of(changed).fingerprint() != found


def test_arrays_of_every_dtype(tmp_path: Path) -> None:
    raw = sf.everything()
    with opened(tmp_path, raw) as w:
        for tensor in w.tensors.values():
            array = tensor.as_array()
            assert array.tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]
            assert array.nbytes == tensor.nbytes
            bits = sf.BITS[tensor.type.upper()]
            if bits >= 8:
                assert array.shape == tensor.shape
                assert array.dtype.itemsize * 8 == bits
            else:
                assert array.dtype == np.uint8
        assert w.tensors["t.F4"].as_array().shape == (2, 1, 2)
        assert w.tensors["t.F6_E2M3"].as_array().shape == (2, 1, 3)
        assert w.tensors["half bytes"].as_array().shape == (3,)


@pytest.mark.parametrize("shift", range(1, 8))
def test_data_at_any_byte(tmp_path: Path, shift: int) -> None:
    """Without padding of the header, NumPy reads unaligned data, and says so."""
    raw = sf.everything(pad=(shift - header_of(sf.everything(pad=0)).nbytes) % 8)
    n_unaligned = 0
    with opened(tmp_path, raw) as w:
        for tensor in w.tensors.values():
            array = tensor.as_array()
            assert array.tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]
            assert array.ctypes.data == tensor.address
            if array.size:
                aligned = tensor.address % array.dtype.alignment == 0
                assert array.flags.aligned == aligned
                n_unaligned += not aligned
    assert n_unaligned > 0


class Case(NamedTuple):
    """A file that breaks a rule; `row` names it in the manual if the library reads it."""

    rule: str
    raw: bytes
    mark: int
    row: str | None = None


RULES: dict[str, Case] = {}


def case(name: str, rule: str, header: str, data: int = 0, row: str | None = None) -> None:
    """Add a file with a marked header."""
    raw_case(name, rule, *sf.marked(header, data), row)


def raw_case(name: str, rule: str, raw: bytes, mark: int, row: str | None = None) -> None:
    assert name not in RULES
    RULES[name] = Case(rule, raw, mark, row)


def each(
    name: str, rule: str, texts: Iterable[str], header: str = "?", data: int = 0, row: str = ""
) -> None:
    """Add the same rule with each of these texts in the place of the header's question mark."""
    for text in texts:
        case(f"{name} {text}", rule, header.replace("?", text), data, row or None)


def u8(begin: int, end: int, mark: str = "") -> str:
    """Return a tensor of bytes; its offsets may be marked."""
    return f"{{'dtype':'U8','shape':[{end - begin}],'data_offsets':{mark}[{begin},{end}]}}"


def fields(dtype: str = "'U8'", shape: str = "[1]", data_offsets: str = "[0,1]") -> str:
    return f"{{'t':{{'dtype':{dtype},'shape':{shape},'data_offsets':{data_offsets}}}}}"


def pair(first: str, second: str) -> str:
    return "{'a':" + first + ",'b':" + second + "}"


TRUNCATED = "the file ends inside its header"
NOT_BEGUN = "the header does not begin with {"
NOT_UTF8 = "the header is not valid UTF-8"
NO_METADATA = "__metadata__ is not an object"
TOO_MANY = "more than 65536 keys of `__metadata__`"
MANY_KEYS = "{'__metadata__':{" + ",".join(f"'{i}':''" for i in range(65536)) + ",^'more':''}}"
NAME_TWICE = "a tensor's name occurs twice"
NO_OBJECT = "a tensor is not an object"
NO_STRING = "a tensor's dtype is not a string"
HALF_BYTES = "a tensor's values are not whole bytes"
INTEGER = "a dimension or offset is not an unsigned integer"
OVERFLOW = "a tensor's dimensions overflow"
PASSES = "a tensor passes the end of the file"
BYTES = "a tensor has not the bytes of its shape and dtype"
HOLE = "the bytes before a tensor are no tensor's"
OVERLAP = "two tensors overlap"
TOO_MUCH = "the file goes on behind its tensors"
TOO_LONG = "the header is longer than 100000000 bytes"
ONE = u8(0, 1)

raw_case("empty", TRUNCATED, b"", 0)
raw_case("7 bytes", TRUNCATED, bytes(7), 0)
raw_case("length", TRUNCATED, sf.file("{}", length=3), 0)
for n in (100_000_001, 2**32, 2**63, 2**64 - 8, 2**64 - 1):
    raw_case(f"length {n}", TOO_LONG, sf.file("{}", length=n), 0)
case("no header", NOT_BEGUN, "^")
case("array", NOT_BEGUN, "^[]")
case("space", NOT_BEGUN, "^ {}", row="a header with spaces before its JSON")
case("mark of byte order", NOT_BEGUN, "^\ufeff{}")
each("behind", "the header goes on behind its JSON", ["{} ^{}", "{}^}", "{}^\0"])
raw_case("UTF-8", NOT_UTF8, sf.file(b'{"__metadata__":{"\xed\xa0\x80":""}}'), 26)
raw_case("UTF-8 cut", NOT_UTF8, sf.file(b'{"\xe2\x82'), 10)
JSON = """{^
{^,}
{^1:2}
{'a'^}
{'a^
{'a':^}
{'__metadata__':{},^}
{'__metadata__':{'a':'b',^}}
{'__metadata__':{'a':'b'}^]
{'__metadata__':{'a':^b}}
{'t':{'shape':[^,1]}}
{'t':{'shape':[1,^]}}
{'t':{'shape':[1 ^2]}}
{'t':{'shape':[^+1]}}
{'t':{'shape':[0^x1]}}
{'t':{'shape':[1],^}}
{'t':{'data_offsets':[0,1^
{'t':{'dtype':^U8}}"""
each("JSON", "the header is not valid JSON", JSON.split("\n"))
for n in range(32):
    header = "{'__metadata__':{'a^" + chr(n) + "':''}}"
    case(f"control character {n}", "a string has a control character", header)
ESCAPES, KEY = ["\\x41", "\\u12", "\\u12g4", "\\ ", "\\u+041"], "{'__metadata__':{'a':'^?'}}"
each("escape", "a string has an escape that JSON does not know", ESCAPES, KEY)
HALVES = ["^\\ud800", "^\\udc00\\ud800", "^\\ud800\\u0041", "\\ud83d\\ude00^\\ude00"]
each("surrogates", "a string has half of a surrogate pair", HALVES, "{'__metadata__':{'?':''}}")
case("metadata nul", NO_METADATA, "{'__metadata__':^nul}")
case("metadata array", NO_METADATA, "{'__metadata__':^[]}")
case("metadata twice", "__metadata__ occurs twice", "{'__metadata__':{},^'__metadata__':{}}")
VALUES = ["1", "null", "true", "{}", "['a']"]
each("value", "a value of __metadata__ is not a string", VALUES, "{'__metadata__':{'a':^?}}")
KEYS = ["'a':'',^'a':''", "'a':'','b':'',^'\\u0061':''", "'':'',^'':''"]
SAME_KEY = "the same key of `__metadata__` twice"
case("many keys", "more than 65536 keys of __metadata__", MANY_KEYS, row=TOO_MANY)
each("key", "a key of __metadata__ occurs twice", KEYS, "{'__metadata__':{?}}", row=SAME_KEY)
case("name twice", NAME_TWICE, pair(u8(0, 1), u8(1, 2) + ",^'\\u0061':" + u8(2, 3)), 3)
EMPTY = "{'a':" + u8(0, 0) + ",^'a':" + u8(0, 0) + "}"
case("empty tensors twice", NAME_TWICE, EMPTY, row="a tensor twice, with the same place")
AS_ARRAY = "{'t':^['U8',[1],[0,1]]}"
case("array of fields", NO_OBJECT, AS_ARRAY, 1, "a tensor as an array of fields")
case("string", NO_OBJECT, "{'t':^'U8'}")
FIELD = "a tensor has a field that the format does not know"
case("field", FIELD, "{'t':{^'x':[{}]," + ONE[1:] + "}", 1, "a tensor with other fields")
case("field twice", "a field of a tensor occurs twice", "{'t':{'dtype':'U8',^'dtype':0}}")
case("no dtype", "a tensor has no dtype", "{'t':^{'shape':[1],'data_offsets':[0,1]}}", 1)
case("no shape", "a tensor has no shape", "{'t':^{'dtype':'U8','data_offsets':[0,1]}}", 1)
case("no offsets", "a tensor has no data_offsets", "{'t':^{'dtype':'U8','shape':[1]}}", 1)
case("dtype number", NO_STRING, fields("^8"), 1)
DTYPE_OBJECT = 'a dtype as an object, `{"U8":null}`'
case("dtype object", NO_STRING, fields("^{'U8':null}"), 1, DTYPE_OBJECT)
DTYPES = ["", "u8", "F12", "F32F", "float32"]
each("dtype", "unknown dtype of a tensor", DTYPES, fields("^'?'"), 1)
case("shape", "a tensor's shape is not an array", fields(shape="^1"), 1)
DIMENSIONS = ["-1", "-0", "1.0", "1e0", "01", "'1'", "[1]", "null", "true"]
each("dimension", INTEGER, DIMENSIONS, fields(shape="[1,^?]"), 1)
OFFSETS = ["-1", "1.0", "1E0", "01", "'1'", "null"]
each("offset", INTEGER, OFFSETS, fields(data_offsets="[0,^?]"), 1)
case("65 bits", "a dimension or offset has more than 64 bits", fields(shape=f"[^{2**64}]"), 1)
MANY = fields(shape="[" + "1," * 64 + "^1]")
MORE = "a tensor of more than 64 dimensions"
case("65 dimensions", "a tensor has more than 64 dimensions", MANY, 1, MORE)
TWO = "a tensor's data_offsets are not an array of two"
each("offsets", TWO, ["^{}", "^[]", "^[0]", "^[0,1,1]"], fields(data_offsets="?"), 1)
case("overflow", OVERFLOW, fields("'U8'", f"^[{2**32},{2**32}]", "[0,0]"))
case("overflow of bits", OVERFLOW, fields("'F64'", f"^[{2**58}]", "[0,0]"))
case("overflow and 0", OVERFLOW, fields("'U8'", f"^[{2**63},2,0]", "[0,0]"))
HIDDEN = "dimensions that overflow but for a 0 among them"
case("0 and overflow", OVERFLOW, fields("'U8'", f"^[0,{2**63},2]", "[0,0]"), 0, HIDDEN)
case("bits of F4", HALF_BYTES, fields("'F4'", "^[3]"), 1)
case("bits of F6", HALF_BYTES, fields("'F6_E2M3'", "^[2]"), 1)
case("backwards", "a tensor ends before it begins", fields(data_offsets="^[1,0]"), 1)
case("too few bytes", BYTES, fields("'U8'", "[2]", "^[0,1]"), 1)
case("too many bytes", BYTES, fields("'U8'", "[0]", "^[0,1]"), 1)
case("bytes of a scalar", BYTES, fields("'F32'", "[]", "^[0,1]"), 1)
case("end", PASSES, fields("'U8'", "[2]", "^[0,2]"), 1)
case("empty behind the end", PASSES, fields("'U8'", "[0]", "^[2,2]"), 1)
case("end of all", PASSES, fields("'U8'", "[1]", f"^[{2**64 - 2},{2**64 - 1}]"), 1)
case("hole", HOLE, fields(data_offsets="^[1,2]"), 2)
case("hole between", HOLE, pair(u8(2, 3, "^"), u8(0, 1)), 3)
case("overlap", OVERLAP, pair(u8(1, 3, "^"), u8(0, 2)), 3)
case("same place", OVERLAP, pair(u8(0, 1), u8(0, 1, "^")), 1)
case("empty inside", OVERLAP, pair(u8(0, 4), u8(2, 2, "^")), 4)
case("too much", TOO_MUCH, "{}^", 1)
raw_case("too much behind a tensor", TOO_MUCH, sf.write({"t": ("U8", (3,))}) + b"x", 67)
ALL = pytest.mark.parametrize("case", [pytest.param(c, id=name) for name, c in RULES.items()])


@ALL
def test_rule(case: Case) -> None:
    with pytest.raises(SafetensorsError) as caught:
        header_of(case.raw, "some/path")
    error = caught.value
    assert str(error) == f"some/path: {case.rule} (at byte {case.mark})"
    for told in (error, pickle.loads(pickle.dumps(error))):
        assert (told.rule, told.offset, told.path) == (case.rule, case.mark, "some/path")


@ALL
def test_the_library_agrees_or_the_manual_differs(case: Case, reference: Any) -> None:
    if case.row is None:
        with pytest.raises(reference.SafetensorError):
            reference.deserialize(case.raw)
    else:
        reference.deserialize(case.raw)
        assert f"| {case.row} | refused" in MANUAL


def test_all_rules_of_the_manual_are_tested() -> None:
    rules = MANUAL.partition("\n## Rules\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(.*?)` \|", rules, re.M)) == {case.rule for case in RULES.values()}


def test_all_rows_of_the_manual_are_tested() -> None:
    rows = MANUAL.partition("\n## Where this is stricter")[2].partition("\n## ")[0]
    rows = rows.partition("|---|")[2]
    assert set(re.findall(r"^\| (.*?) \| refused", rows, re.M)) == {
        case.row for case in RULES.values() if case.row is not None
    }
