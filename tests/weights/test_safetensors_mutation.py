"""Mutated files give the same result as the format's library, or a SafetensorsError."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unimem as um
from support.files import safetensors_files as sf
from support.files.mutations import Mutation, cut, file_of, mutations, places, put
from support.project.tiers import examples
from unimem.errors import SafetensorsError
from unimem.weights.safetensors import SafetensorsHeader

SMALL = sf.write({"t": ("F32", (2, 3)), "e": ("U8", (0,)), "f": ("F4", (2, 3))}, {"k": "\\ü\n"})
VALID = [sf.everything(), SMALL]
# Tokens of headers, and numbers that overflow or wrap.
TOKENS = [
    *(bytes([byte]) for byte in b"{}[]:,\"\\u0'- .e\x00\xff\x80"),
    b"\\u0041",
    b"\\ud83d\\ude00",
    b"\\ud800",
    b"null",
    b"__metadata__",
    b'"dtype"',
    b'"shape"',
    b'"data_offsets"',
    b'"k":"v",',
    b'"e":{',
    b"18446744073709551615",
    b"18446744073709551616",
    b"9223372036854775808",
    b"4294967296",
    b"01",
    b"1e0",
    b"0,0",
    b'"F6_E2M3"',
    b'"C64"',
]
EDGES = [0, 1, 7, 99_999_999, 100_000_000, 100_000_001, 2**32, 2**63, 2**64 - 8, 2**64 - 1]
# Rules that are stricter than the library: see docs/safetensors.md.
STRICTER = {
    "the header does not begin with {",
    "__metadata__ is not an object",
    "a key of __metadata__ occurs twice",
    "a tensor's name occurs twice",
    "a tensor is not an object",
    "a tensor has a field that the format does not know",
    "a tensor's dtype is not a string",
    "a tensor has more than 64 dimensions",
    "a tensor's dimensions overflow",
}


def put_length(length: int) -> Mutation:
    return put(0, length.to_bytes(8, "little"), 8)


MUTATIONS = mutations(
    VALID,
    st.builds(put, places(VALID), st.sampled_from(TOKENS), st.integers(0, 3)),
    st.sampled_from(list(map(put_length, EDGES))),
)


def open_and_read_all(raw: bytes) -> dict[str, Any]:
    """Open the bytes as a file and look at all there is."""
    with file_of(raw) as (fd, path):
        header = SafetensorsHeader(fd, len(raw), path)
        for i in header.keys().values():
            assert header.raw_value(i) == b"str\0" + header.value(i).encode()
        found: dict[str, Any] = {}
        with um.open_weights(path) as w:
            for name, tensor in w.tensors.items():
                data = tensor.as_array().tobytes()
                assert len(data) == tensor.nbytes
                assert data == raw[tensor.offset : tensor.offset + tensor.nbytes]
                kind = tensor.type.upper()
                found[name] = {"dtype": kind, "shape": list(tensor.shape), "data": data}
        return found


def check_as_the_library(raw: bytes) -> None:
    reference = pytest.importorskip("safetensors", reason="safetensors (extra test) has its say")
    refused = ours = theirs = None
    try:
        ours = open_and_read_all(raw)
    except SafetensorsError as error:
        refused = error
    if refused is not None:
        assert refused.offset is not None
        assert 0 <= refused.offset <= len(raw)
        if refused.rule in STRICTER:
            return
    with contextlib.suppress(reference.SafetensorError):
        theirs = dict(reference.deserialize(raw))
    assert ours == theirs


def test_unchanged_files_are_read() -> None:
    assert [len(open_and_read_all(raw)) for raw in VALID] == [len(sf.BITS) + 4, 3]
    for raw in VALID:
        check_as_the_library(raw)


@settings(max_examples=examples(1000), deadline=None)
@given(st.sampled_from(VALID), MUTATIONS, st.booleans())
@example(SMALL, [cut(0)], False)
@example(SMALL, [put_length(0)], False)
def test_mutated_files_are_read_alike(raw: bytes, changes: list[Mutation], in_header: bool) -> None:
    for change in changes:
        raw = change(raw)
    if in_header:  # it ends where its last brace is: what was changed in it is looked at
        raw = put_length(max(raw.rfind(b"}") - 7, 0))(raw)
    check_as_the_library(raw)


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=30).map(b"".join))
def test_any_tokens_are_read_as_by_the_library_or_refused(text: bytes) -> None:
    for header in (b"{" + text, b'{"t":{' + text, b'{"__metadata__":{' + text + b"}}"):
        check_as_the_library(sf.file(header))
