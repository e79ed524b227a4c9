"""Changes of a file's bytes, for searches of what a reader makes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

Mutation = Callable[[bytes], bytes]


def flip(at: int, bit: int) -> Mutation:
    def mutate(raw: bytes) -> bytes:
        i = at % max(len(raw), 1)
        return raw[:i] + bytes(byte ^ 1 << bit for byte in raw[i : i + 1]) + raw[i + 1 :]

    return mutate


def put(at: int, new: bytes, over: int) -> Mutation:
    """Put new bytes over so many."""

    def mutate(raw: bytes) -> bytes:
        i = at % (len(raw) + 1)
        return raw[:i] + new + raw[i + over :]

    return mutate


def splice(source: bytes, start: int, nbytes: int, at: int) -> Mutation:
    """Insert a copy of one stretch, which may be of another file."""
    return put(at, source[start % len(source) :][:nbytes], 0)


def cut(n: int) -> Mutation:
    return lambda raw: raw[: n % (len(raw) + 1)]


def places(valid: list[bytes]) -> st.SearchStrategy[int]:
    """Anywhere, and more often near the beginning, where magic numbers, versions and counts are."""
    return st.one_of(st.integers(0, max(map(len, valid))), st.integers(0, 64))


def mutations(
    valid: list[bytes], *own: st.SearchStrategy[Mutation]
) -> st.SearchStrategy[list[Mutation]]:
    """One to five changes of any of these files; `own` are those of the format."""
    place = places(valid)
    return st.lists(
        st.one_of(
            st.builds(flip, place, st.integers(0, 7)),
            st.builds(put, place, st.just(b""), st.integers(1, 40)),
            st.builds(splice, st.sampled_from(valid), place, st.integers(0, 100), place),
            st.builds(cut, place),
            *own,
        ),
        min_size=1,
        max_size=5,
    )


@contextmanager
def file_of(raw: bytes) -> Iterator[tuple[int, str]]:
    """A file of these bytes in memory: its descriptor, and a path to it."""
    fd = os.memfd_create("tested", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(raw)
        yield fd, f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
