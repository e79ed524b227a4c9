"""Snapshots of KV caches: files that are written whole or not at all, and checked when read.

`KVCache.save`, `KVCache.restore` and `KVCache.verify` are the way in; the format is described in
``docs/snapshots.md``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core import guard
from unimem._core.block import Block
from unimem.errors import CacheFull, SnapshotError
from unimem.kv import snapshot_format as fmt
from unimem.kv.snapshot_format import Chunk, Snapshot
from unimem.kv.snapshot_source import LocalSnapshot, RemoteSnapshot, SnapshotBytes, open_source
from unimem.kv.token_ids import Tokens, token_ids
from unimem.system.arguments import file_path, flag, one_of
from unimem.system.atomic_file import NewFile
from unimem.system.objects import is_url, open_server
from unimem.system.placement import PlacementOptions
from unimem.system.threads import wait_until

__all__ = ["Snapshot", "check", "describe", "read_into", "restore", "save", "verify"]

# What is written at once: more makes no disk faster.
_CHUNK_BYTES = 8 << 20
# One thread hashes while others write; more keep no disk busier.
_THREADS = 4


class Cache(Protocol):
    """What of a cache is saved and restored, in main memory or on a device."""

    _snapshot: Any

    @property
    def _file(self) -> str | None:
        """The file that its rows are mapped from, or None."""

    @property
    def n_rows(self) -> int:
        """Rows of a lane."""

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit."""

    @property
    def seq_len(self) -> int:
        """Tokens that all layers hold."""

    @property
    def next_position(self) -> int:
        """The position of the next token."""

    @property
    def window(self) -> int | None:
        """Tokens of a ring, or None."""

    @property
    def order(self) -> Literal["token", "head"]:
        """What lies side by side in a lane."""

    def crop(self, n: int) -> None:
        """Keep the first tokens."""

    def clear(self) -> None:
        """Drop all tokens."""

    def _rows(self, layer: int, part: Literal["k", "v"], stream: int) -> NDArray[np.uint8]:
        """Return the bytes of the tokens of one lane."""

    def _begin_restore(self, next_position: int, n: int) -> None:
        """Prepare for n tokens that end at a position."""

    def _restore_rows(
        self, layer: int, part: Literal["k", "v"], stream: int, n: int, next_position: int
    ) -> NDArray[np.uint8]:
        """Return the memory into which the tokens of one lane are read."""

    def _finish_restore(self, next_position: int, n: int) -> None:
        """Take over the tokens that were read."""


class HostCache(Cache, Protocol):
    """A cache in main memory, which can be made of a snapshot."""

    def __init__(self, **options: Any) -> None:
        """Make an empty one."""

    @classmethod
    def _mapped(
        cls,
        fields: dict[str, Any],
        fd: int,
        path: str,
        offsets: list[int],
        n: int,
        next_position: int,
    ) -> Self:
        """Make one whose rows are mapped from a file."""

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Close it to new use."""


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
    ids = None if tokens is None else token_ids(tokens)
    if ids is not None and len(ids) != kv.next_position:
        raise ValueError(
            f"tokens: expected the ids of all {kv.next_position} tokens up to next_position, got "
            f"{len(ids)}"
        )
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
        _model_name(model),
        ids,
        name,
    )
    rows = [kv._rows(*lane) for lane in snapshot.lanes] if snapshot.seq_len else []

    def data_of(chunk: Chunk, staging: NDArray[np.uint8]) -> NDArray[np.uint8]:
        data = rows[chunk.lane][chunk.begin : chunk.begin + chunk.nbytes]
        # Pages of a file that may be lost are copied first: neither hashed nor written from.
        if chunk.padding or data.ctypes.data % mmap.PAGESIZE or kv._file is not None:
            piece = staging[: chunk.nbytes + chunk.padding]
            if kv._file is None:
                piece[: chunk.nbytes] = data
            else:
                guard.copy(piece, data.ctypes.data, chunk.nbytes, kv._file)
            piece[chunk.nbytes :] = 0
            data = piece
        snapshot.checksums[chunk.number] = xxhash.xxh3_64_intdigest(data.data)
        return data

    if is_url(name):
        _save_object(snapshot, name, data_of)
    else:
        _save_file(snapshot, name, data_of)


_DataOf = Callable[[Chunk, NDArray[np.uint8]], NDArray[np.uint8]]


def _save_file(snapshot: Snapshot, name: str, data_of: _DataOf) -> None:
    with NewFile(name) as file:
        file.allocate(snapshot.file_bytes)
        _for_each_chunk(
            snapshot, lambda chunk, staging: file.write(data_of(chunk, staging), chunk.offset)
        )
        # Last, since it has the checksums.
        with _staging(snapshot.data_offset) as block:
            head = block.as_array("uint8", snapshot.data_offset)
            fmt.encode(snapshot, head)
            file.write(head, 0)
            del head
        file.publish()


def _save_object(snapshot: Snapshot, url: str, data_of: _DataOf) -> None:
    """Write an object from its first byte to its last; it is there when all of it is.

    The header comes first and has the checksums, so all data is looked at twice.
    """
    server, shown = open_server(url)
    try:
        _for_each_chunk(snapshot, data_of)
        head = np.zeros(snapshot.data_offset, np.uint8)
        fmt.encode(snapshot, head)

        def parts() -> Iterator[memoryview]:
            yield head.data
            for chunk in snapshot.chunks():
                # Of its own, since it may be on its way when the next one is asked for.
                yield data_of(chunk, np.empty(chunk.nbytes + chunk.padding, np.uint8)).data

        server.put_parts(shown, parts(), snapshot.file_bytes)
    finally:
        server.close()


# The constructor's arguments, which a snapshot has as fields of these names.
_DIMS = (
    *("n_layers", "n_kv_heads", "head_dim", "max_seq_len", "batch", "dtype", "window"),
    *("spare_rows", "grow", "order", "v_dtype"),
)


# What a cache that a snapshot is read into has in common with it.
_SAME = ("n_layers", "n_kv_heads", "head_dim", "batch", "dtype", "v_dtype", "window", "order")


def describe(path: str | os.PathLike[str]) -> Snapshot:
    """Read and check what a snapshot says of itself; its data is not read.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    Snapshot

    Raises
    ------
    SnapshotError
        It is no snapshot, of a newer version, damaged, cut off or too long.
    OSError
        It cannot be read, or is not a regular file.
    """
    with _opened(file_path(path)) as (_, snapshot):
        return snapshot


def check(path: str | os.PathLike[str]) -> Snapshot:
    """Read all of a snapshot and check it; nothing is kept.

    Parameters
    ----------
    path : path-like
        The file.

    Returns
    -------
    Snapshot
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
    with _opened(file_path(path)) as (source, snapshot):
        _check_data(snapshot, source)
        return snapshot


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
    with _opened(file_path(path)) as (source, snapshot):
        _check_wanted(snapshot, ids, model)
        fields = {key: getattr(snapshot, key) for key in _DIMS}
        is_apart = snapshot.dtype != snapshot.v_dtype
        can_be_mapped = snapshot.seq_len and not snapshot.window and not is_apart
        can_be_mapped = can_be_mapped and snapshot.alignment % mmap.PAGESIZE == 0
        file = None
        if mode == "map" and isinstance(source, LocalSnapshot):
            file = _SnapshotFile(source.fd, snapshot)
        if file and can_be_mapped:
            if verify:
                _check_data(snapshot, source)
            offsets = [snapshot.offset_of(lane) for lane in range(len(snapshot.lanes))]
            kv = cls._mapped(
                *(fields, file.fd, snapshot.path, offsets),
                *(snapshot.seq_len, snapshot.next_position),
            )
        else:
            kv = cls(**fields, **placement)
            try:
                _read(kv, snapshot, source, verify=verify is not False)
            except BaseException:
                # Not close(), which raises while the error's traceback holds views.
                kv.__exit__()
                raise
        kv._snapshot = file
        return kv


def read_into(
    kv: Cache, path: str | os.PathLike[str], tokens: Tokens | None = None, model: str | None = None
) -> Snapshot:
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
    Snapshot

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
    ids = None if tokens is None else token_ids(tokens)
    with _opened(file_path(path)) as (source, snapshot):
        _check_wanted(snapshot, ids, model)
        for key in _SAME:
            there, here = getattr(snapshot, key), getattr(kv, key)
            if there != here:
                rule = f"the snapshot is of a cache with {key}={there!r}, and this one has {here!r}"
                raise SnapshotError(
                    f"{rule}: make the cache with the same",
                    fmt.OFFSETS[{"order": "flags", "v_dtype": "dtype"}.get(key, key)],
                    snapshot.path,
                )
        if snapshot.seq_len > kv.max_seq_len:
            raise CacheFull(
                f"{snapshot.path}: {snapshot.seq_len} tokens, and the cache has room for "
                f"{kv.max_seq_len}: make it with a larger max_seq_len",
                kv.max_seq_len,
                0,
                snapshot.seq_len,
            )
        try:
            _read(kv, snapshot, source, verify=True)
        except BaseException:
            kv.clear()
            raise
        return snapshot


def verify(kv: Cache) -> None:
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

    def __init__(self, fd: int, snapshot: Snapshot) -> None:
        self.fd = -1
        self._snapshot = snapshot
        self.fd = os.dup(fd)

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
        _check_data(self._snapshot, LocalSnapshot(self.fd, self._snapshot.path, there))

    def __del__(self) -> None:
        if self.fd >= 0:
            with suppress(OSError):
                os.close(self.fd)


# ---- what the caller gave ----


def _model_name(model: str | None) -> str | None:
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model: expected a str, got {type(model).__name__}")
    return model


def _check_wanted(snapshot: Snapshot, tokens: NDArray[np.int32] | None, model: str | None) -> None:
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


@contextmanager
def _opened(path: str) -> Iterator[tuple[LocalSnapshot | RemoteSnapshot, Snapshot]]:
    """Give the open file and what its header says, all of which is checked."""
    with open_source(path) as source:
        yield source, _again(source, lambda: _read_header(source))


def _read_header(source: SnapshotBytes) -> Snapshot:
    head = np.empty(min(fmt.HEADER_BYTES, source.nbytes), np.uint8)
    source.read(head, 0)
    values = fmt.checked_header(head.tobytes(), source.nbytes, source.path)
    tables = np.empty(values["data_offset"] - fmt.HEADER_BYTES, np.uint8)
    source.read(tables, fmt.HEADER_BYTES)
    return fmt.checked_tables(values, tables, source.path)


def _again(source: SnapshotBytes, work: Callable[[], _T]) -> _T:
    """Do what reads and checks; where a server's bytes are damaged, once more."""
    try:
        return work()
    except SnapshotError:
        if not isinstance(source, RemoteSnapshot):
            raise
    return work()


def _read(kv: Cache, snapshot: Snapshot, source: SnapshotBytes, *, verify: bool) -> None:
    """Read the rows into an empty cache."""
    n, position = snapshot.seq_len, snapshot.next_position
    kv._begin_restore(position, n)
    rows = [kv._restore_rows(*lane, n, position) for lane in snapshot.lanes] if n else []

    def read(chunk: Chunk, staging: NDArray[np.uint8]) -> None:
        data = rows[chunk.lane][chunk.begin : chunk.begin + chunk.nbytes]
        source.read(data, chunk.offset)
        if verify:
            padding = staging[: chunk.padding]
            source.read(padding, chunk.offset + chunk.nbytes)
            _check_chunk(snapshot, chunk, data, padding)

    _for_each_chunk(snapshot, lambda *given: _again(source, lambda: read(*given)))
    kv._finish_restore(position, n)


def _check_data(snapshot: Snapshot, source: SnapshotBytes) -> None:
    def check(chunk: Chunk, staging: NDArray[np.uint8]) -> None:
        data = staging[: chunk.nbytes + chunk.padding]
        source.read(data, chunk.offset)
        _check_chunk(snapshot, chunk, data)

    _for_each_chunk(snapshot, lambda *given: _again(source, lambda: check(*given)))


def _check_chunk(snapshot: Snapshot, chunk: Chunk, *pieces: NDArray[np.uint8]) -> None:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    if digest.intdigest() != snapshot.checksums[chunk.number]:
        layer, part, lane = snapshot.lanes[chunk.lane]
        stream, head = divmod(lane, snapshot.lanes_per_stream)
        of_head = f" of head {head}" if snapshot.order == "head" else ""
        of_stream = f" of stream {stream}" if snapshot.batch > 1 else ""
        raise SnapshotError(
            f"the data's checksum does not match in {part} of layer {layer}{of_head}{of_stream}; "
            f"{fmt.DAMAGED}",
            chunk.offset,
            snapshot.path,
        )


# ---- both ----


def _staging(nbytes: int) -> Block:
    return Block(nbytes, pages="4k", name="snapshot", category="staging")


def _for_each_chunk(snapshot: Snapshot, work: Callable[[Chunk, NDArray[np.uint8]], object]) -> None:
    """Do the work for every chunk, in threads, each with page-aligned memory for a chunk.

    The error of the first chunk that has one is raised, and what has not begun then is left. No
    work is under way any more when this returns or raises, however often it is interrupted: the
    caller closes the file, and gives the memory to others.
    """
    n_threads = min(_THREADS, len(snapshot.checksums))
    if n_threads == 0:
        return
    longest = max(snapshot.lane_stride, snapshot.v_lane_stride)
    nbytes = min(snapshot.chunk_bytes, longest)
    buffers: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()

    stopped = False

    def one(chunk: Chunk) -> None:
        buffer = buffers.get()
        try:
            # Read while the buffer is held: a thread without one begins no work after the stop.
            if not stopped:
                work(chunk, buffer)
        finally:
            buffers.put(buffer)

    def is_idle() -> bool:
        return buffers.qsize() == n_threads

    with _staging(n_threads * nbytes) as block, ThreadPoolExecutor(n_threads) as pool:
        for i in range(n_threads):
            buffers.put(block.as_array("uint8", nbytes, i * nbytes))
        try:
            for _ in pool.map(one, snapshot.chunks()):
                pass
        finally:
            stopped = True
            try:
                wait_until(is_idle)
            finally:
                wait_until(is_idle)  # an interrupt may have come before its first line
