"""A model staged once on each node of a Ray cluster, for all engines there (extra ``ray``).

Ray schedules, restarts and moves bytes; `um.plan` computes what fits; `um.stage` keeps the copy of
a node. This module combines them: docs/cluster.md.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.base.arguments import file_path, flag, integer, string
from unimem.base.closing import Closing
from unimem.base.install_hint import install_hint
from unimem.base.text import format_bytes
from unimem.errors import CapacityError, ClosedError, PlacementError
from unimem.planning.plan import plans_of
from unimem.planning.result import Plan
from unimem.planning.search import find_largest
from unimem.remote.client import Answer, Data, Server, is_url
from unimem.staging.stage import Stage, stage, stage_files
from unimem.system import policy
from unimem.system.doctor import doctor
from unimem.system.machine import MachineFacts
from unimem.system.placement import PlacementOptions
from unimem.weights.remote_files import open_remote

__all__ = ["NodePlan", "Stager"]

_NODE_ID = "ray.io/node-id"  # a label that Ray gives to every node
_MOST_ENGINES = 1 << 20
_MOST_ON_A_NODE = 4096  # the most sessions of a plan
_ROOMY = {"memory": 1 << 50}  # a machine that shortens no context
_PIECES_AT_ONCE = 4  # pieces of a file that a neighbour sends at once
_TRIES = 2  # per piece: other neighbours, and the store, have it, too
_NEIGHBOURS = 4  # neighbours to ask, since a list of all would be passed to all
_PIECE_S = 60.0  # timeout for a piece
_ANSWER_S = 2.0  # timeout for a neighbour to answer whether it has the model
_LOOK_S = 1.0  # interval of checks whether a node is alive, since Ray would wait for a dead one
_FACTS_S = 60.0  # timeout for the facts of a node
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node with a copy, and its plan, made before anything started.

    Attributes
    ----------
    node_id : str
        Ray's name of the node, in hexadecimal digits.
    address, labels : str, dict of str to str
        The node's.
    n_engines : int
        Engines that are placed there.
    plan : Plan
        The plan for one copy of the model and as many of the requested engines as fit there
        (`Plan.sessions`).
    origin : str
        The source of its copy: ``"file"``, ``"neighbour"`` or ``"store"``.
    """

    node_id: str
    address: str
    labels: dict[str, str]
    n_engines: int
    plan: Plan
    origin: str


class Stager(Closing):
    """A model staged once on each node of a Ray cluster that has room for it.

    Make it in a program that is connected to the cluster (``ray.init``). The constructor asks each
    node for its memory, plans, places the engines, and stages the model. A node takes the model
    from its own file system, else from a neighbour, else from `store`; the number of copies doubles
    in each round. The copies end with `close`, or with the program.

    It may be passed to tasks and actors, whose engines open `path`: the copy on their node. Any
    number of threads may use it; the program that made it closes it.

    Parameters
    ----------
    model : path-like
        The model's path on the nodes that have it; or a URL, which is then the `store`.
    store : path-like, optional
        The model for other nodes: a path that they can read, or a URL (extra ``remote``,
        docs/remote.md).
    labels : mapping of str to str, optional
        Labels that a node must have to be used.
    n_engines : int, default 1
        Engines to place.
    ctx : int, optional
        Tokens of context of an engine; by default the smaller of the model's and 4096.
    kv_dtype : str, default "f16"
        Type of an engine's KV cache, as for `plan`.
    resume : bool
        As for `stage`, with a URL: after an interruption a node keeps its part for the next
        `Stager`. By default nothing is left.
    **placement
        Placement of the copies, as for `stage`.

    Raises
    ------
    ImportError
        Ray, or the library for URLs, is not installed.
    RuntimeError
        The program is not connected to a cluster.
    CapacityError
        No node with these labels has room, or not for all engines; nothing was started.
    GGUFError, SafetensorsError, OSError
        The model cannot be used or found; no copy is left.
    ValueError, TypeError
        An argument is out of range.

    Attributes
    ----------
    nodes : tuple of NodePlan
        The nodes with a copy.
    engine_bytes : int
        Memory of an engine beside the copy.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        store: str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        n_engines: int = 1,
        ctx: int | None = None,
        kv_dtype: str = "f16",
        resume: bool = False,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        self._copies: dict[str, Any] = {}
        self._is_owner = True
        self.nodes: tuple[NodePlan, ...] = ()
        source = _Source.from_arguments(model, store, flag(resume, "resume"))
        wanted = _labels(labels)
        integer(n_engines, "n_engines", 1, _MOST_ENGINES)
        policy.check_options(placement)
        ray = _connected()
        found = _facts_of_nodes(ray, source, wanted)
        model_bytes, self.engine_bytes, plans = _plan_nodes(
            ray, source, found, _Engines(n_engines, ctx, kv_dtype)
        )
        rooms = [
            _Room(facts, plans[facts.node_id], model_bytes, self.engine_bytes) for facts in found
        ]
        shares = _place(n_engines, rooms)
        fitting = [facts for facts in found if facts.node_id in shares]
        try:
            origins = self._start(ray, source, fitting, model_bytes, placement)
            if any(n for node_id, n in shares.items() if node_id not in origins):
                shares = _place(n_engines, [r for r in rooms if r.facts.node_id in origins])
        except BaseException:
            self.close()
            raise
        self.nodes = tuple(
            NodePlan(
                one.node_id,
                one.address,
                one.labels,
                shares[one.node_id],
                plans[one.node_id],
                origins[one.node_id],
            )
            for one in fitting
            if one.node_id in origins
        )

    def _start(
        self,
        ray: Any,
        source: _Source,
        nodes: list[_NodeFacts],
        model_bytes: int,
        placement: PlacementOptions,
    ) -> dict[str, str]:
        """Stage on all nodes, and return the origin of each copy."""
        actor = ray.remote(_Copy)
        for node in nodes:
            self._copies[node.node_id] = actor.options(
                num_cpus=0,
                memory=model_bytes,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=2 * _PIECES_AT_ONCE,
                label_selector={_NODE_ID: node.node_id},
            ).remote(source, placement)
        origins: dict[str, str] = {}
        waiting = deque(node.node_id for node in nodes if not node.has_file)
        batch = [node.node_id for node in nodes if node.has_file] or _take(waiting, 1)
        while batch:
            having = [self._copies[node_id] for node_id in origins]
            # Each node with a copy serves one other.
            started = {
                node_id: self._copies[node_id].bring_in.remote(_some_from(having, i))
                for i, node_id in enumerate(batch)
            }
            for node_id, ref in started.items():
                try:
                    origins[node_id] = _answer(ray, ref, node_id)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError as error:  # its node is gone
                    ray.kill(self._copies.pop(node_id))
                    what = type(error).__name__
                    policy.warn(f"node {node_id} was lost while it was staged: {what}")
            batch = _take(waiting, max(1, len(origins)))
        return origins

    @property
    def path(self) -> str:
        """The path of the copy on this process's node; RuntimeError if it has none: see `nodes`."""
        if not self._copies:
            raise ClosedError("the Stager is closed: make another one")
        ray = _connected()
        node_id = ray.get_runtime_context().get_node_id()
        copy = self._copies.get(node_id)
        if copy is None:
            raise RuntimeError(
                f"node {node_id} has no copy of the model: expected one of "
                f"{', '.join(self._copies)}; actor_options() places engines there"
            )
        copies = list(self._copies.values())
        others = _some_from(copies, copies.index(copy) + 1)
        path: str = ray.get(copy.path.remote([other for other in others if other is not copy]))
        return path

    def actor_options(self) -> list[dict[str, Any]]:
        """Return Ray's options for each engine, for ``Engine.options(**options).remote(...)``.

        Each engine runs on its planned node. If the node fails, Ray restarts the engine on another
        node with a copy, once there is room, and repeats its tasks.

        Returns
        -------
        list of dict
            One for each of `n_engines`, with ``num_cpus=0``: tell the engine itself how many
            threads to use.
        """
        anywhere = {_NODE_ID: f"in({','.join(node.node_id for node in self.nodes)})"}
        return [
            {
                "num_cpus": 0,
                "memory": self.engine_bytes,
                "max_restarts": -1,
                "max_task_retries": -1,
                "label_selector": {_NODE_ID: node.node_id},
                "fallback_strategy": [{"label_selector": anywhere}],
            }
            for node in self.nodes
            for _ in range(node.n_engines)
        ]

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return not self._copies

    def close(self) -> None:
        """Give up the copies; engines keep what they have mapped. Closing twice is no error.

        In a process that it was passed to, this ends nothing.
        """
        copies, self._copies = self._copies, {}
        if not copies or not self._is_owner:
            return
        ray = _ray()
        if not ray.is_initialized():  # the copies ended with the connection
            return
        ray.wait(
            [copy.close.remote() for copy in copies.values()],
            num_returns=len(copies),
            timeout=_CLOSE_S,
        )
        for copy in copies.values():
            ray.kill(copy)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the Stager is closed: make another one")

    def __del__(self) -> None:
        if self._is_owner and not self.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_owner": False}

    def __repr__(self) -> str:
        if self.closed:
            return "Stager(closed)"
        n = sum(node.n_engines for node in self.nodes)
        return f"Stager({len(self.nodes)} nodes, {n} engines of {format_bytes(self.engine_bytes)})"


class _Source(NamedTuple):
    """The model's path on nodes that have it, and its path or URL for others."""

    path: str
    store: str | None
    resume: bool = False

    @classmethod
    def from_arguments(cls, model: Any, store: Any, resume: bool) -> _Source:
        """Check arguments, and make paths absolute, since processes of nodes have other folders."""
        path = file_path(model, "model")
        other = None if store is None else file_path(store, "store")
        if is_url(path):
            if other is not None:
                raise ValueError(
                    f"store: expected none beside a model that is a URL, got {other!r}"
                )
            path, other = "", path
        return cls(
            path and os.path.abspath(path),
            other if other is None or is_url(other) else os.path.abspath(other),
            resume,
        )

    @property
    def places(self) -> list[str]:
        """The path and the store, if given."""
        return [place for place in (self.path, self.store) if place]


class _NodeFacts(NamedTuple):
    """A node, the facts of its machine, and whether it has the model's file."""

    node_id: str
    address: str
    labels: dict[str, str]
    ray_bytes: int  # its memory by Ray's count
    machine: MachineFacts
    has_file: bool


class _Room(NamedTuple):
    """The room on a node, by its plan and by Ray's own figure."""

    facts: _NodeFacts
    plan: Plan
    model_bytes: int
    engine_bytes: int

    @property
    def n_engines(self) -> int:
        """Engines that fit beside a copy; -1 if the copy does not fit."""
        left = self.facts.ray_bytes - self.model_bytes
        if self.plan.verdict != "fits" or left < 0:
            return -1
        return min(self.plan.sessions, left // max(1, self.engine_bytes))

    @property
    def shortage(self) -> str:
        one = self.plan
        if self.n_engines > 0:
            return f"node {self.facts.node_id} has room for {self.n_engines}"
        if one.verdict != "fits":
            have, want = one.available_bytes, one.required_bytes
            whose = "of memory"
        else:
            have, want = self.facts.ray_bytes, self.model_bytes + self.engine_bytes
            whose = "by Ray's figure ('ray start --memory')"
        return (
            f"node {self.facts.node_id} has room for none: it has {format_bytes(have)} {whose}, a "
            f"copy and an engine take {format_bytes(want)}"
        )


class _Engines(NamedTuple):
    """The requested engines."""

    n: int
    ctx: int | None
    kv_dtype: str


class _Copy:
    """The keeper of a node's copy: an actor, which Ray restarts on the same node."""

    def __init__(self, source: _Source, placement: PlacementOptions) -> None:
        self._source, self._placement = source, placement
        self._lock = threading.Lock()
        self._stage: Stage | None = None
        self._fds: dict[str, int] = {}
        self._origin = ""

    def bring_in(self, neighbours: list[Any]) -> str:
        """Stage the model once, and return the origin of the copy."""
        with self._lock:
            if self._stage is None:
                made, origin = self._make(neighbours)
                paths = zip(made._names, made.paths, strict=True)
                self._fds = {name: os.open(at, os.O_RDONLY | os.O_CLOEXEC) for name, at in paths}
                self._stage, self._origin = made, origin
        return self._origin

    def _make(self, neighbours: list[Any]) -> tuple[Stage, str]:
        """Stage the model, and return it with its origin."""
        source = self._source
        if source.path and os.path.exists(source.path):
            return stage(source.path, **self._placement), "file"
        failed = []
        for neighbour in _having(neighbours):
            try:
                return _stage_from(neighbour, self._placement), "neighbour"
            except (OSError, _ray().exceptions.RayError) as error:
                if isinstance(error, PlacementError):
                    raise
                failed.append(f"a neighbour: {error}")
        if source.store is None:
            raise FileNotFoundError(
                errno.ENOENT,
                "; ".join(("the model is not on this node, and no store was given", *failed)),
                source.path,
            )
        return stage(source.store, resume=source.resume, **self._placement), "store"

    def path(self, neighbours: list[Any]) -> str:
        """Return the path of the copy, which a restarted process stages again."""
        self.bring_in(neighbours)
        assert self._stage is not None
        return self._stage.path

    def files(self) -> tuple[list[tuple[str, int]], str, str] | None:
        """Return names and sizes of the files, the name to open and the node; None without copy."""
        if self._stage is None:
            return None
        rows = zip(self._stage._names, self._stage._versions, strict=True)
        sizes = [(name, version[2]) for name, (_, version) in rows]
        return sizes, self._stage._first, _ray().get_runtime_context().get_node_id()

    def read(self, name: str, offset: int, nbytes: int) -> tuple[NDArray[np.uint8], bytes]:
        """Read a piece of a file, with its hash: TCP notices few errors."""
        piece = np.empty(nbytes, np.uint8)
        rest, at = piece.data, offset
        while rest:
            done = os.preadv(self._fds[name], [rest], at)
            if done == 0:
                raise OSError(errno.EIO, "the file ends early", name)
            rest, at = rest[done:], at + done
        return piece, xxhash.xxh3_128_digest(piece.data)

    def close(self) -> None:
        """Give up the copy."""
        with self._lock:
            made, self._stage = self._stage, None
            for fd in self._fds.values():
                os.close(fd)
            self._fds = {}
            if made is not None:
                made.close()


def _having(neighbours: list[Any]) -> Iterator[Any]:
    """Yield the neighbours that have the model now, in their order."""
    if not neighbours:
        return
    ray = _ray()
    asked = [neighbour.files.remote() for neighbour in neighbours]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
    for neighbour, ref in zip(neighbours, asked, strict=True):
        if ref in done:
            try:
                has_it = ray.get(ref) is not None
            except ray.exceptions.RayError:  # it has ended
                continue
            if has_it:
                yield neighbour


class _Bytes(Answer):
    """A range of a file from a neighbour."""

    def __init__(self, nbytes: int, tag: str, first: int, data: NDArray[np.uint8]) -> None:
        super().__init__(nbytes, tag, first + data.nbytes)
        self._data = data.data

    def read(self, n: int) -> Data:
        found, self._data = self._data[:n], self._data[n:]
        return found

    def close(self) -> None:
        self._data = self._data[:0]


class _Neighbour(Server):
    """The copy of a neighbour, as files of a server."""

    def __init__(self, neighbour: Any, files: list[tuple[str, int]], tag: str) -> None:
        super().__init__(_PIECE_S)
        self._neighbour, self._sizes, self._tag = neighbour, dict(files), tag

    def _get(self, path: str, first: int, end: int) -> Answer:
        name = path.rpartition("/")[2]
        if name not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, "the neighbour has no such file", path)
        nbytes = self._sizes[name]
        wanted = min(end, nbytes) - first
        piece, digest = _ray().get(
            self._neighbour.read.remote(name, first, wanted), timeout=_PIECE_S
        )
        if xxhash.xxh3_128_digest(piece.data) != digest:
            raise OSError(errno.EIO, "Bytes were changed on their way", path)
        return _Bytes(nbytes, self._tag, first, piece)


def _stage_from(neighbour: Any, placement: PlacementOptions) -> Stage:
    """Stage the copy of a neighbour; Ray sends its bytes."""
    files, first, node_id = _ray().get(neighbour.files.remote(), timeout=_PIECE_S)
    url = f"ray://{node_id}/{first}"
    server = _Neighbour(neighbour, files, node_id)
    with open_remote(url, _TRIES, server) as model:
        model.data_tries, model.data_threads = _TRIES, _PIECES_AT_ONCE
        return stage_files(model, url, **placement)


# ---- nodes, and what fits there ----


def _facts_of_nodes(ray: Any, source: _Source, labels: dict[str, str]) -> list[_NodeFacts]:
    """Ask each node with these labels for its facts."""
    asked = {}
    task = ray.remote(_look)
    for node in ray.nodes():
        own = node.get("Labels") or {}
        if node["Alive"] and labels.items() <= own.items():
            selector = {_NODE_ID: node["NodeID"]}
            ref = task.options(num_cpus=0, label_selector=selector).remote(source.path)
            memory = int(node["Resources"].get("memory", 0))
            asked[ref] = (node["NodeID"], node["NodeManagerAddress"], own, memory)
    if not asked:
        raise CapacityError(f"labels: no node of the cluster has {labels}")
    ray.wait(list(asked), num_returns=len(asked), timeout=_FACTS_S)
    found = []
    for ref, node in asked.items():
        try:
            found.append(_NodeFacts(*node, *ray.get(ref, timeout=0)))
        except (ray.exceptions.RayError, TimeoutError):
            policy.warn(f"node {node[0]} at {node[1]} does not answer, and is left out")
    if not found:
        raise CapacityError("no node of the cluster answers")
    return found


def _look(path: str) -> tuple[MachineFacts, bool]:
    """Return the facts of this node, and whether it has the model's file."""
    return doctor(), bool(path) and os.path.exists(path)


def _plan_nodes(
    ray: Any, source: _Source, found: list[_NodeFacts], engines: _Engines
) -> tuple[int, int, dict[str, Plan]]:
    """Plan in a process that can read the model's header: here, or on a node with its file."""
    machines = {facts.node_id: facts.machine for facts in found}
    for place in source.places:
        if is_url(place) or os.path.exists(place):
            return _plan_all(place, machines, engines)
    for facts in found:
        if facts.has_file:
            task = ray.remote(_plan_all).options(
                num_cpus=0, label_selector={_NODE_ID: facts.node_id}
            )
            try:
                answer: tuple[int, int, dict[str, Plan]] = ray.get(
                    task.remote(source.path, machines, engines)
                )
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            return answer
    raise FileNotFoundError(
        errno.ENOENT, "the model is neither here nor on a node", " or ".join(source.places)
    )


def _plan_all(
    place: str, machines: Mapping[str, MachineFacts], engines: _Engines
) -> tuple[int, int, dict[str, Plan]]:
    """Return the bytes of a copy, the bytes of an engine, and the plan of each machine.

    A copy is planned as copied weights, and engines as sessions over them.
    """
    options: dict[str, Any] = {"kv_dtype": engines.kv_dtype, "load": "copy"}
    with plans_of(place) as plan:
        options["ctx"] = plan(_ROOMY, **{"ctx": engines.ctx} | options).ctx
        one, two = (plan(_ROOMY, sessions=n, **options).required_bytes for n in (1, 2))

        def planned(machine: MachineFacts) -> Plan:
            def of(n: int) -> Plan:
                return plan(machine, sessions=n, **options)

            n = find_largest(min(engines.n, _MOST_ON_A_NODE), lambda n: of(n).verdict == "fits")
            return of(max(1, n))

        plans = {node_id: planned(machine) for node_id, machine in machines.items()}
    return 2 * one - two, two - one, plans


def _place(n_engines: int, rooms: list[_Room]) -> dict[str, int]:
    """Spread engines over the nodes with a copy, by their free room; raise CapacityError if full.

    Nodes without engines, but with a copy, have 0.
    """
    room = {one.facts.node_id: one.n_engines for one in rooms if one.n_engines >= 0}
    if sum(room.values()) < n_engines:
        raise CapacityError(
            f"the cluster has room for {sum(room.values())} of {n_engines} engines: "
            + "; ".join(one.shortage for one in rooms),
            sum(room.values()),
            0,
            n_engines,
        )
    shares = dict.fromkeys(room, 0)
    heap = [(-n, 0, node_id) for node_id, n in room.items()]
    heapq.heapify(heap)
    for _ in range(n_engines):
        left, share, node_id = heap[0]
        shares[node_id] = share + 1
        heapq.heapreplace(heap, (left + 1, share + 1, node_id))
    return shares


def _answer(ray: Any, ref: Any, node_id: str) -> Any:
    """Wait for an answer; raise RayError if the node dies.

    Ray itself would wait for another node with its label, to restart the actor.
    """
    while not ray.wait([ref], num_returns=1, timeout=_LOOK_S)[0]:
        if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id):
            raise ray.exceptions.RayActorError
    return ray.get(ref)


def _some_from(copies: list[Any], i: int) -> list[Any]:
    """Return some of the copies, from an index on."""
    return (copies[i:] + copies[:i])[:_NEIGHBOURS]


def _take(waiting: deque[str], n: int) -> list[str]:
    return [waiting.popleft() for _ in range(min(n, len(waiting)))]


def _labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    if labels is not None and not isinstance(labels, Mapping):
        raise TypeError(f"labels: expected a mapping of str to str, got {labels!r:.60}")
    return {string(k, "labels"): string(v, "labels") for k, v in (labels or {}).items()}


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"unimem.ray needs Ray: {install_hint('ray')}; importing it said: {error}"
        ) from error
    return ray


def _connected() -> Any:
    ray = _ray()
    if not ray.is_initialized():
        raise RuntimeError("expected a program that is connected to a cluster: ray.init(...) first")
    return ray
