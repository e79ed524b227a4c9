"""Staging on the nodes of a cluster: plans, sources of copies, failures."""

# ruff: noqa: F811 - fixtures that are imported, and asked for by their names

from __future__ import annotations

import errno
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.processes.staged_models import TINY, split  # noqa: F401 - a fixture
from support.servers.object_server import BUCKET, ObjectServer, serving_objects
from support.servers.one_process_ray import NODE_ID, OneProcessRay
from unimem import ray as ur
from unimem.errors import CapacityError, ClosedError, GGUFError
from unimem.remote import transfers
from unimem.staging.unfinished import find_unfinished
from unimem.system.limits import Limit
from unimem.weights.remote_files import RemoteFiles

CTX = 64
LABELS = {"a": {"zone": "x"}, "b": {"zone": "x"}, "c": {"zone": "y"}}
MISSING = "/nowhere/tiny.gguf"
URL = f"s3://{BUCKET}/tiny.gguf"
NEEDED = um.plan(TINY, ctx=CTX, load="copy", machine={"memory": "1T"}).required_bytes
ENGINE = um.plan(TINY, ctx=CTX, load="copy", sessions=2, machine={"memory": "1T"}).required_bytes
ENGINE -= NEEDED


class Cluster(OneProcessRay):
    """Three nodes that have as much memory as `room` says, in engines beside a copy."""

    def __init__(self) -> None:
        super().__init__(LABELS)
        self.room = dict.fromkeys(LABELS, 4)

    def doctor(self) -> um.Machine:
        machine = um.doctor()
        memory = NEEDED + (self.room[self.here] - 1) * ENGINE
        limit = Limit("memory of the machine", memory, 0, "another machine")
        return replace(machine, memory=replace(machine.memory, limits=(limit,)))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr("unimem.ray.doctor", made.doctor)
    yield made
    for actor in made.actors:
        actor.thing.close()


@contextmanager
def stager(*arguments: Any, **options: Any) -> Iterator[ur.Stager]:
    with ur.Stager(*arguments, **{"ctx": CTX} | options) as made:
        yield made


def path_on(cluster: Cluster, made: ur.Stager, node: str) -> str:
    cluster.here = node
    return made.path


def origins(made: ur.Stager) -> list[str]:
    return [node.origin for node in made.nodes]


@pytest.mark.parametrize(
    ("room", "n", "expected"),
    [
        ((4, 4, 4), 6, {"a": 2, "b": 2, "c": 2}),
        ((4, 2, 1), 6, {"a": 3, "b": 2, "c": 1}),
        ((4, 2, 1), 7, {"a": 4, "b": 2, "c": 1}),
        ((4, 0, 1), 4, {"a": 3, "c": 1}),
        ((4, 4, 4), 1, {"a": 1, "b": 0, "c": 0}),
    ],
)
def test_engines_are_placed_by_the_room_that_a_plan_finds(
    cluster: Cluster, room: tuple[int, ...], n: int, expected: dict[str, int]
) -> None:
    cluster.room = dict(zip(LABELS, room, strict=True))
    with stager(TINY, n_engines=n) as made:
        assert {node.node_id: node.n_engines for node in made.nodes} == expected
        assert made.engine_bytes == ENGINE
        # Ray counts as much memory as was planned.
        options = made.actor_options()
        assert [o["label_selector"][NODE_ID] for o in options] == [
            node for node, share in expected.items() for _ in range(share)
        ]
        elsewhere = [{"label_selector": {NODE_ID: f"in({','.join(expected)})"}}]
        for one in options:
            assert (one["memory"], one["fallback_strategy"]) == (ENGINE, elsewhere)
            assert one["max_restarts"] == one["max_task_retries"] == -1
        assert {actor.options["memory"] for actor in cluster.actors} == {NEEDED - ENGINE}
        for node in made.nodes:
            assert node.labels["zone"] == LABELS[node.node_id]["zone"]
            assert node.plan.sessions == min(n, cluster.room[node.node_id])


def test_the_context_is_not_cut_short_by_a_small_node(cluster: Cluster) -> None:
    cluster.room = {"a": 0, "b": 100, "c": 100}
    with stager(TINY, ctx=None) as made:
        expected = um.plan(TINY, machine={"memory": "1T"}).ctx
        assert {node.plan.ctx for node in made.nodes} == {expected}


def test_a_node_without_engines_has_a_copy_for_those_of_others(cluster: Cluster) -> None:
    with stager(TINY, n_engines=1) as made:
        assert [node.n_engines for node in made.nodes] == [1, 0, 0]
        assert os.path.exists(path_on(cluster, made, "c"))


def test_without_room_nothing_is_started(cluster: Cluster) -> None:
    cluster.room = {"a": 2, "b": 0, "c": 1}
    with pytest.raises(
        CapacityError, match=r"room for 3 of 4 engines: .* b has room for none"
    ) as e:
        ur.Stager(TINY, n_engines=4, ctx=CTX)
    assert (e.value.limit, e.value.asked) == (3, 4)
    with pytest.raises(CapacityError, match="room for 3 of 10000 engines"):
        ur.Stager(TINY, n_engines=10_000, ctx=CTX)
    with pytest.raises(CapacityError, match="no node of the cluster has"):
        ur.Stager(TINY, labels={"zone": "z"}, ctx=CTX)
    assert cluster.actors == []


def test_a_node_without_the_labels_is_not_asked(cluster: Cluster) -> None:
    cluster.before = lambda node, _: pytest.fail("it was asked") if node == "c" else None
    with stager(TINY, labels={"zone": "x"}, n_engines=8) as made:
        assert [node.node_id for node in made.nodes] == ["a", "b"]


def test_each_node_has_a_copy_of_its_own_and_keeps_it(cluster: Cluster) -> None:
    with stager(TINY) as made:
        paths = [path_on(cluster, made, node) for node in LABELS]
        assert paths == [path_on(cluster, made, node) for node in LABELS]
        assert len({(os.stat(path).st_dev, os.stat(path).st_ino) for path in paths}) == 3
        assert all(Path(path).read_bytes() == TINY.read_bytes() for path in paths)
        assert origins(made) == ["file"] * 3
        given = pickle.loads(pickle.dumps(made.nodes))
        assert given == made.nodes
    assert made.closed
    assert all(actor.killed for actor in cluster.actors)
    assert not any(os.path.exists(path) for path in paths)
    for use in (lambda: made.path, made.__enter__):
        with pytest.raises(ClosedError):
            use()
    made.close()
    assert repr(made) == "Stager(closed)"


def test_it_is_closed_by_the_program_that_made_it_alone(cluster: Cluster) -> None:
    with stager(TINY) as made:
        passed = ur.Stager.__new__(ur.Stager)
        passed.__dict__ |= made.__getstate__()
        passed.close()
        assert passed.closed
        assert os.path.exists(made.path)
        assert repr(made).startswith("Stager(3 nodes, 1 engines of ")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")
    monkeypatch.setattr(transfers, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(transfers, "MOST_WAIT_S", 0.001)
    monkeypatch.setattr(RemoteFiles, "data_threads", 1)  # so that the order is known
    with serving_objects(monkeypatch) as server:
        server.add(f"/{BUCKET}/tiny.gguf", TINY.read_bytes())
        yield server


def test_a_model_is_read_once_and_goes_on_from_neighbours(
    cluster: Cluster, s3: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for arguments in ((MISSING, URL), (URL,)):
        s3.asked.clear()
        with stager(*arguments) as made:
            assert origins(made) == ["store", "neighbour", "neighbour"]
            for node in LABELS:
                assert Path(path_on(cluster, made, node)).read_bytes() == TINY.read_bytes()
        data = [int(wanted.split("-")[0]) for _, _, wanted in s3.asked if wanted != "0-262143"]
        assert sorted(data) == list(range(0, TINY.stat().st_size, 100_000))
    assert list(tmp_path.iterdir()) == [], "nothing lies on a disk"


def test_a_model_of_several_files_on_a_server(
    cluster: Cluster, s3: ObjectServer, split: list[Path]
) -> None:
    for part in split:
        s3.add(f"/{BUCKET}/{part.name}", part.read_bytes())
    with stager(f"s3://{BUCKET}/{split[0].name}") as made:
        assert origins(made) == ["store", "neighbour", "neighbour"]
        path = Path(path_on(cluster, made, "c"))
        assert [path.with_name(part.name).read_bytes() for part in split] == [
            part.read_bytes() for part in split
        ]


@pytest.mark.parametrize("resume", [False, True])
def test_a_node_goes_on_where_an_earlier_stager_ended(
    cluster: Cluster, s3: ObjectServer, resume: bool
) -> None:
    good = iter(range(6))
    s3.choose_fault = lambda *_: "" if next(good, None) is not None else "503"
    with pytest.raises(OSError, match="503"):
        ur.Stager(URL, ctx=CTX, resume=resume)
    left = find_unfinished(URL)
    assert len(left) == resume
    s3.choose_fault = lambda *_: ""
    s3.asked.clear()
    with stager(URL, resume=resume):
        data = [wanted for _, _, wanted in s3.asked if wanted != "0-262143"]
        assert len(data) == 11 - sum(len(held.arrived) for held in left)
    assert find_unfinished(URL) == []


def broken(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def read(self: Any, name: str, offset: int, nbytes: int) -> Any:
        return change(ORIGINAL_READ(self, name, offset, nbytes))

    return read


def flipped(answer: tuple[np.ndarray, bytes]) -> tuple[np.ndarray, bytes]:
    answer[0][7] ^= 1
    return answer


def gone(_: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


ORIGINAL_READ = ur._Copy.read


@pytest.mark.parametrize("change", [flipped, gone])
def test_a_neighbour_that_fails_is_passed_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(ur._Copy, "read", broken(change))
    with stager(MISSING, TINY) as made:
        assert origins(made) == ["store"] * 3
        assert Path(path_on(cluster, made, "c")).read_bytes() == TINY.read_bytes()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_node_that_is_lost_while_it_is_staged_gives_its_engines_to_others(
    cluster: Cluster, hangs: bool
) -> None:
    def lose(node: str, method: str) -> None:
        if (node, method) == ("b", "bring_in"):
            cluster.dead.add("b")

    cluster.before = lose
    if hangs:  # as Ray, which waits for a node of this name
        cluster.hanging = {("b", "bring_in")}
    with pytest.warns(um.PlacementWarning, match="node b was lost while it was staged"):
        made = ur.Stager(TINY, n_engines=6, ctx=CTX)
    with made:
        assert {node.node_id: node.n_engines for node in made.nodes} == {"a": 3, "c": 3}
        assert [actor.killed for actor in cluster.actors] == [False, True, False]
        with pytest.raises(RuntimeError, match="node b has no copy"):
            path_on(cluster, made, "b")


@pytest.mark.parametrize("method", ["files", "read"])
def test_a_neighbour_that_hangs_is_passed_over(cluster: Cluster, method: str) -> None:
    cluster.hanging = {("a", method)}
    with stager(MISSING, TINY) as made:
        assert origins(made) == ["store", "store", "neighbour"]


def test_no_more_is_placed_than_ray_itself_counts(cluster: Cluster) -> None:
    copy = NEEDED - ENGINE
    cluster.memory = {"a": copy - 1, "b": copy, "c": copy + 2 * ENGINE + 1}
    with stager(TINY, n_engines=2) as made:
        assert {node.node_id: node.n_engines for node in made.nodes} == {"b": 0, "c": 2}
    with pytest.raises(CapacityError, match=r"room for 2 of 3 .*a has .*'ray start --memory'"):
        ur.Stager(TINY, n_engines=3, ctx=CTX)


def test_a_node_that_does_not_answer_is_left_out(cluster: Cluster) -> None:
    def lose(node: str, method: str) -> None:
        if (node, method) == ("b", "_look"):
            cluster.dead.add("b")

    cluster.before = lose
    with (
        pytest.warns(um.PlacementWarning, match="node b at 10.0.0.1 does not answer"),
        stager(TINY) as made,
    ):
        assert [node.node_id for node in made.nodes] == ["a", "c"]
    cluster.dead |= {"a", "c"}
    cluster.labels = {"d": {}}
    cluster.before = lambda node, _: cluster.dead.add(node)
    cluster.memory["d"] = 1 << 40
    with (
        pytest.warns(um.PlacementWarning, match="node d"),
        pytest.raises(CapacityError, match="no node of the cluster answers"),
    ):
        ur.Stager(TINY)


def test_a_copy_that_was_started_again_is_staged_again(cluster: Cluster) -> None:
    with stager(MISSING, TINY) as made:
        actor = made._copies["b"]
        actor.thing.close()
        actor.thing = ur._Copy(actor.thing._source, {})  # as Ray does
        cluster.dead.add("a")
        after = path_on(cluster, made, "b")
        assert actor.thing.bring_in([]) == "neighbour"
        assert Path(after).read_bytes() == TINY.read_bytes()


def test_a_model_that_cannot_be_used_leaves_no_copy(cluster: Cluster, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(GGUFError):
        ur.Stager(bad)
    good = tmp_path / "good.gguf"
    good.write_bytes(TINY.read_bytes())

    def spoil(_: str, method: str) -> None:
        if method == "bring_in":
            good.write_bytes(b"GGUX" + bytes(64))

    cluster.before = spoil
    with pytest.raises(GGUFError):
        ur.Stager(good)
    assert all(actor.killed for actor in cluster.actors)
    assert all(actor.thing._stage is None for actor in cluster.actors)


def test_a_model_that_is_nowhere(cluster: Cluster) -> None:
    with pytest.raises(FileNotFoundError, match="neither here nor on a node"):
        ur.Stager(MISSING)


def test_a_model_that_only_a_node_has_is_planned_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists, plan_all, run = os.path.exists, ur._plan_all, cluster.run
    on, planned = [""], []  # the node that something runs on: "" is the program

    def is_there(path: str) -> bool:
        return exists(path) and (path != str(TINY) or on[-1] == "b")

    def noting(node: str, name: str, work: Callable[[], Any]) -> Any:
        on.append(node)
        try:
            return run(node, name, work)
        finally:
            on.pop()

    def planning(*arguments: Any) -> Any:
        planned.append(on[-1])
        return plan_all(*arguments)

    monkeypatch.setattr("unimem.ray.os.path.exists", is_there)
    monkeypatch.setattr(ur, "_plan_all", planning)
    monkeypatch.setattr(cluster, "run", noting)
    with stager(TINY) as made:
        assert planned == ["b"]
        assert sorted(zip((n.node_id for n in made.nodes), origins(made), strict=True)) == [
            ("a", "neighbour"),
            ("b", "file"),
            ("c", "neighbour"),
        ]


def test_paths_mean_the_same_in_processes_of_other_folders(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(TINY.parent)
    with stager("no.gguf", TINY.name) as made:
        monkeypatch.chdir(tmp_path)
        for actor in cluster.actors:
            assert actor.thing._source == (str(TINY.parent / "no.gguf"), str(TINY), False)
        assert origins(made) == ["store", "neighbour", "neighbour"]


def test_no_store_and_no_neighbour_names_both() -> None:
    with pytest.raises(FileNotFoundError, match="not on this node, and no store"):
        ur._Copy(ur._Source(MISSING, None), {}).bring_in([])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"labels": "zone"}, TypeError, "labels: expected a mapping"),
        ({"labels": {"zone": 1}}, TypeError, "labels: expected a string"),
        ({"store": 3}, TypeError, "store: expected the path"),
        ({"n_engines": 0}, ValueError, "n_engines"),
        ({"resume": "no"}, ValueError, "resume: expected False or True"),
        ({"ctx": -1}, ValueError, "ctx"),
        ({"kv_dtype": "int3"}, ValueError, "kv_dtype"),
        ({"pages": "3k"}, ValueError, "pages"),
        ({"model": "https://x/y.gguf", "store": "s"}, ValueError, "store: expected none"),
        ({"model": None}, TypeError, "model: expected the path"),
    ],
)
def test_arguments(
    cluster: Cluster, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ur.Stager(**{"model": TINY} | options)
    assert cluster.actors == []


def test_it_needs_ray_and_a_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.connected = False
    with pytest.raises(RuntimeError, match=r"ray\.init"):
        ur.Stager(TINY)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="extra 'ray'"):
        ur.Stager(TINY)


def test_errors_show_no_secret_of_a_url(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(OSError, match="cannot be reached") as e:
        ur.Stager("http://me:word@127.0.0.1:1/m.gguf?key=word", ctx=CTX)
    assert e.value.filename == "http://127.0.0.1:1/m.gguf"
    assert "word" not in str(e.value)


def test_a_stager_left_open_warns(cluster: Cluster) -> None:
    made = ur.Stager(TINY, ctx=CTX)
    with pytest.warns(ResourceWarning, match=r"unclosed Stager\(3 nodes"):
        made.__del__()
    made.close()
    made.__del__()
