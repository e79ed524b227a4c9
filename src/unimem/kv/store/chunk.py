"""KV chunks: their identities, which are chained hashes, and the bytes that a store keeps.

``docs/store.md`` specifies both, with test vectors. Nothing here opens a file.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unimem._core.hashing import copy_hashed
from unimem.base.binary_header import BinaryHeader
from unimem.kv.types import round_up, row_bytes_of

#: A page, so that the data begins at a page.
HEADER_BYTES = 4096
_HEADER = BinaryHeader(
    """
    8s magic; I version header_bytes; Q file_bytes data_bytes; 32s key; 16s hash;
    I n_tokens n_lanes; Q row_bytes
    """,
    b"UNIMEMCH",
    "chunk",
    versions=(2,),
)
_OTHER_BYTES = "its bytes are not those that were written"
_SIZES = "data_bytes n_tokens n_lanes row_bytes".split()


class LaneGroup(NamedTuple):
    """Layers whose rows share a chunk: all layers without a window, or all with the same window.

    `row_bytes` has the bytes of a token in each lane: K of the first layer, V of the first layer, K
    of the next.
    """

    window: int | None
    row_bytes: tuple[int, ...]

    def key(self, key: bytes) -> bytes:
        """Return the identity of its rows, given the identity of the tokens."""
        if self.window is None:
            return key
        return hashlib.sha256(f"unimem.kv-window/1\nwindow={self.window}\n".encode() + key).digest()

    def first_needed(self, end: int) -> int:
        """Return the first position whose rows a cache needs to continue at `end`."""
        return 0 if self.window is None else max(0, end - self.window)


class LayerRows(NamedTuple):
    """What one layer keeps in a cache whose layers differ.

    The layer shows the rows of the layer `share_of`, or has its own. `v_head_dim` is None if heads
    of V have `head_dim` values.
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
        """The hashed text."""
        if self.share_of is not None:
            return f"share={self.share_of}"
        return f"{self.rows_text} window={self.window or 'none'}"

    @property
    def rows_text(self) -> str:
        """The hashed text of its rows."""
        # If heads have one size, the text is that of stores that knew no other.
        differs = self.v_head_dim not in (None, self.head_dim)
        v_dim = f" v_dim={self.v_head_dim}" if differs else ""
        return f"heads={self.n_kv_heads} dim={self.head_dim}{v_dim} k={self.dtype} v={self.v_dtype}"


class EqualLayers(NamedTuple):
    """The kind of a cache whose layers are alike. Its chunks have all tokens.

    Types are those of `KVCache.dtype`, and `rotation` is "none", or "hadamard" for heads that were
    rotated before they were stored (`KVCache.rotate`).
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
        """The hashed text."""
        layer = self._layer.rows_text
        return f"layers={self.n_layers} {layer} position=0 rotation={self.rotation}"

    @property
    def groups(self) -> tuple[LaneGroup]:
        """All layers."""
        return (LaneGroup(None, self.n_layers * self._layer.row_bytes),)


class MixedLayers(NamedTuple):
    """The kind of a cache whose layers differ."""

    layers: tuple[LayerRows, ...]
    rotation: str = "none"

    @property
    def text(self) -> str:
        """The hashed text."""
        head = f"layers={len(self.layers)} position=0 rotation={self.rotation}"
        return "\n".join([head, *(layer.text for layer in self.layers)])

    @property
    def groups(self) -> tuple[LaneGroup, ...]:
        """The layers that keep all tokens, then the layers of each window, the smallest first."""
        rows: dict[int | None, list[int]] = {}
        for layer in self.layers:
            if layer.share_of is None:
                rows.setdefault(layer.window, []).extend(layer.row_bytes)
        return tuple(
            LaneGroup(window, tuple(rows[window])) for window in sorted(rows, key=lambda w: w or 0)
        )


#: The kind of a cache: caches of one kind can take each other's rows.
Kind: TypeAlias = EqualLayers | MixedLayers


def root_of(text: str, salt: bytes = b"") -> bytes:
    """Return the hash that identities begin with; with a salt, one that only its owner knows."""
    if salt:
        return hmac.digest(salt, text.encode(), "sha256")
    return hashlib.sha256(text.encode()).digest()


def chunk_keys(
    kind: Kind, model: str, ids: NDArray[np.int32], chunk_tokens: int, salt: bytes = b""
) -> Iterator[bytes]:
    """Give the identities of the whole chunks of a conversation, 32 bytes each.

    The hash is SHA-256, although others are faster: strangers send prompts, and must not be able
    to make one whose chunks another conversation would be given. `model` is a text that tells
    models apart, and `ids` are the tokens from position 0 on.
    """
    key = root_of(f"unimem.kv-chunk/1\n{kind.text}\n{model}", salt)
    words = ids.astype("<u4").tobytes()
    size = 4 * chunk_tokens
    for begin in range(0, len(words) // size * size, size):
        key = hashlib.sha256(key + words[begin : begin + size]).digest()
        yield key


class ChunkShape(NamedTuple):
    """The shape of a chunk of some tokens; the chunk of another engine is one row of one lane."""

    group: LaneGroup
    n_tokens: int
    of_engine: bool = False

    @property
    def data_bytes(self) -> int:
        """Bytes of all lanes."""
        return self.n_tokens * sum(self.group.row_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk: header, data, and zeros up to a multiple of 4096."""
        return HEADER_BYTES + round_up(self.data_bytes, HEADER_BYTES)

    @property
    def rows(self) -> dict[str, int]:
        """The fields of a header that tell its rows; a note has them as well."""
        lanes = self.group.row_bytes
        return {
            # Only the other engine knows its tokens.
            "n_tokens": 0 if self.of_engine else self.n_tokens,
            "n_lanes": len(lanes),
            "row_bytes": lanes[0] if len(set(lanes)) == 1 else 0,
        }

    def lanes(self, blob: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """View each lane of a chunk's bytes as ``[n_tokens, row bytes]``."""
        found, begin = [], HEADER_BYTES
        for row_bytes in self.group.row_bytes:
            end = begin + self.n_tokens * row_bytes
            found.append(blob[begin:end].reshape(self.n_tokens, row_bytes))
            begin = end
        return found


def _header(chunk: ChunkShape, key: bytes, digest: bytes) -> bytes:
    return _header_of({"data_bytes": chunk.data_bytes} | chunk.rows, key, digest)


def _header_of(sizes: dict[str, int], key: bytes, digest: bytes) -> bytes:
    own = {
        "header_bytes": HEADER_BYTES,
        "file_bytes": HEADER_BYTES + round_up(sizes["data_bytes"], HEADER_BYTES),
        "key": key,
        # Bound to the identity: a place that two chunks were written to at once has neither.
        "hash": bytes(a ^ b for a, b in zip(digest, key, strict=False)),
    }
    return _HEADER.pack(sizes | own).ljust(HEADER_BYTES, b"\0")


def seal(
    chunk: ChunkShape, key: bytes, blob: NDArray[np.uint8], data: NDArray[np.uint8] | None = None
) -> None:
    """Complete ``uint8 [chunk.nbytes]``: write the header, and zeros behind the data.

    The data is there already, or is copied from `data` in the pass that hashes it.
    """
    inside, zeros = _behind(chunk, blob)
    zeros[:] = 0
    if data is None:
        digest = copy_hashed(inside, None, zeros.nbytes)
    else:
        digest = copy_hashed(data, inside, zeros.nbytes)
    blob[:HEADER_BYTES] = np.frombuffer(_header(chunk, key, digest), np.uint8)


def find_fault(
    chunk: ChunkShape,
    key: bytes,
    blob: NDArray[np.uint8],
    nbytes: int | None = None,
    out: NDArray[np.uint8] | None = None,
) -> str | None:
    """Say what is wrong with a chunk that was read; None if every byte is as it was sealed.

    The whole header is compared, since all of it but the data's hash is known beforehand. `nbytes`
    is the size of the file that it was read from. The data is copied to `out` in the pass that
    hashes it; if it is damaged, `out` gets zeros.
    """
    if nbytes not in (None, chunk.nbytes):
        return f"it has {nbytes} bytes, not {chunk.nbytes}"
    inside, zeros = _behind(chunk, blob)
    digest = copy_hashed(inside, out, zeros.nbytes)
    fault = _compare(blob, _header(chunk, key, digest), zeros)
    if fault and out is not None:
        out[:] = 0
    return fault


def size_fault(head: bytes, nbytes: int) -> str | None:
    """Say what is wrong with the bytes of a file, as its first `HEADER_BYTES` have them."""
    if len(head) < HEADER_BYTES:
        return f"it has {len(head)} bytes, not those of a header"
    (data_bytes,) = struct.unpack_from(
        _HEADER.codes["data_bytes"], head, _HEADER.offsets["data_bytes"]
    )
    whole = HEADER_BYTES + round_up(data_bytes, HEADER_BYTES)
    return None if nbytes == whole else f"it has {nbytes} bytes, not {whole}"


def find_fault_alone(key: bytes, blob: NDArray[np.uint8], note: Mapping[str, object]) -> str | None:
    """Say what is wrong with all bytes of a file whose shape only its header has.

    The file's note may have the header's fields on rows as well (`ChunkShape.rows`).
    """
    head = blob[:HEADER_BYTES].tobytes()
    if (fault := size_fault(head, len(blob))) is not None:
        return fault
    codes, offsets = _HEADER.codes, _HEADER.offsets
    sizes = {name: struct.unpack_from(codes[name], head, offsets[name])[0] for name in _SIZES}
    n, rows = max(1, sizes["n_tokens"]), sizes["n_lanes"] * sizes["row_bytes"]
    is_odd = rows * n != sizes["data_bytes"] if sizes["row_bytes"] else sizes["data_bytes"] % n
    if is_odd or any(note.get(name, value) != value for name, value in sizes.items()):
        return _OTHER_BYTES
    data, zeros = np.split(blob[HEADER_BYTES:], [sizes["data_bytes"]])
    digest = copy_hashed(data, None, zeros.nbytes)
    return _compare(blob, _header_of(sizes, key, digest), zeros)


def _compare(blob: NDArray[np.uint8], header: bytes, zeros: NDArray[np.uint8]) -> str | None:
    found = blob[:HEADER_BYTES].tobytes()
    if found == header and not zeros.any():
        return None
    at = slice(_HEADER.offsets["key"], _HEADER.offsets["hash"])
    if _HEADER.is_magic(found) and found[at] != header[at]:
        return "it is another chunk than its name says"
    return _OTHER_BYTES


def _behind(
    chunk: ChunkShape, blob: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """View the data, and the zeros behind it."""
    end = HEADER_BYTES + chunk.data_bytes
    return blob[HEADER_BYTES:end], blob[end : chunk.nbytes]
