"""The way to place a model on several nodes, chosen on invented machines."""

from __future__ import annotations

from typing import Any

import pytest

import unimem as um
from support.models.plans import validated
from unimem.planning.spread import NodeSpread, spread
from unimem.system import limits
from unimem.system.limits import Node

GIB = 1 << 30
W, REST = 8 * GIB, GIB


def node(n: int, available: int, distances: tuple[int, ...], **more: Any) -> Node:
    sizes = (more.pop("total", 64 * GIB), available, available)
    cpus = more.pop("cpus", (2 * n, 2 * n + 1))
    return Node(n, *sizes, cpus, distances, more.pop("allowed", True), **more)


def two(*available: int, **more: Any) -> dict[int, Node]:
    first, second = available or (32 * GIB, 32 * GIB)
    return {0: node(0, first, (10, 21), **more), 1: node(1, second, (21, 10))}


def chosen(nodes: dict[int, Node], sessions: int = 1, room: int = 64 * GIB) -> NodeSpread:
    found = spread(W, REST * sessions, sessions, nodes, room)
    assert found is not None
    return found


def test_one_session_is_nearest_on_the_node_with_most_room() -> None:
    found = chosen(two(32 * GIB, 33 * GIB))
    assert (found.best, found.numa) == ("one node", "mirror:1")
    assert found.distances == {"one node": 10, "mirror": 10, "interleave": 15.5}
    assert str(found) == (
        "one node (--numa mirror:1): the mean distance of a read is 10 for one node, "
        "10 for mirror, 15.5 for interleave (SLIT)"
    )
    first = found.nodes[0]
    assert (first.node, first.available_bytes, first.distance) == (0, 32 * GIB, 15.5)
    assert (first.alone_bytes, first.mirror_bytes) == (W + REST, W + REST)
    assert first.interleave_bytes == (W + REST) // 2


def test_several_sessions_are_nearest_with_a_copy_each() -> None:
    found = chosen(two(), sessions=3)
    assert (found.best, found.numa) == ("mirror", "mirror")
    assert found.distances == {"mirror": 10, "interleave": 15.5, "one node": 15.5}
    assert found.nodes[0].mirror_bytes == W + 2 * REST  # one node has two of the three
    assert chosen(two(), 3, room=2 * W + 3 * REST).best == "mirror"
    assert chosen(two(), 3, room=2 * W + 3 * REST - 1).best == "interleave"
    found = chosen(two(9 * GIB, 12 * GIB), sessions=3)
    assert (found.numa, found.distances) == (
        "interleave:0-1",
        {"interleave": 15.5, "one node": 15.5},
    )
    near_first = {0: node(0, 12 * GIB, (10, 21)), 1: node(1, 9 * GIB, (12, 10))}
    assert chosen(near_first, sessions=3).numa == "bind:0"


@pytest.mark.parametrize(("sessions", "best"), [(1, "interleave"), (4, "interleave")])
def test_what_no_node_has_room_for_is_interleaved(sessions: int, best: str) -> None:
    found = chosen(two(7 * GIB, 7 * GIB), sessions)
    assert (found.best, found.numa) == (best, "interleave:0-1")
    assert list(found.distances) == ["interleave"]


def test_a_node_of_memory_alone_helps_only_if_the_others_are_full() -> None:
    def three(room: int) -> dict[int, Node]:
        return {
            0: node(0, room, (10, 20, 30)),
            1: node(1, room, (20, 10, 25)),
            2: node(2, 30 * GIB, (30, 25, 10), cpus=()),
        }

    found = chosen(three(30 * GIB))
    assert (found.best, found.distances["interleave"]) == ("one node", 15)
    alone = found.nodes[2]
    assert (alone.alone_bytes, alone.mirror_bytes, alone.interleave_bytes) == (None, None, 0)
    assert alone.distance == 27.5
    found = chosen(three(4 * GIB))
    assert (found.numa, found.distances) == ("interleave:0-2", {"interleave": 19.17})


def test_the_firmware_s_bandwidth_decides_between_equally_near_nodes() -> None:
    found = chosen(two(20 * GIB, 30 * GIB, read_mb_per_second=25_600))
    assert found.numa == "mirror:0"
    assert found.reason.endswith("(SLIT); node 0 reads 25,600 MB/s (HMAT)")


def test_no_way_has_room() -> None:
    found = chosen(two(GIB, GIB))
    assert (found.best, found.numa, found.distances) == (None, None, {})
    assert str(found) == "no node has room for its share of the model"


@pytest.mark.parametrize(
    "nodes",
    [
        {0: node(0, GIB, (10,))},
        {0: node(0, GIB, (10, 20)), 1: node(1, GIB, (20, 10), allowed=False)},
        {0: node(0, GIB, (10, 20)), 1: node(1, 0, (20, 10), total=0)},
    ],
)
def test_one_usable_node_is_no_choice(nodes: dict[int, Node]) -> None:
    assert spread(W, REST, 1, nodes, 64 * GIB) is None


def test_a_firmware_without_distances_is_near_or_far() -> None:
    nodes = {n: node(n, 7 * GIB, ()) for n in (0, 1)}
    assert chosen(nodes).distances == {"interleave": 15}


def test_a_plan_has_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    plan = um.plan(dims, machine={"memory": "8G", "cpus": 2, "nodes": 2})
    assert plan.spread is not None
    assert plan.spread.nodes[1].alone_bytes == plan.total_bytes
    assert plan.spread.numa == "mirror:0"
    document = validated(plan)
    assert document["spread"]["nodes"][0]["interleave_bytes"] * 2 == plan.total_bytes
    for text in (str(plan), plan._repr_html_()):
        assert "interleave" in text
        assert "--numa mirror:0" in text
    assert um.plan(dims, machine={"memory": "8G"}).spread is None
    monkeypatch.setattr(limits, "nodes", two)
    mirrored = um.plan(dims, numa="mirror", load="copy").spread
    alone = um.plan(dims, load="copy").spread
    assert alone is not None
    assert mirrored is not None
    # The gaps between tensors are not counted in a copy.
    sizes = [each.nodes[0].alone_bytes or 0 for each in (alone, mirrored)]
    assert 0 <= sizes[0] - sizes[1] < 1 << 21
