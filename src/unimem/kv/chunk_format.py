"""KV chunks: their identity, which is a chained hash, and the bytes that a store keeps of one.

``docs/store.md`` specifies both, with test vectors. Nothing here opens a file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.kv.snapshot_format import round_up, row_bytes_of

__all__ = ["BytesShape", "ChunkShape", "DataShape", "Kind", "chunk_keys", "find_fault", "seal"]

MAGIC = b"UNIMEMCH"
VERSION = 1
#: A page, so that the data begins at one.
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQ32s16sIIQ")


class Kind(NamedTuple):
    """What caches have in common that can take each other's rows.

    Attributes
    ----------
    n_layers, n_kv_heads, head_dim : int
        Dimensions of the cache.
    dtype : str
        What is stored, as `KVCache.dtype`.
    rotation : str
        What was done to heads before they were stored: "none", or "hadamard" (`KVCache.rotate`).
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    rotation: str = "none"

    @property
    def n_lanes(self) -> int:
        """K and V of each layer."""
        return 2 * self.n_layers

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one lane."""
        return row_bytes_of(self.n_kv_heads, self.head_dim, self.dtype)

    @property
    def text(self) -> str:
        """What is hashed of it. Tokens begin at position 0, with K as the model has rotated it."""
        return (
            f"layers={self.n_layers} heads={self.n_kv_heads} dim={self.head_dim} "
            f"k={self.dtype} v={self.dtype} position=0 rotation={self.rotation}"
        )


def chunk_keys(
    kind: Kind, model: str, ids: NDArray[np.int32], chunk_tokens: int
) -> Iterator[bytes]:
    """Give the identities of the whole chunks of a conversation.

    SHA-256 is not the fastest hash. But prompts come from strangers, and with it nobody can make
    one whose chunks another conversation would be given.

    Parameters
    ----------
    kind : Kind
        Of the cache.
    model : str
        What tells models apart.
    ids : numpy.ndarray
        ``int32``: the tokens from position 0 on.
    chunk_tokens : int
        Tokens of a chunk.

    Yields
    ------
    bytes
        The 32 bytes of each, in the order of the tokens.
    """
    root = f"unimem.kv-chunk/1\n{kind.text}\n{model}".encode()
    key = hashlib.sha256(root).digest()
    words = ids.astype("<u4").tobytes()
    size = 4 * chunk_tokens
    for begin in range(0, len(words) // size * size, size):
        key = hashlib.sha256(key + words[begin : begin + size]).digest()
        yield key


class DataShape(Protocol):
    """What the header of a chunk says of its data."""

    @property
    def n_tokens(self) -> int:
        """Tokens in it; 0 where only its engine knows."""

    @property
    def n_lanes(self) -> int:
        """Lanes of the data."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a lane."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all lanes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk: header, data, and zeros up to a multiple of 4096."""


class BytesShape(NamedTuple):
    """The shape of a chunk of another engine: one lane, of one row, of no token that we know.

    Attributes
    ----------
    data_bytes : int
        Bytes of the data.
    """

    data_bytes: int

    @property
    def n_tokens(self) -> int:
        """Known to the engine alone."""
        return 0

    @property
    def n_lanes(self) -> int:
        """All of it is one."""
        return 1

    @property
    def row_bytes(self) -> int:
        """All of it is one row."""
        return self.data_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk: header, data, and zeros up to a multiple of 4096."""
        return HEADER_BYTES + round_up(self.data_bytes, HEADER_BYTES)


class ChunkShape(NamedTuple):
    """The shape of a chunk: what its bytes are, all but the data.

    Attributes
    ----------
    kind : Kind
        Of the cache.
    n_tokens : int
        Tokens in it.
    """

    kind: Kind
    n_tokens: int

    @property
    def n_lanes(self) -> int:
        """K and V of each layer."""
        return self.kind.n_lanes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one lane."""
        return self.kind.row_bytes

    @property
    def lane_bytes(self) -> int:
        """Bytes of the rows of one lane."""
        return self.n_tokens * self.kind.row_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of all lanes."""
        return self.kind.n_lanes * self.lane_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk: header, data, and zeros up to a multiple of 4096."""
        return HEADER_BYTES + round_up(self.data_bytes, HEADER_BYTES)

    def lanes(self, blob: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View the data of a chunk's bytes as ``[n_lanes, lane_bytes]``."""
        data = blob[HEADER_BYTES : HEADER_BYTES + self.data_bytes]
        return data.reshape(self.kind.n_lanes, self.lane_bytes)


def _header(chunk: DataShape, key: bytes, blob: NDArray[np.uint8]) -> bytes:
    digest = xxhash.xxh3_128_digest(blob[HEADER_BYTES:].data)
    return _HEADER.pack(
        MAGIC, VERSION, HEADER_BYTES, chunk.nbytes, chunk.data_bytes, key, digest,
        chunk.n_tokens, chunk.n_lanes, chunk.row_bytes,
    ).ljust(HEADER_BYTES, b"\0")  # fmt: skip


def seal(chunk: DataShape, key: bytes, blob: NDArray[np.uint8]) -> None:
    """Write what is not data into a chunk whose data is there: the header, and the zeros behind.

    Parameters
    ----------
    chunk : DataShape
        Its shape.
    key : bytes
        Its identity.
    blob : numpy.ndarray
        ``uint8 [chunk.nbytes]``.
    """
    blob[HEADER_BYTES + chunk.data_bytes :] = 0
    blob[:HEADER_BYTES] = np.frombuffer(_header(chunk, key, blob), np.uint8)


def find_fault(chunk: DataShape, key: bytes, blob: NDArray[np.uint8]) -> str | None:
    """Say what is wrong with a chunk that was read; None where every byte is as it was sealed.

    All of the header is known beforehand but for the hash of the data, so it is compared whole.
    """
    found = blob[:HEADER_BYTES].tobytes()
    if found == _header(chunk, key, blob):
        return None
    if found.startswith(MAGIC) and found[32:64] != key:
        return "it is another chunk than its name says"
    return "its bytes are not those that were written"
