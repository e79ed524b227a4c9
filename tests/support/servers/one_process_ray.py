"""The parts of Ray's interface that `unimem.ray` uses, over objects of one process.

tests/test_ray_cluster.py uses the real Ray.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable
from typing import Any

NODE_ID = "ray.io/node-id"


class RayError(Exception): ...


class RayActorError(RayError): ...


class ActorUnschedulableError(RayError):
    """Ray's error for an actor whose node has died."""


class GetTimeoutError(RayError, TimeoutError): ...


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Ref:
    """The result of a call."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.hangs = False


class OneProcessRay(types.ModuleType):
    """A cluster; `here` is the node that code of this thread runs on."""

    exceptions = types.SimpleNamespace(
        RayError=RayError, RayActorError=RayActorError, RayTaskError=RayTaskError
    )

    def __init__(self, nodes: dict[str, dict[str, str]]) -> None:
        super().__init__("ray")
        self._thread = threading.local()
        self.labels, self.connected = nodes, True
        self.dead: set[str] = set()
        self.actors: list[Actor] = []
        self.before: Callable[[str, str], None] = lambda _node, _method: None
        self.hanging: set[tuple[str, str]] = set()  # nodes and methods that never answer
        self.memory = dict.fromkeys(nodes, 1 << 40)

    @property
    def here(self) -> str:
        return getattr(self._thread, "here", next(iter(self.labels)))

    @here.setter
    def here(self, node: str) -> None:
        self._thread.here = node

    def is_initialized(self) -> bool:
        return self.connected

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": name not in self.dead,
                "NodeManagerAddress": f"10.0.0.{i}",
                "Labels": {NODE_ID: name, **own},
                "Resources": {"memory": float(self.memory[name])},
            }
            for i, (name, own) in enumerate(self.labels.items())
        ]

    def remote(self, thing: Any) -> Remote:
        return Remote(self, thing, {})

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if ref.hangs:
            assert timeout is not None, "it would wait for ever"
            raise GetTimeoutError
        if ref.error is not None:
            raise ref.error
        return ref.value

    def wait(
        self, refs: list[Ref], num_returns: int, timeout: float | None
    ) -> tuple[list[Ref], list[Ref]]:
        assert num_returns == len(refs)
        return [ref for ref in refs if not ref.hangs], [ref for ref in refs if ref.hangs]

    def kill(self, actor: Actor) -> None:
        actor.killed = True

    def get_runtime_context(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(get_node_id=lambda: self.here)

    def run(self, node: str, name: str, work: Callable[[], Any]) -> Ref:
        """Run something on a node."""
        was, self.here = self.here, node
        try:
            self.before(node, name)
            if (node, name) in self.hanging:
                ref = Ref()
                ref.hangs = True
                return ref
            if node in self.dead:
                return Ref(error=ActorUnschedulableError(f"node {node} is gone"))
            return Ref(work())
        except RayError as error:
            return Ref(error=error)
        except Exception as error:
            return Ref(error=RayTaskError(error))
        finally:
            self.here = was


class Remote:
    """A function or a class with options."""

    def __init__(self, ray: OneProcessRay, thing: Any, options: dict[str, Any]) -> None:
        self._ray, self._thing, self._options = ray, thing, options

    def options(self, **options: Any) -> Remote:
        return Remote(self._ray, self._thing, options)

    def remote(self, *arguments: Any) -> Any:
        node = self._options["label_selector"][NODE_ID]
        if isinstance(self._thing, type):
            actor = Actor(self._ray, node, self._options, self._thing(*copy.deepcopy(arguments)))
            self._ray.actors.append(actor)
            return actor
        return self._ray.run(node, self._thing.__name__, lambda: self._thing(*arguments))


class Actor:
    """An object that lives on a node."""

    def __init__(self, ray: OneProcessRay, node: str, options: dict[str, Any], thing: Any) -> None:
        self.ray, self.node, self.options, self.thing = ray, node, options, thing
        self.killed = False

    def __getattr__(self, name: str) -> types.SimpleNamespace:
        def call(*arguments: Any) -> Ref:
            return self.ray.run(self.node, name, lambda: getattr(self.thing, name)(*arguments))

        return types.SimpleNamespace(remote=call)
