"""Writing snapshots: a cache's tokens go to a file or an object, whole or not at all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core import guard
from unimem.base.arguments import file_path
from unimem.base.atomic_file import NewFile
from unimem.kv.snapshot import format_layers, format_rows, format_states
from unimem.kv.snapshot.chunk_threads import for_each_chunk, staging
from unimem.kv.snapshot.format_rows import Chunk, Section
from unimem.kv.snapshot.protocols import Cache, CacheOfLayers
from unimem.kv.states import LayerStates
from unimem.kv.token_ids import Tokens, token_ids
from unimem.remote.client import is_url, open_server

# What is written at once: more makes no disk faster.
_CHUNK_BYTES = 8 << 20

DIMS = """
    n_layers n_kv_heads head_dim max_seq_len batch dtype window spare_rows grow order v_dtype
    v_head_dim rotate
""".split()
"""The arguments of a cache's constructor that are fields of its snapshot."""


def save(kv: Cache, path: str | os.PathLike[str], tokens: Tokens | None, model: str | None) -> None:
    """Write a cache's tokens to a file, which is replaced whole or not at all.

    It is as `KVCache.save`, which has checked the cache. An existing file keeps its permissions. It
    raises MemoryError if there is no page-aligned memory to write from.
    """
    name = file_path(path)
    target = _Target(name, model_name(model), _checked_ids(kv, tokens))
    _save([_rows_section(kv, target, 0)], name, np.empty(0, np.uint8))


def save_layers(
    kv: CacheOfLayers, path: str | os.PathLike[str], tokens: Tokens | None, model: str | None
) -> None:
    """Write the tokens of a cache whose layers differ, as `save` does."""
    name, ids = file_path(path), _checked_ids(kv, tokens)
    target = _Target(name, model_name(model), ids)
    pieces = kv._parts if kv._states is None else (kv._states, *kv._parts)
    begin = base = format_layers.first_offset(len(kv.layers), len(pieces), mmap.PAGESIZE)
    sections: list[_Section] = []
    for piece in pieces:
        if isinstance(piece, LayerStates):
            sections.append(_states_section(kv, piece, target, base))
        else:
            sections.append(_rows_section(piece, target, base))
        base += sections[-1].facts.file_bytes
        target = _Target(name, None, None)  # the first section has them for all
    head = np.zeros(begin, np.uint8)
    format_layers.encode(kv.layers, [section.facts for section in sections], head)
    _save(sections, name, head)


def model_name(model: str | None) -> str | None:
    """Return the name of a model; raise TypeError if it is no string."""
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model: expected a str, got {type(model).__name__}")
    return model


def _checked_ids(kv: Cache | CacheOfLayers, tokens: Tokens | None) -> NDArray[np.int32] | None:
    """Return the ids of all tokens up to `next_position`."""
    ids = None if tokens is None else token_ids(tokens)
    if ids is not None and len(ids) != kv.next_position:
        raise ValueError(
            f"tokens: expected the ids of all {kv.next_position} tokens up to next_position, got "
            f"{len(ids)}"
        )
    return ids


class _Target(NamedTuple):
    """Where a section is saved, and what is saved with it."""

    path: str
    model: str | None
    ids: NDArray[np.int32] | None


_DataOf: TypeAlias = Callable[[Chunk, NDArray[np.uint8]], NDArray[np.uint8]]


class _Section(NamedTuple):
    """A section to be written, and the function that returns a chunk's bytes and hashes them."""

    facts: Section
    data_of: _DataOf


def _rows_section(kv: Cache, target: _Target, base: int) -> _Section:
    """Lay out the rows of a cache, from a byte of the file on."""
    facts: dict[str, Any] = {key: getattr(kv, key) for key in DIMS if key != "spare_rows"}
    facts |= {
        # A fixed cache may have fewer rows because of its budget_bytes.
        "max_seq_len": kv.max_seq_len if kv.window else min(kv.max_seq_len, kv.n_rows),
        "spare_rows": kv.n_rows - kv.window if kv.window else 0,
        "trimmed": bool(kv.window and kv._first_kept()),
        "seq_len": kv.seq_len,
        "next_position": kv.next_position,
        "alignment": mmap.PAGESIZE,
        "chunk_bytes": _CHUNK_BYTES,
    }
    made = format_rows.new(facts, target.model, target.ids, target.path, base)
    rows = [kv._rows(*lane) for lane in made.lanes] if made.seq_len else []
    return _section_of(made, rows, kv._file)


def _states_section(kv: CacheOfLayers, states: LayerStates, target: _Target, base: int) -> _Section:
    """Lay out the states of a cache, from a byte of the file on."""
    facts: dict[str, Any] = {
        "states": states.states,
        "batch": states.batch,
        "every": states.every or None,
        "max_checkpoints": states.n_checkpoints,
        "positions": tuple(states.positions),
        "seq_len": kv.seq_len,
        "next_position": kv.next_position,
        "max_seq_len": kv.max_seq_len,
        "alignment": mmap.PAGESIZE,
        "chunk_bytes": _CHUNK_BYTES,
    }
    made = format_states.new(facts, target.model, target.ids, target.path, base)
    return _section_of(made, [states._slot(slot) for slot in states._slots()], None)


def _section_of(facts: Section, rows: list[NDArray[np.uint8]], file: str | None) -> _Section:
    """Make a section from the bytes of its lanes, which may be mapped from a file."""

    def data_of(chunk: Chunk, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        data = rows[chunk.lane][chunk.begin : chunk.begin + chunk.nbytes]
        # Pages of a mapped file may be lost: they are copied before they are hashed or written.
        if chunk.padding or data.ctypes.data % mmap.PAGESIZE or file is not None:
            piece = buffer[: chunk.nbytes + chunk.padding]
            if file is None:
                piece[: chunk.nbytes] = data
            else:
                guard.copy(piece, data.ctypes.data, chunk.nbytes, file)
            piece[chunk.nbytes :] = 0
            data = piece
        facts.checksums[chunk.number] = xxhash.xxh3_64_intdigest(data.data)
        return data

    return _Section(facts, data_of)


def _save(sections: list[_Section], name: str, front: NDArray[np.uint8]) -> None:
    """Write the bytes of `front`, if any, and the sections behind them."""
    last = sections[-1].facts
    nbytes = last.base + last.file_bytes
    if is_url(name):
        _save_object(sections, name, front, nbytes)
        return
    with NewFile(name) as file:
        file.allocate(nbytes)
        for facts, data_of in sections:
            _write_data(file, facts, data_of)
            _write_head(file, facts._head(), facts.base)  # last, since it has the checksums
        if front.size:
            _write_head(file, front, 0)
        file.publish()


def _write_data(file: NewFile, facts: Section, data_of: _DataOf) -> None:
    for_each_chunk(facts, lambda chunk, buffer: file.write(data_of(chunk, buffer), chunk.offset))


def _write_head(file: NewFile, head: NDArray[np.uint8], offset: int) -> None:
    """Write a head from page-aligned memory."""
    with staging(len(head)) as block:
        aligned = block.as_array("uint8", len(head))
        aligned[:] = head
        file.write(aligned, offset)
        del aligned


def _save_object(sections: list[_Section], url: str, front: NDArray[np.uint8], nbytes: int) -> None:
    """Write an object from its first byte to its last; it appears when it is complete.

    Headers are first and have the checksums, so all data is read twice.
    """
    server, shown = open_server(url)
    try:
        for facts, data_of in sections:
            for_each_chunk(facts, data_of)

        def parts() -> Iterator[memoryview]:
            if front.size:
                yield front.data
            for facts, data_of in sections:
                yield facts._head().data
                for chunk in facts.chunks():
                    # New memory, since a chunk may be on its way when the next one is asked for.
                    yield data_of(chunk, np.empty(chunk.nbytes + chunk.padding, np.uint8)).data

        server.put_parts(shown, parts(), nbytes)
    finally:
        server.close()
