"""The format of the states in a snapshot: a header, tables, and the states and their checkpoints.

``docs/snapshots.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.base.text import format_bytes, format_count
from unimem.errors import SnapshotError
from unimem.kv.layer_specs import LayerState
from unimem.kv.snapshot.format_rows import (
    DAMAGED,
    DTYPES,
    MAX_ALIGNMENT,
    MAX_CACHE_BYTES,
    MAX_CHUNK_BYTES,
    MAX_MODEL_BYTES,
    MAX_POSITION,
    MIN_ALIGNMENT,
    Chunk,
    check_model,
    model_of,
    round_up,
    row_bytes_of,
    seal_header,
    tokens_of,
)

__all__ = ["HEADER_BYTES", "StatesSnapshot", "checked_header", "checked_tables", "encode", "new"]

MAGIC = b"UNIMEMST"
VERSION = 1
_HAS_MODEL, _HAS_TOKENS = 2, 4
_STATE_ALIGN = 64
# As many states as a file has layers.
_MAX_STATES = 1 << 16
_MAX_CHECKPOINTS = 1 << 31
_MAX_SEQ_LEN = 1 << 32
# Of floats: a state has no blocks.
_FLOATS = ("f32", "f16", "bf16")

_FIELDS = (
    ("magic", "8s"),
    ("version", "I"),
    ("header_bytes", "I"),
    ("file_bytes", "Q"),
    ("data_offset", "Q"),
    ("lane_stride", "Q"),
    ("state_bytes", "Q"),
    ("chunk_bytes", "Q"),
    ("seq_len", "Q"),
    ("next_position", "Q"),
    ("max_seq_len", "Q"),
    ("every", "Q"),
    ("max_checkpoints", "I"),
    ("n_checkpoints", "I"),
    ("n_states", "I"),
    ("batch", "I"),
    ("flags", "I"),
    ("alignment", "I"),
    ("model_bytes", "I"),
    ("reserved", "I"),
    ("tables_checksum", "Q"),
    ("header_checksum", "Q"),
)
_HEADER = struct.Struct("<" + "".join(code for _, code in _FIELDS))
HEADER_BYTES = _HEADER.size
OFFSETS = {
    name: struct.calcsize("<" + "".join(code for _, code in _FIELDS[:i]))
    for i, (name, _) in enumerate(_FIELDS)
}
# A dtype's number, how many dimensions there are, and these; the rest is zeros.
_STATE = np.dtype([("dtype", "<u4"), ("n_dims", "<u4"), ("dims", "<u4", (8,))])


@dataclass(frozen=True, slots=True, eq=False)
class StatesSnapshot:
    """What a snapshot says of the states in it.

    Attributes
    ----------
    path : str
        The file.
    states : tuple of LayerState
        What each layer keeps that keeps one, in the order of the layers.
    batch, seq_len, next_position, max_seq_len
        As in `Snapshot`.
    every : int or None
        After how many tokens the cache took a checkpoint.
    max_checkpoints : int
        How many it had room for.
    positions : tuple of int
        Of the checkpoints in the file, the oldest first.
    model, tokens
        As in `Snapshot`.
    state_bytes : int
        Bytes of all states of all streams, each rounded up to 64.
    alignment, data_offset, lane_stride, chunk_bytes, file_bytes, checksums, base
        As in `Snapshot`. A lane is all states: those of `next_position`, then each checkpoint's.
    """

    path: str
    states: tuple[LayerState, ...]
    batch: int
    seq_len: int
    next_position: int
    max_seq_len: int
    every: int | None
    max_checkpoints: int
    positions: tuple[int, ...]
    model: str | None
    tokens: NDArray[np.int32] | None
    state_bytes: int
    alignment: int
    data_offset: int
    lane_stride: int
    chunk_bytes: int
    file_bytes: int
    checksums: NDArray[np.uint64] = field(repr=False)
    base: int = 0

    @property
    def v_lane_stride(self) -> int:
        """As `lane_stride`: there are no others."""
        return self.lane_stride

    @property
    def tokens_offset(self) -> int:
        """Where the token ids begin in the file."""
        tables = len(self.states) * _STATE.itemsize + 8 * len(self.positions)
        return self.base + HEADER_BYTES + tables + 8 * len(self.checksums)

    def chunks(self) -> Iterator[Chunk]:
        """Give the chunks, in the order of their checksums."""
        number = 0
        for lane in range(1 + len(self.positions)):
            for begin in range(0, self.lane_stride, self.chunk_bytes):
                end = min(begin + self.chunk_bytes, self.lane_stride)
                nbytes = min(end, self.state_bytes) - begin
                offset = self.base + self.data_offset + lane * self.lane_stride + begin
                yield Chunk(number, lane, begin, nbytes, end - begin - nbytes, offset)
                number += 1

    def name_of(self, lane: int) -> str:
        """Say which lane that is."""
        return "the states" if lane == 0 else f"the checkpoint of {self.positions[lane - 1]}"

    def __str__(self) -> str:
        states = format_count(len(self.states), "state")
        checkpoints = format_count(len(self.positions), "checkpoint")
        return f"{states} of {format_bytes(self.state_bytes)}, {checkpoints}"


def _bytes_of(states: Sequence[LayerState], batch: int) -> int:
    return sum(
        round_up(row_bytes_of(batch, math.prod(state.shape), state.dtype), _STATE_ALIGN)
        for state in states
    )


def _sizes(facts: dict[str, Any], n_tokens: int) -> tuple[int, int, int, int]:
    """Return lane_stride, n_chunks, data_offset and file_bytes."""
    stride = round_up(facts["state_bytes"], facts["alignment"])
    n_lanes = 1 + facts["n_checkpoints"]
    n_chunks = n_lanes * -(-stride // facts["chunk_bytes"])
    tables = facts["n_states"] * _STATE.itemsize + 8 * facts["n_checkpoints"] + 8 * n_chunks
    tables += 4 * n_tokens + facts["model_bytes"]
    data_offset = round_up(HEADER_BYTES + tables, facts["alignment"])
    return stride, n_chunks, data_offset, data_offset + n_lanes * stride


def new(
    facts: dict[str, Any],
    model: str | None,
    tokens: NDArray[np.int32] | None,
    path: str,
    base: int = 0,
) -> StatesSnapshot:
    """Lay the states of a new file out.

    Parameters
    ----------
    facts : dict
        The fields of `StatesSnapshot` from `states` to `positions`, and `alignment` and
        `chunk_bytes`.
    model, tokens, path, base
        As in `StatesSnapshot`.

    Raises
    ------
    ValueError
        More bytes, or a longer name of the model, than a snapshot can have.
    """
    nbytes = _bytes_of(facts["states"], facts["batch"])
    if nbytes * (1 + facts["max_checkpoints"]) > MAX_CACHE_BYTES:
        raise ValueError(
            f"a snapshot is of states of at most {format_bytes(MAX_CACHE_BYTES)} with their "
            f"checkpoints, and these have {format_bytes(nbytes)} each"
        )
    counts = {
        "state_bytes": nbytes,
        "n_states": len(facts["states"]),
        "n_checkpoints": len(facts["positions"]),
        "model_bytes": check_model(model),
    }
    sizes = _sizes(facts | counts, 0 if tokens is None else len(tokens))
    return StatesSnapshot(
        path=path,
        model=model,
        tokens=tokens,
        state_bytes=nbytes,
        lane_stride=sizes[0],
        checksums=np.zeros(sizes[1], np.uint64),
        data_offset=sizes[2],
        file_bytes=sizes[3],
        base=base,
        **facts,
    )


def encode(snapshot: StatesSnapshot, out: NDArray[np.uint8]) -> None:
    """Write the header and the tables.

    Parameters
    ----------
    snapshot : StatesSnapshot
        What to write.
    out : numpy.ndarray
        ``uint8 [data_offset]``, all zeros: the beginning of the states in the file.
    """
    table = np.zeros(len(snapshot.states), _STATE)
    for row, state in zip(table, snapshot.states, strict=True):
        row["dtype"], row["n_dims"] = DTYPES.index(state.dtype), len(state.shape)
        row["dims"][: len(state.shape)] = state.shape
    model = b"" if snapshot.model is None else snapshot.model.encode()
    tokens = b"" if snapshot.tokens is None else snapshot.tokens.astype("<i4").tobytes()
    tables = table.tobytes() + np.array(snapshot.positions, "<u8").tobytes()
    tables += snapshot.checksums.astype("<u8").tobytes() + tokens + model
    out[HEADER_BYTES : HEADER_BYTES + len(tables)] = np.frombuffer(tables, np.uint8)
    special = {
        "magic": MAGIC,
        "version": VERSION,
        "header_bytes": HEADER_BYTES,
        "every": snapshot.every or 0,
        "n_checkpoints": len(snapshot.positions),
        "n_states": len(snapshot.states),
        "flags": _HAS_MODEL * (snapshot.model is not None)
        | _HAS_TOKENS * (snapshot.tokens is not None),
        "model_bytes": len(model),
        "reserved": 0,
        "tables_checksum": xxhash.xxh3_64_intdigest(out[HEADER_BYTES:].data),
        "header_checksum": 0,
    }
    values = [special[name] if name in special else getattr(snapshot, name) for name, _ in _FIELDS]
    out[:HEADER_BYTES] = np.frombuffer(seal_header(_HEADER.pack(*values)), np.uint8)


def _refuse(name: str, rule: str, path: str) -> NoReturn:
    raise SnapshotError(f"{rule}; {DAMAGED}", OFFSETS[name], path)


def checked_header(head: bytes, nbytes: int, path: str) -> dict[str, Any]:
    """Read the header of the states, and check every field.

    Parameters
    ----------
    head : bytes
        The beginning of the states: `HEADER_BYTES` of them, or all that there is.
    nbytes : int
        Bytes of the file that are theirs.
    path : str
        The file, for errors.

    Raises
    ------
    SnapshotError
        They are damaged, or cut off.
    """
    if len(head) < HEADER_BYTES:
        rule = f"the states are cut off inside their header: they have {len(head)} bytes"
        raise SnapshotError(f"{rule}; {DAMAGED}", len(head), path)
    values = dict(zip((name for name, _ in _FIELDS), _HEADER.unpack(head), strict=True))
    if values["magic"] != MAGIC or values["version"] != VERSION:
        _refuse("magic", "the states do not begin with UNIMEMST and version 1", path)
    if head != seal_header(head):
        _refuse("header_checksum", "the checksum of the states' header does not match", path)

    def check(holds: bool, name: str, expected: str) -> None:
        if not holds:
            _refuse(name, f"{name}: expected {expected}, got {values[name]}", path)

    alignment, chunk = values["alignment"], values["chunk_bytes"]
    is_power = alignment & (alignment - 1) == 0
    check(is_power and MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT, "alignment", "a page's size")
    whole = 0 < chunk <= MAX_CHUNK_BYTES and chunk % alignment == 0
    check(whole, "chunk_bytes", f"a multiple of the alignment up to {MAX_CHUNK_BYTES}")
    check(1 <= values["n_states"] <= _MAX_STATES, "n_states", f"1 to {_MAX_STATES}")
    check(values["batch"] >= 1, "batch", "at least 1")
    check(values["max_checkpoints"] < _MAX_CHECKPOINTS, "max_checkpoints", "less than 2**31")
    most = values["max_checkpoints"]
    check(values["n_checkpoints"] <= most, "n_checkpoints", f"at most {most}")
    most = MAX_CACHE_BYTES // (1 + most)
    check(1 <= values["state_bytes"] <= most, "state_bytes", f"1 to {most}")
    check(values["next_position"] < MAX_POSITION, "next_position", f"less than {MAX_POSITION}")
    most = values["next_position"]
    check(values["seq_len"] <= most, "seq_len", f"at most {most}")
    check(1 <= values["max_seq_len"] < _MAX_SEQ_LEN, "max_seq_len", f"1 to {_MAX_SEQ_LEN - 1}")
    check(values["flags"] & ~(_HAS_MODEL | _HAS_TOKENS) == 0, "flags", "no bit but 2 and 4")
    max_model = MAX_MODEL_BYTES if values["flags"] & _HAS_MODEL else 0
    check(values["model_bytes"] <= max_model, "model_bytes", f"at most {max_model}")
    n_tokens = values["next_position"] if values["flags"] & _HAS_TOKENS else 0
    stride, _, data_offset, file_bytes = _sizes(values, n_tokens)
    exact = {"header_bytes": HEADER_BYTES, "lane_stride": stride, "data_offset": data_offset}
    exact |= {"file_bytes": file_bytes, "reserved": 0}
    for name, expected in exact.items():
        check(values[name] == expected, name, str(expected))
    if nbytes != file_bytes:
        _refuse("file_bytes", f"the states have {nbytes} bytes of the file, not {file_bytes}", path)
    return values


def checked_tables(
    values: dict[str, Any], tables: NDArray[np.uint8], path: str, base: int
) -> StatesSnapshot:
    """Read what follows the header.

    Parameters
    ----------
    values : dict
        From `checked_header`.
    tables : numpy.ndarray
        ``uint8``: from `HEADER_BYTES` to `data_offset`.
    path : str
        The file.
    base : int
        Where the header begins in it.

    Raises
    ------
    SnapshotError
        Their checksum does not match, or they hold what cannot be.
    """
    if xxhash.xxh3_64_intdigest(tables.data) != values["tables_checksum"]:
        _refuse("tables_checksum", "the checksum of the states' tables does not match", path)
    begin = values["n_states"] * _STATE.itemsize
    try:
        states = tuple(_state_of(row) for row in tables[:begin].view(_STATE))
    except (ValueError, IndexError) as error:
        raise SnapshotError(f"a state cannot be: {error}; {DAMAGED}", HEADER_BYTES, path) from None
    if _bytes_of(states, values["batch"]) != values["state_bytes"]:
        _refuse("state_bytes", "state_bytes are not those of the states", path)
    end = begin + 8 * values["n_checkpoints"]
    positions = [int(position) for position in tables[begin:end].view("<u8")]
    in_order = all(a < b for a, b in pairwise(positions))
    if not in_order or (positions and positions[-1] > values["next_position"]):
        _refuse("n_checkpoints", "checkpoints: expected rising positions up to the end", path)
    n_tokens = values["next_position"] if values["flags"] & _HAS_TOKENS else 0
    n_chunks = _sizes(values, n_tokens)[1]
    checksums = tables[end : end + 8 * n_chunks].view("<u8").astype(np.uint64)
    end += 8 * n_chunks
    tokens = tokens_of(tables, end, n_tokens, HEADER_BYTES, path)
    model = model_of(tables, end + 4 * n_tokens, values["model_bytes"], HEADER_BYTES, path)
    same = tuple(
        """
        batch seq_len next_position max_seq_len max_checkpoints state_bytes alignment
        data_offset lane_stride chunk_bytes file_bytes
    """.split()
    )
    return StatesSnapshot(
        path=path,
        states=states,
        every=values["every"] or None,
        positions=tuple(positions),
        model=model if values["flags"] & _HAS_MODEL else None,
        tokens=tokens if values["flags"] & _HAS_TOKENS else None,
        checksums=checksums,
        base=base,
        **{name: values[name] for name in same},
    )


def _state_of(row: np.void) -> LayerState:
    dtype, n_dims = DTYPES[row["dtype"]], int(row["n_dims"])
    if dtype not in _FLOATS or row["dims"][n_dims:].any():
        raise ValueError(f"dtype {dtype} with {n_dims} dimensions {row['dims'].tolist()}")
    return LayerState(tuple(int(n) for n in row["dims"][:n_dims]), dtype)
