"""Memory on several nodes: how fast each place is read and computed with, and what asking costs.

verify() checks where pages lie before anything is measured, and the facts keep the result: a policy
that the kernel did not follow says nothing about its speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import unimem as um
from unimem.system import limits
from unimem_bench import decoding, models, plain, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, NotMeasured, Suite

SUITE = Suite("numa", "Which memory nodes should memory lie on?")

KIND: models.Kind = "q8_0"
HUGE_PAGE = 2 << 20
NBYTES, QUICK_NBYTES = 1 << 30, 64 << 20
ASKED_NBYTES = 256 << 20
INTERLEAVE = "interleave"
LOCAL = "C, touched there"


@SUITE.case("asking", "What does it cost to ask for a node?", unit="ms")
def asking(measure: Measure) -> None:
    """Make, warm and close a block, bound to the first node and without a policy.

    The limit is C that touches one byte a huge page.
    """
    cpus = measure.pin(None)
    node = next(iter(memory_nodes(at_least=1)))
    nbytes = QUICK_NBYTES if measure.quick else ASKED_NBYTES

    def block(numa: str | None) -> float:
        states.ready(nbytes, cpus)
        start = time.perf_counter()
        with um.Block(nbytes, pages="thp", numa=numa, strict=True, warm=len(cpus)):
            pass
        return (time.perf_counter() - start) * 1e3

    def touch() -> float:
        states.ready(nbytes, cpus)
        return plain.touch(nbytes, HUGE_PAGE, "thp", cpus) * 1e3

    bound = f"bind:{node}"
    with placed(nbytes, bound):
        pass  # it is possible
    ours = {bound: partial(block, bound), "no policy": partial(block, None)}
    limits = {"C, a byte a huge page": touch}
    measure.compare(ours, limits=limits, rounds=21, quick_rounds=5)


@SUITE.case("one-node", "How fast do a node's CPUs read memory of each node?", unit="GB/s")
def one_node(measure: Measure) -> None:
    """Read from the CPUs of one node memory of that node, of each other node, and interleaved.

    The limit is memory that these CPUs touched first, without a policy.
    """
    nodes, allowed = memory_nodes(at_least=2), measure.pin(None)
    home, cpus = next(
        (number, cpus)
        for number, node in nodes.items()
        if (cpus := [cpu for cpu in allowed if cpu in node.cpus])
    )
    measure.cpus = cpus
    measure.fact("cpus of node", home)
    others = [f"bind:{number}" for number in nodes if number != home]
    read(measure, [f"bind:{home}", *others, INTERLEAVE])


@SUITE.case("all-nodes", "How fast do the CPUs of all nodes together read memory?", unit="GB/s")
def all_nodes(measure: Measure) -> None:
    """Read from all CPUs memory that is interleaved, and of one node.

    The limit is memory that the same CPUs touched first, each its part.
    """
    nodes = memory_nodes(at_least=2)
    measure.pin(None)
    read(measure, [INTERLEAVE, *(f"bind:{number}" for number in nodes)])


@SUITE.case("decode", "How fast are tokens made under each policy?", unit="tokens/s")
def decode(measure: Measure) -> None:
    """Make 8 tokens at a time, with weights, KV cache and scratch memory under a policy.

    The limit is C that reads interleaved weights.
    """
    first = next(iter(memory_nodes(at_least=2)))
    cpus = measure.pin(None)
    path = decoding.model(measure, KIND)
    policies = {INTERLEAVE: INTERLEAVE, f"bind:{first}": f"bind:{first}", "no policy": None}
    decoding.require_room(len(policies) + 1, path)
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(
                DecoderProcess(path, threads=len(cpus), ctx=decoding.N_CTX, load="copy", numa=numa)
            )
            for name, numa in policies.items()
        }
        measure.fact("nodes", {name: nodes_of(side) for name, side in sides.items()})
        for side in sides.values():
            side.prefill(decoding.PROMPT)
        weights = stack.enter_context(um.open_weights(path, load="copy", numa=INTERLEAVE))
        ours = {name: partial(side.decode, decoding.N_DECODE) for name, side in sides.items()}
        limits = {decoding.READ_BANDWIDTH: decoding.reading(weights, cpus)}
        decoding.compare(measure, sides, ours, limits=limits, rounds=21, quick_rounds=5)


def read(measure: Measure, policies: Sequence[str]) -> None:
    """Read a block under each policy, one at a time."""
    nbytes = QUICK_NBYTES if measure.quick else NBYTES
    if nbytes * (len(policies) + 1) > states.available_bytes():
        raise NotMeasured(f"wants {len(policies) + 1} blocks of {nbytes >> 20} MiB")

    def gb_s(block: um.Block) -> float:
        seconds, _ = plain.scan([(block.address, block.nbytes)], measure.cpus)
        return block.nbytes / seconds / 1e9

    with ExitStack() as stack:
        ours: dict[str, Side] = {}
        nodes = {}
        for policy in policies:
            block = stack.enter_context(placed(nbytes, policy))
            nodes[policy] = {str(node): n for node, n in block.verify().nodes.items()}
            ours[policy] = partial(gb_s, block)
        measure.fact("nodes", nodes)
        touched = stack.enter_context(um.Block(nbytes, pages="thp"))
        plain.fill_by_threads(touched.address, nbytes, 1, measure.cpus)
        beside = {LOCAL: partial(gb_s, touched)}
        measure.compare(ours=ours, limits=beside, rounds=31, quick_rounds=7)


@contextmanager
def placed(nbytes: int, policy: str) -> Iterator[um.Block]:
    """Yield a block that lies on the nodes of its policy, written once, and nowhere else."""
    with um.Block(nbytes, pages="thp", numa=policy, strict=True, warm=True) as block:
        wanted = set(memory_nodes(at_least=1))
        if policy != INTERLEAVE:
            wanted = {int(policy.removeprefix("bind:"))}
        found = block.verify().nodes
        if set(found) != wanted:
            raise AssertionError(f"asked for {policy}, memory is on nodes {sorted(found)}")
        yield block


def memory_nodes(*, at_least: int) -> dict[int, limits.Node]:
    """Return the nodes that this process may allocate on; NotMeasured if fewer than `at_least`."""
    nodes = {
        number: node for number, node in limits.nodes().items() if node.total_bytes and node.allowed
    }
    if len(nodes) < at_least:
        raise NotMeasured("wants two memory nodes, this machine has one")
    return nodes


def nodes_of(process: DecoderProcess) -> dict[str, int]:
    """Sum up the memory of a decoder on each node."""
    nodes: dict[str, int] = {}
    for part in process.facts["granted"].values():
        for node, nbytes in part["nodes"].items():
            nodes[node] = nodes.get(node, 0) + nbytes
    return nodes
