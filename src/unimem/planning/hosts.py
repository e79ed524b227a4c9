"""The hosts of a plan: this machine, a cgroup of it, or a described machine.

A host has the functions of the module `unimem.system.limits`, which is itself the host for this
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from unimem.base import kernel_files
from unimem.base.arguments import integer
from unimem.base.kernel_files import parse_list
from unimem.base.text import format_bytes, format_count, parse_bytes
from unimem.system import cgroups, limits
from unimem.system.limits import HugePool, Limit, Node
from unimem.system.machine import MachineFacts
from unimem.system.policy import HUGETLB, MAX_NODES
from unimem.system.pressure import Pressure, memory_pressure

_KEYS = ("memory", "cpus", "pools", "nodes")
_EXAMPLE = "{'memory': '16G', 'cpus': 8, 'pools': {'2m': 4096}, 'nodes': 2}"
_PAGE_BYTES = {"2m": 2 << 20, "1g": 1 << 30}
_MOST_BYTES = 1 << 56  # a CPU's addresses
_MOST_CPUS = 8192  # of a kernel for x86-64
_NEAR, _FAR = 10, 20  # distances, as firmware gives them for two sockets


class Host(Protocol):
    """The limits of a process on a machine; the functions are those of `limits`."""

    def memory_limits(self) -> tuple[Limit, ...]:
        """Return every limit on memory."""

    def huge_pools(self) -> Mapping[str, HugePool]:
        """Return the pools of hugetlb pages, by size."""

    def nodes(self) -> Mapping[int, Node]:
        """Return the NUMA nodes."""

    def node_weights(self, nodes: Iterable[int]) -> Mapping[int, int]:
        """Return the weights of nodes for weighted interleaving."""

    def memlock(self) -> Limit | None:
        """Return the limit on locked memory."""

    def thread_count(self) -> int:
        """Return how many threads can compute at the same time."""


def pressures_on(host: Host) -> tuple[Pressure, ...]:
    """Return the memory pressure on a process there; a machine elsewhere has none.

    In another cgroup of this machine it is that of the machine.
    """
    if isinstance(host, DescribedHost):
        return ()
    found = memory_pressure()
    return found if host is limits else tuple(one for one in found if one.source == "machine")


def find_host(machine: object) -> Host:
    """Return the host that a user means.

    Parameters
    ----------
    machine : None, Machine, mapping, str or path-like
        None: this machine. The result of `unimem.doctor`, here or elsewhere. Figures: ``"memory"``
        (bytes, or a text such as ``"16G"``), and optionally ``"cpus"`` (physical cores, 1),
        ``"pools"`` (pages of hugetlb pools by their size, none), ``"nodes"`` (NUMA nodes that share
        all this evenly, 1). The folder of a cgroup, of version 1 or 2.

    Raises
    ------
    TypeError, ValueError
        The value is of another type, or a figure is out of range.
    """
    if machine is None:
        return limits
    if isinstance(machine, MachineFacts):
        return DescribedHost.from_machine(machine)
    if isinstance(machine, Mapping):
        return DescribedHost.from_figures(machine)
    if isinstance(machine, (str, os.PathLike)):
        try:
            return CgroupHost(os.fsdecode(machine))
        except ValueError as error:
            raise ValueError(f"machine: {error}") from None
    raise TypeError(
        f"machine: expected the result of unimem.doctor(), figures such as {_EXAMPLE}, or the "
        f"folder of a cgroup, got {type(machine).__name__}"
    )


@dataclass(frozen=True, slots=True)
class DescribedHost:
    """A machine with known figures. Immutable.

    Attributes
    ----------
    memory : tuple of Limit
        Every limit on memory.
    pools, numa_nodes : mapping
        Pools of hugetlb pages by size, and nodes by number.
    threads : int
        Physical cores that a process may use.
    locked : Limit or None
        The limit on locked memory.
    weights : mapping of int to int
        Weights of nodes for weighted interleaving, if not 1.
    """

    memory: tuple[Limit, ...]
    pools: Mapping[str, HugePool]
    numa_nodes: Mapping[int, Node]
    threads: int
    locked: Limit | None = None
    weights: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_machine(cls, machine: MachineFacts) -> DescribedHost:
        """Take the figures of a process on a machine from `unimem.doctor`."""
        return cls(
            machine.memory.limits,
            machine.pools,
            machine.numa.nodes,
            machine.cpu.usable_cores,
            machine.memory.memlock,
            machine.numa.weights,
        )

    @classmethod
    def from_figures(cls, figures: Mapping[Any, Any]) -> DescribedHost:
        """Describe an otherwise idle machine; see `find_host`."""
        for name in figures:
            if name not in _KEYS:
                raise ValueError(
                    f"machine: expected {', '.join(map(repr, _KEYS))}, as in {_EXAMPLE}, "
                    f"got {name!r}"
                )
        if "memory" not in figures:
            raise ValueError(f"machine: expected its 'memory', as in {_EXAMPLE}")
        memory = _size(figures["memory"])
        n_nodes = _figure("nodes", figures.get("nodes", 1), 1, MAX_NODES)
        cpus = _figure("cpus", figures.get("cpus", 1), 1, _MOST_CPUS)
        pages = _pool_pages(figures.get("pools", {}), memory)
        shares = {size: _share_out(n, n_nodes) for size, n in pages.items()}
        pools = {
            size: HugePool(_PAGE_BYTES[size], n, n, 0, 0, dict(enumerate((k, k) for k in each)))
            for (size, n), each in zip(pages.items(), shares.values(), strict=True)
        }
        nodes, first = {}, 0
        for number, (nbytes, n_cpus) in enumerate(
            zip(_share_out(memory, n_nodes), _share_out(cpus, n_nodes), strict=True)
        ):
            reserved = sum(shares[size][number] * _PAGE_BYTES[size] for size in pages)
            free = max(0, nbytes - reserved)
            distances = tuple(_NEAR if n == number else _FAR for n in range(n_nodes))
            own = tuple(range(first, first + n_cpus))
            nodes[number] = Node(number, nbytes, free, free, own, distances, True)
            first += n_cpus
        used = sum(n * _PAGE_BYTES[size] for size, n in pages.items())
        limit = Limit("memory of the machine", memory, used, "take less, or a larger machine")
        return cls((limit,), pools, nodes, cpus)

    def __str__(self) -> str:
        pools = [f"{size}={pool.total}" for size, pool in self.pools.items() if pool.total]
        return ", ".join(
            [
                f"another one: {format_bytes(self.memory[0].limit_bytes)}",
                format_count(self.threads, "core"),
                format_count(len(self.numa_nodes), "node"),
                *([f"pool {', '.join(pools)}"] if pools else []),
            ]
        )

    def memory_limits(self) -> tuple[Limit, ...]:
        """Return every limit on memory."""
        return self.memory

    def huge_pools(self) -> Mapping[str, HugePool]:
        """Return the pools of hugetlb pages, by size."""
        return self.pools

    def nodes(self) -> Mapping[int, Node]:
        """Return the NUMA nodes."""
        return self.numa_nodes

    def node_weights(self, nodes: Iterable[int]) -> Mapping[int, int]:
        """Return the weights of nodes for weighted interleaving."""
        return {node: self.weights.get(node, 1) for node in nodes}

    def memlock(self) -> Limit | None:
        """Return the limit on locked memory."""
        return self.locked

    def thread_count(self) -> int:
        """Return how many threads can compute at the same time."""
        return self.threads


class CgroupHost:
    """A cgroup of this machine, for a process that is started there.

    Any number of threads may use it. Such a process may lock as much as this one.

    Parameters
    ----------
    folder : str
        The folder of the cgroup's files.

    Raises
    ------
    ValueError
        It is not a cgroup.
    """

    def __init__(self, folder: str) -> None:
        cgroups.locate(folder)
        self._folder = folder

    def __str__(self) -> str:
        return f"this one, in cgroup {self._folder}"

    def memory_limits(self) -> tuple[Limit, ...]:
        """Return every limit on memory."""
        return limits.memory_limits(cgroup=self._folder)

    def huge_pools(self) -> Mapping[str, HugePool]:
        """Return the pools of hugetlb pages, by size."""
        return limits.huge_pools(self._folder)

    def nodes(self) -> Mapping[int, Node]:
        """Return the NUMA nodes."""
        found = limits.nodes()
        allowed = self._listed("cpuset.effective_mems", "cpuset.mems.effective")
        if allowed is None:
            return found
        return {n: replace(node, allowed=n in allowed) for n, node in found.items()}

    def node_weights(self, nodes: Iterable[int]) -> Mapping[int, int]:
        """Return the weights of nodes for weighted interleaving."""
        return limits.node_weights(nodes)

    def memlock(self) -> Limit | None:
        """Return the limit on locked memory."""
        return limits.memlock()

    def thread_count(self) -> int:
        """Return how many threads can compute at the same time."""
        cpus = self._listed("cpuset.effective_cpus", "cpuset.cpus.effective")
        return limits.thread_count(cpus, self._folder)

    def _listed(self, v1: str, v2: str) -> tuple[int, ...] | None:
        """Read a list of the nearest cgroup that has one; None without any."""
        for cgroup in cgroups.cgroups_above("cpuset", folder=self._folder):
            text = kernel_files.read_text(cgroup.path(v1, v2))
            if text:
                return parse_list(text)
        return None


def _size(value: Any) -> int:
    expected = "memory: expected bytes, or a size such as '16G' or '512M'"
    try:
        nbytes = parse_bytes(value) if isinstance(value, str) else integer(value)
    except (TypeError, ValueError):
        raise ValueError(f"{expected}, got {value!r:.60}") from None
    if not 1 <= nbytes <= _MOST_BYTES:
        raise ValueError(f"{expected}, at least 1 and at most 64 PiB, got {value!r:.60}")
    return nbytes


def _figure(name: str, value: Any, least: int, most: int) -> int:
    try:
        n = integer(value)
    except TypeError:
        n = least - 1
    if not least <= n <= most:
        raise ValueError(f"{name}: expected an integer from {least} to {most}, got {value!r:.60}")
    return n


def _pool_pages(pools: object, memory: int) -> dict[str, int]:
    """Check the pools of a machine; their pages are part of its memory."""
    if not isinstance(pools, Mapping):
        raise ValueError(f"pools: expected pages by size, as in {{'2m': 4096}}, got {pools!r:.60}")
    pages = {}
    for size, n in pools.items():
        if size not in HUGETLB:
            raise ValueError(f"pools: expected pages of '2m' or '1g', got {size!r:.60}")
        pages[size] = _figure(f"pools: {size}", n, 0, _MOST_BYTES // _PAGE_BYTES[size])
    nbytes = sum(n * _PAGE_BYTES[size] for size, n in pages.items())
    if nbytes > memory:
        raise ValueError(
            f"pools: expected at most the memory, {format_bytes(memory)}, got "
            f"{format_bytes(nbytes)} of hugetlb pages"
        )
    return pages


def _share_out(total: int, n: int) -> list[int]:
    """Share evenly; the first ones get the remainder."""
    return [total // n + (i < total % n) for i in range(n)]
