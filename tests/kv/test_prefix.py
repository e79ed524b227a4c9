"""The index of cached prefixes finds what a search through all of them finds, and never what is
not there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.project.tiers import examples
from unimem.kv import prefix
from unimem.kv.prefix import Node, PrefixIndex


class Pool:
    """Blocks that are cached or not."""

    def __init__(self) -> None:
        self.cached: set[int] = set()

    def _is_cached(self, block: int) -> bool:
        return block in self.cached

    def _cache(self, block: int) -> None:
        assert block not in self.cached
        self.cached.add(block)

    def _uncache(self, block: int) -> None:
        self.cached.discard(block)


def found(index: PrefixIndex, pool: Pool, chain: Sequence[bytes]) -> list[int]:
    """The blocks of the longest prefix."""
    return [node.block for node in index.find(pool, chain)]


def add_chain(
    index: PrefixIndex, pool: Pool, chain: list[bytes], blocks: list[int]
) -> list[Node | None]:
    """Cache blocks one behind the other, as far as they are taken."""
    nodes: list[Node | None] = []
    parent: Node | None = index.root
    for ids, block in zip(chain, blocks, strict=True):
        assert parent is not None
        parent = index.add(pool, parent, ids, block)
        nodes.append(parent)
    return nodes


CHAIN = [b"aa", b"bb", b"cc"]
Cached = tuple[PrefixIndex, Pool, list[Node | None]]


@pytest.fixture
def cached() -> Cached:
    """An index in which the chain is in blocks 7, 3 and 5."""
    index, pool = PrefixIndex(), Pool()
    return index, pool, add_chain(index, pool, CHAIN, [7, 3, 5])


def test_the_longest_prefix_is_found(cached: Cached) -> None:
    index, pool, nodes = cached
    assert len(index) == 3
    assert pool.cached == {3, 5, 7}
    for n in range(4):
        assert found(index, pool, CHAIN[:n]) == [7, 3, 5][:n]
        assert found(index, pool, [*CHAIN[:n], b"xx"]) == [7, 3, 5][:n]
    # The same ids behind other ids, or behind nothing, are another block.
    assert found(index, pool, [b"bb"]) == []
    assert found(index, pool, [b"aa", b"cc"]) == [7]
    # Of two blocks with the same tokens the first stays, and a block is cached for one prefix.
    again = add_chain(index, pool, [*CHAIN, b"dd"], [10, 11, 12, 13])
    assert again[:3] == nodes
    assert pool.cached == {7, 3, 5, 13}
    assert found(index, pool, [*CHAIN, b"dd"]) == [7, 3, 5, 13]
    assert index.add(pool, index.root, b"bb", 7) is None
    assert found(index, pool, [b"bb"]) == []


def test_a_block_that_was_taken_is_cached_for_other_tokens(cached: Cached) -> None:
    index, pool, nodes = cached
    pool.cached.discard(7)
    other = index.add(pool, index.root, b"zz", 7)
    assert other is not None
    assert pool.cached == {7}
    assert found(index, pool, CHAIN) == []
    assert found(index, pool, [b"zz"]) == [7]
    for node in nodes:
        assert node is not None
        assert not index.holds(node)
        assert index.add(pool, node, b"yy", 5) is None
    assert index.holds(index.root)
    assert index.holds(other)
    assert pool.cached == {7}


def test_other_tokens_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "digest", lambda ids, key: 1)
    index, pool = PrefixIndex(), Pool()
    first = index.add(pool, index.root, b"aa", 0)
    assert first is not None
    assert index.add(pool, index.root, b"bb", 1) is None
    assert index.add(pool, first, b"aa", 2) is None  # the same ids behind another block
    assert pool.cached == {0}
    assert found(index, pool, [b"bb"]) == []
    assert found(index, pool, [b"aa", b"aa"]) == [0]
    pool.cached.clear()
    assert index.add(pool, index.root, b"bb", 1) is not None
    assert found(index, pool, [b"bb"]) == [1]


def test_the_hash_is_of_the_ids_and_of_all_before() -> None:
    first = [prefix.digest(ids, 0) for ids in CHAIN]
    keys = {*first, *(prefix.digest(ids, key) for ids in CHAIN for key in first)}
    assert len(keys) == 12
    assert all(0 <= key < 2**64 for key in keys)


def test_a_long_chain_goes_at_once() -> None:
    index, pool = PrefixIndex(), Pool()
    chain = [b"%d" % i for i in range(20_000)]
    add_chain(index, pool, chain, list(range(20_000)))
    pool.cached.discard(0)
    assert index.find(pool, chain) == []
    assert len(index) == 0
    assert pool.cached == set()


# ---- against a search through all that was ever added ----


@dataclass
class Entry:
    parent: Entry | None
    ids: bytes
    block: int
    node: Node
    lost: bool = False


N_BLOCKS = 12
IDS = st.sampled_from([b"a", b"b"])


class PrefixAgainstModel(RuleBasedStateMachine):
    """Blocks are added and lost in any order. The model keeps all entries, and walks through those
    whose block was not lost."""

    @initialize(weak=st.booleans())
    def start(self, weak: bool) -> None:
        self.weak = weak
        self.digest = prefix.digest
        if weak:
            prefix.digest = lambda ids, key: (key * 3 + ids[0]) % 5
        self.index, self.pool = PrefixIndex(), Pool()
        self.entries: list[Entry] = []

    def teardown(self) -> None:
        prefix.digest = self.digest

    def walk(self, chain: Sequence[bytes]) -> list[Entry]:
        found: list[Entry] = []
        for ids in chain:
            parent = found[-1] if found else None
            here = [e for e in self.entries if e.parent is parent and e.ids == ids and not e.lost]
            if not here:
                break
            (entry,) = here
            found.append(entry)
        return found

    def lose(self, block: int) -> None:
        """The pool takes a block."""
        self.pool._uncache(block)
        for entry in self.entries:
            entry.lost = entry.lost or entry.block == block

    @rule(chain=st.lists(IDS, min_size=1, max_size=5), data=st.data())
    def add(self, chain: list[bytes], data: st.DataObject) -> None:
        """A sequence takes blocks, and caches them behind the prefix that is found."""
        nodes = self.index.find(self.pool, chain)
        entries = self.walk(chain)[: len(nodes)]
        parent = nodes[-1] if nodes else self.index.root
        in_use = {entry.block for entry in entries}
        for ids in chain[len(nodes) :]:
            spare = sorted(set(range(N_BLOCKS)) - in_use)
            block = data.draw(st.sampled_from(spare))
            self.lose(block)
            in_use.add(block)
            node = self.index.add(self.pool, parent, ids, block)
            if node is None:
                assert self.weak
                break
            entries.append(Entry(entries[-1] if entries else None, ids, block, node))
            self.entries.append(entries[-1])
            parent = node

    @rule(ids=IDS, block=st.integers(0, N_BLOCKS - 1), data=st.data())
    def go_on(self, ids: bytes, block: int, data: st.DataObject) -> None:
        """A sequence caches one more block behind one that may be lost meanwhile."""
        if not self.entries:
            return
        parent = data.draw(st.sampled_from(self.entries))
        above: Entry | None = parent
        while above is not None:
            if above.block == block:
                return  # a sequence has a block once
            above = above.parent
        self.lose(block)
        node = self.index.add(self.pool, parent.node, ids, block)
        if node is None:
            assert self.weak or not self.index.holds(parent.node)
        elif node.block == block:
            self.entries.append(Entry(parent, ids, block, node))
        else:
            assert node in [e.node for e in self.entries if not e.lost and e.parent is parent]

    @rule(block=st.integers(0, N_BLOCKS - 1))
    def take(self, block: int) -> None:
        self.lose(block)

    @invariant()
    def finds_the_same(self) -> None:
        for chain in itertools.product([b"a", b"b"], repeat=4):
            expected = [entry.block for entry in self.walk(chain)]
            assert found(self.index, self.pool, chain) == expected

    @invariant()
    def knows_one_node_a_block(self) -> None:
        assert len(self.index) <= N_BLOCKS
        assert self.pool.cached <= set(range(N_BLOCKS))


TestPrefixAgainstModel = PrefixAgainstModel.TestCase
TestPrefixAgainstModel.settings = settings(
    max_examples=examples(100), stateful_step_count=30, deadline=None
)
