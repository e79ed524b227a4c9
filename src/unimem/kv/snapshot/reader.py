"""Snapshots of KV caches: files that are written whole or not at all, and checked when read.

`KVCache.save`, `KVCache.restore` and `KVCache.verify` are the way in; the format is described in
``docs/snapshots.md``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core import guard
from unimem.base.arguments import file_path, flag, one_of
from unimem.base.atomic_file import NewFile
from unimem.base.descriptors import Descriptors
from unimem.errors import CacheFull, SnapshotError
from unimem.kv.snapshot import format_layers as many
from unimem.kv.snapshot import format_rows as fmt
from unimem.kv.snapshot import format_states as st
from unimem.kv.snapshot.chunk_threads import (
    Section,
    again,
    check_data,
    for_each_chunk,
    read_rows,
    staging,
)
from unimem.kv.snapshot.format_layers import LayersSnapshot
from unimem.kv.snapshot.format_rows import Chunk, Snapshot
from unimem.kv.snapshot.format_states import StatesSnapshot
from unimem.kv.snapshot.protocols import AnyCache, Cache, CacheOfLayers, HostCache, body_of
from unimem.kv.snapshot.source import LocalSnapshot, RemoteSnapshot, SnapshotBytes, open_source
from unimem.kv.states import LayerStates
from unimem.kv.token_ids import Tokens, token_ids
from unimem.remote.client import is_url, open_server
from unimem.system.placement import PlacementOptions

__all__ = [
    "LayersSnapshot",
    "OpenSnapshot",
    "Snapshot",
    "check",
    "describe",
    "opened",
    "read_into",
    "restore",
    "save",
    "save_layers",
    "verify",
]

# What is written at once: more makes no disk faster.
_CHUNK_BYTES = 8 << 20

_HostCacheT = TypeVar("_HostCacheT", bound=HostCache)
_T = TypeVar("_T")


def save(kv: Cache, path: str | os.PathLike[str], tokens: Tokens | None, model: str | None) -> None:
    """Write a cache's tokens to a file, which is replaced whole or not at all.

    Parameters
    ----------
    kv : KVCache
        Without reserved rows, and of equally many tokens in all layers: the caller has checked.
    path : path-like
        The file, or the URL of an object. A file that is there keeps its permissions.
    tokens : sequence of int, optional
        The ids of all tokens of the conversation, up to `next_position`, those that were trimmed
        included.
    model : str, optional
        A fingerprint of the model.

    Raises
    ------
    ValueError, TypeError
        `tokens` are not `next_position` many, or no ids; `model` is too long or no string.
    OSError
        The file cannot be written. It is as before, or was not there and is not.
    MemoryError
        There is no room for what is written by way of page-aligned memory.
    """
    name = file_path(path)
    ids = _checked_ids(kv, tokens)
    _save([_section(kv, _model_name(model), ids, name, 0)], name, np.empty(0, np.uint8))


def save_layers(
    kv: CacheOfLayers, path: str | os.PathLike[str], tokens: Tokens | None, model: str | None
) -> None:
    """Write the tokens of a cache whose layers differ, as `save` does.

    Parameters
    ----------
    kv : KVCache
        As for `save`.
    path, tokens, model
        As for `save`.

    Raises
    ------
    ValueError, TypeError, OSError, MemoryError
        As `save`.
    """
    name, ids = file_path(path), _checked_ids(kv, tokens)
    pieces = kv._parts if kv._states is None else (kv._states, *kv._parts)
    begin = base = many.first_offset(len(kv.layers), len(pieces), mmap.PAGESIZE)
    sections: list[_Section] = []
    for piece in pieces:
        own = (None, None) if sections else (_model_name(model), ids)
        if isinstance(piece, LayerStates):
            sections.append(_states_section(kv, piece, *own, name, base))
        else:
            sections.append(_section(piece, *own, name, base))
        base += sections[-1].snapshot.file_bytes
    head = np.zeros(begin, np.uint8)
    many.encode(kv.layers, [section.snapshot for section in sections], head)
    _save(sections, name, head)


def _checked_ids(kv: Cache | CacheOfLayers, tokens: Tokens | None) -> NDArray[np.int32] | None:
    """Return the ids of all tokens up to `next_position`."""
    ids = None if tokens is None else token_ids(tokens)
    if ids is not None and len(ids) != kv.next_position:
        raise ValueError(
            f"tokens: expected the ids of all {kv.next_position} tokens up to next_position, got "
            f"{len(ids)}"
        )
    return ids


_DataOf: TypeAlias = Callable[[Chunk, NDArray[np.uint8]], NDArray[np.uint8]]


class _Section(NamedTuple):
    """What a cache is in a file, and what gives the bytes of a chunk, and notes their checksum."""

    snapshot: Section
    data_of: _DataOf


def _section(
    kv: Cache, model: str | None, ids: NDArray[np.int32] | None, path: str, base: int
) -> _Section:
    """Lay out what of a file is a cache's, from a byte on."""
    snapshot = fmt.new(
        {
            **{key: getattr(kv, key) for key in _DIMS if key != "spare_rows"},
            # A fixed cache may have fewer rows, for its budget_bytes.
            "max_seq_len": kv.max_seq_len if kv.window else min(kv.max_seq_len, kv.n_rows),
            "spare_rows": kv.n_rows - kv.window if kv.window else 0,
            "seq_len": kv.seq_len,
            "next_position": kv.next_position,
            "alignment": mmap.PAGESIZE,
            "chunk_bytes": _CHUNK_BYTES,
        },
        model,
        ids,
        path,
        base,
    )
    rows = [kv._rows(*lane) for lane in snapshot.lanes] if snapshot.seq_len else []
    return _section_of(snapshot, rows, kv._file)


def _states_section(
    kv: CacheOfLayers,
    states: LayerStates,
    model: str | None,
    ids: NDArray[np.int32] | None,
    path: str,
    base: int,
) -> _Section:
    """Lay out what of a file is a cache's states, from a byte on."""
    facts = {
        **{"states": states.states, "batch": states.batch, "every": states.every or None},
        **{"max_checkpoints": states.n_checkpoints, "positions": tuple(states.positions)},
        **{key: getattr(kv, key) for key in ("seq_len", "next_position", "max_seq_len")},
        **{"alignment": mmap.PAGESIZE, "chunk_bytes": _CHUNK_BYTES},
    }
    snapshot = st.new(facts, model, ids, path, base)
    return _section_of(snapshot, [states._slot(slot) for slot in states._slots()], None)


def _section_of(snapshot: Section, rows: list[NDArray[np.uint8]], file: str | None) -> _Section:
    """Make a section of the bytes of its lanes, which may be mapped from a file."""

    def data_of(chunk: Chunk, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        data = rows[chunk.lane][chunk.begin : chunk.begin + chunk.nbytes]
        # Pages of a file that may be lost are copied first: neither hashed nor written from.
        if chunk.padding or data.ctypes.data % mmap.PAGESIZE or file is not None:
            piece = buffer[: chunk.nbytes + chunk.padding]
            if file is None:
                piece[: chunk.nbytes] = data
            else:
                guard.copy(piece, data.ctypes.data, chunk.nbytes, file)
            piece[chunk.nbytes :] = 0
            data = piece
        snapshot.checksums[chunk.number] = xxhash.xxh3_64_intdigest(data.data)
        return data

    return _Section(snapshot, data_of)


def _save(sections: list[_Section], name: str, front: NDArray[np.uint8]) -> None:
    """Write what comes in front, and the sections."""
    if is_url(name):
        _save_object(sections, name, front)
    else:
        _save_file(sections, name, front)


def _file_bytes(sections: list[_Section]) -> int:
    last = sections[-1].snapshot
    return last.base + last.file_bytes


def _save_file(sections: list[_Section], name: str, front: NDArray[np.uint8]) -> None:
    with NewFile(name) as file:
        file.allocate(_file_bytes(sections))
        for snapshot, data_of in sections:
            _save_section(file, snapshot, data_of)
        if front.size:
            _write_head(file, front, 0)
        file.publish()


def _save_section(file: NewFile, snapshot: Section, data_of: _DataOf) -> None:
    for_each_chunk(snapshot, lambda chunk, buffer: file.write(data_of(chunk, buffer), chunk.offset))
    # Last, since it has the checksums.
    _write_head(file, _head(snapshot), snapshot.base)


def _head(snapshot: Section) -> NDArray[np.uint8]:
    head = np.zeros(snapshot.data_offset, np.uint8)
    if isinstance(snapshot, StatesSnapshot):
        st.encode(snapshot, head)
    else:
        fmt.encode(snapshot, head)
    return head


def _write_head(file: NewFile, head: NDArray[np.uint8], offset: int) -> None:
    """Write by way of memory that is aligned to pages."""
    with staging(len(head)) as block:
        aligned = block.as_array("uint8", len(head))
        aligned[:] = head
        file.write(aligned, offset)
        del aligned


def _save_object(sections: list[_Section], url: str, front: NDArray[np.uint8]) -> None:
    """Write an object from its first byte to its last; it is there when all of it is.

    Headers come first and have the checksums, so all data is looked at twice.
    """
    server, shown = open_server(url)
    try:
        for snapshot, data_of in sections:
            for_each_chunk(snapshot, data_of)

        def parts() -> Iterator[memoryview]:
            if front.size:
                yield front.data
            for snapshot, data_of in sections:
                yield _head(snapshot).data
                for chunk in snapshot.chunks():
                    # Of its own, since it may be on its way when the next one is asked for.
                    yield data_of(chunk, np.empty(chunk.nbytes + chunk.padding, np.uint8)).data

        server.put_parts(shown, parts(), _file_bytes(sections))
    finally:
        server.close()


# The constructor's arguments, which a snapshot has as fields of these names.
_DIMS = tuple(
    """
    n_layers n_kv_heads head_dim max_seq_len batch dtype window spare_rows grow order v_dtype
    v_head_dim rotate
""".split()
)


# What a cache that a snapshot is read into has in common with it.
_SAME = tuple(
    """
    n_layers n_kv_heads head_dim v_head_dim batch dtype v_dtype window order rotate
""".split()
)


def describe(path: str | os.PathLike[str]) -> Snapshot | Any:
    """Read and check what a snapshot says of itself; its data is not read.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    Snapshot, or LayersSnapshot
        The latter of a cache whose layers differ.

    Raises
    ------
    SnapshotError
        It is no snapshot, of a newer version, damaged, cut off or too long.
    OSError
        It cannot be read, or is not a regular file.
    """
    with opened(path) as file:
        return file.facts


def check(path: str | os.PathLike[str]) -> Snapshot | Any:
    """Read all of a snapshot and check it; nothing is kept.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    Snapshot, or LayersSnapshot
        As `describe` returns it.

    Raises
    ------
    SnapshotError
        As `describe`; or the data is damaged.
    OSError
        It cannot be read, or is not a regular file.
    MemoryError
        There is no room for what is read at once, at most 256 MiB.
    """
    with opened(path) as file:
        file.check()
        return file.facts


def restore(
    cls: type[_HostCacheT],
    path: str | os.PathLike[str],
    mode: Literal["map", "copy"],
    tokens: Tokens | None,
    model: str | None,
    verify: bool | None,
    placement: PlacementOptions,
) -> _HostCacheT:
    """Make a cache of a snapshot.

    Parameters
    ----------
    cls : type
        KVCache.
    path : path-like
        The file, or its URL.
    mode : {"map", "copy"}
        Map the file, privately, so that pages are read when they are touched; or read all of it. A
        ring, a cache without tokens, and what a URL names, is read in both.
    tokens : sequence of int, optional
        What the conversation shall begin with: the snapshot's tokens have to be a prefix of these.
    model : str, optional
        The fingerprint that the snapshot has to have.
    verify : bool, optional
        Whether to check the data; by default, what is read is checked and what is mapped is not.
    placement : PlacementOptions
        As for KVCache; only with ``"copy"``.

    Returns
    -------
    KVCache

    Raises
    ------
    SnapshotError
        The snapshot cannot be used: `rule` says why.
    ValueError, TypeError
        An unknown mode or option, placement of what is mapped, `tokens` that are no ids.
    OSError
        The file cannot be read.
    MemoryError, PlacementError
        As KVCache.
    """
    one_of(mode, "mode", ("map", "copy"))
    known = PlacementOptions.__annotations__
    if unknown := [name for name in placement if name not in known]:
        raise TypeError(
            f"KVCache.restore: expected mode, tokens, model, verify, {', '.join(known)}; got "
            f"{', '.join(unknown)}"
        )
    if mode == "map" and placement:
        raise ValueError(
            f"a mapped file lies in the page cache: {', '.join(placement)} not accepted with "
            "mode='map', use mode='copy'"
        )
    if verify is not None:
        flag(verify, "verify")
    ids = None if tokens is None else token_ids(tokens)
    with opened(path) as there:
        source, snapshot = there.source, there.facts
        _check_wanted(_parts_of(snapshot)[0], ids, model)
        file = None
        if mode == "map" and isinstance(source, LocalSnapshot):
            file = _SnapshotFile(source.fd, snapshot)
        given = (source, file, verify, placement)
        if isinstance(snapshot, Snapshot):
            kv = _restored(cls, snapshot, *given)
        else:
            kv = _restored_layers(cls, snapshot, *given)
        kv._snapshot = file
        return kv


def _restored(
    cls: type[_HostCacheT],
    snapshot: Snapshot,
    source: SnapshotBytes,
    file: _SnapshotFile | None,
    verify: bool | None,
    placement: PlacementOptions,
) -> _HostCacheT:
    """Make a cache whose layers are alike."""
    fields = {key: getattr(snapshot, key) for key in _DIMS}
    in_pages = snapshot.alignment % mmap.PAGESIZE == snapshot.base % mmap.PAGESIZE == 0
    if file and snapshot.seq_len and not snapshot.window and in_pages:
        if verify:
            check_data(snapshot, source)
        offsets = [snapshot.offset_of(lane) for lane in range(len(snapshot.lanes))]
        return cls._mapped(
            fields,
            file.fd,
            snapshot.path,
            offsets,
            snapshot.seq_len,
            snapshot.next_position,
        )
    kv = cls(**fields, **placement)
    try:
        _read(kv, snapshot, source, verify=verify is not False)
    except BaseException:
        # Not close(), which raises while the error's traceback holds views.
        kv.__exit__()
        raise
    return kv


def _restored_layers(
    cls: type[_HostCacheT],
    snapshot: LayersSnapshot,
    source: SnapshotBytes,
    file: _SnapshotFile | None,
    verify: bool | None,
    placement: PlacementOptions,
) -> _HostCacheT:
    """Make a cache whose layers differ."""
    parts: list[_HostCacheT] = []
    states = None
    try:
        if (of := snapshot.states) is not None:
            room = of.max_checkpoints, of.every
            states = LayerStates(of.states, of.batch, *room, "kv", dict(placement))
            _read_states(states, of, source, verify=verify is not False)
        for part in snapshot.parts:
            parts.append(_restored(cls, part, source, file, verify, placement))
        made: _HostCacheT = cls._of_layers(snapshot.layers, parts, snapshot.max_seq_len, states)
        if states is not None:
            made._finish_restore(snapshot.next_position, snapshot.seq_len)
    except BaseException:
        for one in parts:
            one.__exit__()
        if states is not None:
            states.__exit__()
        raise
    return made


def read_into(
    kv: AnyCache,
    path: str | os.PathLike[str],
    tokens: Tokens | None = None,
    model: str | None = None,
) -> Snapshot | Any:
    """Read a snapshot into a cache that is there, and check all of it.

    Parameters
    ----------
    kv : KVCache
        Cleared, and of the snapshot's dimensions; `max_seq_len`, `spare_rows` and `grow` may
        differ.
    path, tokens, model
        As in `restore`.

    Returns
    -------
    Snapshot, or LayersSnapshot
        As `describe` returns it.

    Raises
    ------
    SnapshotError
        The snapshot cannot be used, or is of a cache of other dimensions.
    CacheFull
        There is no room for its tokens.
    ValueError, TypeError
        The cache is not cleared; `tokens` are no ids.
    OSError
        The file cannot be read.

    Notes
    -----
    When it raises, the cache is as empty as before.
    """
    with opened(path) as file:
        file.read_into(kv, tokens, model)
        return file.facts


class OpenSnapshot:
    """A snapshot that is held open: all that is done with it is done with one file.

    Attributes
    ----------
    source : LocalSnapshot or RemoteSnapshot
        What is read; another file may have its name meanwhile.
    facts : Snapshot or LayersSnapshot
        What it says of itself, which is checked.
    """

    def __init__(self, source: LocalSnapshot | RemoteSnapshot, facts: Any) -> None:
        self.source, self.facts = source, facts

    def check(self) -> None:
        """Read all of it and check it, as `snapshot.check` does."""
        for part in _parts_of(self.facts):
            check_data(part, self.source)

    def read_into(
        self, kv: AnyCache, tokens: Tokens | None = None, model: str | None = None
    ) -> None:
        """Read it into a cleared cache, as `snapshot.read_into` does."""
        kv = body_of(kv)
        _check_cleared(kv)
        source, snapshot = self.source, self.facts
        ids = None if tokens is None else token_ids(tokens)
        _check_wanted(_parts_of(snapshot)[0], ids, model)
        pairs = _check_like(kv, snapshot)
        if snapshot.seq_len > kv.max_seq_len:
            raise CacheFull(
                f"{snapshot.path}: {snapshot.seq_len} tokens, and the cache has room for "
                f"{kv.max_seq_len}: make it with a larger max_seq_len",
                kv.max_seq_len,
                0,
                snapshot.seq_len,
            )
        try:
            for one, part in pairs:
                _read(one, part, source, verify=True)
            if isinstance(kv, CacheOfLayers):
                states = snapshot.states if isinstance(snapshot, LayersSnapshot) else None
                if kv._states is not None and states is not None:
                    _read_states(kv._states, states, source, verify=True)
                kv._finish_restore(snapshot.next_position, snapshot.seq_len)
        except BaseException:
            kv.clear()
            raise


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[OpenSnapshot]:
    """Open a snapshot and read what it says of itself, as `describe` does; close it at the end.

    Parameters
    ----------
    path : path-like
        The file, or its URL.

    Yields
    ------
    OpenSnapshot

    Raises
    ------
    SnapshotError, OSError
        As `describe`.
    """
    with open_source(file_path(path)) as source:
        yield OpenSnapshot(source, again(source, lambda: _read_header(source)))


def _check_cleared(kv: Cache | CacheOfLayers) -> None:
    """Refuse a cache that holds tokens, or reserved rows."""
    if kv.next_position:
        raise ValueError(
            f"expected a cleared cache, got one at position {kv.next_position}: call clear() first"
        )
    try:
        kv.crop(0)  # drops nothing, and refuses what no position shows
    except RuntimeError as error:
        raise ValueError(
            "expected a cleared cache, got one with reserved rows, or with tokens that not all "
            "layers hold: call clear() first"
        ) from error


def _check_like(
    kv: Cache | CacheOfLayers, snapshot: Snapshot | LayersSnapshot
) -> list[tuple[Cache, Snapshot]]:
    """Refuse the snapshot of another kind of cache; return the caches that its parts belong in."""
    if isinstance(kv, CacheOfLayers) and isinstance(snapshot, LayersSnapshot):
        keys: tuple[str, ...] = ("layers", "batch", "order", "rotate")
        pairs: list[tuple[Cache, Snapshot]] = list(zip(kv._parts, snapshot.parts, strict=False))
    elif isinstance(kv, CacheOfLayers) or isinstance(snapshot, LayersSnapshot):
        kinds = "layers that differ", "layers that are alike"
        there, here = kinds if isinstance(snapshot, LayersSnapshot) else reversed(kinds)
        rule = f"the snapshot is of a cache of {there}, and this one is of {here}"
        raise SnapshotError(f"{rule}: make the cache with the same", 8, snapshot.path)
    else:
        keys = _SAME
        pairs = [(kv, snapshot)]
    for key in keys:
        there, here = getattr(snapshot, key), getattr(kv, key)
        if there != here:
            rule = f"the snapshot is of a cache with {key}={there!r}, and this one has {here!r}"
            fields = {"order": "flags", "rotate": "flags", "v_dtype": "dtype"}
            field = (fields | {"v_head_dim": "head_dim"}).get(key, key)
            at = fmt.OFFSETS.get(field, many.HEADER_BYTES)
            raise SnapshotError(f"{rule}: make the cache with the same", at, snapshot.path)
    return pairs


def verify(kv: Cache | CacheOfLayers) -> None:
    """Check the data of the file that a cache was mapped from.

    What is checked is the file, as it was saved: it does not matter what was done to the cache
    since then, which never changes the file.

    Parameters
    ----------
    kv : KVCache
        Restored with ``mode="map"``.

    Raises
    ------
    SnapshotError
        The data is damaged, or the file was truncated.
    OSError
        The file cannot be read.
    ValueError
        The cache was not restored with ``mode="map"``.
    """
    if kv._snapshot is None:
        raise ValueError("nothing to verify: the cache was not restored with mode='map'")
    kv._snapshot.verify()


class _SnapshotFile:
    """The file behind a mapped cache, held open: another may have its name by now."""

    def __init__(self, fd: int, snapshot: Snapshot | LayersSnapshot) -> None:
        self._fds = Descriptors()
        self._snapshot = snapshot
        self.fd = self._fds.add(os.dup, fd)

    def verify(self) -> None:
        there, whole = os.fstat(self.fd).st_size, self._snapshot.file_bytes
        if there < whole:
            raise SnapshotError(
                f"the file was truncated after it was mapped: it has {there} of {whole} bytes, and "
                "the tokens in the rest are lost: close the cache, take another copy of the file "
                "or save anew",
                there,
                self._snapshot.path,
            )
        source = LocalSnapshot(self.fd, self._snapshot.path, there)
        for part in _parts_of(self._snapshot):
            check_data(part, source)


# ---- what the caller gave ----


def _model_name(model: str | None) -> str | None:
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model: expected a str, got {type(model).__name__}")
    return model


def _check_wanted(snapshot: Section, tokens: NDArray[np.int32] | None, model: str | None) -> None:
    """Refuse the snapshot of another model or conversation."""
    path = snapshot.path
    if _model_name(model) is not None and model != snapshot.model:
        there = "no model" if snapshot.model is None else f"model {snapshot.model!r}"
        rule = f"expected a snapshot of model {model!r}, got one of {there}"
        at = snapshot.tokens_offset + (0 if snapshot.tokens is None else snapshot.tokens.nbytes)
        raise SnapshotError(f"{rule}: restore it with its own model, or save anew", at, path)
    if tokens is None:
        return
    if snapshot.tokens is None:
        rule = "expected the tokens given, got a snapshot without token ids"
        raise SnapshotError(f"{rule}: save it with tokens=", snapshot.tokens_offset, path)
    n = min(len(tokens), len(snapshot.tokens))
    different = np.flatnonzero(tokens[:n] != snapshot.tokens[:n])
    if different.size or n < len(snapshot.tokens):
        at = int(different[0]) if different.size else n
        rule = (
            f"its {len(snapshot.tokens)} tokens are no prefix of the {len(tokens)} given, from "
            f"token {at} on: restore without tokens=, or begin anew"
        )
        raise SnapshotError(rule, snapshot.tokens_offset + 4 * at, path)


# ---- reading ----


def _read_header(source: SnapshotBytes) -> Snapshot | LayersSnapshot:
    begin = _read_bytes(source, 0, min(many.HEADER_BYTES, source.nbytes)).tobytes()
    if many.is_head(begin):
        return _read_layers(source, begin)
    snapshot: Snapshot = _read_part(source, 0, source.nbytes)
    return snapshot


def _read_part(source: SnapshotBytes, base: int, nbytes: int, form: Any = fmt) -> Any:
    """Read the header and the tables of a snapshot, which has these bytes of the file."""
    head = _read_bytes(source, base, min(form.HEADER_BYTES, nbytes))
    try:
        values = form.checked_header(head.tobytes(), nbytes, source.path)
        size = values["data_offset"] - form.HEADER_BYTES
        tables = _read_bytes(source, base + form.HEADER_BYTES, size)
        return form.checked_tables(values, tables, source.path, base)
    except SnapshotError as error:
        if not base:
            raise
        raise SnapshotError(error.rule, base + (error.offset or 0), source.path) from None


def _read_layers(source: SnapshotBytes, head: bytes) -> LayersSnapshot:
    """Read the header of a cache whose layers differ, and those of its parts."""
    values = many.checked_header(head, source.nbytes, source.path)
    size = values["data_offset"] - many.HEADER_BYTES
    found = many.checked_head(values, _read_bytes(source, many.HEADER_BYTES, size), source.path)
    sections: list[Section] = []
    for i, (at, nbytes) in enumerate(found.parts):
        of_states = found.has_states and i == 0
        sections.append(_read_part(source, at, nbytes, st if of_states else fmt))
    return many.checked_layers(found, sections, source.path)


def _parts_of(snapshot: Snapshot | LayersSnapshot) -> tuple[Section, ...]:
    return snapshot.sections if isinstance(snapshot, LayersSnapshot) else (snapshot,)


def _read_bytes(source: SnapshotBytes, offset: int, nbytes: int) -> NDArray[np.uint8]:
    out = np.empty(nbytes, np.uint8)
    source.read(out, offset)
    return out


def _read(kv: Cache, snapshot: Snapshot, source: SnapshotBytes, *, verify: bool) -> None:
    """Read the rows into an empty cache."""
    n, position = snapshot.seq_len, snapshot.next_position
    kv._begin_restore(position, n)
    rows = [kv._restore_rows(*lane, n, position) for lane in snapshot.lanes] if n else []
    read_rows(rows, snapshot, source, verify=verify)
    kv._finish_restore(position, n)


def _read_states(
    states: LayerStates, snapshot: StatesSnapshot, source: SnapshotBytes, *, verify: bool
) -> None:
    """Read states, and the newest of their checkpoints for which there is room."""
    n_left = max(0, len(snapshot.positions) - states.n_checkpoints)
    positions = snapshot.positions[n_left:]
    rows: list[NDArray[np.uint8] | None] = [states._slot(0), *([None] * n_left)]
    rows += [states._slot(1 + i) for i in range(len(positions))]
    read_rows(rows, snapshot, source, verify=verify)
    states._adopt(positions)
