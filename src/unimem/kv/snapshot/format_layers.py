"""The format of snapshots of caches whose layers differ: a table, and a section for each kind.

``docs/snapshots.md`` describes it. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem.base.binary_header import BinaryHeader, HeaderFields, Tables
from unimem.base.text import format_bytes, format_count
from unimem.errors import SnapshotError
from unimem.kv.layer_specs import Layer, LayerKV, kinds_of, places_of
from unimem.kv.snapshot.format_rows import (
    DAMAGED,
    MAGIC,
    NEWEST,
    Order,
    Section,
    Snapshot,
)
from unimem.kv.snapshot.format_states import StatesSnapshot
from unimem.kv.types import kv_name, round_up

# Version 1 has the layout of `format_rows`.
VERSION, VERSION_OF_STATES = 2, 3
MAX_LAYERS = 1 << 16
_NO_LAYER = 0xFFFFFFFF

HEADER = BinaryHeader(
    """
    8s magic; I version header_bytes; Q file_bytes data_offset; I n_layers n_parts;
    Q tables_checksum header_checksum
    """,
    MAGIC,
    "snapshot of unimem",
    versions=(VERSION, VERSION_OF_STATES),
    newest=NEWEST,
    error=SnapshotError,
    advice=DAMAGED,
)
_PART, _LAYER = np.dtype([("offset", "<u8"), ("nbytes", "<u8")]), np.dtype("<u4")


class Head(NamedTuple):
    """What the tables of a file say.

    `parts` has the offset and the bytes of each section; the first one holds the states if
    `has_states`. `layers` has, for each layer, the number of its section, and the layer whose rows
    it shows, or None.
    """

    file_bytes: int
    data_offset: int
    has_states: bool
    parts: list[tuple[int, int]]
    layers: list[tuple[int, int | None]]


@dataclass(frozen=True, slots=True, eq=False)
class LayersSnapshot:
    """What a snapshot says of a cache whose layers differ.

    Attributes
    ----------
    path : str
        The file.
    layers : tuple of LayerKV and LayerState
        What each layer keeps.
    states : StatesSnapshot or None
        The states of layers that keep one.
    parts : tuple of Snapshot
        The rows of each kind of layers; kinds that keep all tokens are first. Within a part, rows
        have the order of the layers.
    file_bytes : int
        Bytes of the file.
    """

    path: str
    layers: tuple[Layer, ...]
    states: StatesSnapshot | None
    parts: tuple[Snapshot, ...]
    file_bytes: int

    @property
    def sections(self) -> tuple[Section, ...]:
        """All sections in the order of the file: the states, then the parts."""
        return self.parts if self.states is None else (self.states, *self.parts)

    @property
    def n_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @property
    def seq_len(self) -> int:
        """Tokens of the layers that hold most."""
        return max(section.seq_len for section in self.sections)

    @property
    def next_position(self) -> int:
        """The position after the last token."""
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
        """The name of the model that it was saved with."""
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
    """Whether a file that begins with these bytes is of this format."""
    return HEADER.version_of(head) in HEADER.versions


def first_offset(n_layers: int, n_parts: int, alignment: int) -> int:
    """Return the byte where the first section begins."""
    return round_up(_tables_end(n_layers, n_parts), alignment)


def _tables_end(n_layers: int, n_parts: int) -> int:
    return HEADER.nbytes + n_parts * _PART.itemsize + 2 * n_layers * _LAYER.itemsize


def encode(layers: Sequence[Layer], sections: Sequence[Section], out: NDArray[np.uint8]) -> None:
    """Write the header and the tables to `out`, the bytes before the first section."""
    has_states = isinstance(sections[0], StatesSnapshot)
    numbers: dict[Any, int] = {None: 0}
    numbers |= {kind: has_states + i for i, kind in enumerate(kinds_of(layers))}
    parts = np.array([(section.base, section.file_bytes) for section in sections], _PART)
    rows = [
        (numbers[place.kind], _shared(layer))
        for layer, place in zip(layers, places_of(layers), strict=True)
    ]
    fields = {
        "version": VERSION_OF_STATES if has_states else VERSION,
        "file_bytes": sections[-1].base + sections[-1].file_bytes,
        "data_offset": len(out),
        "n_layers": len(layers),
        "n_parts": len(sections),
    }
    HEADER.write(out, fields, parts.tobytes() + np.array(rows, _LAYER).tobytes())


def _shared(layer: Layer) -> int:
    of = layer.share_of if isinstance(layer, LayerKV) else None
    return _NO_LAYER if of is None else of


def checked_header(head: bytes, file_bytes: int, path: str) -> HeaderFields:
    """Read the header of a file of version 2 or 3 and check every field.

    `head` is the header, or all bytes of a shorter file. In the result, `data_offset` is inside the
    file. It raises SnapshotError if the file is damaged, cut off or too long.
    """
    values = HEADER.read(head, path)
    values.check_range("n_layers", 1, MAX_LAYERS)
    values.check_range("n_parts", 1, values["n_layers"])
    values.check_exact(header_bytes=HEADER.nbytes)
    values.check_file(file_bytes)
    end = _tables_end(values["n_layers"], values["n_parts"])
    is_behind = end <= values["data_offset"] < values["file_bytes"]
    values.check(is_behind, "data_offset", "it behind the tables")
    return values


def checked_head(values: HeaderFields, data: NDArray[np.uint8]) -> Head:
    """Read the tables: `data` are all bytes between the header and `data_offset`."""
    tables = Tables(values, data)
    n_parts, n_layers = values["n_parts"], values["n_layers"]
    parts = [(int(at), int(n)) for at, n in tables.take(_PART, n_parts)]
    expected = values["data_offset"]
    for i, (at, nbytes) in enumerate(parts):
        if at != expected or nbytes > values["file_bytes"] - at:
            values.refuse("n_parts", f"part {i}: expected it at byte {expected}, inside the file")
        expected = at + nbytes
    values.check_exact(file_bytes=expected)
    rows = tables.take(_LAYER, 2 * n_layers).reshape(-1, 2)
    layers = [(int(part), None if of == _NO_LAYER else int(of)) for part, of in rows]
    for i, (part, of) in enumerate(layers):
        if part >= n_parts or (of is not None and (of >= n_layers or layers[of] != (part, None))):
            values.refuse("n_layers", f"layer {i}: there is no such part, or layer to share")
    has_states = values["version"] == VERSION_OF_STATES
    return Head(values["file_bytes"], values["data_offset"], has_states, parts, layers)


def checked_layers(head: Head, sections: Sequence[Section], path: str) -> LayersSnapshot:
    """Put the sections together; raise SnapshotError if they are not of one cache."""
    first, n_tokens = sections[0], max(section.seq_len for section in sections)
    states = first if isinstance(first, StatesSnapshot) else None
    parts = [part for part in sections if isinstance(part, Snapshot)]
    layers = _layers_of(head, sections, path)
    counts = [head.layers.count((i, None)) for i in range(len(sections))]
    kinds = [
        (p.n_kv_heads, p.head_dim, p.v_head_dim, p.window, kv_name(p.dtype, p.v_dtype))
        for p in parts
    ]
    n_own = ([] if states is None else [len(states.states)]) + [part.n_layers for part in parts]
    rules = {
        "the layers are not those of the parts": counts == n_own
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
            raise SnapshotError(f"{rule}; {DAMAGED}", HEADER.nbytes, path)
    return LayersSnapshot(path, layers, states, tuple(parts), head.file_bytes)


def _layers_of(head: Head, sections: Sequence[Section], path: str) -> tuple[Layer, ...]:
    """Return what each layer keeps, as the sections say."""
    layers: list[Layer] = []
    n_states = 0
    for number, of in head.layers:
        section = sections[number]
        if isinstance(section, Snapshot):
            dims = section.n_kv_heads, section.head_dim, section.v_head_dim
            dtype = kv_name(section.dtype, section.v_dtype)
            layers.append(LayerKV(*dims, window=section.window, dtype=dtype, share_of=of))
            continue
        assert isinstance(section, StatesSnapshot)
        if of is not None or n_states == len(section.states):
            raise SnapshotError(f"there is no such state; {DAMAGED}", HEADER.nbytes, path)
        layers.append(section.states[n_states])
        n_states += 1
    return tuple(layers)
