"""KV chunks: their identity, which is a chained hash, and the bytes that a store keeps of one.

``docs/store.md`` specifies both, with test vectors. Nothing here opens a file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.kv.snapshot.format_rows import round_up, row_bytes_of

__all__ = [
    "BytesShape",
    "ChunkShape",
    "DataShape",
    "EqualLayers",
    "Kind",
    "LaneGroup",
    "LayerRows",
    "MixedLayers",
    "chunk_keys",
    "find_fault",
    "seal",
]

MAGIC = b"UNIMEMCH"
VERSION = 1
#: A page, so that the data begins at one.
HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQ32s16sIIQ")


class LaneGroup(NamedTuple):
    """Layers whose rows lie in one chunk: all that keep all tokens, or all of one window.

    Attributes
    ----------
    window : int or None
        The last tokens that they keep; None for all.
    row_bytes : tuple of int
        Bytes of a token in each lane: K of the first of these layers, V of it, K of the next.
    """

    window: int | None
    row_bytes: tuple[int, ...]

    def key(self, key: bytes) -> bytes:
        """Return the identity of its rows, by that of the tokens."""
        if self.window is None:
            return key
        return hashlib.sha256(f"unimem.kv-window/1\nwindow={self.window}\n".encode() + key).digest()

    def first_needed(self, end: int) -> int:
        """Return the first position whose rows a cache has to have that ends at `end`."""
        return 0 if self.window is None else max(0, end - self.window)


class Kind(Protocol):
    """What caches have in common that can take each other's rows."""

    @property
    def text(self) -> str:
        """What is hashed of it. Tokens begin at position 0, with K as the model has rotated it."""

    @property
    def groups(self) -> Sequence[LaneGroup]:
        """Its layers, by what they keep; those that keep all tokens come first."""


class LayerRows(NamedTuple):
    """What a layer of a cache keeps whose layers differ.

    Attributes
    ----------
    n_kv_heads, head_dim : int
        Dimensions of the layer.
    dtype, v_dtype : str
        What is stored of K, and of V.
    window : int or None
        The last tokens that it keeps; None for all.
    share_of : int or None
        The layer whose rows it shows; None where it has its own.
    v_head_dim : int or None
        Values of a head of V; None for as many as `head_dim`.
    """

    n_kv_heads: int
    head_dim: int
    dtype: str
    v_dtype: str
    window: int | None = None
    share_of: int | None = None
    v_head_dim: int | None = None

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token's K, and of its V."""
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return (
            row_bytes_of(self.n_kv_heads, self.head_dim, self.dtype),
            row_bytes_of(self.n_kv_heads, v_head_dim, self.v_dtype),
        )

    @property
    def text(self) -> str:
        """What is hashed of it."""
        if self.share_of is not None:
            return f"share={self.share_of}"
        return f"{self.rows_text} window={self.window or 'none'}"

    @property
    def rows_text(self) -> str:
        """What is hashed of its rows."""
        # Most have heads of one size. Their text is that of stores which knew no other.
        differs = self.v_head_dim not in (None, self.head_dim)
        v_dim = f" v_dim={self.v_head_dim}" if differs else ""
        return f"heads={self.n_kv_heads} dim={self.head_dim}{v_dim} k={self.dtype} v={self.v_dtype}"


class EqualLayers(NamedTuple):
    """The kind of a cache whose layers are alike.

    Its chunks have all tokens, whatever the cache keeps.

    Attributes
    ----------
    n_layers, n_kv_heads, head_dim : int
        Dimensions of the cache.
    dtype, v_dtype : str
        What is stored of K, and of V, as `KVCache.dtype`.
    rotation : str
        What was done to heads before they were stored: "none", or "hadamard" (`KVCache.rotate`).
    v_head_dim : int or None
        As of `LayerRows`.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    v_dtype: str
    rotation: str = "none"
    v_head_dim: int | None = None

    @property
    def _layer(self) -> LayerRows:
        dims = self.n_kv_heads, self.head_dim
        return LayerRows(*dims, self.dtype, self.v_dtype, v_head_dim=self.v_head_dim)

    @property
    def text(self) -> str:
        """What is hashed of it."""
        layer = self._layer.rows_text
        return f"layers={self.n_layers} {layer} position=0 rotation={self.rotation}"

    @property
    def groups(self) -> tuple[LaneGroup]:
        """All layers."""
        return (LaneGroup(None, self.n_layers * self._layer.row_bytes),)


class MixedLayers(NamedTuple):
    """The kind of a cache whose layers differ.

    Attributes
    ----------
    layers : tuple of LayerRows
        What each keeps.
    rotation : str
        As of `EqualLayers`.
    """

    layers: tuple[LayerRows, ...]
    rotation: str = "none"

    @property
    def text(self) -> str:
        """What is hashed of it."""
        head = f"layers={len(self.layers)} position=0 rotation={self.rotation}"
        return "\n".join([head, *(layer.text for layer in self.layers)])

    @property
    def groups(self) -> tuple[LaneGroup, ...]:
        """Those that keep all tokens, and those of each window, the smallest first."""
        rows: dict[int | None, list[int]] = {}
        for layer in self.layers:
            if layer.share_of is None:
                rows.setdefault(layer.window, []).extend(layer.row_bytes)
        return tuple(
            LaneGroup(window, tuple(rows[window])) for window in sorted(rows, key=lambda w: w or 0)
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
    group : LaneGroup
        Of a cache's layers.
    n_tokens : int
        Tokens in it.
    """

    group: LaneGroup
    n_tokens: int

    @property
    def n_lanes(self) -> int:
        """K and V of each layer."""
        return len(self.group.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one lane; 0 where lanes differ."""
        first = self.group.row_bytes[0]
        return first if set(self.group.row_bytes) == {first} else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of all lanes."""
        return self.n_tokens * sum(self.group.row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk: header, data, and zeros up to a multiple of 4096."""
        return HEADER_BYTES + round_up(self.data_bytes, HEADER_BYTES)

    def lanes(self, blob: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """View each lane of a chunk's bytes as ``[n_tokens, row bytes]``."""
        found, begin = [], HEADER_BYTES
        for row_bytes in self.group.row_bytes:
            end = begin + self.n_tokens * row_bytes
            found.append(blob[begin:end].reshape(self.n_tokens, row_bytes))
            begin = end
        return found


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
