"""First tokens of llama.cpp's conversations in a `KVStore`, in chunks of their own kind.

`docs/llama-cpp.md` specifies the chunks. A chunk of tokens has their rows in the first cache of
attention. What models have besides, windows and recurrent states, is of one number of tokens only:
it is an *end*, kept with the tokens behind the last whole chunk, in pieces as large as a chunk.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import instance, string
from unimem.errors import FormatError
from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.store import KVStore
from unimem.kv.token_ids import Tokens, token_ids
from unimem.llama_cpp.layout import empty_cells, layout_of
from unimem.llama_cpp.state import CellRows, LlamaKV, Part, StateLane, kv_to_state, state_to_kv
from unimem.weights.dequantize import dequantize
from unimem.weights.gguf import tensor_type

#: Before the tokens and rows of each chunk.
HEAD_BYTES = 8192
_MAGIC = b"UNIMEMLL"
# Magic, kind, tokens before it, its tokens, bytes of the state, key of the chunk before, length of
# the rest: JSON with what all chunks of a layout have in common, compressed.
_HEAD = struct.Struct("<8s4sIIQ32sI")
_ROWS, _END = b"rows", b"end."
_LEAST_PIECE = 1 << 20
_MOST_FACTS = _MOST_TOKENS = 1 << 20
_ROOT = hashlib.sha256(b"unimem.llama-cpp/1").digest()


class ChunkHead(NamedTuple):
    """The head of a chunk: what it has, and which conversation it belongs to.

    `facts` are the model, the options, the layout and the tokens of a whole chunk, which all chunks
    of a namespace have in common.
    """

    is_end: bool
    first: int
    tokens: NDArray[np.int32]
    nbytes: int  # of the rows, or of all pieces of an end
    parent: bytes
    facts: dict[str, str]

    @classmethod
    def read(cls, take: Callable[[int], bytes]) -> ChunkHead | None:
        """Read the first bytes of a chunk's data, as of a file; None if it is another engine's.

        ValueError if they are damaged. Its size is that of the store that it was put into.
        """
        data = take(HEAD_BYTES)
        if len(data) < HEAD_BYTES or not data.startswith(_MAGIC):
            return None
        _, kind, first, n, nbytes, parent, length = _HEAD.unpack(data[: _HEAD.size])
        packed = data[_HEAD.size : _HEAD.size + length]
        try:
            facts = json.loads(zlib.decompressobj().decompress(packed, _MOST_FACTS))
        except (zlib.error, RecursionError) as error:
            raise ValueError(f"the facts of a chunk: {error}") from None
        names = ("model", "options", "layout", "chunk_tokens")
        if not isinstance(facts, dict) or {str} != {type(facts.get(name)) for name in names}:
            raise ValueError(f"the facts of a chunk: expected texts, got {facts!r:.60}")
        tokens = np.frombuffer(take(4 * min(n, int(facts["chunk_tokens"]), _MOST_TOKENS)), "<i4")
        if len(tokens) != n:
            raise ValueError(f"the tokens of a chunk: expected {n}, got {len(tokens)}")
        return cls(kind == _END, first, tokens, nbytes, parent, facts)

    @property
    def key(self) -> bytes:
        """The key of the tokens up to its end."""
        return _next_key(self.parent, self.tokens)


def chain(ids: NDArray[np.int32], size: int) -> Iterator[bytes]:
    """Give the keys of a conversation: of no tokens, then of each whole chunk."""
    key = _ROOT
    yield key
    for begin in range(0, len(ids) // size * size, size):
        key = _next_key(key, ids[begin : begin + size])
        yield key


class LlamaPrefixes:
    """First tokens of a model's conversations, as llama.cpp computed them, in a store.

    They lie beside the chunks of other engines, within the budgets of the store, and are never
    given to another model, layout or version.

    Parameters
    ----------
    store : KVStore
        It stays open. Its `chunk_tokens` are those of the chunks.
    model : str
        The hash of all bytes of the model.
    layout : str or LlamaKV
        The layout to store and restore, or a state of some tokens that has it.
    options : str, optional
        Whatever else changes what llama.cpp computes: adapters, other options for positions than
        the model's own, and whether the context is a long one for a model with
        ``rope_factors_long``.

    Raises
    ------
    TypeError
        `store` is no `KVStore`, or another argument no text.
    FormatError
        The layout is too long to be stored.

    Attributes
    ----------
    layout : str
        The layout, in JSON.
    has_ends : bool
        Whether layers with windows or states limit what can be restored to ends.
    """

    def __init__(
        self, store: KVStore, model: str, layout: str | LlamaKV, *, options: str = ""
    ) -> None:
        self.store = instance(store, "store", KVStore)
        self._size = store.chunk_tokens
        self.layout = layout_of(layout) if isinstance(layout, LlamaKV) else string(layout, "layout")
        self._facts = {"model": string(model, "model"), "options": string(options, "options")}
        self._facts |= {"layout": self.layout, "chunk_tokens": str(self._size)}
        text = json.dumps(self._facts, sort_keys=True)
        self._packed = zlib.compress(text.encode())
        if _HEAD.size + len(self._packed) > HEAD_BYTES:
            raise FormatError(f"a layout of {len(self.layout)} characters is too long to be stored")
        try:
            facts = json.loads(self.layout)
            n_parts, self._version = len(facts["parts"]), int(facts["version"])
            cells = empty_cells(self.layout, self._size)
        except (TypeError, ValueError, LookupError):
            raise FormatError(f"layout: expected that of a state, got {layout!r:.60}") from None
        self._has_rows, self.has_ends = cells is not None, cells is None or n_parts > 1
        rows = () if cells is None else (cells,)
        self._piece_bytes = max(len(self._blob(rows)), _LEAST_PIECE * self.has_ends)
        self._begin = HEAD_BYTES + 4 * self._size
        of: dict[str, str] = {"engine": "llama.cpp", "model": model}
        self._chunks = EngineChunks(store, text, self._begin + self._piece_bytes, **of)

    def put(
        self,
        tokens: Tokens,
        kv: LlamaKV,
        checkpoints: Sequence[tuple[int, LlamaKV]] = (),
    ) -> int:
        """Keep the tokens of a conversation.

        Parameters
        ----------
        tokens : sequence of int
            The ids of its tokens, as many as the state has, or more.
        kv : LlamaKV
            Its state.
        checkpoints : sequence of (int, LlamaKV), optional
            What `kv` had at earlier numbers of tokens, without the first cache, as in slot files.

        Returns
        -------
        int
            Tokens of the conversation that the store has now.

        Raises
        ------
        FormatError
            The state has another layout, lacks its first tokens, or is longer than `tokens`.
        ValueError, TypeError
            `tokens` are no ids.
        OSError
            A chunk cannot be written.
        """
        ids = self._check(token_ids(tokens), kv)
        keys = list(chain(ids, self._size))
        now = time.time_ns()  # before the chunks that are there, which stay
        self._chunks.touch(keys[1:])
        cells = kv.parts[0]
        for i, key in enumerate(keys[1:] if isinstance(cells, CellRows) else ()):
            first, end = i * self._size, (i + 1) * self._size
            if not self._chunks.has(key):
                assert isinstance(cells, CellRows)
                blob = self._blob((cells.take(first, end),))
                place = first, ids[first:end], keys[i]
                # Later chunks count as used earlier, and do not evict those before them.
                if not self._put(key, _ROWS, place, blob, len(blob), now - i):
                    break
        if self.has_ends:
            rest = kv.parts[self._has_rows :]
            ends = [(len(ids), rest), *((n, state.parts) for n, state in checkpoints)]
            for n, parts in ends:
                if n <= len(ids) and _are_behind(parts, n):
                    self._put_end(ids[:n], keys[n // self._size], kv, parts)
        self._chunks.sync()
        return self.longest(ids)

    def longest(self, tokens: Tokens) -> int:
        """Return how many of the first tokens can be restored; damage is found by reading only."""
        ids = token_ids(tokens)
        return self._longest(ids, list(chain(ids, self._size)), set())

    def restore(self, tokens: Tokens) -> LlamaKV | None:
        """Read the first tokens of a conversation, as many as the store has.

        Parameters
        ----------
        tokens : sequence of int
            Its ids. Logits are not stored: leave out the last token, so that it is computed.

        Returns
        -------
        LlamaKV or None
            Their state, for a slot file and one stream. None if the store has none of them.
        """
        ids = token_ids(tokens)
        keys = list(chain(ids, self._size))
        lacking: set[bytes] = set()
        while n := self._longest(ids, keys, lacking):
            found = self._read(ids[:n], keys, lacking)
            if found is not None:
                self._chunks.touch(keys[1 : n // self._size + 1])
                return found
        return None

    def agrees(self, tokens: Tokens, kv: LlamaKV) -> bool:
        """Compare the state of some fixed tokens to the first one that was given for this model.

        Returns
        -------
        bool
            Whether they are nearly equal: False for another adapter, other positions, or another
            model under the name of this one.
        """
        instance(kv, "kv", LlamaKV)
        ids = token_ids(tokens)
        key = hashlib.sha256(b"probe" + ids.tobytes()).digest()
        blob = self._get_pieces(key, ids[:0], _ROOT)
        if blob is None:
            self._put_pieces(key, (0, ids[:0], _ROOT), self._blob(kv.parts))
            self._chunks.sync()
            return True
        self._chunks.touch([_piece_key(key, 0)])
        return _distance(state_to_kv(blob, version=self._version), kv) < 0.1

    def _check(self, ids: NDArray[np.int32], kv: LlamaKV) -> NDArray[np.int32]:
        """Return the ids of a state's tokens."""
        if (layout := layout_of(instance(kv, "kv", LlamaKV))) != self.layout:
            raise FormatError(
                f"expected a state with the layout {self.layout:.400}, got {layout:.400}: another "
                "model, version of llama.cpp, cache type or flash attention"
            )
        n = kv.n_tokens
        cells = kv.parts[0]
        if n > len(ids):
            raise FormatError(f"expected the ids of {n} tokens, got {len(ids)}")
        if isinstance(cells, CellRows) and not np.array_equal(cells.positions, np.arange(n)):
            raise FormatError("expected a state with all of its tokens, got one that lost some")
        return ids[:n]

    def _longest(self, ids: NDArray[np.int32], keys: list[bytes], lacking: set[bytes]) -> int:
        def has(key: bytes) -> bool:
            return key not in lacking and self._chunks.has(key)

        n_whole = len(keys) - 1
        if self._has_rows:
            n_whole = next((i for i, key in enumerate(keys[1:]) if not has(key)), n_whole)
        if not self.has_ends:
            return n_whole * self._size
        for n in range(min(len(ids), (n_whole + 1) * self._size - 1), 0, -1):
            if has(_piece_key(_end_key(keys[n // self._size], ids[:n], self._size), 0)):
                return n
        return 0

    def _read(
        self, ids: NDArray[np.int32], keys: list[bytes], lacking: set[bytes]
    ) -> LlamaKV | None:
        """Read all tokens; None, and `lacking` has a further key, if a chunk is missing."""
        n, size = len(ids), self._size
        rows: list[CellRows] = []
        rest: tuple[Part, ...] = ()
        for i in range(n // size if self._has_rows else 0):
            held = ids[i * size : (i + 1) * size]
            blob = self._get(keys[i + 1], held, keys[i])
            if blob is None:
                lacking.add(keys[i + 1])
                return None
            rows += self._parse(blob[1][: blob[0]]).parts  # type: ignore[arg-type]
        if self.has_ends:
            tail = ids[n // size * size :]
            key = _end_key(keys[n // size], ids, size)
            data = self._get_pieces(key, tail, keys[n // size])
            if data is None:
                lacking.add(_piece_key(key, 0))
                return None
            parts = self._parse(data).parts
            n_rows = int(self._has_rows and len(tail) > 0)
            rows += parts[:n_rows]  # type: ignore[arg-type]
            rest = parts[n_rows:]
        joined = (_join(rows),) if rows else ()
        return LlamaKV(self._version, b"", 1, (*joined, *rest))

    def _parse(self, blob: NDArray[np.uint8]) -> LlamaKV:
        return state_to_kv(blob, version=self._version)

    def _blob(self, parts: tuple[Part, ...]) -> NDArray[np.uint8]:
        return np.frombuffer(kv_to_state(LlamaKV(self._version, b"", 1, parts)), np.uint8)

    def _put_end(
        self, ids: NDArray[np.int32], parent: bytes, kv: LlamaKV, parts: tuple[Part, ...]
    ) -> None:
        first = len(ids) // self._size * self._size
        tail: tuple[Part, ...] = ()
        cells = kv.parts[0]
        if isinstance(cells, CellRows) and first < len(ids):
            tail = (cells.take(first, len(ids)),)
        key = _end_key(parent, ids, self._size)
        self._put_pieces(key, (first, ids[first:], parent), self._blob((*tail, *parts)))

    def _put_pieces(
        self, key: bytes, place: tuple[int, NDArray[np.int32], bytes], blob: NDArray[np.uint8]
    ) -> None:
        # The first piece is the last one written: an end is there whole, or not at all.
        for begin in reversed(range(0, len(blob), self._piece_bytes)):
            piece = blob[begin : begin + self._piece_bytes]
            self._put(_piece_key(key, begin // self._piece_bytes), _END, place, piece, len(blob))

    def _get_pieces(
        self, key: bytes, ids: NDArray[np.int32], parent: bytes
    ) -> NDArray[np.uint8] | None:
        pieces: list[NDArray[np.uint8]] = []
        nbytes = 1
        while nbytes > self._piece_bytes * len(pieces):
            found = self._get(_piece_key(key, len(pieces)), ids, parent)
            if found is None:
                return None
            nbytes, piece = found
            pieces.append(piece)
        return np.concatenate(pieces)[:nbytes]

    def _put(
        self,
        key: bytes,
        kind: bytes,
        place: tuple[int, NDArray[np.int32], bytes],
        blob: NDArray[np.uint8],
        nbytes: int,
        used_ns: int | None = None,
    ) -> bool:
        first, ids, parent = place
        data = np.zeros(self._begin + self._piece_bytes, np.uint8)
        head = _HEAD.pack(_MAGIC, kind, first, len(ids), nbytes, parent, len(self._packed))
        for at, piece in (0, head + self._packed), (HEAD_BYTES, ids.astype("<i4").tobytes()):
            data[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        data[self._begin : self._begin + len(blob)] = blob
        return self._chunks.put(key, data, used_ns)

    def _get(
        self, key: bytes, ids: NDArray[np.int32], parent: bytes
    ) -> tuple[int, NDArray[np.uint8]] | None:
        """Return a state's size and the bytes behind the head, if they are of these tokens."""
        data = np.empty(self._begin + self._piece_bytes, np.uint8)
        if not self._chunks.get(key, data):
            return None
        head = ChunkHead.read(io.BytesIO(data[: self._begin].tobytes()).read)
        if head is None or head.parent != parent or not np.array_equal(head.tokens, ids):
            return None
        return head.nbytes, data[self._begin :]


def _next_key(key: bytes, ids: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(key + ids.astype("<i4").tobytes()).digest()


def _end_key(parent: bytes, ids: NDArray[np.int32], size: int) -> bytes:
    return hashlib.sha256(b"end" + _next_key(parent, ids[len(ids) // size * size :])).digest()


def _piece_key(key: bytes, i: int) -> bytes:
    return hashlib.sha256(key + struct.pack("<I", i)).digest()


def _are_behind(parts: tuple[Part, ...], n: int) -> bool:
    """Whether all parts are of exactly n tokens."""
    return all(
        (int(part.positions[-1]) if isinstance(part, CellRows) else part.position) == n - 1
        for part in parts
    )


def _join(rows: list[CellRows]) -> CellRows:
    first = rows[0]
    keys, values = (
        tuple(
            StateLane(lane.type, np.concatenate([getattr(cells, part)[i].rows for cells in rows]))
            for i, lane in enumerate(getattr(first, part))
        )
        for part in ("keys", "values")
    )
    extra = None
    if first.extra is not None:
        extra = np.concatenate([cells.extra for cells in rows if cells.extra is not None])
    positions = np.concatenate([cells.positions for cells in rows])
    return CellRows(positions, extra, first.is_transposed, first.rotations, keys, values)


def _distance(a: LlamaKV, b: LlamaKV) -> float:
    """Return how far K and states of two are apart, as a share of the first one's size."""
    apart = size = 0.0
    for lane, its in zip(_compared(a), _compared(b), strict=True):
        if lane.rows.shape != its.rows.shape:
            return float("inf")
        x, y = _values(lane), _values(its)
        apart += float(np.square(x - y).sum())
        size += float(np.square(x).sum())
    return float((apart / size) ** 0.5) if size else 0.0


def _compared(kv: LlamaKV) -> list[StateLane]:
    parts = (part.keys if isinstance(part, CellRows) else part.tensors for part in kv.parts)
    return [lane for lanes in parts for lane in lanes]


def _values(lane: StateLane) -> NDArray[np.float32]:
    data = np.ascontiguousarray(lane.rows).reshape(-1)
    if lane.type == 0:
        return data.view("<f4")
    if lane.type == 1:
        return data.view("<f2").astype(np.float32)
    name, block_values, block_bytes = tensor_type(lane.type)
    values = np.empty(data.size // block_bytes * block_values, np.float32)
    dequantize(data, name, lane.type, values, name="K", path="")
    return values
