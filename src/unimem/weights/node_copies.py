"""Copies of weights on NUMA nodes: which nodes have one, how it is filled, and which is nearest."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np

from unimem._core.block import Block
from unimem._core.tmpfs import huge_page_bytes
from unimem.base.threads import run_in_threads
from unimem.errors import PlacementError
from unimem.system import limits, policy
from unimem.system.limits import Node
from unimem.system.placement import PlacementOptions
from unimem.system.policy import NumaPolicy

__all__ = [
    "Copies",
    "choose_copies",
    "copy_from",
    "find_nearest",
    "is_mirrored",
    "nodes_for_copies",
    "without_lone_mirror",
]

_CHUNK_BYTES = 16 << 20  # copied between two looks whether to stop


class Copies(NamedTuple):
    """Which nodes get a copy.

    Attributes
    ----------
    nodes : tuple of int
        Those that have room, ascending. Empty where none has: then there is one copy, anywhere.
    asked : tuple of int
        Those that were asked for.
    shortfalls : tuple of str
        A sentence for each of these that gets none.
    """

    nodes: tuple[int, ...]
    asked: tuple[int, ...]
    shortfalls: tuple[str, ...]


def _mirror_of(placement: PlacementOptions) -> NumaPolicy | None:
    numa = policy.parse_numa(placement.get("numa"), mirror=True)
    return numa if numa is not None and numa.mode == "mirror" else None


def is_mirrored(placement: PlacementOptions) -> bool:
    """Whether a copy on each node is asked for."""
    return _mirror_of(placement) is not None


def without_lone_mirror(placement: PlacementOptions, facts: policy.Facts) -> PlacementOptions:
    """Return a placement without "mirror" where one node has all memory: there is one copy then."""
    numa = _mirror_of(placement)
    if numa is None:
        return placement
    usable = _usable(facts.nodes())
    if len(usable) > 1 or not usable.issuperset(numa.nodes):
        return placement
    rest = placement.copy()
    del rest["numa"]
    return rest


def choose_copies(nbytes: int, placement: PlacementOptions, facts: policy.Facts) -> Copies:
    """Choose the nodes that get a copy of `nbytes`, of those that a mirrored placement names.

    Where it names none, of those that have memory and CPUs: nobody would read a copy elsewhere.
    """
    numa = _mirror_of(placement)
    assert numa is not None
    nodes = facts.nodes()
    usable = sorted(_usable(nodes))
    asked = numa.nodes or tuple(n for n in usable if nodes[n].cpus) or tuple(usable[:1])
    chosen, shortfalls = [], []
    for node in asked:
        bound = NumaPolicy("bind", (node,))
        request = policy.Request(
            nbytes,
            placement.get("pages", "auto"),
            bound,
            page_bytes=mmap.PAGESIZE,
            thp_bytes=huge_page_bytes(),
        )
        found = policy.decide(request, facts)
        if found.numa == bound:
            chosen.append(node)
            continue
        # The block of each copy tells itself what pages it does not get.
        text = next(each for each in found.shortfalls if each.startswith("numa="))
        text = text.replace(f"numa='{bound}'", f"numa='{numa}': a copy on node {node}", 1)
        shortfalls.append(text.replace("name more nodes", "name other nodes"))
    return Copies(tuple(chosen), asked, tuple(shortfalls))


def nodes_for_copies(name: str, nbytes: int, placement: PlacementOptions) -> tuple[int, ...]:
    """Return the nodes that get a copy now, once there is room for all of them.

    Raises
    ------
    PlacementError
        With ``strict``, a node has no room. Else it is in a `PlacementWarning`.
    CapacityError
        A limit has no room for all copies together.
    """
    found = choose_copies(nbytes, placement, limits)
    if found.shortfalls:
        text = policy.placement_message(name, nbytes, found.shortfalls, None)
        if placement.get("strict"):
            raise PlacementError(text)
        policy.warn(text)
    total = nbytes * len(found.nodes)
    # Pages of a pool were taken from memory when the pool was filled.
    request = policy.Request(max(total, 1), placement.get("pages", "auto"))
    if policy.decide(request, limits).pages not in policy.HUGETLB:
        limits.require(total, f"{len(found.nodes)} copies of {name}")
    return found.nodes


def _usable(nodes: Mapping[int, Node]) -> set[int]:
    return {n for n, node in nodes.items() if node.allowed and node.total_bytes}


def copy_from(source: Block, nbytes: int, node: int) -> Callable[[Block], None]:
    """Return what fills a block with the first bytes of another one, in threads on a node.

    An interrupt stops it, and leaves no thread.
    """

    def fill(block: Block) -> None:
        n_threads = limits.thread_count()
        bound = NumaPolicy("bind", (node,))
        cpus = policy.warm_cpus(bound, n_threads, limits.nodes(), limits.cpus())
        unused = deque(cpus or [])
        begins = deque(range(0, nbytes, _CHUNK_BYTES))
        views = [each.as_array("uint8", nbytes) for each in (block, source)]

        def work() -> None:
            if unused:
                os.sched_setaffinity(0, {unused.popleft()})  # of this thread alone
            while True:
                try:
                    begin = begins.popleft()
                except IndexError:  # all are taken
                    return
                end = begin + _CHUNK_BYTES
                np.copyto(views[0][begin:end], views[1][begin:end])

        try:
            run_in_threads(n_threads, work, stop=begins.clear, tick=lambda: None)
        finally:
            views.clear()
        # What the block has behind these bytes is to be in RAM, too.
        block._warm_range(nbytes, block.nbytes - nbytes)

    return fill


def find_nearest(nodes: Mapping[int, Node], copies: Collection[int]) -> dict[int, int]:
    """Return for each node the node of the copy that is nearest to it."""
    order = list(nodes)

    def distance(node: int, copy: int) -> tuple[int, int]:
        known = nodes[node].distances
        if copy in order and len(known) == len(order):
            return known[order.index(copy)], copy
        return int(node != copy), copy

    return {node: min(copies, key=lambda copy: distance(node, copy)) for node in nodes}
