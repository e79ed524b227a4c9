"""The chunks on a store's disk: whose they are, which follow each other, and which are damaged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from unimem.kv.store import notes
from unimem.kv.store.chunk import HEADER_BYTES, find_fault_alone, size_fault
from unimem.kv.store.tiers import FolderTier

_MOST = 1 << 53  # of tokens, and of seconds that still have a date


class StoredChunk(NamedTuple):
    """A chunk on the disk. Without a note of its file, most is empty, 0 or None.

    `tenant` tells salts apart; `at` and `parent` are the identities of the tokens up to its end and
    up to its beginning, and `end` is their number. `used` and `made` are seconds since 1970, and
    `pinned_until` nanoseconds.
    """

    key: str
    nbytes: int
    used: float
    made: int | None
    hits: int
    pinned_until: int | None
    engine: str
    model: str
    layout: str
    tenant: str
    at: str
    parent: str
    end: int

    @property
    def namespace(self) -> tuple[str, str, str, str]:
        """The engine, model, layout and tenant."""
        return self.engine, self.model, self.layout, self.tenant


class Total(NamedTuple):
    """The sum of chunks of one namespace; times are the last use and the first making."""

    engine: str
    model: str
    layout: str
    tenant: str
    n_chunks: int
    nbytes: int
    hits: int
    used: float
    made: int | None
    pinned_chunks: int


def total_of(chunks: Sequence[StoredChunk], before: Total | None = None) -> Total:
    """Sum up chunks of one namespace, and those of another sum."""
    made = [chunk.made for chunk in chunks if chunk.made is not None]
    own = Total(
        *chunks[0].namespace,
        len(chunks),
        sum(chunk.nbytes for chunk in chunks),
        sum(chunk.hits for chunk in chunks),
        used(chunks),
        min(made, default=None),
        sum(chunk.pinned_until is not None for chunk in chunks),
    )
    if before is None:
        return own
    return own._replace(
        n_chunks=before.n_chunks + own.n_chunks,
        nbytes=before.nbytes + own.nbytes,
        hits=before.hits + own.hits,
        used=max(before.used, own.used),
        made=min((each for each in (before.made, own.made) if each is not None), default=None),
        pinned_chunks=before.pinned_chunks + own.pinned_chunks,
    )


@dataclass(slots=True)
class ChunkNode:
    """The chunks that end at the same token of a conversation, or one chunk of another engine."""

    at: str
    parent: str
    end: int
    chunks: list[StoredChunk] = field(default_factory=list)
    children: list[ChunkNode] = field(default_factory=list)


class Inventory:
    """All chunks on the disk, as they are now; other processes go on to put and drop.

    Attributes
    ----------
    chunks : dict of str to StoredChunk
        By identity.
    nodes : dict of str to ChunkNode
        By identity of their tokens, or of the chunk.
    """

    def __init__(self, disk: FolderTier) -> None:
        found = (_chunk(disk, file.name, file.nbytes, file.used_ns) for file in disk.chunks())
        self.chunks = {chunk.key: chunk for chunk in found}
        self.nodes: dict[str, ChunkNode] = {}
        self._totals: dict[str, Total] = {}
        for chunk in self.chunks.values():
            node = self.nodes.setdefault(chunk.at, ChunkNode(chunk.at, chunk.parent, chunk.end))
            node.chunks.append(chunk)
        for node in self.nodes.values():
            if node.parent in self.nodes:
                self.nodes[node.parent].children.append(node)

    def ends(self) -> list[ChunkNode]:
        """List where conversations end, and where several begin to differ; the last used first."""
        found = [node for node in self.nodes.values() if node.end and len(node.children) != 1]
        return sorted(found, key=lambda node: used(node.chunks), reverse=True)

    def path(self, node: ChunkNode) -> list[StoredChunk]:
        """List the chunks from the first one of a conversation to a node."""
        chunks: list[StoredChunk] = []
        seen: set[str] = set()
        while node.at not in seen:  # a note may be damaged
            seen.add(node.at)
            chunks += node.chunks
            node = self.nodes.get(node.parent, node)
        return chunks

    def total(self, node: ChunkNode) -> Total:
        """Sum up the chunks from the first one of a conversation to a node; each is added once."""
        new: list[ChunkNode] = []
        seen: set[str] = set()
        while node.at not in seen and node.at not in self._totals:
            seen.add(node.at)
            new.append(node)
            node = self.nodes.get(node.parent, node)
        total = self._totals.get(node.at)
        for each in reversed(new):
            self._totals[each.at] = total = total_of(each.chunks, total)
        assert total is not None
        return total

    def only(self, node: ChunkNode) -> list[StoredChunk]:
        """List the chunks of a node and behind it, and those before that nothing else continues."""
        chunks: list[StoredChunk] = []
        nodes = [node]
        seen = {node.at}
        for each in nodes:  # grows in the loop
            chunks += each.chunks
            nodes += [child for child in each.children if child.at not in seen]
            seen |= {child.at for child in each.children}
        while (before := self.nodes.get(node.parent)) and len(before.children) == 1:
            if before.at in seen:
                break
            seen.add(before.at)
            chunks += before.chunks
            node = before
        return chunks


def used(chunks: Iterable[StoredChunk]) -> float:
    """Return when chunks were used last."""
    return max(chunk.used for chunk in chunks)


def _chunk(disk: FolderTier, name: str, nbytes: int, used_ns: int) -> StoredChunk:
    key = os.path.splitext(name)[0]
    path = disk.path_of(bytes.fromhex(key))
    note = notes.read_note(path)
    made, end = (_number(note.get(name)) for name in ("made", "end"))
    return StoredChunk(
        key,
        nbytes,
        used_ns / 1e9,
        made,
        notes.hits_of(path),
        notes.pinned_until(path),
        engine=str(note.get("engine", "")),
        model=str(note.get("model", "")),
        layout=str(note.get("layout", "")),
        tenant=str(note.get("tenant", "")),
        at=str(note.get("at", key)),
        parent=str(note.get("parent", "")),
        end=end or 0,
    )


def _number(value: object) -> int | None:
    """Return a number of a note; None if another writer made it something else."""
    return value if isinstance(value, int) and 0 <= value < _MOST else None


def find_damaged(
    disk: FolderTier, model: str | None = None
) -> Iterator[tuple[str, int, str | None]]:
    """Read each chunk, or each of a model; give its identity, its bytes, and its fault, or None.

    No chunk counts as used by that. Those that others remove meanwhile are left out.
    """
    for file in disk.chunks():
        key = bytes.fromhex(os.path.splitext(file.name)[0])
        if model is not None and notes.read_note(disk.path_of(key)).get("model") != model:
            continue
        nbytes, fault = file.nbytes, _fault(disk, key, file.nbytes)
        if fault is not None:
            try:
                with disk._locked():  # others may have put it anew meanwhile, or removed it
                    nbytes = os.stat(disk.path_of(key), follow_symlinks=False).st_size
                    fault = _fault(disk, key, nbytes)
            except FileNotFoundError:
                continue
        yield key.hex(), nbytes, fault


def _fault(disk: FolderTier, key: bytes, nbytes: int) -> str | None:
    try:
        # Memory is taken for a size that the header has, too.
        if (fault := size_fault(disk.read_head(key, HEADER_BYTES), nbytes)) is not None:
            return fault
        blob = np.empty(nbytes, np.uint8)
        n = disk.read(key, blob, marks=False)
        if n != nbytes:
            return f"it has {n} bytes, not {nbytes}"
        return find_fault_alone(key, blob, notes.read_note(disk.path_of(key)))
    except OSError as error:
        return error.strerror or str(error)
