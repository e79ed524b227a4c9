"""Bytes that are copied and hashed in one pass: the hash is that of the xxhash package."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest
import xxhash

from unimem._core.hashing import copy_hashed

BYTES = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)


def test_every_length() -> None:
    wrong = []
    for n in range(2049):
        data, out, n_zeros = BYTES[n : 2 * n], np.zeros(n, np.uint8), 0 if n % 5 else n % 67
        found = copy_hashed(data, out, n_zeros)
        if found != xxhash.xxh3_128_digest(data.tobytes() + bytes(n_zeros)) or (out != data).any():
            wrong.append(n)
    assert wrong == []


@pytest.mark.parametrize("n", [(1 << 18) - 1, 1 << 18, (1 << 20) + 4096, 2_900_001])
@pytest.mark.parametrize("offset", [0, 64, 3])
def test_much(n: int, offset: int) -> None:
    data, out = BYTES[offset : offset + n], np.zeros(offset + n, np.uint8)
    expected = xxhash.xxh3_128_digest(data.data)
    assert expected == copy_hashed(data) == copy_hashed(data, out[offset:])
    np.testing.assert_array_equal(out[offset:], data)
    assert not out[:offset].any()


def test_the_hash_is_that_of_the_copy_if_the_data_changes() -> None:
    """The copy changes the data: both are mappings of the same memory, 16 bytes apart."""
    fd = os.memfd_create("data")
    os.truncate(fd, 1 << 20)
    wrong = []
    with open(fd, "r+b") as file, mmap.mmap(fd, 0) as one, mmap.mmap(fd, 0) as other:
        for n in [*range(1, 5000, 7), (1 << 18) + 100]:
            file.seek(0)
            file.write(BYTES[: 1 << 20].data)
            file.flush()
            with memoryview(one) as data, memoryview(other) as out:
                found = copy_hashed(data[16 : 16 + n], out[:n], n % 5)
                if found != xxhash.xxh3_128_digest(bytes(out[:n]) + bytes(n % 5)):
                    wrong.append(n)
    assert wrong == []


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ((b"abc", bytearray(2)), ValueError, "out: expected 3 bytes, got 2"),
        ((b"abc", b"abc"), BufferError, "writable"),
        ((b"abc", "abc"), TypeError, "bytes-like"),
        (("abc",), TypeError, "bytes-like"),
        ((np.zeros((4, 4))[:, 1],), ValueError, "contiguous"),
        ((b"abc", None, -1), ValueError, "n_zeros: expected an integer from 0"),
        ((b"abc", None, "1"), TypeError, "n_zeros"),
    ],
)
def test_wrong_arguments(given: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        copy_hashed(*given)
