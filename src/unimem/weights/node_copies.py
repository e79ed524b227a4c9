"""Copies of weights on NUMA nodes: choosing nodes, copying, and finding the nearest copy."""

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

_CHUNK_BYTES = 16 << 20  # copied between two checks for a stop


class Copies(NamedTuple):
    """The nodes that get a copy; if none has room, there is one copy, anywhere."""

    nodes: tuple[int, ...]  # ascending
    asked: tuple[int, ...]
    shortfalls: tuple[str, ...]  # a sentence for each node that gets no copy


def _mirror_of(placement: PlacementOptions) -> NumaPolicy | None:
    numa = policy.parse_numa(placement.get("numa"), mirror=True)
    return numa if numa is not None and numa.mode == "mirror" else None


def is_mirrored(placement: PlacementOptions) -> bool:
    """Whether the placement asks for a copy on each node."""
    return _mirror_of(placement) is not None


def without_lone_mirror(placement: PlacementOptions, facts: policy.Facts) -> PlacementOptions:
    """Return the placement without "mirror" if one node has all memory: one copy is enough then."""
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
    """Choose the nodes that get a copy of `nbytes`, among those that the placement names.

    If it names none, among those that have memory and CPUs: no thread would read other copies.
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
        # The block of each copy reports other shortfalls.
        text = next(each for each in found.shortfalls if each.startswith("numa="))
        text = text.replace(f"numa='{bound}'", f"numa='{numa}': a copy on node {node}", 1)
        shortfalls.append(text.replace("name more nodes", "name other nodes"))
    return Copies(tuple(chosen), asked, tuple(shortfalls))


def nodes_for_copies(name: str, nbytes: int, placement: PlacementOptions) -> tuple[int, ...]:
    """Return the nodes that get a copy now, if there is room for all copies.

    A node without room is a `PlacementWarning`, or with ``strict`` a PlacementError. CapacityError
    says that a limit has no room for all copies together.
    """
    found = choose_copies(nbytes, placement, limits)
    if found.shortfalls:
        text = policy.placement_message(name, nbytes, found.shortfalls, None)
        if placement.get("strict"):
            raise PlacementError(text)
        policy.warn(text)
    total = nbytes * len(found.nodes)
    # Pages of a pool were reserved when the pool was filled.
    request = policy.Request(max(total, 1), placement.get("pages", "auto"))
    if policy.decide(request, limits).pages not in policy.HUGETLB:
        limits.require(total, f"{len(found.nodes)} copies of {name}")
    return found.nodes


def _usable(nodes: Mapping[int, Node]) -> set[int]:
    return {n for n, node in nodes.items() if node.allowed and node.total_bytes}


def copy_from(source: Block, nbytes: int, node: int) -> Callable[[Block], None]:
    """Return a function that fills a block from another one, in threads on a node.

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
                except IndexError:  # all chunks are taken
                    return
                end = begin + _CHUNK_BYTES
                np.copyto(views[0][begin:end], views[1][begin:end])

        try:
            run_in_threads(n_threads, work, stop=begins.clear, tick=lambda: None)
        finally:
            views.clear()
        # The rest of the block is warmed, too.
        block._warm_range(nbytes, block.nbytes - nbytes)

    return fill


def find_nearest(nodes: Mapping[int, Node], copies: Collection[int]) -> dict[int, int]:
    """Return the node of the nearest copy for each node."""
    order = list(nodes)

    def distance(node: int, copy: int) -> tuple[int, int]:
        known = nodes[node].distances
        if copy in order and len(known) == len(order):
            return known[order.index(copy)], copy
        return int(node != copy), copy

    return {node: min(copies, key=lambda copy: distance(node, copy)) for node in nodes}
