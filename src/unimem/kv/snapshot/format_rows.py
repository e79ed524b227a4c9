"""The format of snapshots of caches whose layers are alike: headers, tables, and where rows lie.

``docs/snapshots.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from unimem.base.binary_header import BinaryHeader, HeaderFields, Tables
from unimem.base.text import format_bytes, format_count
from unimem.errors import SnapshotError
from unimem.kv.types import KV_TYPES, DType, block_values, round_up, row_bytes_of

Order: TypeAlias = Literal["token", "head"]

MAGIC = b"UNIMEMKV"
#: The newest version of a file; versions 2 and 3 are those of `format_layers`.
NEWEST = 3
# In the file a dtype is its index here.
DTYPES = KV_TYPES
_GROW, HAS_MODEL, HAS_TOKENS, _BY_HEAD, _V_DIM, _ROTATED, _TRIMMED = 1, 2, 4, 8, 16, 32, 64
# The upper half of `head_dim` is the size of V's heads, if that differs.
_MOST_HALF = 0xFFFF

MIN_ALIGNMENT, MAX_ALIGNMENT = 4096, 1 << 20
_ROTATION = 64  # rotated heads are multiples of it
MAX_CHUNK_BYTES = 64 << 20
MAX_LANES = 1 << 20
MAX_SEQ_LEN = (1 << 32) - 1  # as KVCache
MAX_MODEL_BYTES = 65535
MAX_POSITION = 1 << 62
# A growing cache reserves twice its rows of address space, which has 47 bits.
MAX_CACHE_BYTES = 1 << 44
_LANES = "2 * n_layers * batch, with rows by head times n_kv_heads"

#: The end of each error about a damaged file.
DAMAGED = "the file is damaged, take another copy of it or save anew"
HEADER = BinaryHeader(
    """
    8s magic; I version header_bytes;
    Q file_bytes data_offset lane_stride row_bytes chunk_bytes seq_len next_position
      max_seq_len window spare_rows;
    I n_layers n_kv_heads head_dim batch dtype flags alignment model_bytes;
    Q tables_checksum header_checksum
    """,
    MAGIC,
    "snapshot of unimem",
    newest=NEWEST,
    error=SnapshotError,
    advice=DAMAGED,
)


class Lane(NamedTuple):
    """K or V of one layer of one stream, as arguments of `KVCache`.

    If each head has a lane, head h of stream s is stream ``s * n_kv_heads + h``.
    """

    layer: int
    part: Literal["k", "v"]
    stream: int


class Chunk(NamedTuple):
    """A piece of a lane that has a checksum of its own.

    `begin` and `nbytes` are its bytes of the lane's rows. The checksum covers the `padding` behind
    them, too. `number` is the index of the checksum, and `offset` the byte of the file.
    """

    number: int
    lane: int
    begin: int
    nbytes: int
    padding: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Section(ABC):
    """A part of a file that has a header, tables and data of its own: rows, or states.

    Attributes
    ----------
    path : str
        The file.
    max_seq_len, batch : int
        Dimensions of the cache.
    seq_len, next_position : int
        Tokens in the file, and the position after the last one.
    model : str or None
        The name of the model that it was saved with.
    tokens : numpy.ndarray or None
        ``int32 [next_position]``, read-only: the ids of all tokens of the conversation.
    alignment, data_offset, lane_stride, chunk_bytes, file_bytes : int
        Where the data is, in bytes: see ``docs/snapshots.md``.
    checksums : numpy.ndarray
        ``uint64 [n_chunks]``: the checksum of each chunk of the data.
    base : int
        Where this section begins in the file; offsets in its header count from there.
    """

    path: str
    max_seq_len: int
    batch: int
    seq_len: int
    next_position: int
    model: str | None
    tokens: NDArray[np.int32] | None
    alignment: int
    data_offset: int
    lane_stride: int
    chunk_bytes: int
    file_bytes: int
    checksums: NDArray[np.uint64] = field(repr=False)
    base: int = 0

    @property
    @abstractmethod
    def tokens_offset(self) -> int:
        """Where the token ids begin in the file."""

    @property
    def _longest_lane(self) -> int:
        """Bytes of the longest lane with its padding."""
        return self.lane_stride

    @abstractmethod
    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Give the offset in the file, the bytes and the stride of each lane."""

    @abstractmethod
    def name_of(self, lane: int) -> str:
        """Name a lane, for errors."""

    @abstractmethod
    def _head(self) -> NDArray[np.uint8]:
        """Return all bytes before the data: the header and the tables."""

    def chunks(self) -> Iterator[Chunk]:
        """Give the chunks, in the order of their checksums."""
        number = 0
        for lane, (offset, lane_bytes, stride) in enumerate(self._places()):
            for begin in range(0, stride, self.chunk_bytes):
                end = min(begin + self.chunk_bytes, stride)
                nbytes = min(end, lane_bytes) - begin
                yield Chunk(number, lane, begin, nbytes, end - begin - nbytes, offset + begin)
                number += 1

    def _write_head(
        self, header: BinaryHeader, fields: dict[str, Any], flags: int, front: bytes = b""
    ) -> NDArray[np.uint8]:
        """Return the header with these fields, and the tables: `front`, then those of all kinds."""
        model = b"" if self.model is None else self.model.encode()
        tokens = b"" if self.tokens is None else self.tokens.astype("<i4").tobytes()
        flags |= HAS_MODEL * (self.model is not None) | HAS_TOKENS * (self.tokens is not None)
        values = {name: getattr(self, name) for name in header.offsets if hasattr(self, name)}
        out = np.zeros(self.data_offset, np.uint8)
        tables = front + self.checksums.astype("<u8").tobytes() + tokens + model
        header.write(out, values | fields | {"flags": flags, "model_bytes": len(model)}, tables)
        return out


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Snapshot(Section):
    """What the header of a snapshot file says. It has the attributes of `Section`, and these.

    Attributes
    ----------
    n_layers, n_kv_heads, head_dim, v_head_dim : int
        The cache's dimensions. `max_seq_len` is smaller if `budget_bytes` has cut its rows.
    dtype, v_dtype : str
        The stored types of K and V, as for `KVCache`.
    rotate, grow : bool
        Whether heads are stored rotated, and whether the cache's storage grew with its tokens.
    window, spare_rows : int or None, int
        The tokens that a ring shows, and its rows beyond them.
    trimmed : bool
        Whether first tokens of a ring were trimmed: later tokens never saw them.
    order : {"token", "head"}
        Whether a row of a lane has all heads of a token, or each head has a lane.
    row_bytes, v_row_bytes : int
        Bytes of one token in one lane of K, and of V: all heads, or one.
    v_lane_stride : int
        As `lane_stride`, for lanes of V.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: DType
    v_dtype: DType
    rotate: bool
    window: int | None
    spare_rows: int
    trimmed: bool
    grow: bool
    order: Order
    row_bytes: int
    v_row_bytes: int
    v_lane_stride: int

    def lane_bytes(self, part: Literal["k", "v"]) -> int:
        """Return the bytes of the rows of one lane, without padding."""
        return self.seq_len * (self.row_bytes if part == "k" else self.v_row_bytes)

    @property
    def lanes_per_stream(self) -> int:
        """Lanes of K (or V) of one layer of one stream."""
        return _lanes_of_stream(self.order, self.n_kv_heads)

    @property
    def lanes(self) -> list[Lane]:
        """The lanes, in the order of the file."""
        return [
            Lane(layer, part, stream)
            for layer in range(self.n_layers)
            for part in get_args(Literal["k", "v"])
            for stream in range(self.batch * self.lanes_per_stream)
        ]

    @property
    def tokens_offset(self) -> int:
        """Where the token ids begin in the file."""
        return self.base + HEADER.nbytes + 8 * len(self.checksums)

    def offset_of(self, lane: int) -> int:
        """Return where a lane begins in the file."""
        n = self.batch * self.lanes_per_stream
        layer, in_layer = divmod(lane, 2 * n)
        of_k, of_v = layer * n + min(in_layer, n), layer * n + max(in_layer - n, 0)
        return self.base + self.data_offset + of_k * self.lane_stride + of_v * self.v_lane_stride

    @property
    def _longest_lane(self) -> int:
        """Bytes of the longest lane with its padding."""
        return max(self.lane_stride, self.v_lane_stride)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Give the offset in the file, the bytes and the stride of each lane."""
        strides = {"k": self.lane_stride, "v": self.v_lane_stride}
        for i, lane in enumerate(self.lanes):
            yield self.offset_of(i), self.lane_bytes(lane.part), strides[lane.part]

    def name_of(self, lane: int) -> str:
        """Name a lane, for errors."""
        layer, part, number = self.lanes[lane]
        stream, head = divmod(number, self.lanes_per_stream)
        of_head = f" of head {head}" if self.order == "head" else ""
        of_stream = f" of stream {stream}" if self.batch > 1 else ""
        return f"{part} of layer {layer}{of_head}{of_stream}"

    def _head(self) -> NDArray[np.uint8]:
        """Return all bytes before the data: the header and the tables."""
        flags = _GROW * self.grow | _BY_HEAD * (self.order == "head") | _ROTATED * self.rotate
        flags |= _TRIMMED * self.trimmed
        head_dim = self.head_dim
        if head_dim != self.v_head_dim:
            flags |= _V_DIM
            head_dim |= self.v_head_dim << 16
        # The upper half is one more than the number of V's type, if that differs.
        k, v = DTYPES.index(self.dtype), DTYPES.index(self.v_dtype)
        dtype = k if k == v else k | (v + 1) << 16
        fields = {"window": self.window or 0, "head_dim": head_dim, "dtype": dtype}
        return self._write_head(HEADER, fields, flags)

    def __str__(self) -> str:
        layers, heads = format_count(self.n_layers, "layer"), format_count(self.n_kv_heads, "head")
        by_head = ", rows by head" if self.order == "head" else ""
        types = self.dtype if self.dtype == self.v_dtype else f"{self.dtype} and {self.v_dtype}"
        dims = f"{self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f" and {self.v_head_dim}"
        rotated = ", rotated" if self.rotate else ""
        shape = f"{layers} of {heads} of {dims} {types}{by_head}{rotated}"
        tokens = format_count(self.seq_len, "token")
        streams = f", {self.batch} streams" if self.batch > 1 else ""
        where = f" up to position {self.next_position - 1}" if self.seq_len else ""
        kind = f"window of {self.window}" if self.window else f"at most {self.max_seq_len}"
        model = f"model {self.model!r}" if self.model is not None else "no model named"
        ids = "with token ids" if self.tokens is not None else "without token ids"
        return (
            f"{shape}{streams}; {tokens}{where}, {kind}; {model}; {ids}; "
            f"{format_bytes(self.file_bytes)}"
        )


class _Sizes(NamedTuple):
    """Sizes that follow from a cache's dimensions and from what it holds."""

    row_bytes: int
    v_row_bytes: int
    lane_stride: int
    v_lane_stride: int
    data_offset: int
    file_bytes: int
    n_chunks: int


def _lanes_of_stream(order: Order, n_kv_heads: int) -> int:
    return n_kv_heads if order == "head" else 1


def _n_lanes(facts: dict[str, Any]) -> int:
    per_stream = _lanes_of_stream(facts["order"], facts["n_kv_heads"])
    return int(2 * facts["n_layers"] * facts["batch"] * per_stream)


def _row_bytes(facts: dict[str, Any], key: Literal["dtype", "v_dtype"]) -> int:
    n_heads = facts["n_kv_heads"] // _lanes_of_stream(facts["order"], facts["n_kv_heads"])
    dim = facts["head_dim" if key == "dtype" else "v_head_dim"]
    return row_bytes_of(n_heads, dim, facts[key])


def _sizes(facts: dict[str, Any], n_tokens: int) -> _Sizes:
    rows = _row_bytes(facts, "dtype"), _row_bytes(facts, "v_dtype")
    strides = [round_up(facts["seq_len"] * row, facts["alignment"]) for row in rows]
    n_pairs = _n_lanes(facts) // 2
    n_chunks = n_pairs * sum(-(-stride // facts["chunk_bytes"]) for stride in strides)
    tables_end = HEADER.nbytes + 8 * n_chunks + 4 * n_tokens + facts["model_bytes"]
    data_offset = round_up(tables_end, facts["alignment"])
    file_bytes = data_offset + n_pairs * sum(strides)
    return _Sizes(*rows, strides[0], strides[1], data_offset, file_bytes, n_chunks)


def new(
    facts: dict[str, Any],
    model: str | None,
    tokens: NDArray[np.int32] | None,
    path: str,
    base: int = 0,
) -> Snapshot:
    """Lay out a new file, with checksums that are all zeros.

    `facts` are the fields of `Snapshot` that describe the cache and its end, with `alignment` and
    `chunk_bytes`. It raises ValueError if the cache is larger, or the model's name longer, than a
    snapshot can have.
    """
    n_lanes = _n_lanes(facts)
    if n_lanes > MAX_LANES:
        raise ValueError(
            f"a snapshot has at most {MAX_LANES} lanes ({_LANES}), and this cache {n_lanes}"
        )
    dims = facts["head_dim"], facts["v_head_dim"]
    if dims[0] != dims[1] and max(dims) > _MOST_HALF:
        raise ValueError(
            f"a snapshot is of heads of at most {_MOST_HALF} values where those of V have another "
            f"size, and this cache's have {dims[0]} and {dims[1]}"
        )
    model_bytes = check_model(model)
    n_tokens = 0 if tokens is None else len(tokens)
    *_, n_chunks = sizes = _sizes(facts | {"model_bytes": model_bytes}, n_tokens)
    window = facts["window"]
    n_rows = window + facts["spare_rows"] if window else facts["max_seq_len"]
    token = n_lanes // 2 * (sizes.row_bytes + sizes.v_row_bytes)
    if (nbytes := n_rows * token) > MAX_CACHE_BYTES:
        raise ValueError(
            f"a snapshot is of a cache of at most {format_bytes(MAX_CACHE_BYTES)}, and this one "
            f"has room for {format_bytes(nbytes)}"
        )
    places = sizes._asdict()
    del places["n_chunks"]
    checksums = np.zeros(n_chunks, np.uint64)
    return Snapshot(
        path=path, model=model, tokens=tokens, checksums=checksums, base=base, **places, **facts
    )


def check_model(model: str | None) -> int:
    """Return the bytes of a model's name; raise ValueError if these are too many."""
    model_bytes = len(model.encode()) if model is not None else 0
    if model_bytes > MAX_MODEL_BYTES:
        raise ValueError(
            f"model: expected at most {MAX_MODEL_BYTES} bytes of UTF-8, got {model_bytes}"
        )
    return model_bytes


def checked_header(head: bytes, file_bytes: int, path: str, base: int = 0) -> HeaderFields:
    """Read the header of a file or of a section, and check every field.

    `head` is the header, or all bytes of a shorter file; `file_bytes` counts the bytes from `base`
    on. In the result, `data_offset` is inside the file, and every other size is what it has to be.
    It raises SnapshotError if the file is no snapshot, of another version, damaged, cut off or too
    long.
    """
    values = HEADER.read(head, path, base)
    _check_dims(values)
    check_storage(values)
    _check_tokens(values)
    sizes = _sizes(values, n_ids(values))
    values.check_exact(
        header_bytes=HEADER.nbytes,
        lane_stride=sizes.lane_stride,
        data_offset=sizes.data_offset,
        file_bytes=sizes.file_bytes,
    )
    values.check_file(file_bytes)
    return values


def _check_dims(values: HeaderFields) -> None:
    """Check the dimensions of a cache, and decode its types, order and sizes of heads."""
    check, flags = values.check, values["flags"]
    check(flags < 2 * _TRIMMED, "flags", "no bit but 1, 2, 4, 8, 16, 32 and 64")
    values["v_head_dim"] = values["head_dim"]
    if flags & _V_DIM:
        values["v_head_dim"], values["head_dim"] = divmod(values["head_dim"], _MOST_HALF + 1)
        check(values["v_head_dim"] != values["head_dim"], "head_dim", "another size of V's heads")
    values["rotate"], values["grow"] = bool(flags & _ROTATED), bool(flags & _GROW)
    values["trimmed"] = bool(flags & _TRIMMED)
    for name in ("n_layers", "n_kv_heads", "head_dim", "batch", "max_seq_len"):
        check(values[name] >= 1, name, "at least 1")
    values["order"] = "head" if flags & _BY_HEAD else "token"
    check(_n_lanes(values) <= MAX_LANES, "n_layers", f"at most {MAX_LANES} lanes ({_LANES})")
    k, v = values["dtype"] & 0xFFFF, (values["dtype"] >> 16) - 1
    known = k < len(DTYPES) and v < len(DTYPES) and k != v
    check(known, "dtype", f"numbers below {len(DTYPES)}, and another one of V than of K")
    values["dtype"], values["v_dtype"] = DTYPES[k], DTYPES[k if v < 0 else v]
    for name, dim in ((values["dtype"], "head_dim"), (values["v_dtype"], "v_head_dim")):
        in_block = block_values(name)
        whole = values[dim] % in_block == 0
        check(whole, "head_dim", f"a multiple of {in_block} for {name}")
        whole = not values["rotate"] or values[dim] % _ROTATION == 0
        check(whole, "head_dim", f"a multiple of {_ROTATION} where heads are rotated")


def check_storage(values: HeaderFields) -> None:
    """Check the fields that each section has: alignment, chunks, the end, and the model."""
    alignment, chunk = values["alignment"], values["chunk_bytes"]
    values.check(
        MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0,
        "alignment",
        f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
    )
    values.check(
        0 < chunk <= MAX_CHUNK_BYTES and chunk % alignment == 0,
        "chunk_bytes",
        f"a multiple of the alignment up to {MAX_CHUNK_BYTES}",
    )
    is_position = values["next_position"] < MAX_POSITION
    values.check(is_position, "next_position", f"less than {MAX_POSITION}")
    max_model = MAX_MODEL_BYTES if values["flags"] & HAS_MODEL else 0
    values.check(values["model_bytes"] <= max_model, "model_bytes", f"at most {max_model}")


def _check_tokens(values: HeaderFields) -> None:
    """Check rows, and the tokens in them."""
    row_bytes, window = _row_bytes(values, "dtype"), values["window"]
    values.check_exact(row_bytes=row_bytes)
    token = _n_lanes(values) // 2 * (row_bytes + _row_bytes(values, "v_dtype"))
    max_rows = MAX_CACHE_BYTES // token

    def check_most(name: str, most: int) -> None:
        values.check(values[name] <= most, name, f"at most {most}")

    # A ring has only the rows of its window and the spare ones.
    check_most("max_seq_len", MAX_SEQ_LEN if window else min(max_rows, MAX_SEQ_LEN))
    check_most("window", min(max_rows, values["max_seq_len"]))
    values.check(not (window and values["grow"]), "window", "none in a cache that grows")
    is_possible = window and values["next_position"] > values["seq_len"]
    values.check(
        is_possible or not values["trimmed"], "flags", "64 only of a ring that lacks tokens"
    )
    check_most("spare_rows", max_rows - window if window else 0)
    check_most("seq_len", min(window or values["max_seq_len"], values["next_position"]))


def n_ids(values: HeaderFields) -> int:
    """Return how many token ids the tables have."""
    return int(values["next_position"]) if values["flags"] & HAS_TOKENS else 0


def ids_and_model(
    values: HeaderFields, tables: Tables
) -> tuple[NDArray[np.int32] | None, str | None]:
    """Read the last tables of a section: token ids, and the model's name."""
    begin, n = tables.at, n_ids(values)
    tokens = tables.take("<i4", n).astype(np.int32)
    tokens.flags.writeable = False
    if n and tokens.min() < 0:
        values.refuse_at(begin + 4 * int(np.argmax(tokens < 0)), "the id of a token is negative")
    begin = tables.at
    model = ""
    try:
        model = tables.take(np.uint8, values["model_bytes"]).tobytes().decode()
    except UnicodeDecodeError as error:
        values.refuse_at(begin + error.start, "the model's name is not valid UTF-8")
    flags = values["flags"]
    return tokens if flags & HAS_TOKENS else None, model if flags & HAS_MODEL else None


def checked_tables(values: HeaderFields, data: NDArray[np.uint8]) -> Snapshot:
    """Read the tables: `data` are all bytes between the header and `data_offset`.

    It raises SnapshotError if their checksum does not match, or they hold impossible values.
    """
    tables = Tables(values, data)
    sizes = _sizes(values, n_ids(values))
    checksums = tables.take("<u8", sizes.n_chunks).astype(np.uint64)
    tokens, model = ids_and_model(values, tables)
    same = """
        n_layers n_kv_heads head_dim max_seq_len batch dtype v_dtype v_head_dim rotate
        spare_rows trimmed seq_len next_position row_bytes alignment data_offset lane_stride
        chunk_bytes file_bytes order grow
    """.split()
    return Snapshot(
        path=values.path,
        window=values["window"] or None,
        model=model,
        tokens=tokens,
        checksums=checksums,
        base=values.base,
        v_row_bytes=sizes.v_row_bytes,
        v_lane_stride=sizes.v_lane_stride,
        **{name: values[name] for name in same},
    )
