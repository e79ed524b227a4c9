"""The format of snapshots of caches whose layers differ: a table, and a snapshot of each part.

``docs/snapshots.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.base.text import format_bytes, format_count
from unimem.errors import SnapshotError
from unimem.kv.layer_specs import Layer, LayerKV, kinds_of, places_of
from unimem.kv.snapshot.format_rows import DAMAGED, MAGIC, Order, Snapshot, round_up, seal_header
from unimem.kv.snapshot.format_states import StatesSnapshot
from unimem.kv.types import kv_name

__all__ = [
    "Head",
    "LayersSnapshot",
    "checked_head",
    "checked_header",
    "checked_layers",
    "encode",
    "first_offset",
    "is_head",
]

#: Of the files of this module, without states and with them; those of `snapshot_format` are
#: version 1.
VERSION, VERSION_OF_STATES = 2, 3
# Layers, and so parts, that a file may have.
MAX_LAYERS = 1 << 16
_NOBODY = 0xFFFFFFFF

_FIELDS = (
    ("magic", "8s"),
    ("version", "I"),
    ("header_bytes", "I"),
    ("file_bytes", "Q"),
    ("data_offset", "Q"),
    ("n_layers", "I"),
    ("n_parts", "I"),
    ("tables_checksum", "Q"),
    ("header_checksum", "Q"),
)
_HEADER = struct.Struct("<" + "".join(code for _, code in _FIELDS))
HEADER_BYTES = _HEADER.size
OFFSETS = {
    name: struct.calcsize("<" + "".join(code for _, code in _FIELDS[:i]))
    for i, (name, _) in enumerate(_FIELDS)
}
_PART, _LAYER = np.dtype([("offset", "<u8"), ("nbytes", "<u8")]), np.dtype("<u4")


class Head(NamedTuple):
    """What a file says of its parts.

    Attributes
    ----------
    file_bytes, data_offset : int
        Bytes of the file, and where its first part begins.
    has_states : bool
        Whether the first part is of the states.
    parts : list of tuple of int
        Where each begins, and its bytes.
    layers : list of tuple
        Of each layer the number of its part, and that of the layer whose rows it shows, or None.
    """

    file_bytes: int
    data_offset: int
    has_states: bool
    parts: list[tuple[int, int]]
    layers: list[tuple[int, int | None]]


@dataclass(frozen=True, slots=True, eq=False)
class LayersSnapshot:
    """What a snapshot of a cache says whose layers differ.

    Attributes
    ----------
    path : str
        The file.
    layers : tuple of LayerKV and LayerState
        What each layer keeps.
    states : StatesSnapshot or None
        The states of layers that keep one.
    parts : tuple of Snapshot
        Of the layers that are alike, those that keep all tokens first: with `layers`, the order in
        which they have rows is theirs.
    file_bytes : int
        Bytes of the file.
    """

    path: str
    layers: tuple[Layer, ...]
    states: StatesSnapshot | None
    parts: tuple[Snapshot, ...]
    file_bytes: int

    @property
    def sections(self) -> tuple[Snapshot | StatesSnapshot, ...]:
        """All that has data, in the order of the file: the states, then the parts."""
        return self.parts if self.states is None else (self.states, *self.parts)

    @property
    def n_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @property
    def seq_len(self) -> int:
        """Tokens that the layers hold that hold most."""
        return max(section.seq_len for section in self.sections)

    @property
    def next_position(self) -> int:
        """The position behind the last of them."""
        return self.sections[0].next_position

    @property
    def max_seq_len(self) -> int:
        """Tokens that the cache had room for."""
        return min(section.max_seq_len for section in self.sections)

    @property
    def batch(self) -> int:
        """Streams."""
        return self.sections[0].batch

    @property
    def order(self) -> Order:
        """Whether a row of a lane has all heads of a token, or each head a lane."""
        return self.parts[0].order if self.parts else "token"

    @property
    def rotate(self) -> bool:
        """Whether heads are stored rotated."""
        return any(part.rotate for part in self.parts)

    @property
    def model(self) -> str | None:
        """The fingerprint of the model that it was saved with."""
        return self.sections[0].model

    @property
    def tokens(self) -> NDArray[np.int32] | None:
        """``int32 [next_position]``: the ids of all tokens of the conversation."""
        return self.sections[0].tokens

    def __str__(self) -> str:
        layers = format_count(self.n_layers, "layer")
        tokens = format_count(self.seq_len, "token")
        parts = "; ".join(str(section) for section in self.sections)
        return f"{layers}, {tokens}, {format_bytes(self.file_bytes)}: {parts}"


def is_head(head: bytes) -> bool:
    """Whether a file that begins so is one of this format."""
    at = OFFSETS["version"]
    versions = struct.pack("<I", VERSION), struct.pack("<I", VERSION_OF_STATES)
    return head.startswith(MAGIC) and head[at : at + 4] in versions


def first_offset(n_layers: int, n_parts: int, alignment: int) -> int:
    """Return the byte where the first part begins."""
    return round_up(_tables_end(n_layers, n_parts), alignment)


def _tables_end(n_layers: int, n_parts: int) -> int:
    return HEADER_BYTES + n_parts * _PART.itemsize + 2 * n_layers * _LAYER.itemsize


def encode(
    layers: Sequence[Layer], parts: Sequence[Snapshot | StatesSnapshot], out: NDArray[np.uint8]
) -> None:
    """Write the header and the tables.

    Parameters
    ----------
    layers : sequence of LayerKV and LayerState
        Of the cache.
    parts : sequence of Snapshot and StatesSnapshot
        Of its states, if it has any, and of its parts, in their order.
    out : numpy.ndarray
        ``uint8``, all zeros: the beginning of the file, up to the first part.
    """
    has_states = isinstance(parts[0], StatesSnapshot)
    numbers: dict[Any, int] = {None: 0}
    numbers |= {kind: has_states + i for i, kind in enumerate(kinds_of(layers))}
    version = VERSION_OF_STATES if has_states else VERSION
    table = np.array([(part.base, part.file_bytes) for part in parts], _PART)
    rows = [
        (numbers[place.kind], _shared(layer))
        for layer, place in zip(layers, places_of(layers), strict=True)
    ]
    tables = table.tobytes() + np.array(rows, _LAYER).tobytes()
    out[HEADER_BYTES : HEADER_BYTES + len(tables)] = np.frombuffer(tables, np.uint8)
    header = _HEADER.pack(
        MAGIC,
        version,
        HEADER_BYTES,
        parts[-1].base + parts[-1].file_bytes,
        len(out),
        len(layers),
        len(parts),
        xxhash.xxh3_64_intdigest(out[HEADER_BYTES:].data),
        0,
    )
    out[:HEADER_BYTES] = np.frombuffer(seal_header(header), np.uint8)


def _shared(layer: Layer) -> int:
    of = layer.share_of if isinstance(layer, LayerKV) else None
    return _NOBODY if of is None else of


def _refuse(name: str, rule: str, path: str) -> NoReturn:
    raise SnapshotError(f"{rule}; {DAMAGED}", OFFSETS[name], path)


def checked_header(head: bytes, file_bytes: int, path: str) -> dict[str, int]:
    """Read the header of a file of version 2 or 3, and check every field.

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
        The header's fields by name; `data_offset` is inside the file.

    Raises
    ------
    SnapshotError
        The file is damaged, cut off or too long.
    """
    if len(head) < HEADER_BYTES:
        rule = f"the file is cut off inside its header: it has {len(head)} bytes"
        raise SnapshotError(f"{rule}; {DAMAGED}", len(head), path)
    values = dict(zip((name for name, _ in _FIELDS), _HEADER.unpack(head), strict=True))
    if head != seal_header(head):
        _refuse("header_checksum", "the header's checksum does not match", path)
    n_layers, n_parts = values["n_layers"], values["n_parts"]
    if not 1 <= n_layers <= MAX_LAYERS:
        _refuse("n_layers", f"n_layers: expected 1 to {MAX_LAYERS}, got {n_layers}", path)
    if not 1 <= n_parts <= n_layers:
        _refuse("n_parts", f"n_parts: expected 1 to {n_layers}, got {n_parts}", path)
    if values["header_bytes"] != HEADER_BYTES:
        got = values["header_bytes"]
        _refuse("header_bytes", f"header_bytes: expected {HEADER_BYTES}, got {got}", path)
    there, whole = file_bytes, values["file_bytes"]
    if there != whole:
        what = "cut off" if there < whole else "longer than it should be"
        rule = f"the file is {what}: it has {there} bytes, not {whole}; {DAMAGED}"
        raise SnapshotError(rule, min(there, whole), path)
    begin = values["data_offset"]
    if not _tables_end(n_layers, n_parts) <= begin < whole:
        _refuse("data_offset", f"data_offset: expected it behind the tables, got {begin}", path)
    return values


def checked_head(values: dict[str, int], tables: NDArray[np.uint8], path: str) -> Head:
    """Read what follows the header.

    Parameters
    ----------
    values : dict
        From `checked_header`.
    tables : numpy.ndarray
        ``uint8``: the file from `HEADER_BYTES` to `data_offset`.
    path : str
        The file.

    Raises
    ------
    SnapshotError
        Their checksum does not match, or they hold what cannot be.
    """
    if xxhash.xxh3_64_intdigest(tables.data) != values["tables_checksum"]:
        _refuse("tables_checksum", "the checksum of the tables does not match", path)
    n_parts, n_layers = values["n_parts"], values["n_layers"]
    end = n_parts * _PART.itemsize
    parts = [(int(at), int(n)) for at, n in tables[:end].view(_PART)]
    expected = values["data_offset"]
    for i, (at, nbytes) in enumerate(parts):
        if at != expected or nbytes > values["file_bytes"] - at:
            _refuse("n_parts", f"part {i}: expected it at byte {expected}, inside the file", path)
        expected = at + nbytes
    if expected != values["file_bytes"]:
        _refuse("file_bytes", f"file_bytes: expected {expected}, where the parts end", path)
    rows = tables[end : end + 2 * n_layers * _LAYER.itemsize].view(_LAYER).reshape(-1, 2)
    layers = [(int(part), None if of == _NOBODY else int(of)) for part, of in rows]
    for i, (part, of) in enumerate(layers):
        if part >= n_parts or (of is not None and (of >= n_layers or layers[of] != (part, None))):
            _refuse("n_layers", f"layer {i}: there is no such part, or layer to share", path)
    has_states = values["version"] == VERSION_OF_STATES
    return Head(values["file_bytes"], values["data_offset"], has_states, parts, layers)


def checked_layers(
    head: Head, sections: Sequence[Snapshot | StatesSnapshot], path: str
) -> LayersSnapshot:
    """Put the parts together, which have to be of one cache.

    Parameters
    ----------
    head : Head
        From `checked_head`.
    sections : sequence of Snapshot and StatesSnapshot
        The parts as they say of themselves, with states first.
    path : str
        The file.

    Raises
    ------
    SnapshotError
        They are not.
    """
    first, n_tokens = sections[0], max(section.seq_len for section in sections)
    states = first if isinstance(first, StatesSnapshot) else None
    parts = [part for part in sections if isinstance(part, Snapshot)]
    layers = _layers_of(head, sections, path)
    counts = [head.layers.count((i, None)) for i in range(len(sections))]
    kinds = [
        (p.n_kv_heads, p.head_dim, p.v_head_dim, p.window, kv_name(p.dtype, p.v_dtype))
        for p in parts
    ]
    rules = {
        "the layers are not those of the parts": counts
        == [len(p.states) if isinstance(p, StatesSnapshot) else p.n_layers for p in sections]
        and kinds == list(kinds_of(layers)),
        "the parts do not end alike": all(
            getattr(section, name) == getattr(first, name)
            for section in sections
            for name in ("batch", "next_position", "alignment")
        )
        and len({(part.order, part.rotate) for part in parts}) <= 1,
        "the parts hold other tokens than they should": all(
            part.seq_len == min(n_tokens, part.window or n_tokens) for part in parts
        ),
        "the first part is not where it should be": head.data_offset
        == first_offset(len(layers), len(sections), first.alignment),
        "a part but the first has tokens or a model": all(
            section.tokens is None and section.model is None for section in sections[1:]
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise SnapshotError(f"{rule}; {DAMAGED}", HEADER_BYTES, path)
    return LayersSnapshot(path, layers, states, tuple(parts), head.file_bytes)


def _layers_of(
    head: Head, sections: Sequence[Snapshot | StatesSnapshot], path: str
) -> tuple[Layer, ...]:
    """Return what each layer keeps, as the parts say it."""
    layers: list[Layer] = []
    n_states = 0
    for number, of in head.layers:
        part = sections[number]
        if isinstance(part, Snapshot):
            dims = part.n_kv_heads, part.head_dim, part.v_head_dim
            dtype = kv_name(part.dtype, part.v_dtype)
            kept = LayerKV(*dims, window=part.window, dtype=dtype, share_of=of)
            layers.append(kept)
            continue
        if of is not None or n_states == len(part.states):
            raise SnapshotError(f"there is no such state; {DAMAGED}", HEADER_BYTES, path)
        layers.append(part.states[n_states])
        n_states += 1
    return tuple(layers)
