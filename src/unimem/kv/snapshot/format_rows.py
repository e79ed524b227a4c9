"""The format of snapshot files: packing a header, and reading one with every field checked.

``docs/snapshots.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.base.text import format_bytes, format_count
from unimem.errors import SnapshotError
from unimem.kv.types import KV_TYPES, DType, block_values, round_up, row_bytes_of

__all__ = [
    "Chunk",
    "Lane",
    "Snapshot",
    "check_model",
    "checked_header",
    "checked_tables",
    "encode",
    "model_of",
    "new",
    "round_up",
    "row_bytes_of",
    "seal_header",
    "tokens_of",
]

Order: TypeAlias = Literal["token", "head"]

MAGIC = b"UNIMEMKV"
VERSION = 1
# In the file a dtype is its index here.
DTYPES = KV_TYPES
_GROW, _HAS_MODEL, _HAS_TOKENS, _BY_HEAD, _V_DIM, _ROTATED = 1, 2, 4, 8, 16, 32
# Of heads, where those of V have another size; there the upper half of a field is V's.
_MOST_HALF = 0xFFFF

MIN_ALIGNMENT, MAX_ALIGNMENT = 4096, 1 << 20
_ROTATION = 64  # rotated heads are multiples of it
MAX_CHUNK_BYTES = 64 << 20
MAX_LANES = 1 << 20
MAX_SEQ_LEN = (1 << 32) - 1  # as KVCache
MAX_MODEL_BYTES = 65535
MAX_POSITION = 1 << 62
# A growing cache keeps twice its rows of address space, of which there are 47 bits.
MAX_CACHE_BYTES = 1 << 44
_LANES = "2 * n_layers * batch, with rows by head times n_kv_heads"

_FIELDS = (
    ("magic", "8s"),
    ("version", "I"),
    ("header_bytes", "I"),
    ("file_bytes", "Q"),
    ("data_offset", "Q"),
    ("lane_stride", "Q"),
    ("row_bytes", "Q"),
    ("chunk_bytes", "Q"),
    ("seq_len", "Q"),
    ("next_position", "Q"),
    ("max_seq_len", "Q"),
    ("window", "Q"),
    ("spare_rows", "Q"),
    ("n_layers", "I"),
    ("n_kv_heads", "I"),
    ("head_dim", "I"),
    ("batch", "I"),
    ("dtype", "I"),
    ("flags", "I"),
    ("alignment", "I"),
    ("model_bytes", "I"),
    ("tables_checksum", "Q"),
    ("header_checksum", "Q"),
)
_HEADER = struct.Struct("<" + "".join(code for _, code in _FIELDS))
#: Bytes of the header.
HEADER_BYTES = _HEADER.size
#: Where each field of the header begins.
OFFSETS = {
    name: struct.calcsize("<" + "".join(code for _, code in _FIELDS[:i]))
    for i, (name, _) in enumerate(_FIELDS)
}
#: What every error of a damaged file ends with.
DAMAGED = "the file is damaged, take another copy of it or save anew"


class Lane(NamedTuple):
    """K or V of one layer of one stream: which, as `KVCache` takes it.

    Where each head has a lane, head h of stream s is stream ``s * n_kv_heads + h``.
    """

    layer: int
    part: Literal["k", "v"]
    stream: int


class Chunk(NamedTuple):
    """A piece of a lane that has a checksum of its own.

    Attributes
    ----------
    number : int
        Which checksum.
    lane : int
        Which lane.
    begin, nbytes : int
        The bytes of the lane's rows.
    padding : int
        Zeros that follow them in the file, and that the checksum covers, too.
    offset : int
        Where it begins in the file.
    """

    number: int
    lane: int
    begin: int
    nbytes: int
    padding: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What the header of a snapshot file says.

    Attributes
    ----------
    path : str
        The file.
    n_layers, n_kv_heads, head_dim, max_seq_len, batch : int
        The cache's dimensions; of a fixed cache whose rows `budget_bytes` has cut, `max_seq_len`
        is these rows.
    v_head_dim : int
        Elements of a head of V.
    dtype, v_dtype : str
        What is stored of K, and of V, as for `KVCache`.
    rotate : bool
        Whether heads are stored rotated.
    window : int or None
        Of a ring, the tokens that it shows.
    spare_rows : int
        Of a ring, its rows beyond the window.
    grow : bool
        Whether the cache's storage grew with its tokens.
    order : {"token", "head"}
        Whether a row of a lane has all heads of a token, or each head a lane.
    seq_len : int
        Tokens in the file.
    next_position : int
        The position behind the last of them.
    model : str or None
        The fingerprint of the model that it was saved with.
    tokens : numpy.ndarray or None
        ``int32 [next_position]``, read-only: the ids of all tokens of the conversation.
    row_bytes, v_row_bytes : int
        Bytes of one token in one lane of K, and of V: of all heads, or of one.
    alignment, data_offset, lane_stride, v_lane_stride, chunk_bytes, file_bytes : int
        Where the data is, in bytes: see ``docs/snapshots.md``.
    checksums : numpy.ndarray
        ``uint64 [n_chunks]``: of each chunk of the data.
    base : int
        The byte of the file where this begins, which other offsets count from: not 0 where it is
        one of several (`snapshot_layers`).
    """

    path: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    max_seq_len: int
    batch: int
    dtype: DType
    v_dtype: DType
    rotate: bool
    window: int | None
    spare_rows: int
    grow: bool
    order: Order
    seq_len: int
    next_position: int
    model: str | None
    tokens: NDArray[np.int32] | None
    row_bytes: int
    v_row_bytes: int
    alignment: int
    data_offset: int
    lane_stride: int
    v_lane_stride: int
    chunk_bytes: int
    file_bytes: int
    checksums: NDArray[np.uint64] = field(repr=False)
    base: int = 0

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
        return self.base + HEADER_BYTES + 8 * len(self.checksums)

    def offset_of(self, lane: int) -> int:
        """Return where a lane begins in the file."""
        n = self.batch * self.lanes_per_stream
        layer, in_layer = divmod(lane, 2 * n)
        of_k, of_v = min(in_layer, n), max(in_layer - n, 0)
        of_k, of_v = of_k + layer * n, of_v + layer * n
        return self.base + self.data_offset + of_k * self.lane_stride + of_v * self.v_lane_stride

    def chunks(self) -> Iterator[Chunk]:
        """Give the chunks, in the order of their checksums."""
        number = 0
        strides = {"k": self.lane_stride, "v": self.v_lane_stride}
        for lane, (_, part, _) in enumerate(self.lanes):
            for begin in range(0, strides[part], self.chunk_bytes):
                end = min(begin + self.chunk_bytes, strides[part])
                nbytes = min(end, self.lane_bytes(part)) - begin
                offset = self.offset_of(lane) + begin
                yield Chunk(number, lane, begin, nbytes, end - begin - nbytes, offset)
                number += 1

    def name_of(self, lane: int) -> str:
        """Say which lane that is."""
        layer, part, number = self.lanes[lane]
        stream, head = divmod(number, self.lanes_per_stream)
        of_head = f" of head {head}" if self.order == "head" else ""
        of_stream = f" of stream {stream}" if self.batch > 1 else ""
        return f"{part} of layer {layer}{of_head}{of_stream}"

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
    """What follows from a cache's dimensions and from what it holds."""

    row_bytes: int
    v_row_bytes: int
    lane_stride: int
    v_lane_stride: int
    n_chunks: int
    tables_end: int
    data_offset: int
    file_bytes: int


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
    tables_end = HEADER_BYTES + 8 * n_chunks + 4 * n_tokens + facts["model_bytes"]
    data_offset = round_up(tables_end, facts["alignment"])
    file_bytes = data_offset + n_pairs * sum(strides)
    return _Sizes(*rows, strides[0], strides[1], n_chunks, tables_end, data_offset, file_bytes)


def new(
    facts: dict[str, Any],
    model: str | None,
    tokens: NDArray[np.int32] | None,
    path: str,
    base: int = 0,
) -> Snapshot:
    """Lay a new file out.

    Parameters
    ----------
    facts : dict
        The fields of `Snapshot` from `n_layers` to `next_position`, and `alignment` and
        `chunk_bytes`.
    model, tokens, path, base
        As in `Snapshot`.

    Returns
    -------
    Snapshot
        With checksums that are still to be written.

    Raises
    ------
    ValueError
        A cache of more lanes or bytes, or a longer name of the model, than a snapshot can have.
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
    sizes = _sizes(facts | {"model_bytes": model_bytes}, n_tokens)
    window = facts["window"]
    n_rows = window + facts["spare_rows"] if window else facts["max_seq_len"]
    token = n_lanes // 2 * (sizes.row_bytes + sizes.v_row_bytes)
    if (nbytes := n_rows * token) > MAX_CACHE_BYTES:
        raise ValueError(
            f"a snapshot is of a cache of at most {format_bytes(MAX_CACHE_BYTES)}, and this one "
            f"has room for {format_bytes(nbytes)}"
        )
    return Snapshot(
        path=path,
        model=model,
        tokens=tokens,
        row_bytes=sizes.row_bytes,
        v_row_bytes=sizes.v_row_bytes,
        data_offset=sizes.data_offset,
        lane_stride=sizes.lane_stride,
        v_lane_stride=sizes.v_lane_stride,
        file_bytes=sizes.file_bytes,
        checksums=np.zeros(sizes.n_chunks, np.uint64),
        base=base,
        **facts,
    )


def check_model(model: str | None) -> int:
    """Return the bytes of a model's name; ValueError where these are too many."""
    model_bytes = len(model.encode()) if model is not None else 0
    if model_bytes > MAX_MODEL_BYTES:
        raise ValueError(
            f"model: expected at most {MAX_MODEL_BYTES} bytes of UTF-8, got {model_bytes}"
        )
    return model_bytes


def encode(snapshot: Snapshot, out: NDArray[np.uint8]) -> None:
    """Write the header and the tables.

    Parameters
    ----------
    snapshot : Snapshot
        What to write.
    out : numpy.ndarray
        ``uint8 [data_offset]``, all zeros: the beginning of the file.
    """
    model = b"" if snapshot.model is None else snapshot.model.encode()
    tokens = b"" if snapshot.tokens is None else snapshot.tokens.astype("<i4").tobytes()
    tables = snapshot.checksums.astype("<u8").tobytes() + tokens + model
    out[HEADER_BYTES : HEADER_BYTES + len(tables)] = np.frombuffer(tables, np.uint8)
    flags = _GROW * snapshot.grow
    flags |= _HAS_MODEL * (snapshot.model is not None)
    flags |= _HAS_TOKENS * (snapshot.tokens is not None)
    flags |= _BY_HEAD * (snapshot.order == "head")
    flags |= _ROTATED * snapshot.rotate
    head_dim = snapshot.head_dim
    if head_dim != snapshot.v_head_dim:
        flags |= _V_DIM
        head_dim |= snapshot.v_head_dim << 16
    special = {
        "magic": MAGIC,
        "version": VERSION,
        "header_bytes": HEADER_BYTES,
        "window": snapshot.window or 0,
        "head_dim": head_dim,
        "dtype": _dtype_number(snapshot),
        "flags": flags,
        "model_bytes": len(model),
        "tables_checksum": xxhash.xxh3_64_intdigest(out[HEADER_BYTES:].data),
        "header_checksum": 0,
    }
    values = [special[name] if name in special else getattr(snapshot, name) for name, _ in _FIELDS]
    out[:HEADER_BYTES] = np.frombuffer(seal_header(_HEADER.pack(*values)), np.uint8)


def _dtype_number(snapshot: Snapshot) -> int:
    """Return that of K and, in the upper half, one more than that of V where it is another."""
    k, v = DTYPES.index(snapshot.dtype), DTYPES.index(snapshot.v_dtype)
    return k if k == v else k | (v + 1) << 16


def seal_header(header: bytes) -> bytes:
    """Return a header of this format or of its sisters with its checksum: the last 8 bytes."""
    head = header[:-8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def _refuse(name: str, rule: str, path: str) -> NoReturn:
    raise SnapshotError(rule, OFFSETS[name], path)


def checked_header(head: bytes, file_bytes: int, path: str) -> dict[str, Any]:
    """Read the header of a file, and check every field.

    Parameters
    ----------
    head : bytes
        The beginning of the file: `HEADER_BYTES` of it, or all that there is.
    file_bytes : int
        Bytes of the file.
    path : str
        The file, for errors.

    Returns
    -------
    dict
        The header's fields by name. `data_offset` is inside the file, and every other size is what
        it has to be.

    Raises
    ------
    SnapshotError
        The file is no snapshot, of another version, damaged, cut off or too long.
    """
    if not head.startswith(MAGIC[: len(head)]) or not head:
        _refuse("magic", "this is no snapshot of unimem: it does not begin with UNIMEMKV", path)
    if len(head) < HEADER_BYTES:
        rule = f"the file is cut off inside its header: it has {len(head)} bytes"
        raise SnapshotError(f"{rule}; {DAMAGED}", len(head), path)
    values = dict(zip((name for name, _ in _FIELDS), _HEADER.unpack(head), strict=True))
    version = values["version"]
    # Before the checksum, since a newer version may have a longer header. Versions 2 and 3 are read
    # by snapshot_layers, and are no part of another file.
    if version > VERSION:
        rule = f"version {version} is newer than this unimem, which reads versions 1 to 3"
        _refuse("version", f"{rule}: update unimem-llm, or save anew", path)
    if version != VERSION:
        _refuse("version", f"expected version {VERSION}, got {version}; {DAMAGED}", path)
    if head != seal_header(head):
        _refuse("header_checksum", f"the header's checksum does not match; {DAMAGED}", path)
    _check_dims(values, path)
    _check_layout(values, file_bytes, path)
    return values


def _check_dims(values: dict[str, Any], path: str) -> None:
    """Check what a cache is and holds; dtype, window, order and model get their meaning."""

    def check(holds: bool, name: str, expected: str) -> None:
        if not holds:
            _refuse(name, f"{name}: expected {expected}, got {values[name]}", path)

    check(values["flags"] < 2 * _ROTATED, "flags", "no bit but 1, 2, 4, 8, 16 and 32")
    values["v_head_dim"] = values["head_dim"]
    if values["flags"] & _V_DIM:
        values["v_head_dim"], values["head_dim"] = divmod(values["head_dim"], _MOST_HALF + 1)
        check(values["v_head_dim"] != values["head_dim"], "head_dim", "another size of V's heads")
    values["rotate"] = bool(values["flags"] & _ROTATED)
    for name in ("n_layers", "n_kv_heads", "head_dim", "batch", "max_seq_len"):
        check(values[name] >= 1, name, "at least 1")
    values["order"] = "head" if values["flags"] & _BY_HEAD else "token"
    n_lanes = _n_lanes(values)
    check(n_lanes <= MAX_LANES, "n_layers", f"at most {MAX_LANES} lanes ({_LANES})")
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
    alignment = values["alignment"]
    check(
        MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0,
        "alignment",
        f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
    )
    chunk = values["chunk_bytes"]
    check(
        0 < chunk <= MAX_CHUNK_BYTES and chunk % alignment == 0,
        "chunk_bytes",
        f"a multiple of the alignment up to {MAX_CHUNK_BYTES}",
    )
    row_bytes = _row_bytes(values, "dtype")
    check(values["row_bytes"] == row_bytes, "row_bytes", str(row_bytes))
    max_rows = MAX_CACHE_BYTES // (n_lanes // 2 * (row_bytes + _row_bytes(values, "v_dtype")))
    window = values["window"]
    # A ring has only the rows of its window and the spare ones.
    most = MAX_SEQ_LEN if window else min(max_rows, MAX_SEQ_LEN)
    check(values["max_seq_len"] <= most, "max_seq_len", f"at most {most}")
    most = min(max_rows, values["max_seq_len"])
    check(window <= most, "window", f"at most {most}")
    check(not window or not values["flags"] & _GROW, "window", "none in a cache that grows")
    max_spare = max_rows - window if window else 0
    check(values["spare_rows"] <= max_spare, "spare_rows", f"at most {max_spare}")
    check(values["next_position"] < MAX_POSITION, "next_position", f"less than {MAX_POSITION}")
    most = min(window or values["max_seq_len"], values["next_position"])
    check(values["seq_len"] <= most, "seq_len", f"at most {most}")
    max_model = MAX_MODEL_BYTES if values["flags"] & _HAS_MODEL else 0
    check(values["model_bytes"] <= max_model, "model_bytes", f"at most {max_model}")


def _check_layout(values: dict[str, Any], file_bytes: int, path: str) -> None:
    """Check what follows from these."""
    n_tokens = values["next_position"] if values["flags"] & _HAS_TOKENS else 0
    sizes = _sizes(values, n_tokens)
    exact = {
        "header_bytes": HEADER_BYTES,
        "lane_stride": sizes.lane_stride,
        "data_offset": sizes.data_offset,
        "file_bytes": sizes.file_bytes,
    }
    for name, expected in exact.items():
        if values[name] != expected:
            _refuse(name, f"{name}: expected {expected}, got {values[name]}", path)
    if file_bytes < sizes.file_bytes:
        rule = f"the file is cut off: it has {file_bytes} of {sizes.file_bytes} bytes"
        raise SnapshotError(f"{rule}; {DAMAGED}", file_bytes, path)
    if file_bytes > sizes.file_bytes:
        rule = f"the file is longer than it should be: {file_bytes} bytes, not {sizes.file_bytes}"
        raise SnapshotError(f"{rule}; {DAMAGED}", sizes.file_bytes, path)


def tokens_of(
    tables: NDArray[np.uint8], begin: int, n: int, header_bytes: int, path: str
) -> NDArray[np.int32]:
    """Read the ids of n tokens at a byte of the tables; SnapshotError for what is none."""
    tokens = tables[begin : begin + 4 * n].view("<i4").astype(np.int32)
    tokens.flags.writeable = False
    if n and tokens.min() < 0:
        at = header_bytes + begin + 4 * int(np.argmax(tokens < 0))
        raise SnapshotError("the id of a token is negative", at, path)
    return tokens


def model_of(
    tables: NDArray[np.uint8], begin: int, nbytes: int, header_bytes: int, path: str
) -> str:
    """Read a model's name at a byte of the tables; SnapshotError for what is none."""
    name = tables[begin : begin + nbytes].tobytes()
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        at = header_bytes + begin + error.start
        raise SnapshotError("the model's name is not valid UTF-8", at, path) from None


def checked_tables(
    values: dict[str, Any], tables: NDArray[np.uint8], path: str, base: int = 0
) -> Snapshot:
    """Read what follows the header.

    Parameters
    ----------
    values : dict
        From `checked_header`.
    tables : numpy.ndarray
        ``uint8``: the file from `HEADER_BYTES` to `data_offset`.
    path : str
        The file.
    base : int
        Where the header begins in it.

    Returns
    -------
    Snapshot

    Raises
    ------
    SnapshotError
        Their checksum does not match, or they hold what cannot be.
    """
    if xxhash.xxh3_64_intdigest(tables.data) != values["tables_checksum"]:
        rule = f"the checksum of the checksums, tokens and model does not match; {DAMAGED}"
        raise SnapshotError(rule, HEADER_BYTES, path)
    flags = values["flags"]
    n_tokens = values["next_position"] if flags & _HAS_TOKENS else 0
    sizes = _sizes(values, n_tokens)
    n_chunks = sizes.n_chunks
    begin = 8 * n_chunks
    tokens = tokens_of(tables, begin, n_tokens, HEADER_BYTES, path)
    model = model_of(tables, begin + 4 * n_tokens, values["model_bytes"], HEADER_BYTES, path)
    same = tuple(
        """
        n_layers n_kv_heads head_dim max_seq_len batch dtype v_dtype v_head_dim rotate
        spare_rows seq_len next_position row_bytes alignment data_offset lane_stride
        chunk_bytes file_bytes order
    """.split()
    )
    return Snapshot(
        path=path,
        window=values["window"] or None,
        grow=bool(flags & _GROW),
        model=model if flags & _HAS_MODEL else None,
        tokens=tokens if flags & _HAS_TOKENS else None,
        checksums=tables[: 8 * n_chunks].view("<u8").astype(np.uint64),
        base=base,
        v_row_bytes=sizes.v_row_bytes,
        v_lane_stride=sizes.v_lane_stride,
        **{name: values[name] for name in same},
    )
