"""The cost of a model on each NUMA node, and the placement whose reads are the nearest.

The functions use nothing but their arguments, so that tests can invent machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unimem.base.text import format_ranges
from unimem.system.limits import Node

_NEAR, _FAR = 10, 20  # distances where the firmware has none

Way = Literal["one node", "mirror", "interleave"]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The bytes of a model on a node with each way to place it. Immutable.

    Attributes
    ----------
    node, available_bytes : int
        Its number, and its room.
    alone_bytes, mirror_bytes : int or None
        All of the model; and a copy of the weights, beside the sessions that read it. None for a
        node of memory alone, on which no thread runs.
    interleave_bytes : int
        Its share; 0 if the others are enough.
    distance : float
        The mean distance of a read from there: 10 is the node itself.
    read_mb_per_second : int
        The bandwidth by its firmware (HMAT); 0 if that has none.
    """

    node: int
    available_bytes: int
    alone_bytes: int | None
    mirror_bytes: int | None
    interleave_bytes: int
    distance: float
    read_mb_per_second: int


@dataclass(frozen=True, slots=True)
class NodeSpread:
    """The best way to place a model on several nodes. Immutable.

    Attributes
    ----------
    best : {"one node", "mirror", "interleave"} or None
        None if no way has room.
    numa : str or None
        The option for it.
    distances : dict of str to float
        The mean distance of a read of weights, by each way that has room.
    reason : str
        The figure that decided.
    nodes : tuple of NodeCost
        One for each node that may be used.
    """

    best: Way | None
    numa: str | None
    distances: dict[Way, float]
    reason: str
    nodes: tuple[NodeCost, ...]

    def __str__(self) -> str:
        way = "" if self.numa is None else f"{self.best} (--numa {self.numa}): "
        return way + self.reason


def spread(
    weight_bytes: int,
    rest_bytes: int,
    sessions: int,
    nodes: Mapping[int, Node],
    room_bytes: int,
) -> NodeSpread | None:
    """Choose how to place weights, and what sessions have beside them; None with one usable node.

    A session computes on the CPUs of one node, so one alone has nothing to read elsewhere. Several
    run on all nodes with CPUs. All limits on memory have room for `room_bytes`.
    """
    usable = [n for n, node in nodes.items() if node.allowed and node.total_bytes]
    if len(usable) < 2:
        return None
    with_cpus = [n for n in usable if nodes[n].cpus]
    readers = with_cpus or [n for n, node in nodes.items() if node.cpus] or usable
    total = weight_bytes + rest_bytes
    copy = weight_bytes + rest_bytes * -(-sessions // len(readers)) // sessions
    far = {n: _mean([_distance(nodes, reader, n) for reader in readers]) for n in usable}
    near = {n: _distance(nodes, n, n) if sessions == 1 else far[n] for n in with_cpus}

    def has_room(some: Sequence[int], nbytes: int) -> bool:
        return bool(some) and all(nodes[n].available_bytes >= nbytes for n in some)

    # Nodes of memory alone are farther than the others.
    among = with_cpus if has_room(with_cpus, -(-total // max(1, len(with_cpus)))) else usable
    share = -(-total // len(among))
    alone = [n for n in with_cpus if has_room([n], total)]
    nearest = [n for n in alone if near[n] == min(near[each] for each in alone)]
    chosen = max(
        nearest,
        key=lambda n: (nodes[n].read_mb_per_second, nodes[n].available_bytes, -n),
        default=None,
    )
    ways: dict[Way, tuple[float, str]] = {}
    if chosen is not None and sessions == 1:
        ways["one node"] = near[chosen], f"mirror:{chosen}"
    copies = weight_bytes * len(with_cpus) + rest_bytes
    if has_room(with_cpus, copy) and copies <= room_bytes:
        ways["mirror"] = _mean([_distance(nodes, n, n) for n in with_cpus]), "mirror"
    if has_room(among, share):
        ways["interleave"] = _mean([far[n] for n in among]), f"interleave:{format_ranges(among)}"
    if chosen is not None and sessions > 1:
        ways["one node"] = near[chosen], f"bind:{chosen}"
    costs = tuple(
        NodeCost(
            node=n,
            available_bytes=nodes[n].available_bytes,
            alone_bytes=total if n in with_cpus else None,
            mirror_bytes=copy if n in with_cpus else None,
            interleave_bytes=share if n in among else 0,
            distance=far[n],
            read_mb_per_second=nodes[n].read_mb_per_second,
        )
        for n in usable
    )
    if not ways:
        return NodeSpread(None, None, {}, "no node has room for its share of the model", costs)
    distances = {name: distance for name, (distance, _) in ways.items()}
    best = min(ways, key=lambda name: distances[name])  # the first of equal ones
    figures = ", ".join(f"{distance:g} for {name}" for name, distance in distances.items())
    reason = f"the mean distance of a read is {figures} (SLIT)"
    if chosen is not None and len({nodes[n].read_mb_per_second for n in nearest}) > 1:
        reason += f"; node {chosen} reads {nodes[chosen].read_mb_per_second:,} MB/s (HMAT)"
    return NodeSpread(best, ways[best][1], distances, reason, costs)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2)


def _distance(nodes: Mapping[int, Node], source: int, target: int) -> int:
    order, known = list(nodes), nodes[source].distances
    if len(known) == len(order):
        return known[order.index(target)]
    return _NEAR if source == target else _FAR
