"""The format of the states in a snapshot: a header, tables, and the states and their checkpoints.

``docs/snapshots.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem.base.binary_header import BinaryHeader, HeaderFields, Tables
from unimem.base.text import format_bytes, format_count
from unimem.errors import SnapshotError
from unimem.kv.layer_specs import LayerState
from unimem.kv.snapshot.format_rows import (
    DAMAGED,
    DTYPES,
    HAS_MODEL,
    HAS_TOKENS,
    MAX_CACHE_BYTES,
    MAX_POSITION,
    MAX_SEQ_LEN,
    Section,
    check_model,
    check_storage,
    ids_and_model,
    n_ids,
)
from unimem.kv.types import round_up, row_bytes_of

MAGIC = b"UNIMEMST"
_STATE_ALIGN = 64
_MAX_STATES = 1 << 16  # as many as a file has layers
_MAX_CHECKPOINTS = (1 << 31) - 1
_FLOATS = ("f32", "f16", "bf16")  # a state has no blocks

HEADER = BinaryHeader(
    """
    8s magic; I version header_bytes;
    Q file_bytes data_offset lane_stride state_bytes chunk_bytes seq_len next_position
      max_seq_len every;
    I max_checkpoints n_checkpoints n_states batch flags alignment model_bytes reserved;
    Q tables_checksum header_checksum
    """,
    MAGIC,
    "part of states",
    error=SnapshotError,
    advice=DAMAGED,
)
# The number of a dtype, how many dimensions there are, and these; the rest is zeros.
_STATE = np.dtype([("dtype", "<u4"), ("n_dims", "<u4"), ("dims", "<u4", (8,))])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StatesSnapshot(Section):
    """What a snapshot says of the states in it. It has the attributes of `Section`, and these.

    A lane holds all states: first those of `next_position`, then each checkpoint's.

    Attributes
    ----------
    states : tuple of LayerState
        What each layer with a state keeps, in the order of the layers.
    every : int or None
        The number of tokens after which the cache took a checkpoint.
    max_checkpoints : int
        The number of checkpoints that the cache had room for.
    positions : tuple of int
        The positions of the checkpoints in the file, the oldest first.
    state_bytes : int
        Bytes of all states of all streams, each rounded up to 64.
    """

    states: tuple[LayerState, ...]
    every: int | None
    max_checkpoints: int
    positions: tuple[int, ...]
    state_bytes: int

    @property
    def tokens_offset(self) -> int:
        """Where the token ids begin in the file."""
        tables = len(self.states) * _STATE.itemsize + 8 * len(self.positions)
        return self.base + HEADER.nbytes + tables + 8 * len(self.checksums)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Give the offset in the file, the bytes and the stride of each lane."""
        for lane in range(1 + len(self.positions)):
            offset = self.base + self.data_offset + lane * self.lane_stride
            yield offset, self.state_bytes, self.lane_stride

    def name_of(self, lane: int) -> str:
        """Name a lane, for errors."""
        return "the states" if lane == 0 else f"the checkpoint of {self.positions[lane - 1]}"

    def _head(self) -> NDArray[np.uint8]:
        """Return all bytes before the data: the header and the tables."""
        table = np.zeros(len(self.states), _STATE)
        for row, state in zip(table, self.states, strict=True):
            row["dtype"], row["n_dims"] = DTYPES.index(state.dtype), len(state.shape)
            row["dims"][: len(state.shape)] = state.shape
        counts = {"n_checkpoints": len(self.positions), "n_states": len(self.states)}
        fields = counts | {"every": self.every or 0, "reserved": 0}
        front = table.tobytes() + np.array(self.positions, "<u8").tobytes()
        return self._write_head(HEADER, fields, 0, front)

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
    data_offset = round_up(HEADER.nbytes + tables, facts["alignment"])
    return stride, n_chunks, data_offset, data_offset + n_lanes * stride


def new(
    facts: dict[str, Any],
    model: str | None,
    tokens: NDArray[np.int32] | None,
    path: str,
    base: int = 0,
) -> StatesSnapshot:
    """Lay out the states of a new file, as `format_rows.new` does."""
    nbytes = _bytes_of(facts["states"], facts["batch"])
    if nbytes * (1 + facts["max_checkpoints"]) > MAX_CACHE_BYTES:
        raise ValueError(
            f"a snapshot is of states of at most {format_bytes(MAX_CACHE_BYTES)} with their "
            f"checkpoints, and these have {format_bytes(nbytes)} each"
        )
    if facts["next_position"] >= MAX_POSITION:
        raise ValueError(
            f"a snapshot is of positions below {MAX_POSITION}, and the next one here is "
            f"{facts['next_position']}"
        )
    counts = {
        "state_bytes": nbytes,
        "n_states": len(facts["states"]),
        "n_checkpoints": len(facts["positions"]),
        "model_bytes": check_model(model),
    }
    stride, n_chunks, data_offset, file_bytes = _sizes(
        facts | counts, 0 if tokens is None else len(tokens)
    )
    return StatesSnapshot(
        path=path,
        model=model,
        tokens=tokens,
        state_bytes=nbytes,
        lane_stride=stride,
        checksums=np.zeros(n_chunks, np.uint64),
        data_offset=data_offset,
        file_bytes=file_bytes,
        base=base,
        **facts,
    )


def checked_header(head: bytes, nbytes: int, path: str, base: int = 0) -> HeaderFields:
    """Read the header of the states and check every field, as `format_rows` does."""
    values = HEADER.read(head, path, base)
    check_storage(values)
    check = values.check
    values.check_range("n_states", 1, _MAX_STATES)
    check(values["batch"] >= 1, "batch", "at least 1")
    values.check_range("max_checkpoints", 0, _MAX_CHECKPOINTS)
    most = values["max_checkpoints"]
    check(values["n_checkpoints"] <= most, "n_checkpoints", f"at most {most}")
    values.check_range("state_bytes", 1, MAX_CACHE_BYTES // (1 + most))
    most = values["next_position"]
    check(values["seq_len"] <= most, "seq_len", f"at most {most}")
    values.check_range("max_seq_len", 1, MAX_SEQ_LEN)
    check(values["flags"] & ~(HAS_MODEL | HAS_TOKENS) == 0, "flags", "no bit but 2 and 4")
    stride, _, data_offset, file_bytes = _sizes(values, n_ids(values))
    values.check_exact(
        header_bytes=HEADER.nbytes,
        lane_stride=stride,
        data_offset=data_offset,
        file_bytes=file_bytes,
        reserved=0,
    )
    values.check_file(nbytes)
    return values


def checked_tables(values: HeaderFields, data: NDArray[np.uint8]) -> StatesSnapshot:
    """Read the tables behind a header, as `format_rows.checked_tables` does."""
    tables = Tables(values, data)
    try:
        states = tuple(_state_of(row) for row in tables.take(_STATE, values["n_states"]))
    except (ValueError, IndexError) as error:
        values.refuse_at(HEADER.nbytes, f"a state cannot be: {error}")
    if _bytes_of(states, values["batch"]) != values["state_bytes"]:
        values.refuse("state_bytes", "state_bytes are not those of the states")
    positions = [int(position) for position in tables.take("<u8", values["n_checkpoints"])]
    in_order = all(a < b for a, b in pairwise(positions))
    if not in_order or (positions and positions[-1] > values["next_position"]):
        values.refuse("n_checkpoints", "checkpoints: expected rising positions up to the end")
    n_chunks = _sizes(values, n_ids(values))[1]
    checksums = tables.take("<u8", n_chunks).astype(np.uint64)
    tokens, model = ids_and_model(values, tables)
    same = """
        batch seq_len next_position max_seq_len max_checkpoints state_bytes alignment
        data_offset lane_stride chunk_bytes file_bytes
    """.split()
    return StatesSnapshot(
        path=values.path,
        states=states,
        every=values["every"] or None,
        positions=tuple(positions),
        model=model,
        tokens=tokens,
        checksums=checksums,
        base=values.base,
        **{name: values[name] for name in same},
    )


def _state_of(row: np.void) -> LayerState:
    dtype, n_dims = DTYPES[row["dtype"]], int(row["n_dims"])
    if dtype not in _FLOATS or row["dims"][n_dims:].any():
        raise ValueError(f"dtype {dtype} with {n_dims} dimensions {row['dims'].tolist()}")
    return LayerState(tuple(int(n) for n in row["dims"][:n_dims]), dtype)
