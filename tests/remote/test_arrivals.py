"""Pieces that have arrived: found again by their hashes, in memory or in files."""

from __future__ import annotations

import os

import numpy as np
import xxhash

from unimem.remote.arrivals import Arrivals, Piece

PIECE = Piece("s3://bucket/key", 20_000, "tag", 4096, 8192)
DATA = np.arange(8192, dtype=np.uint16).view(np.uint8)[:8192].copy()


def test_noted_bytes_are_recalled_until_they_change() -> None:
    arrivals = Arrivals()
    assert not arrivals
    assert not arrivals.recall(PIECE, DATA)
    arrivals.note(PIECE, DATA)
    assert [piece for piece, _ in arrivals] == [PIECE]
    assert arrivals.recall(PIECE, DATA)
    assert not arrivals.recall(PIECE._replace(tag="other"), DATA)
    assert not arrivals.recall(PIECE, DATA[::-1].copy())


def test_a_left_piece_moves_and_its_memory_is_given_back() -> None:
    digest, out = xxhash.xxh3_128_digest(DATA.data), np.zeros_like(DATA)
    fd = os.memfd_create("left")
    try:
        os.pwrite(fd, DATA.tobytes(), PIECE.first)
        blocks = os.fstat(fd).st_blocks
        arrivals = Arrivals()
        arrivals.add_left(PIECE, bytes(16), fd)  # another hash
        assert not arrivals.recall(PIECE, out)
        arrivals.add_left(PIECE, digest, fd)
        assert arrivals.recall(PIECE, out)
        assert np.array_equal(out, DATA)
        assert os.fstat(fd).st_blocks < blocks
        assert list(arrivals) == [(PIECE, digest)]
        os.ftruncate(fd, 0)
        out[:] = 0
        assert not Arrivals().recall(PIECE, out)
    finally:
        os.close(fd)
