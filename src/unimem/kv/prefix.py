"""Which blocks of a paged cache hold which tokens: the index of its cached prefixes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import xxhash

__all__ = ["Blocks", "Node", "PrefixIndex", "digest"]


class Blocks(Protocol):
    """What the index needs of the pool of blocks."""

    def _is_cached(self, block: int) -> bool: ...
    def _cache(self, block: int) -> None: ...
    def _uncache(self, block: int) -> None: ...


def digest(ids: bytes, parent_key: int, /) -> int:
    """Return the hash of a block's token ids and of all tokens before it.

    Parameters
    ----------
    ids : bytes
        The block's ids, int32.
    parent_key : int
        The hash of the block before it; 0 for the first.

    Returns
    -------
    int
        Two prefixes with one hash are told apart by their tokens: a hash that is easy to collide
        with costs misses, and no more.
    """
    return xxhash.xxh3_64_intdigest(ids, parent_key)


class Node:
    """One cached block: its tokens, and the blocks before and behind it.

    Its block is -1 when the node is not in the index any more.
    """

    __slots__ = ("block", "children", "ids", "key", "parent")

    def __init__(self, parent: Node | None, ids: bytes, key: int, block: int) -> None:
        self.parent = parent
        self.ids = ids
        self.key = key
        self.block = block
        self.children: set[Node] = set()


class PrefixIndex:
    """Finds the cached blocks that hold the first tokens of a sequence.

    A block is known by the ids of its tokens and by the block before it, and found by their chained
    hash; the ids and the block before are compared as well. Where two have one hash, the first
    stays, and the other is not cached.

    The pool takes cached blocks without asking: whether a block is still what a node says is seen
    when the node is found. A block that is gone takes all behind it out of the index, since nobody
    could find these any more.

    Attributes
    ----------
    root : Node
        What the first block of every sequence stands behind. It holds no block.
    """

    def __init__(self) -> None:
        self.root = Node(None, b"", 0, -1)
        self._nodes: dict[int, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._lock = threading.RLock()  # of the two, and of the tree

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, blocks: Blocks, prefix: Iterable[bytes]) -> list[Node]:
        """Return the nodes of the longest cached prefix.

        Parameters
        ----------
        blocks : Blocks
            The pool.
        prefix : iterable of bytes
            The token ids of each block, int32.

        Returns
        -------
        list of Node
            Each one is the parent of the next.
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
        """Cache a block that a sequence holds.

        Parameters
        ----------
        blocks : Blocks
            The pool.
        parent : Node
            The block before it, in the index.
        ids : bytes
            Its token ids, int32.
        block : int
            Its number.

        Returns
        -------
        Node or None
            The node of these tokens: the one that was there, where another block holds the same.
            None when the hash, or the block, is another node's, and when the parent is not in the
            index any more.
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
        """Whether a node is in the index; the root always is."""
        return node is self.root or self._nodes.get(node.key) is node

    def _drop_lost(self, blocks: Blocks, lost: Node | None) -> None:
        """Drop a node whose block the pool took, and all behind it."""
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
