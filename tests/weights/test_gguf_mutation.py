"""Mutated files give a result or a GGUFError."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.files import gguf_files as gf
from support.files.mutations import Mutation, cut, file_of, mutations, places, put
from support.project.tiers import examples
from unimem.errors import GGUFError
from unimem.weights.opened import open_weights

SMALL = gf.with_data(
    gf.head(2, 2),
    gf.kv("general.alignment", gf.UINT32, gf.u32(32)),
    gf.kv("words", gf.ARRAY, gf.array(gf.STRING, 2, gf.string("a"), gf.string("b"))),
    gf.tensor("t", (4, 2), gf.F32, 0),
    gf.tensor("u", (32,), gf.Q8_0, 32),
    nbytes=96,
)[0]
VALID = [gf.everything(), SMALL]
# Counts, lengths and offsets that overflow, wrap or turn negative.
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
EDGE = st.one_of(st.sampled_from(EDGES), st.integers(0, 300))


def put_number(at: int, value: int, nbytes: int) -> Mutation:
    return put(at, (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little"), nbytes)


NUMBERS = st.builds(put_number, places(VALID), EDGE, st.sampled_from([1, 4, 8]))


def open_and_read_all(raw: bytes) -> int:
    """Open the bytes as a file and look at all there is; how many values and tensors there were."""
    with file_of(raw) as (_, path), open_weights(path) as w:
        for value in w.metadata.values():
            repr(value)
        for tensor in w.tensors.values():
            data = tensor.as_array()
            assert data.nbytes == tensor.nbytes
            assert data.tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]
        assert len(w.fingerprint) == 32
        return len(w.metadata) + len(w.tensors)


def check_read_or_refused(raw: bytes) -> None:
    refused = None
    try:
        open_and_read_all(raw)
    except GGUFError as error:
        refused = error
    if refused is not None:
        assert refused.rule
        assert refused.offset is not None
        assert 0 <= refused.offset <= len(raw)


def test_unchanged_files_are_read() -> None:
    assert [open_and_read_all(raw) for raw in VALID] == [5 + 2 * len(gf.CODES) + 4, 4]


@settings(max_examples=examples(1000), deadline=None)
@given(st.sampled_from(VALID), mutations(VALID, NUMBERS, NUMBERS))
@example(SMALL, [cut(0)])
@example(SMALL, [put_number(8, 2**61, 8), put_number(16, 2**61, 8)])
def test_mutated_files_are_read_or_refused(raw: bytes, changes: list[Mutation]) -> None:
    for change in changes:
        raw = change(raw)
    check_read_or_refused(raw)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_bytes_behind_a_head_are_read_or_refused(tail: bytes) -> None:
    for head in (b"", gf.head(1, 0), gf.head(0, 1), gf.head(3, 3)):
        check_read_or_refused(head + tail)
