"""Reading snapshots: described, checked, restored as caches, or read into caches.

`KVCache.restore` and `KVCache.verify` call it; ``docs/snapshots.md`` describes the format.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import file_path, flag, one_of
from unimem.base.descriptors import Descriptors
from unimem.errors import CacheFull, SnapshotError
from unimem.kv.snapshot import format_layers, format_rows, format_states
from unimem.kv.snapshot.chunk_threads import again, check_data, read_rows
from unimem.kv.snapshot.format_layers import LayersSnapshot
from unimem.kv.snapshot.format_rows import Section, Snapshot
from unimem.kv.snapshot.format_states import StatesSnapshot
from unimem.kv.snapshot.protocols import AnyCache, Cache, CacheOfLayers, HostCache, body_of
from unimem.kv.snapshot.source import LocalSnapshot, RemoteSnapshot, SnapshotBytes, open_source
from unimem.kv.snapshot.writer import DIMS, model_name
from unimem.kv.states import LayerStates
from unimem.kv.token_ids import Tokens, token_ids
from unimem.system.placement import PlacementOptions

_HostCacheT = TypeVar("_HostCacheT", bound=HostCache)

# What a cache and a snapshot that is read into it have in common.
_SAME = "n_layers n_kv_heads head_dim v_head_dim batch dtype v_dtype window order rotate".split()
# The fields of the header that hold these.
_FIELD_OF = {"order": "flags", "rotate": "flags", "v_dtype": "dtype", "v_head_dim": "head_dim"}


def describe(path: str | os.PathLike[str]) -> Snapshot | Any:
    """Read and check the headers and tables of a snapshot, without its data.

    Returns
    -------
    Snapshot, or LayersSnapshot
        The latter for a cache whose layers differ.

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
    """Read all of a snapshot and check it; return what `describe` returns.

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
    """Make a cache of the class `cls` from a snapshot, as `KVCache.restore` says.

    Both modes read rings, caches without tokens, and URLs. By default, read data is checked and
    mapped data is not.
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
        _check_wanted(_sections_of(snapshot)[0], ids, model)
        file = None
        if mode == "map" and isinstance(source, LocalSnapshot):
            file = _SnapshotFile(source.fd, snapshot)
        how = _Restoring(source, file, verify, placement)
        if isinstance(snapshot, Snapshot):
            kv = _restored(cls, snapshot, how)
        else:
            kv = _restored_layers(cls, snapshot, how)
        kv._snapshot = file
        return kv


class _Restoring(NamedTuple):
    """How a cache is made from a snapshot."""

    source: SnapshotBytes
    file: _SnapshotFile | None
    verify: bool | None
    placement: PlacementOptions

    @property
    def checks_reads(self) -> bool:
        """Whether read data is checked."""
        return self.verify is not False


def _restored(cls: type[_HostCacheT], snapshot: Snapshot, how: _Restoring) -> _HostCacheT:
    """Make a cache whose layers are alike."""
    fields = {key: getattr(snapshot, key) for key in DIMS}
    in_pages = snapshot.alignment % mmap.PAGESIZE == snapshot.base % mmap.PAGESIZE == 0
    if how.file and snapshot.seq_len and not snapshot.window and in_pages:
        if how.verify:
            check_data(snapshot, how.source)
        offsets = [offset for offset, _, _ in snapshot._places()]
        end = snapshot.seq_len, snapshot.next_position
        return cls._mapped(fields, how.file.fd, snapshot.path, offsets, *end)
    kv = cls(**fields, **how.placement)
    try:
        _read(kv, snapshot, how.source, verify=how.checks_reads)
    except BaseException:
        # Not close(), which raises while the error's traceback holds views.
        kv.__exit__()
        raise
    return kv


def _restored_layers(
    cls: type[_HostCacheT], snapshot: LayersSnapshot, how: _Restoring
) -> _HostCacheT:
    """Make a cache whose layers differ."""
    parts: list[_HostCacheT] = []
    states = None
    try:
        if (of := snapshot.states) is not None:
            room = of.max_checkpoints, of.every
            states = LayerStates(of.states, of.batch, *room, "kv", dict(how.placement))
            _read_states(states, of, how.source, verify=how.checks_reads)
        for part in snapshot.parts:
            parts.append(_restored(cls, part, how))
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
    *,
    last: bool = False,
) -> Snapshot | Any:
    """Read a snapshot into a cleared cache and check all of it; return what `describe` returns.

    The cache has the snapshot's dimensions; `max_seq_len`, `spare_rows` and `grow` may differ, and
    with `last` the window: the cache then has the last tokens alone. When this raises, the cache is
    as empty as before.

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
    """
    with opened(path) as file:
        file.read_into(kv, tokens, model, last=last)
        return file.facts


class OpenSnapshot:
    """A snapshot that is held open, so that all work is done with the same file.

    `source` is the open file, and `facts` are its checked headers and tables.
    """

    def __init__(self, source: LocalSnapshot | RemoteSnapshot, facts: Any) -> None:
        self.source, self.facts = source, facts

    def check(self) -> None:
        """Read all of it and check it, as `snapshot.check` does."""
        for section in _sections_of(self.facts):
            check_data(section, self.source)

    def read_into(
        self,
        kv: AnyCache,
        tokens: Tokens | None = None,
        model: str | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Read it into a cleared cache, as `snapshot.read_into` does."""
        kv = body_of(kv)
        _check_cleared(kv)
        source, snapshot = self.source, self.facts
        ids = None if tokens is None else token_ids(tokens)
        _check_wanted(_sections_of(snapshot)[0], ids, model)
        pairs = _check_like(kv, snapshot, "window" if last else "")
        if pairs and snapshot.seq_len > kv.max_seq_len:  # states alone have room for any
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
    """Open a snapshot, read its headers as `describe` does, and close it at the end."""
    with open_source(file_path(path)) as source:
        yield OpenSnapshot(source, again(source, lambda: _read_header(source)))


def verify(kv: Cache | CacheOfLayers) -> None:
    """Check the data of the file that a cache was mapped from.

    It checks the file as it was saved. Later changes of the cache do not matter, since they never
    change the file.

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
    """The file behind a mapped cache, held open: another file may have its name by now."""

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
        for section in _sections_of(self._snapshot):
            check_data(section, source)


# ---- checks of arguments ----


def _check_cleared(kv: Cache | CacheOfLayers) -> None:
    """Refuse a cache that holds tokens or reserved rows."""
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
    kv: Cache | CacheOfLayers, snapshot: Snapshot | LayersSnapshot, other: str
) -> list[tuple[Cache, Snapshot]]:
    """Refuse the snapshot of another kind of cache; return the cache for each of its parts.

    The fact `other` may differ.
    """
    if isinstance(kv, CacheOfLayers) and isinstance(snapshot, LayersSnapshot):
        keys = ["layers", "batch", "order", "rotate"]
        pairs: list[tuple[Cache, Snapshot]] = list(zip(kv._parts, snapshot.parts, strict=False))
    elif isinstance(kv, CacheOfLayers) or isinstance(snapshot, LayersSnapshot):
        kinds = "layers that differ", "layers that are alike"
        there, here = kinds if isinstance(snapshot, LayersSnapshot) else reversed(kinds)
        rule = f"the snapshot is of a cache of {there}, and this one is of {here}"
        raise SnapshotError(f"{rule}: make the cache with the same", 8, snapshot.path)
    else:
        keys, pairs = [key for key in _SAME if key != other], [(kv, snapshot)]
    for key in keys:
        there, here = getattr(snapshot, key), getattr(kv, key)
        if there != here:
            rule = f"the snapshot is of a cache with {key}={there!r}, and this one has {here!r}"
            offsets, behind = format_rows.HEADER.offsets, format_layers.HEADER.nbytes
            at = offsets.get(_FIELD_OF.get(key, key), behind)
            raise SnapshotError(f"{rule}: make the cache with the same", at, snapshot.path)
    return pairs


def _check_wanted(section: Section, tokens: NDArray[np.int32] | None, model: str | None) -> None:
    """Refuse the snapshot of another model or conversation."""
    path = section.path
    if model_name(model) is not None and model != section.model:
        there = "no model" if section.model is None else f"model {section.model!r}"
        rule = f"expected a snapshot of model {model!r}, got one of {there}"
        at = section.tokens_offset + (0 if section.tokens is None else section.tokens.nbytes)
        raise SnapshotError(f"{rule}: restore it with its own model, or save anew", at, path)
    if tokens is None:
        return
    if section.tokens is None:
        rule = "expected the tokens given, got a snapshot without token ids"
        raise SnapshotError(f"{rule}: save it with tokens=", section.tokens_offset, path)
    n = min(len(tokens), len(section.tokens))
    different = np.flatnonzero(tokens[:n] != section.tokens[:n])
    if different.size or n < len(section.tokens):
        at = int(different[0]) if different.size else n
        rule = (
            f"its {len(section.tokens)} tokens are no prefix of the {len(tokens)} given, from "
            f"token {at} on: restore without tokens=, or begin anew"
        )
        raise SnapshotError(rule, section.tokens_offset + 4 * at, path)


# ---- reading ----


def _read_header(source: SnapshotBytes) -> Snapshot | LayersSnapshot:
    nbytes = min(format_layers.HEADER.nbytes, source.nbytes)
    begin = _read_bytes(source, 0, nbytes).tobytes()
    if format_layers.is_head(begin):
        return _read_layers(source, begin)
    snapshot: Snapshot = _read_section(source, 0, source.nbytes, format_rows)
    return snapshot


def _read_section(source: SnapshotBytes, base: int, nbytes: int, form: Any) -> Any:
    """Read the header and the tables of a section that has `nbytes` bytes of the file."""
    head = _read_bytes(source, base, min(form.HEADER.nbytes, nbytes)).tobytes()
    values = form.checked_header(head, nbytes, source.path, base)
    size = values["data_offset"] - len(head)
    return form.checked_tables(values, _read_bytes(source, base + len(head), size))


def _read_layers(source: SnapshotBytes, head: bytes) -> LayersSnapshot:
    """Read the header of a cache whose layers differ, and those of its sections."""
    values = format_layers.checked_header(head, source.nbytes, source.path)
    size = values["data_offset"] - len(head)
    found = format_layers.checked_head(values, _read_bytes(source, len(head), size))
    sections: list[Section] = []
    for i, (at, nbytes) in enumerate(found.parts):
        form = format_states if found.has_states and i == 0 else format_rows
        sections.append(_read_section(source, at, nbytes, form))
    return format_layers.checked_layers(found, sections, source.path)


def _sections_of(snapshot: Snapshot | LayersSnapshot) -> tuple[Section, ...]:
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
    trimmed = position - n
    if snapshot.window:  # of a full ring it is only known that tokens were trimmed
        trimmed = int(snapshot.trimmed and n == snapshot.window)
    kv._finish_restore(position, n, trimmed)


def _read_states(
    states: LayerStates, snapshot: StatesSnapshot, source: SnapshotBytes, *, verify: bool
) -> None:
    """Read states, and as many of their newest checkpoints as there is room for."""
    n_left = max(0, len(snapshot.positions) - states.n_checkpoints)
    positions = snapshot.positions[n_left:]
    rows: list[NDArray[np.uint8] | None] = [states._slot(0), *([None] * n_left)]
    rows += [states._slot(1 + i) for i in range(len(positions))]
    read_rows(rows, snapshot, source, verify=verify)
    states._adopt(positions)
