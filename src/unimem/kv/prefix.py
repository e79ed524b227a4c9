"""The index of cached prefixes of a paged cache: it finds blocks by their tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import xxhash

__all__ = ["Blocks", "Node", "PrefixIndex", "digest"]


class Blocks(Protocol):
    """The part of the pool of blocks that the index uses."""

    def _is_cached(self, block: int) -> bool: ...
    def _cache(self, block: int) -> None: ...
    def _uncache(self, block: int) -> None: ...


def digest(ids: bytes, parent_key: int, /) -> int:
    """Return the hash of a block's token ids, int32, and of all tokens before it.

    `parent_key` is the hash of the block before it, and 0 for the first. Prefixes with the same
    hash are told apart by their tokens, so that a collision only costs a miss.
    """
    return xxhash.xxh3_64_intdigest(ids, parent_key)


class Node:
    """A cached block: its tokens, and the blocks before and behind it.

    Its block is -1 once the node is out of the index.
    """

    __slots__ = ("block", "children", "ids", "key", "parent")

    def __init__(self, parent: Node | None, ids: bytes, key: int, block: int) -> None:
        self.parent = parent
        self.ids = ids
        self.key = key
        self.block = block
        self.children: set[Node] = set()


class PrefixIndex:
    """An index of cached blocks by the tokens of a sequence.

    A block is found by the chained hash of its token ids and those before it; then its ids and the
    block before it are compared. If two blocks have one hash, only the first is cached. `root` is
    the parent of the first block of every sequence, and holds none.

    The pool evicts cached blocks without asking: the index checks a block when it finds its node.
    A lost block takes all blocks behind it out of the index, since these can no longer be found.
    """

    def __init__(self) -> None:
        self.root = Node(None, b"", 0, -1)
        self._nodes: dict[int, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._lock = threading.RLock()  # for both, and for the tree

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, blocks: Blocks, prefix: Iterable[bytes]) -> list[Node]:
        """Return the nodes of the longest cached prefix, each one the parent of the next.

        `prefix` gives the token ids of each block, int32.
        """
        found: list[Node] = []
        parent = self.root
        with self._lock:
            for ids in prefix:
                key = digest(ids, parent.key)
                self._drop_lost(blocks, self._nodes.get(key))
                node = self._nodes.get(key)
                if node is None or node.parent is not parent or node.ids != ids:
                    break
                found.append(node)
                parent = node
        return found

    def add(self, blocks: Blocks, parent: Node, ids: bytes, block: int) -> Node | None:
        """Cache a block that a sequence holds behind `parent`, and return the node of its tokens.

        The node may have another block that holds them. It returns None if another node has the
        hash or the block, or if the parent is out of the index.
        """
        key = digest(ids, parent.key)
        with self._lock:
            self._drop_lost(blocks, self._node_of.get(block))
            self._drop_lost(blocks, self._nodes.get(key))
            node = self._nodes.get(key)
            if node is not None:
                return node if node.parent is parent and node.ids == ids else None
            if block in self._node_of or not self.holds(parent):
                return None
            blocks._cache(block)
            node = self._nodes[key] = self._node_of[block] = Node(parent, ids, key, block)
            parent.children.add(node)
            return node

    def holds(self, node: Node) -> bool:
        """Return whether a node is in the index; the root always is."""
        return node is self.root or self._nodes.get(node.key) is node

    def _drop_lost(self, blocks: Blocks, lost: Node | None) -> None:
        """Drop a node whose block the pool has evicted, and all nodes behind it."""
        if lost is None or blocks._is_cached(lost.block):
            return
        if lost.parent is not None:
            lost.parent.children.discard(lost)
        gone = [lost]
        while gone:
            node = gone.pop()
            gone += node.children
            del self._nodes[node.key], self._node_of[node.block]
            blocks._uncache(node.block)
            node.block = -1
