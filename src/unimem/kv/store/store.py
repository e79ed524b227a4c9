"""A store of prefixes: chunks of KV that any process finds by the tokens they were made of.

``docs/store.md`` specifies the identities of chunks and the folder.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from unimem._core.arrays import checked_nbytes
from unimem.base.arguments import file_path, integer, one_of
from unimem.base.cache_folder import cache_folder, check_own_folder, default_bytes
from unimem.base.closing import Closing
from unimem.errors import ClosedError, PlacementError
from unimem.kv.store import notes
from unimem.kv.store.chunk import ChunkShape, Kind, chunk_keys, find_fault, seal
from unimem.kv.store.copy_rows import Holder, Rows, rows_of
from unimem.kv.store.huge_tier import HugeTier
from unimem.kv.store.ram_tier import RamTier
from unimem.kv.store.remote_tier import RemoteTier
from unimem.kv.store.tiers import DiskTier, RamPages, Tier, TierStat
from unimem.kv.token_ids import Tokens, token_ids
from unimem.remote.client import is_url
from unimem.system import policy
from unimem.system.placement import Placement

_MOST_CHUNK_TOKENS = 1 << 20
# Digits of hashes, and characters of names, in notes: they have to fit beside a file's other facts.
_SHORT, _MOST_NAME = 16, 200
# Errors of a disk that has lost a chunk. Others, as of a server's folder, say nothing about it.
_LOST = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a store holds, and what this object has done with it.

    Attributes
    ----------
    tiers : tuple of TierStat
        The fastest first.
    put_chunks : int
        Chunks that were written to a tier that lacked them.
    known_chunks : int
        Chunks that were put and that all tiers had already.
    refused_chunks : int
        Chunks for which no tier had room.
    restored_chunks : int
        Chunks that were restored.
    damaged_chunks : int
        Chunks that were read, found damaged, and removed.
    """

    tiers: tuple[TierStat, ...]
    put_chunks: int
    known_chunks: int
    refused_chunks: int
    restored_chunks: int
    damaged_chunks: int


class _GroupChunk(NamedTuple):
    """A chunk of one group of layers: its number, the position of its first token, its identity."""

    number: int
    first: int
    group: int
    key: bytes


class _Chunks:
    """The chunks of a conversation for each group of a cache's layers.

    To continue at some token, a cache needs all earlier chunks of layers that keep all tokens, and
    only the last chunks of layers with a window. vLLM and SGLang find prefixes by the same rule.
    """

    def __init__(
        self, kind: Kind, model: str, ids: NDArray[np.int32], size: int, salt: bytes
    ) -> None:
        self.keys = list(chunk_keys(kind, model, ids, size, salt))
        self._size = size
        self._groups = kind.groups
        self.windows = [group.window for group in kind.groups]
        self.shapes = [ChunkShape(group, size) for group in kind.groups]
        self._notes = [note_of("unimem", model, kind.text, salt, each) for each in self.shapes]

    def _piece(self, group: int, i: int) -> _GroupChunk:
        return _GroupChunk(i, i * self._size, group, self._groups[group].key(self.keys[i]))

    def note(self, piece: _GroupChunk) -> dict[str, Any]:
        """Return the note of a chunk: whose it is, and where it lies in its conversation."""
        i = piece.number
        parent = self.keys[i - 1].hex() if i else ""
        place = {"at": self.keys[i].hex(), "parent": parent, "end": piece.first + self._size}
        return self._notes[piece.group] | place

    def pieces(self) -> Iterator[_GroupChunk]:
        """Give all chunks, in the order of the tokens."""
        for i in range(len(self.keys)):
            for group in range(len(self._groups)):
                yield self._piece(group, i)

    def first_needed(self, group: int, n: int) -> int:
        """Return the first position whose rows are needed to continue after n chunks."""
        return self._groups[group].first_needed(n * self._size)

    def needed(self, first: int, n: int) -> list[_GroupChunk]:
        """List the chunks needed to continue after n chunks.

        Layers that keep all tokens have their chunks before `first` already.
        """
        return [
            self._piece(group, i)
            for group, window in enumerate(self.windows)
            for i in range(
                first if window is None else self.first_needed(group, n) // self._size, n
            )
        ]

    def longest(
        self, most: int, has: Callable[[bytes], bool], look_up: Callable[[list[bytes]], None]
    ) -> int:
        """Return the number of chunks, at most `most`, after which a cache can continue.

        `has` tells whether there is a chunk of an identity; `look_up` prepares it for many.
        """
        n = most
        for group, window in enumerate(self.windows):
            if window is None:
                keys = [self._piece(group, i).key for i in range(n)]
                look_up(keys)
                n = next((i for i, key in enumerate(keys) if not has(key)), n)
        while n:
            last = self.needed(n, n)[::-1]  # the chunks of windows
            look_up([piece.key for piece in last])
            lacking = next((piece for piece in last if not has(piece.key)), None)
            if lacking is None:
                break
            n = lacking.number
        return n


class KVStore(Closing):
    """Chunks of KV caches in RAM, on disk and on a server, found by the tokens they were made of.

    A conversation that begins like an earlier one takes its first tokens from here, in any process
    and after any restart. Conversations that begin alike share their chunks. Each chunk is checked
    by its hash before it is used; a damaged chunk is removed with a warning, and is a miss.

    Any number of threads and processes may use one folder. A process that is killed loses at most
    the chunk that is being written; a machine that stops, at most the chunks of puts that have not
    returned. In a forked child the store is closed.

    Parameters
    ----------
    where : path-like
        A folder that belongs to this user alone; a missing folder is made. Or the URL of a prefix,
        such as ``s3://bucket/prefix`` (``http://`` is read-only), with a folder of this user's
        cache in front of the server. See docs/remote.md.
    ram_bytes : int or str
        The bytes of a pool in shared memory (``/dev/shm``), for all processes of this user that
        have the store open. The first of them takes the memory, and the last one frees it. 0 for
        no chunks in RAM.
    disk_bytes : int or str, optional
        The most bytes that chunks take in the folder, 0 for no chunks on disk. The default is a
        tenth of its file system. If processes give different figures, each keeps to its own.
    chunk_tokens : int, default 256
        Tokens of a chunk. Stores find each other's chunks only if they have the same number.
    pages : {"4k", "thp", "2m"}
        The pages of the pool in RAM, if this object makes it. With ``"thp"``, it lies in huge pages
        as far as it has whole ones. ``"2m"`` takes pages of the hugetlb pool on a hugetlbfs;
        processes that ask for them share a RAM tier of their own. If they cannot be had, the pool
        is ``"thp"``. A `PlacementWarning` says which pages are missing and why.
    numa : str, optional
        The nodes of the pool, as for `PlacementOptions`.
    salt : str, default ""
        The secret of a tenant. Stores with another salt, or none, neither find its chunks nor
        learn by the time of an answer whether it has them.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range, both figures are 0 for a folder, or the URL's scheme is
        unknown.
    ImportError
        A URL needs the extra ``remote``.
    CapacityError
        ``/dev/shm`` is smaller than `ram_bytes`, or has no room for it now.
    OSError
        The folder cannot be made, written or locked; PermissionError if others may write to it,
        since they could decide what is restored.

    Attributes
    ----------
    folder : str
        The absolute path of the folder; "" for a URL without one.
    url : str
        The URL without secrets; "" for a folder.
    chunk_tokens : int
        As given.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import unimem as um
    >>> prompt = list(range(100))
    >>> with (
    ...     tempfile.TemporaryDirectory() as folder,
    ...     um.KVStore(folder, ram_bytes=0, disk_bytes=1 << 24, chunk_tokens=32) as store,
    ...     um.KVCache(1, 2, 8, 128) as kv,
    ... ):
    ...     kv.append(0, *np.ones((2, 100, 2, 8), "f4"))
    ...     stored = store.put(kv, prompt, model="tiny")
    ...     kv.clear()
    ...     stored, store.restore_into(kv, [*prompt[:70], 7], model="tiny"), kv.seq_len
    (96, 64, 64)
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        ram_bytes: int | str,
        disk_bytes: int | str | None = None,
        chunk_tokens: int = 256,
        pages: RamPages = "4k",
        numa: str | None = None,
        salt: str = "",
    ) -> None:
        self._tiers: tuple[Tier, ...] = ()
        path = file_path(where, "where")
        if not path:
            raise ValueError(f"where: expected a folder or a URL, got {path!r:.60}")
        self.chunk_tokens = integer(chunk_tokens, "chunk_tokens", 1, _MOST_CHUNK_TOKENS)
        ram = checked_nbytes(ram_bytes, "ram_bytes")
        disk = None if disk_bytes is None else checked_nbytes(disk_bytes, "disk_bytes")
        if ram == 0 and disk == 0 and not is_url(path):
            raise ValueError("ram_bytes, disk_bytes: expected one that is not 0, got 0 and 0")
        one_of(pages, "pages", get_args(RamPages))
        policy.parse_numa(numa)
        self._salt = _text(salt, "salt").encode()
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the counts
        self._counts = dict.fromkeys(("put", "known", "refused", "restored", "damaged"), 0)
        tiers: list[Tier] = []
        with ExitStack() as undo:
            remote = RemoteTier(path) if is_url(path) else None
            if remote:
                undo.callback(remote.close)
            self.url = remote.path if remote else ""
            self.folder = _folder_before(self.url, ram, disk) if remote else os.path.abspath(path)
            if self.folder:
                check_own_folder(self.folder, create=True, instead="another folder")
            if ram:
                tiers.append(_ram_tier(self.folder, ram, pages, numa))
                undo.callback(tiers[-1].close)
            if self.folder and disk != 0:
                most = default_bytes(self.folder) if disk is None else disk
                tiers.append(DiskTier(self.folder, most))
                undo.callback(tiers[-1].close)
            if remote:
                tiers.append(remote)
            undo.pop_all()
        self._tiers = tuple(tiers)
        # Also at the end of the interpreter, so that no shared memory stays behind.
        self._end = weakref.finalize(self, _close_all, self._tiers)

    # ---- chunks ----

    def put(self, kv: Holder, tokens: Tokens, *, model: str) -> int:
        """Keep the whole chunks of a cache's tokens.

        Parameters
        ----------
        kv : KVCache or Sequence
            Of one stream, holding its tokens from position 0 on.
        tokens : sequence of int
            The ids of its tokens, from position 0 on. Tokens that it does not hold yet, and tokens
            without an id, do not count.
        model : str
            A text that tells models apart, such as ``weights.content_hash()``.

        Returns
        -------
        int
            Tokens of this conversation that the store has now, from the first one on. If there is
            no room, they are fewer than were put.

        Raises
        ------
        ValueError, TypeError
            `kv` is neither, or was trimmed; `tokens` are no ids, or differ from the ids of the
            sequence; `model` is no text.
        RuntimeError
            Rows are reserved, or layers differ in length.
        OSError
            A chunk cannot be written; those before it are kept.
        ClosedError
        """
        self._check_open()
        rows, ids = _given(kv, tokens)
        chunks = self._chunks(rows, model, ids[: rows.check_source()])
        firsts = [rows.first_held(group) for group in range(len(chunks.shapes))]
        # Earlier rows of a window were overwritten.
        held = [piece for piece in chunks.pieces() if piece.first >= firsts[piece.group]]
        now = self._touch([piece.key for piece in held])
        there: set[bytes] = set()
        n_whole = len(chunks.keys)
        try:
            with _blob_of(chunks, rows) as blob:
                for i, piece in enumerate(held):
                    if piece.number >= n_whole:
                        break
                    if self._put_piece(chunks, piece, rows, blob, now - i):
                        there.add(piece.key)
                    elif chunks.windows[piece.group] is None:
                        n_whole = piece.number
        finally:
            self._sync()
        return self._longest(chunks, n_whole, there) * self.chunk_tokens

    def longest(self, tokens: Tokens, *, model: str, kv: Holder) -> int:
        """Return how many of the first tokens the store has.

        Parameters
        ----------
        tokens : sequence of int
            The ids of a conversation, from position 0 on.
        model : str
            The same text as for `put`.
        kv : KVCache or Sequence
            A cache of the kind to restore into: each kind has chunks of its own.

        Returns
        -------
        int
            A multiple of `chunk_tokens`. Damaged chunks are found only when they are read.

        Raises
        ------
        ValueError, TypeError, OSError, ClosedError
            As `put`.
        """
        self._check_open()
        chunks = self._chunks(rows_of(kv), model, token_ids(tokens))
        return self._longest(chunks, len(chunks.keys)) * self.chunk_tokens

    def restore_into(self, kv: Holder, tokens: Tokens, *, model: str) -> int:
        """Read the first tokens of a conversation, as far as the store has them and they fit.

        Parameters
        ----------
        kv : KVCache or Sequence
            A cleared cache of one stream; or a sequence, which may hold the first of `tokens`.
        tokens : sequence of int
            The ids of the conversation, from position 0 on. Logits are not stored: leave out the
            last token, so that it is left to be computed.
        model : str
            The same text as for `put`.

        Returns
        -------
        int
            The number of tokens that `kv` holds now; ``tokens[n]`` is the next to compute.

        Raises
        ------
        ValueError, TypeError
            `kv` is neither, or not cleared; `tokens` are no ids, or differ from the ids of the
            sequence; `model` is no text.
        MemoryError, BufferError
            There is no memory for a chunk, or for the tokens.
        ClosedError

        Notes
        -----
        When it raises, a cache is as empty as before, and a sequence holds whole chunks.
        """
        self._check_open()
        rows, ids = _given(kv, tokens)
        held, most = rows.check_target()
        ids = ids[: most // self.chunk_tokens * self.chunk_tokens]
        chunks = self._chunks(rows, model, ids)
        n = self._longest(chunks, len(chunks.keys))
        if n * self.chunk_tokens <= held:
            return held
        with _blob_of(chunks, rows) as blob:
            try:
                rows.begin(n * self.chunk_tokens)
                n = self._fill(rows, chunks, held // self.chunk_tokens, n, blob)
                rows.finish(n * self.chunk_tokens)
            except BaseException:
                rows.abandon()
                raise
        return max(held, n * self.chunk_tokens)

    def _chunks(self, rows: Rows, model: str, ids: NDArray[np.int32]) -> _Chunks:
        return _Chunks(rows.kind, _text(model, "model"), ids, self.chunk_tokens, self._salt)

    def _fill(
        self, rows: Rows, chunks: _Chunks, first: int, n: int, blob: NDArray[np.uint8]
    ) -> int:
        """Read the chunks from `first` up to n, as far as possible; return the last one's end."""
        read: set[bytes] = set()
        lacking: set[bytes] = set()  # found by `longest`, but unreadable
        done = first
        while n > first:
            wanted = chunks.needed(done, n)
            now = self._touch([piece.key for piece in wanted])
            for i, piece in enumerate(wanted):
                shape = chunks.shapes[piece.group]
                if not self._load(
                    shape, piece.key, blob[: shape.nbytes], now - i, chunks.note(piece)
                ):
                    lacking.add(piece.key)
                    break
                start = max(piece.first, chunks.first_needed(piece.group, n))
                lanes = [lane[start - piece.first :] for lane in shape.lanes(blob)]
                if not rows.write(piece.group, start, lanes):
                    return piece.number
                self._count("restored")
                if chunks.windows[piece.group] is None:  # windows are read anew for another end
                    read.add(piece.key)
                    done = piece.number + 1
            else:
                return n
            n = self._longest(chunks, n, read, lacking)
        return n

    def _has(self, key: bytes) -> bool:
        return any(tier.has(key) for tier in self._tiers)

    def _longest(
        self,
        chunks: _Chunks,
        most: int,
        there: Set[bytes] = frozenset(),
        lacking: Set[bytes] = frozenset(),
    ) -> int:
        """Return the number of chunks after which a cache can continue; `there` are known."""
        *faster, slowest = self._tiers

        def has(key: bytes) -> bool:
            return key in there or (key not in lacking and self._has(key))

        def look_up(keys: list[bytes]) -> None:
            if isinstance(slowest, RemoteTier):  # each question takes a while
                unknown = (key for key in keys if key not in there and key not in lacking)
                slowest.look_up([key for key in unknown if not any(t.has(key) for t in faster)])

        return chunks.longest(most, has, look_up)

    def _touch(self, keys: list[bytes]) -> int:
        """Mark the chunks of a prefix as used now, and return the time.

        Then they do not make room for the rest of the prefix. Later chunks count as used earlier,
        since they are of no use without the first ones.
        """
        now = time.time_ns()
        for tier in self._tiers:
            tier.touch(keys, now)
        return now

    def _sync(self) -> None:
        for tier in self._tiers:
            tier.sync()

    def _put_piece(
        self,
        chunks: _Chunks,
        piece: _GroupChunk,
        rows: Rows,
        blob: NDArray[np.uint8],
        used_ns: int,
    ) -> bool:
        """Write a chunk to the tiers that lack it; return whether any tier has it then."""
        lacking = [tier for tier in self._tiers if not tier.has(piece.key)]
        if not lacking:
            self._count("known")
            return True
        shape, note = chunks.shapes[piece.group], chunks.note(piece)
        blob = blob[: shape.nbytes]
        rows.read(piece.group, piece.first, shape.lanes(blob))
        seal(shape, piece.key, blob)
        written = [tier.write(piece.key, blob, used_ns, note) for tier in lacking]
        if any(written):
            self._count("put")
        elif len(lacking) == len(self._tiers):
            self._count("refused")
            return False
        return True

    def _load(
        self,
        chunk: ChunkShape,
        key: bytes,
        blob: NDArray[np.uint8],
        used_ns: int,
        note: dict[str, Any],
    ) -> bool:
        """Read a chunk from the first tier that has it whole, and keep it in the faster tiers."""
        for i, tier in enumerate(self._tiers):
            fault: str | None
            try:
                # A chunk from a server may have been damaged in transit.
                for _ in range(1 + isinstance(tier, RemoteTier)):
                    n = tier.read(key, blob)
                    fault = find_fault(chunk, key, blob, n) if n else None
                    if fault is None:
                        break
                if n == 0:
                    continue
            except OSError as error:
                fault = error.strerror or str(error)
                if error.errno not in _LOST:
                    policy.warn(f"a chunk of the store {self.folder} cannot be read now: {fault}")
                    continue
            if fault is None:
                for faster in self._tiers[:i]:
                    with suppress(OSError):  # the slower tier still has it
                        faster.write(key, blob, used_ns, note)
                if self._disk is not None:
                    notes.add_hit(self._disk.path_of(key))
                return True
            with suppress(OSError):
                tier.remove(key)
            self._count("damaged")
            where = tier.path if isinstance(tier, RemoteTier) else self.folder
            policy.warn(f"a chunk of the store {where} was removed: {key.hex()}: {fault}")
        return False

    @property
    def _disk(self) -> DiskTier | None:
        return next((tier for tier in self._tiers if isinstance(tier, DiskTier)), None)

    # ---- counts and placement ----

    def stat(self) -> StoreStat:
        """Count what the tiers hold, by listing all of their files.

        Returns
        -------
        StoreStat

        Raises
        ------
        OSError
            They cannot be listed.
        ClosedError
        """
        self._check_open()
        tiers = tuple(tier.stat() for tier in self._tiers)
        with self._lock:
            counts = {f"{name}_chunks": n for name, n in self._counts.items()}
        return StoreStat(tiers, **counts)

    @property
    def granted(self) -> Placement | None:
        """The placement of the pool in RAM, as the kernel reports it; None without chunks."""
        self._check_open()
        for tier in self._tiers:
            if isinstance(tier, RamTier):
                return tier.granted()
        return None

    def give_back(self) -> int:
        """Drop the chunks in RAM that are not being read. A `Governor` calls it.

        Returns
        -------
        int
            The bytes freed; 0 for a closed store.
        """
        if self.closed:
            return 0
        return sum(tier.give_back() for tier in self._tiers if isinstance(tier, RamTier))

    def _count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    # ---- closing ----

    @property
    def closed(self) -> bool:
        """Whether it was closed, or this is a forked child."""
        return not self._tiers or not self._end.alive or os.getpid() != self._pid

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the KVStore is closed, or was opened before a fork: open it anew")

    def close(self) -> None:
        """Close the store. Chunks on disk stay; the last process with the store frees the RAM.

        Closing twice is no error. No other thread may use the store meanwhile.
        """
        if self._tiers:
            self._end()

    def __del__(self) -> None:
        if getattr(self, "_tiers", None) and not self.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a KVStore cannot be pickled: open the folder in the other process")

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"KVStore({self.url or self.folder!r}, chunk_tokens={self.chunk_tokens}{state})"


def _ram_tier(folder: str, ram_bytes: int, pages: RamPages, numa: str | None) -> RamTier:
    """Open the tier in RAM with the requested pages, or the next best ones."""
    if pages == "2m":
        try:
            return HugeTier(folder, ram_bytes, numa=numa)
        except PlacementError as error:
            policy.warn(f"chunks of {folder} in RAM: {error}; they get pages='thp'")
            pages = "thp"
    return RamTier(folder, ram_bytes, pages=pages, numa=numa)


def _close_all(tiers: Sequence[Tier]) -> None:
    for tier in tiers:
        tier.close()


def _folder_before(url: str, ram_bytes: int, disk_bytes: int | None) -> str:
    """Return the folder in front of a server; "" for no folder."""
    if ram_bytes == 0 and disk_bytes == 0:
        return ""
    cache = cache_folder()
    if cache is None:
        if ram_bytes or disk_bytes:
            raise ValueError(
                f"ram_bytes, disk_bytes: expected 0 and 0 for {url}, got {ram_bytes} and "
                f"{disk_bytes}: UNIMEM_CACHE=off leaves no folder for them; set it to a folder"
            )
        return ""
    return os.path.join(cache, "kv", hashlib.sha256(url.encode()).hexdigest()[:32])


def _given(kv: Holder, tokens: Tokens) -> tuple[Rows, NDArray[np.int32]]:
    rows, ids = rows_of(kv), token_ids(tokens)
    rows.check_tokens(ids)
    return rows, ids


def _text(text: str, name: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a string, got {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text in UTF-8, got {text!r:.60}") from None
    return text


def note_of(engine: str, model: str, layout: str, salt: bytes, shape: ChunkShape) -> dict[str, Any]:
    """Make the note of a chunk: the salt is not in it, but a text that tells tenants apart."""
    tenant = hmac.digest(salt, b"unimem.tenant/1", "sha256").hex()[:_SHORT] if salt else ""
    layout = hashlib.sha256(layout.encode()).hexdigest()[:_SHORT]
    of = {"engine": engine, "model": model[:_MOST_NAME], "layout": layout, "tenant": tenant}
    return of | shape.rows


def _blob_of(chunks: _Chunks, rows: Rows) -> AbstractContextManager[NDArray[np.uint8]]:
    """Give memory for one chunk; empty memory if there are no chunks."""
    if not chunks.keys:
        return nullcontext(np.empty(0, np.uint8))
    return rows.memory(max(shape.nbytes for shape in chunks.shapes))
