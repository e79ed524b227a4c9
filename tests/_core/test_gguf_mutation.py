"""Whatever is done to a valid file, opening it gives a result or a GGUFError, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

import gguf_files as gf
from tiers import examples
from unimem.errors import GGUFError
from unimem.weights.opened import open_weights

SMALL = gf.with_data(
    gf.head(2, 2),
    gf.kv("general.alignment", gf.UINT32, gf.u32(32)),
    gf.kv("words", gf.ARRAY, gf.array(gf.STRING, 2, gf.string("a"), gf.string("b"))),
    gf.tensor("t", (4, 2), gf.F32, 0),
    gf.tensor("u", (32,), gf.Q8_0, 32),
)[0]
VALID = [gf.everything(), SMALL]
# Where a count, a length or an offset overflows, wraps or turns negative.
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 1]

Mutation = Callable[[bytes], bytes]


def flip(at: int, bit: int) -> Mutation:
    def mutate(raw: bytes) -> bytes:
        i = at % max(len(raw), 1)
        return raw[:i] + bytes(byte ^ 1 << bit for byte in raw[i : i + 1]) + raw[i + 1 :]

    return mutate


def put(at: int, value: int, nbytes: int) -> Mutation:
    def mutate(raw: bytes) -> bytes:
        i = at % max(len(raw), 1)
        new = (value % (1 << 8 * nbytes)).to_bytes(nbytes, "little")
        return (raw[:i] + new + raw[i + nbytes :])[: len(raw)]

    return mutate


def cut(n: int) -> Mutation:
    return lambda raw: raw[: n % (len(raw) + 1)]


def splice(start: int, nbytes: int, at: int) -> Mutation:
    """Insert a copy of one stretch, which may be of the other file, at another place."""

    def mutate(raw: bytes) -> bytes:
        source = VALID[start % 2]
        i, j = start % len(source), at % (len(raw) + 1)
        return raw[:j] + source[i : i + nbytes] + raw[j:]

    return mutate


def drop(at: int, nbytes: int) -> Mutation:
    def mutate(raw: bytes) -> bytes:
        i = at % max(len(raw), 1)
        return raw[:i] + raw[i + nbytes :]

    return mutate


PLACE = st.integers(0, max(map(len, VALID)))
# Small places are where magic, version and counts are.
ANYWHERE = st.one_of(PLACE, st.integers(0, 64))
MUTATIONS = st.lists(
    st.one_of(
        st.builds(flip, ANYWHERE, st.integers(0, 7)),
        st.builds(put, ANYWHERE, st.sampled_from(EDGES), st.sampled_from([1, 4, 8])),
        st.builds(put, ANYWHERE, st.integers(0, 300), st.sampled_from([1, 4, 8])),
        st.builds(cut, PLACE),
        st.builds(splice, PLACE, st.integers(0, 100), PLACE),
        st.builds(drop, ANYWHERE, st.integers(1, 40)),
    ),
    min_size=1,
    max_size=5,
)


def open_and_read_all(raw: bytes) -> int:
    """Open the bytes as a file and look at all there is; how many values and tensors there were."""
    fd = os.memfd_create("mutated", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(raw)
        with open_weights(f"/proc/self/fd/{fd}") as w:
            for value in w.metadata.values():
                repr(value)
            for tensor in w.tensors.values():
                data = tensor.as_array()
                assert data.nbytes == tensor.nbytes
                assert data.tobytes() == raw[tensor.offset : tensor.offset + tensor.nbytes]
            assert len(w.fingerprint) == 32
            return len(w.metadata) + len(w.tensors)
    finally:
        os.close(fd)


def test_unchanged_files_are_read() -> None:
    assert [open_and_read_all(raw) for raw in VALID] == [5 + 2 * len(gf.CODES) + 4, 4]


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


@settings(max_examples=examples(1000), deadline=None)
@given(st.sampled_from(VALID), MUTATIONS)
@example(SMALL, [cut(0)])
@example(SMALL, [put(8, 2**61, 8), put(16, 2**61, 8)])
def test_mutated_files_are_read_or_refused(raw: bytes, mutations: list[Mutation]) -> None:
    for mutate in mutations:
        raw = mutate(raw)
    check_read_or_refused(raw)


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200))
def test_bytes_behind_a_head_are_read_or_refused(tail: bytes) -> None:
    for head in (b"", gf.head(1, 0), gf.head(0, 1), gf.head(3, 3)):
        check_read_or_refused(head + tail)
