"""A store's prefixes of llama.cpp, as its folder shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem.base.arguments import instance, string
from unimem.kv.store.chunk import HEADER_BYTES
from unimem.kv.store.store import KVStore
from unimem.llama_cpp.prefixes import ChunkHead

_CHUNK = re.compile(r"[0-9a-f]{64}\.kv")


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """First tokens of conversations, up to where the store has no more of them.

    Attributes
    ----------
    key : str
        Its name: hexadecimal digits.
    model, options, layout : str
        As for `LlamaPrefixes`.
    tokens : int32 [n]
        The ids.
    nbytes : int
        Bytes on the disk, also of chunks that other prefixes share.
    used : float
        When it was last used, in seconds since 1970.
    chunk_tokens : int
        Those of the store that it was put into.
    chunks : tuple of str
        The identities of its chunks in the store.
    """

    key: str
    model: str
    options: str
    layout: str
    tokens: NDArray[np.int32]
    nbytes: int
    used: float
    chunk_tokens: int
    chunks: tuple[str, ...] = ()


class _Found(NamedTuple):
    head: ChunkHead
    nbytes: int
    used: float
    chunks: tuple[str, ...]

    def joined(self, other: _Found) -> _Found:
        """Return one with the bytes and chunks of both."""
        return self._replace(nbytes=self.nbytes + other.nbytes, chunks=self.chunks + other.chunks)


def stored_prefixes(store: KVStore, *, model: str | None = None) -> list[StoredPrefix]:
    """Return the prefixes that a store has on its disk, the last used first.

    Parameters
    ----------
    store : KVStore
        One with a folder.
    model : str, optional
        The hash of a model, for its prefixes alone.

    Returns
    -------
    list of StoredPrefix
        Each ends where a chunk has no successor. Chunks are not checked before they are read.

    Raises
    ------
    OSError
        The folder cannot be listed.
    """
    instance(store, "store", KVStore)
    model = None if model is None else string(model, "model")
    rows: dict[tuple[str, bytes], _Found] = {}
    ends: dict[tuple[str, bytes], _Found] = {}
    for found in _found(store):
        head = found.head
        if model not in (None, head.facts["model"]) or not len(head.tokens) + head.first:
            continue
        of = ends if head.is_end else rows
        before = of.get(name := (str(head.facts), head.key))
        of[name] = found if before is None else found.joined(before)
    inner = {(str(found.head.facts), found.head.parent) for found in rows.values()}
    last = {facts: found for facts, found in rows.items() if facts not in inner}
    # Layouts with ends are restored at ends alone.
    with_ends = {facts for facts, _ in ends}
    last = {name: found for name, found in last.items() if name[0] not in with_ends} | ends
    whole = (_prefix(name, found, rows) for name, found in last.items())
    return sorted(filter(None, whole), key=lambda prefix: prefix.used, reverse=True)


def _prefix(
    name: tuple[str, bytes], last: _Found, rows: dict[tuple[str, bytes], _Found]
) -> StoredPrefix | None:
    """Collect the chunks before the last one; None if one is missing."""
    chunks, first = [last], last.head.first
    while first and len(chunks) <= len(rows) + 1:
        before = rows.get((name[0], chunks[-1].head.parent))
        if before is None or before.head.first >= first:
            return None
        chunks.append(before)
        first = before.head.first
    facts = last.head.facts
    return StoredPrefix(
        key=name[1].hex(),
        model=facts["model"],
        options=facts["options"],
        layout=facts["layout"],
        tokens=np.concatenate([chunk.head.tokens for chunk in reversed(chunks)]),
        nbytes=sum(chunk.nbytes for chunk in chunks),
        used=last.used,
        chunk_tokens=int(facts["chunk_tokens"]),
        chunks=tuple(each for chunk in chunks for each in chunk.chunks),
    )


def _open(path: str, flags: int) -> int:
    """Open a chunk; a link is refused, and a FIFO is not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _found(store: KVStore) -> Iterator[_Found]:
    names = os.listdir(store.folder) if store.folder else []
    for name in filter(_CHUNK.fullmatch, names):
        # Another process may remove it meanwhile, or it is damaged.
        with suppress(OSError, ValueError, KeyError, TypeError):
            with open(os.path.join(store.folder, name), "rb", opener=_open) as file:
                file.seek(HEADER_BYTES)
                head = ChunkHead.read(file.read)
                info = os.fstat(file.fileno())
            if head is not None:
                yield _Found(head, info.st_size, info.st_mtime, (name[: -len(".kv")],))
