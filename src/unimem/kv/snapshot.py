"""Snapshots of KV caches: files that are written whole or not at all, and checked when read.

`KVCache.save`, `KVCache.restore` and `KVCache.verify` are the way in; the format is described in
``docs/snapshots.md``.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core import guard
from unimem._core.block import Block
from unimem.errors import CacheFull, SnapshotError
from unimem.kv import snapshot_format as fmt
from unimem.kv import snapshot_layers as many
from unimem.kv.snapshot_caches import Cache, CacheOfLayers, HostCache
from unimem.kv.snapshot_format import Chunk, Snapshot
from unimem.kv.snapshot_layers import LayersSnapshot
from unimem.system.arguments import file_path, flag, one_of
from unimem.system.atomic_file import NewFile
from unimem.system.placement import PlacementOptions
from unimem.system.threads import wait_until

__all__ = [
    "LayersSnapshot",
    "Snapshot",
    "check",
    "describe",
    "read_into",
    "restore",
    "save",
    "save_layers",
    "verify",
]

# What is written at once: more makes no disk faster.
_CHUNK_BYTES = 8 << 20
# One thread hashes while others write; more keep no disk busier.
_THREADS = 4

Tokens = Sequence[int] | NDArray[Any] | None


_HostCacheT = TypeVar("_HostCacheT", bound=HostCache)


def save(kv: Cache, path: str | os.PathLike[str], tokens: Tokens, model: str | None) -> None:
    """Write a cache's tokens to a file, which is replaced whole or not at all.

    Parameters
    ----------
    kv : KVCache
        Without reserved rows, and of equally many tokens in all layers: the caller has checked.
    path : path-like
        The file. One that is there keeps its permissions.
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
    snapshot = _describe_cache(kv, _model_name(model), ids, name, 0)
    with NewFile(name) as file:
        file.allocate(snapshot.file_bytes)
        _write(file, kv, snapshot)
        file.publish()


def save_layers(
    kv: CacheOfLayers, path: str | os.PathLike[str], tokens: Tokens, model: str | None
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
    begin = base = many.first_offset(len(kv.layers), len(kv._parts), mmap.PAGESIZE)
    parts: list[Snapshot] = []
    for part in kv._parts:
        own = (None, None) if parts else (_model_name(model), ids)
        parts.append(_describe_cache(part, *own, name, base))
        base += parts[-1].file_bytes
    with NewFile(name) as file:
        file.allocate(base)
        for part, snapshot in zip(kv._parts, parts, strict=True):
            _write(file, part, snapshot)
        with _staging(begin) as block:
            head = block.as_array("uint8", begin)
            many.encode(kv.layers, parts, head)
            file.write(head, 0)
            del head
        file.publish()


def _describe_cache(
    kv: Cache, model: str | None, ids: NDArray[np.int32] | None, path: str, base: int
) -> Snapshot:
    return fmt.new(
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


def _write(file: NewFile, kv: Cache, snapshot: Snapshot) -> None:
    """Write the rows of a cache, and what says where they are."""
    rows = [kv._rows(*lane) for lane in snapshot.lanes] if snapshot.seq_len else []

    def write(chunk: Chunk, staging: NDArray[np.uint8]) -> None:
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
        file.write(data, chunk.offset)

    _for_each_chunk(snapshot, write)
    # Last, since it has the checksums.
    with _staging(snapshot.data_offset) as block:
        head = block.as_array("uint8", snapshot.data_offset)
        fmt.encode(snapshot, head)
        file.write(head, snapshot.base)
        del head


# The constructor's arguments, which a snapshot has as fields of these names.
_DIMS = (
    *("n_layers", "n_kv_heads", "head_dim", "max_seq_len", "batch", "dtype", "window"),
    *("spare_rows", "grow", "order", "v_dtype"),
)


# What a cache that a snapshot is read into has in common with it.
_SAME = ("n_layers", "n_kv_heads", "head_dim", "batch", "dtype", "v_dtype", "window", "order")


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
    with _opened(file_path(path)) as (_, snapshot):
        return snapshot


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
    with _opened(file_path(path)) as (fd, snapshot):
        for part in _parts_of(snapshot):
            _check_data(part, fd)
        return snapshot


def restore(
    cls: type[_HostCacheT],
    path: str | os.PathLike[str],
    mode: Literal["map", "copy"],
    tokens: Tokens,
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
        The file.
    mode : {"map", "copy"}
        Map the file, privately, so that pages are read when they are touched; or read all of it. A
        ring, and a cache without tokens, is read in both.
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
    ids = _token_ids(tokens)
    with _opened(file_path(path)) as (fd, snapshot):
        _check_wanted(_parts_of(snapshot)[0], ids, model)
        source = _SnapshotFile(fd, snapshot) if mode == "map" else None
        if isinstance(snapshot, Snapshot):
            kv = _restored(cls, fd, snapshot, mode, verify, placement)
            kv._snapshot = source
            return kv
        parts: list[_HostCacheT] = []
        try:
            for part in snapshot.parts:
                parts.append(_restored(cls, fd, part, mode, verify, placement))
            kv = cls._of_layers(snapshot.layers, parts, snapshot.max_seq_len)
        except BaseException:
            for one in parts:
                one.__exit__()
            raise
        kv._snapshot = source
        return kv


def _restored(
    cls: type[_HostCacheT],
    fd: int,
    snapshot: Snapshot,
    mode: Literal["map", "copy"],
    verify: bool | None,
    placement: PlacementOptions,
) -> _HostCacheT:
    """Make a cache whose layers are alike."""
    fields = {key: getattr(snapshot, key) for key in _DIMS}
    in_pages = snapshot.alignment % mmap.PAGESIZE == snapshot.base % mmap.PAGESIZE == 0
    can_grow = not snapshot.window and snapshot.dtype == snapshot.v_dtype
    if mode == "map" and snapshot.seq_len and can_grow and in_pages:
        if verify:
            _check_data(snapshot, fd)
        offsets = [snapshot.offset_of(lane) for lane in range(len(snapshot.lanes))]
        return cls._mapped(
            fields, fd, snapshot.path, offsets, snapshot.seq_len, snapshot.next_position
        )
    kv = cls(**fields, **placement)
    try:
        _read(kv, snapshot, fd, verify=verify is not False)
    except BaseException:
        # Not close(), which raises while the error's traceback holds views.
        kv.__exit__()
        raise
    return kv


def read_into(
    kv: Cache | CacheOfLayers,
    path: str | os.PathLike[str],
    tokens: Tokens = None,
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
    ids = _token_ids(tokens)
    with _opened(file_path(path)) as (fd, snapshot):
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
                _read(one, part, fd, verify=True)
            if isinstance(kv, CacheOfLayers):
                kv._finish_restore(snapshot.next_position, snapshot.seq_len)
        except BaseException:
            kv.clear()
            raise
        return snapshot


def _check_like(
    kv: Cache | CacheOfLayers, snapshot: Snapshot | LayersSnapshot
) -> list[tuple[Cache, Snapshot]]:
    """Refuse the snapshot of another kind of cache; return the caches that its parts belong in."""
    if isinstance(kv, CacheOfLayers) and isinstance(snapshot, LayersSnapshot):
        keys: tuple[str, ...] = ("layers", "batch", "order")
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
            field = {"order": "flags", "v_dtype": "dtype"}.get(key, key)
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
        self._fd = -1
        self._snapshot = snapshot
        self._fd = os.dup(fd)

    def verify(self) -> None:
        there, whole = os.fstat(self._fd).st_size, self._snapshot.file_bytes
        if there < whole:
            raise SnapshotError(
                f"the file was truncated after it was mapped: it has {there} of {whole} bytes, and "
                "the tokens in the rest are lost: close the cache, take another copy of the file "
                "or save anew",
                there,
                self._snapshot.path,
            )
        for part in _parts_of(self._snapshot):
            _check_data(part, self._fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)


# ---- what the caller gave ----


def _model_name(model: str | None) -> str | None:
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model: expected a str, got {type(model).__name__}")
    return model


def _checked_ids(kv: Cache | CacheOfLayers, tokens: Tokens) -> NDArray[np.int32] | None:
    """Return the ids of all tokens up to `next_position`."""
    ids = _token_ids(tokens)
    if ids is not None and len(ids) != kv.next_position:
        raise ValueError(
            f"tokens: expected the ids of all {kv.next_position} tokens up to next_position, got "
            f"{len(ids)}"
        )
    return ids


def _token_ids(tokens: Tokens) -> NDArray[np.int32] | None:
    if tokens is None:
        return None
    given = np.asarray(tokens)
    if given.ndim != 1:
        raise ValueError(f"tokens: expected one dimension, got shape {given.shape}")
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got {given.dtype}")
    if given.size and not 0 <= given.min() <= given.max() < 2**31:
        raise ValueError(f"tokens: expected 0 to 2**31 - 1, got {given.min()} to {given.max()}")
    return given.astype(np.int32)


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
def _opened(path: str) -> Iterator[tuple[int, Snapshot | LayersSnapshot]]:
    """Give the open file and what its header says, all of which is checked."""
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "Is not a regular file", path)
        begin = _read_bytes(fd, 0, min(many.HEADER_BYTES, info.st_size), path)
        if many.is_head(begin.tobytes()):
            yield fd, _read_layers(fd, begin.tobytes(), info.st_size, path)
        else:
            yield fd, _read_part(fd, 0, info.st_size, path)
    finally:
        os.close(fd)


def _read_part(fd: int, base: int, nbytes: int, path: str) -> Snapshot:
    """Read the header and the tables of a snapshot, which has these bytes of the file."""
    head = _read_bytes(fd, base, min(fmt.HEADER_BYTES, nbytes), path)
    try:
        values = fmt.checked_header(head.tobytes(), nbytes, path)
        size = values["data_offset"] - fmt.HEADER_BYTES
        tables = _read_bytes(fd, base + fmt.HEADER_BYTES, size, path)
        return fmt.checked_tables(values, tables, path, base)
    except SnapshotError as error:
        if not base:
            raise
        raise SnapshotError(error.rule, base + (error.offset or 0), path) from None


def _read_layers(fd: int, head: bytes, file_bytes: int, path: str) -> LayersSnapshot:
    """Read the header of a cache whose layers differ, and those of its parts."""
    values = many.checked_header(head, file_bytes, path)
    size = values["data_offset"] - many.HEADER_BYTES
    found = many.checked_head(values, _read_bytes(fd, many.HEADER_BYTES, size, path), path)
    parts = [_read_part(fd, at, nbytes, path) for at, nbytes in found.parts]
    return many.checked_layers(found, parts, path)


def _parts_of(snapshot: Snapshot | LayersSnapshot) -> tuple[Snapshot, ...]:
    return snapshot.parts if isinstance(snapshot, LayersSnapshot) else (snapshot,)


def _read_bytes(fd: int, offset: int, nbytes: int, path: str) -> NDArray[np.uint8]:
    out = np.empty(nbytes, np.uint8)
    _read_fully(fd, out, offset, path)
    return out


def _read_fully(fd: int, out: NDArray[np.uint8], offset: int, path: str) -> None:
    rest = out.data
    while rest:
        try:
            n = os.preadv(fd, [rest], offset)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or errno.EIO), path) from error
        if n == 0:
            raise SnapshotError("the file became shorter while it was read", offset, path)
        rest, offset = rest[n:], offset + n


def _read(kv: Cache, snapshot: Snapshot, fd: int, *, verify: bool) -> None:
    """Read the rows into an empty cache."""
    n, position = snapshot.seq_len, snapshot.next_position
    kv._begin_restore(position, n)
    rows = [kv._restore_rows(*lane, n, position) for lane in snapshot.lanes] if n else []

    def read(chunk: Chunk, staging: NDArray[np.uint8]) -> None:
        data = rows[chunk.lane][chunk.begin : chunk.begin + chunk.nbytes]
        _read_fully(fd, data, chunk.offset, snapshot.path)
        if verify:
            padding = staging[: chunk.padding]
            _read_fully(fd, padding, chunk.offset + chunk.nbytes, snapshot.path)
            _check_chunk(snapshot, chunk, data, padding)

    _for_each_chunk(snapshot, read)
    kv._finish_restore(position, n)


def _check_data(snapshot: Snapshot, fd: int) -> None:
    def check(chunk: Chunk, staging: NDArray[np.uint8]) -> None:
        data = staging[: chunk.nbytes + chunk.padding]
        _read_fully(fd, data, chunk.offset, snapshot.path)
        _check_chunk(snapshot, chunk, data)

    _for_each_chunk(snapshot, check)


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


def _for_each_chunk(snapshot: Snapshot, work: Callable[[Chunk, NDArray[np.uint8]], None]) -> None:
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
