"""The states of llama.cpp's sequences: parsed into rows of tokens, and written again.

A state is a list of parts, as llama.cpp's memory is made of them: caches of attention, each with a
row of K and of V for each token and layer, and recurrent states. llama.cpp writes no number that
says which parts follow, so they are found by trying: a state is known if all of its bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import instance
from unimem.errors import FormatError

#: Versions of sequences' states (`LLAMA_STATE_SEQ_VERSION`): 4 added the sizes of rotations.
VERSIONS = (3, 4)
_SEQUENCE_MAGIC = 0xAF143CD8  # before what llama_state_seq_get_data writes
_MOST_ARCH = 64  # bytes of an architecture's name
_MOST_LAYERS, _MOST_STREAMS, _MOST_ROW = 1024, 1024, 1 << 26
# Its memories have up to 3 parts; bytes that can be parts in many ways are read this often at most.
_MOST_PARTS, _MOST_READS = 8, 1 << 15
_EXTRA_BYTES = 12  # of a cell with further positions (M-RoPE) and a token
# Bytes of values by ggml's number of the type, for types that V can be transposed with.
_VALUE_BYTES = {0: 4, 1: 2, 30: 2}
_CACHE_TYPES = {*_VALUE_BYTES, 2, 3, 6, 7, 8, 20}


class StateLane(NamedTuple):
    """K or V of a layer: ggml's number of the type, and ``uint8 [cells, bytes of a row]``."""

    type: int
    rows: NDArray[np.uint8]


class CellRows(NamedTuple):
    """One cache of attention, its cells in the order of positions.

    `positions` is ``int32 [cells]``. `extra` is ``uint8 [cells, 12]`` for models whose tokens have
    several positions, or None. V `is_transposed` if the context has no flash attention. `rotations`
    are the sizes of the rotations of K and V, none before version 4. Layers without V have no lane
    in `values`.
    """

    positions: NDArray[np.int32]
    extra: NDArray[np.uint8] | None
    is_transposed: bool
    rotations: tuple[int, ...]
    keys: tuple[StateLane, ...]
    values: tuple[StateLane, ...]

    def take(self, first: int, end: int) -> CellRows:
        """View some of the cells."""
        lanes = (
            tuple(StateLane(lane.type, lane.rows[first:end]) for lane in lanes)
            for lanes in (self.keys, self.values)
        )
        extra = None if self.extra is None else self.extra[first:end]
        head = self.positions[first:end], extra, self.is_transposed, self.rotations
        return CellRows(*head, *lanes)


class Recurrent(NamedTuple):
    """Recurrent states behind the token at `position`: a type and bytes for each tensor.

    `n_layers` are all layers of the model; those without a state have no tensor.
    """

    position: int
    n_layers: int
    tensors: tuple[StateLane, ...]


Part: TypeAlias = CellRows | Recurrent


class LlamaKV(NamedTuple):
    """The state of one sequence of llama.cpp.

    Attributes
    ----------
    version : int
        The format, as ``LLAMA_STATE_SEQ_VERSION`` counts.
    head : bytes
        What is before the first part: empty in slot files.
    n_streams : int
        Sequences for which the context has caches of their own; 1 for a unified cache.
    parts : tuple of CellRows or Recurrent
        In llama.cpp's order.
    """

    version: int
    head: bytes
    n_streams: int
    parts: tuple[Part, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence: the number behind its last position."""
        return 1 + max(
            int(part.positions[-1]) if isinstance(part, CellRows) else part.position
            for part in self.parts
        )

    @property
    def is_context(self) -> bool:
        """Whether it is of ``llama_state_get_data``, which writes all sequences."""
        return bool(self.head) and not _is_sequence(self.head)


def state_to_kv(blob: bytes | NDArray[np.uint8], *, version: int | None = None) -> LlamaKV:
    """Parse the state of a sequence of llama.cpp.

    Parameters
    ----------
    blob : bytes-like
        From ``llama_state_seq_get_data``, or ``llama_state_get_data`` of a context with one
        sequence, or what follows the tokens in a slot file. Rows are views of it where its cells
        are in the order of their positions.
    version : {3, 4}, optional
        The format. The default is the newest that the bytes can be.

    Returns
    -------
    LlamaKV

    Raises
    ------
    FormatError
        The version is not known, or the bytes are not a state of one.
    """
    if version is not None:
        check_version(version)
    try:
        data = np.frombuffer(blob, np.uint8)
    except (TypeError, ValueError, BufferError):
        raise TypeError(f"blob: expected the bytes of a state, got {blob!r:.60}") from None
    return begin_of_state(data, version, b"")[0]


def check_version(version: int) -> None:
    """Refuse a version of states that is not known."""
    if not isinstance(version, int) or version not in VERSIONS:
        raise FormatError(
            f"version {version} of llama.cpp's states is not known, only "
            f"{' and '.join(map(str, VERSIONS))}: use a llama.cpp that writes one, or update unimem"
        )


def begin_of_state(
    data: NDArray[np.uint8], version: int | None, behind: bytes
) -> tuple[LlamaKV, int]:
    """Parse a state as `state_to_kv`, and return its end: that of `data`, or where `behind` is."""
    reached = 0
    versions = VERSIONS if version is None else (version,)
    for number in versions[::-1]:
        for at, is_context in _heads(data):
            parser = _Parser(data, number, is_context, behind)
            if (parts := parser.parse(at)) is not None:
                kv = LlamaKV(number, data[:at].tobytes(), parser.n_streams, parts)
                return kv, parser.reached
            reached = max(reached, parser.reached)
    raise FormatError(
        f"expected the state of one sequence with tokens, in version "
        f"{' or '.join(map(str, versions))} of llama.cpp's states, got bytes that are laid out in "
        "another way",
        reached,
    )


def kv_to_state(kv: LlamaKV) -> bytes:
    """Write a state as llama.cpp reads it, in the version and with the head that it has.

    Parameters
    ----------
    kv : LlamaKV

    Returns
    -------
    bytes
        For ``llama_state_seq_set_data``, or ``llama_state_set_data``, or a slot file.
    """
    pieces = [instance(kv, "kv", LlamaKV).head]
    for part in kv.parts:
        if isinstance(part, Recurrent):
            pieces += _recurrent_pieces(part, kv.is_context)
        else:
            pieces += _cells_pieces(part, kv.n_streams)
    return b"".join(pieces)


def _is_sequence(head: bytes) -> bool:
    return len(head) == 8 and head.startswith(struct.pack("<I", _SEQUENCE_MAGIC))


def _heads(data: NDArray[np.uint8]) -> Iterator[tuple[int, bool]]:
    """Yield where parts can begin, and whether they are of a whole context."""
    if _is_sequence(data[:8].tobytes()):
        yield 8, False
        return
    yield 0, False
    if data.size >= 4:
        n = int.from_bytes(data[:4].tobytes(), "little")
        name = data[4 : 4 + min(n, _MOST_ARCH)].tobytes()
        if len(name) == n and name.isascii() and name.decode().isprintable():
            yield 4 + n, True


def _cells_pieces(cells: CellRows, n_streams: int) -> Iterator[Any]:
    n, others = len(cells.positions), n_streams - 1
    yield struct.pack("<II", n_streams, n)
    table = np.zeros(n, _cell_type(cells.extra is not None))
    table["position"], table["n_sequences"] = cells.positions, 1
    if cells.extra is not None:
        table["extra"] = cells.extra
    yield table.tobytes()
    head = int(cells.is_transposed), len(cells.keys), *cells.rotations
    yield struct.pack(f"<{len(head)}I", *head)
    for lane in cells.keys:
        yield struct.pack("<iQ", lane.type, lane.rows.shape[1])
        yield np.ascontiguousarray(lane.rows).data
    for lane in cells.values:
        if not cells.is_transposed:
            yield struct.pack("<iQ", lane.type, lane.rows.shape[1])
            yield np.ascontiguousarray(lane.rows).data
            continue
        size = _VALUE_BYTES[lane.type]
        values = np.ascontiguousarray(lane.rows).view(f"V{size}")
        yield struct.pack("<iII", lane.type, size, values.shape[1])
        yield values.T.tobytes()
    yield bytes(4 * others)


def _recurrent_pieces(states: Recurrent, is_context: bool) -> Iterator[Any]:
    yield struct.pack("<IiI", 1, states.position, int(is_context))
    yield bytes(4 * is_context)  # the sequence
    yield struct.pack("<II", 0, states.n_layers)
    for tensor in states.tensors:
        yield struct.pack("<iQ", tensor.type, tensor.rows.size)
        yield np.ascontiguousarray(tensor.rows).data


def _cell_type(has_extra: bool) -> np.dtype[Any]:
    extra = [("extra", "u1", _EXTRA_BYTES)] if has_extra else []
    return np.dtype([("position", "<i4"), ("n_sequences", "<u4"), *extra, ("sequence", "<i4")])


class _Parser:
    """Finds parts that take all bytes: each method yields what can begin at a byte, and its end."""

    def __init__(
        self, data: NDArray[np.uint8], version: int, is_context: bool, behind: bytes
    ) -> None:
        self._data, self._version, self._is_context = data, version, is_context
        self._behind = behind
        self.n_streams = 1
        self.reached = 0
        self._left = _MOST_READS

    def parse(self, at: int, most: int = _MOST_PARTS) -> tuple[Part, ...] | None:
        """Return the parts from a byte to the end, `most` of them; None if there are none."""
        self.reached = max(self.reached, at)
        if not most:
            return None
        for parts in (self._cells(at), self._recurrent(at)):
            for part, end in parts:
                rest = self._data[end : end + len(self._behind)].tobytes()
                if end == self._data.size or (rest and rest == self._behind):
                    self.reached = end
                    return (part,)
                if (more := self.parse(end, most - 1)) is not None:
                    return (part, *more)
        return None

    def _words(self, at: int, code: str) -> tuple[int, ...] | None:
        end = at + struct.calcsize(f"<{code}")
        self._left -= 1
        if end > self._data.size or self._left < 0:
            return None
        return struct.unpack(f"<{code}", self._data[at:end].tobytes())

    def _cells(self, at: int) -> Iterator[tuple[CellRows, int]]:
        found = self._words(at, "I")
        if found is None or not 1 <= found[0] <= _MOST_STREAMS:
            return
        n_streams, at = found[0], at + 4
        counts = self._data[at : at + 4 * n_streams]
        if counts.size != 4 * n_streams:
            return
        n_before = int(np.argmax(counts.view("<u4") != 0))  # streams of other sequences are empty
        at += 4 * n_before
        n = int(counts.view("<u4")[n_before])
        for has_extra in (False, True):
            found_cells = self._table(at + 4, n, has_extra)
            if found_cells is None:
                continue
            table, end = found_cells
            for cells, last in self._lanes(table, end):
                rest = last + 4 * (n_streams - 1 - n_before)
                if rest <= self._data.size and not self._data[last:rest].any():
                    self.n_streams = n_streams
                    yield cells, rest

    def _table(self, at: int, n: int, has_extra: bool) -> tuple[NDArray[Any], int] | None:
        kind = _cell_type(has_extra)
        end = at + n * kind.itemsize
        if n == 0 or end > self._data.size:
            return None
        table = self._data[at:end].view(kind)
        is_one = (table["n_sequences"] == 1) & (table["sequence"] == table["sequence"][0])
        return (table, end) if is_one.all() and (table["position"] >= 0).all() else None

    def _lanes(self, table: NDArray[Any], at: int) -> Iterator[tuple[CellRows, int]]:
        has_rotations = self._version >= 4
        head = self._words(at, "IIII" if has_rotations else "II")
        if head is None or head[0] > 1 or not 1 <= head[1] <= _MOST_LAYERS:
            return
        at += 4 * len(head)
        is_transposed, n, n_layers = bool(head[0]), len(table), head[1]
        order = np.argsort(table["position"], kind="stable")
        is_sorted = bool((order == np.arange(n)).all())
        keys: list[StateLane] = []
        values: list[StateLane] = []
        for _ in range(n_layers):
            if (found := self._lane(at, n)) is None:
                return
            lane, at = found
            keys.append(lane)
        ends = [at]
        while len(values) < n_layers:
            found = self._transposed(at, n) if is_transposed else self._lane(at, n)
            if found is None:
                break
            lane, at = found
            values.append(lane)
            ends.append(at)
        self.reached = max(self.reached, at)
        if not is_sorted:
            keys, values = (
                [StateLane(lane.type, lane.rows[order]) for lane in lanes]
                for lanes in (keys, values)
            )
            table = table[order]
        extra = table["extra"] if "extra" in (table.dtype.names or ()) else None
        facts = table["position"], extra, is_transposed, head[2:], tuple(keys)
        for n_values in range(len(values), -1, -1):
            yield CellRows(*facts, tuple(values[:n_values])), ends[n_values]

    def _lane(self, at: int, n: int, least: int = 1) -> tuple[StateLane, int] | None:
        head = self._words(at, "iQ")
        if head is None or head[0] not in _CACHE_TYPES or not least <= head[1] <= _MOST_ROW:
            return None
        begin = at + 12
        end = begin + n * head[1]
        if end > self._data.size:
            return None
        return StateLane(head[0], self._data[begin:end].reshape(n, head[1])), end

    def _transposed(self, at: int, n: int) -> tuple[StateLane, int] | None:
        head = self._words(at, "iII")
        if head is None or _VALUE_BYTES.get(head[0]) != head[1] or not 1 <= head[2] <= _MOST_ROW:
            return None
        begin, row_bytes = at + 12, head[1] * head[2]
        end = begin + n * row_bytes
        if end > self._data.size:
            return None
        values = self._data[begin:end].view(f"V{head[1]}").reshape(head[2], n)
        return StateLane(head[0], np.ascontiguousarray(values.T).view(np.uint8)), end

    def _recurrent(self, at: int) -> Iterator[tuple[Recurrent, int]]:
        code = "IiIiII" if self._is_context else "IiIII"
        head = self._words(at, code)
        if head is None or head[0] != 1 or head[1] < 0 or head[2] != int(self._is_context):
            return
        position, s_transposed, n_layers = head[1], head[-2], head[-1]
        if s_transposed or not 1 <= n_layers <= _MOST_LAYERS:
            return
        at += struct.calcsize(f"<{code}")
        tensors: list[StateLane] = []
        ends = []
        while len(tensors) < 2 * n_layers:
            found = self._lane(at, 1, least=0)  # a convolution has no other state
            if found is None:
                break
            lane, at = found
            tensors.append(lane)
            ends.append(at)
        self.reached = max(self.reached, at)
        # Each layer that has states has two: of a convolution, and recurrent.
        for n in range(len(tensors) // 2 * 2, 0, -2):
            yield Recurrent(position, n_layers, tuple(tensors[:n])), ends[n - 1]
