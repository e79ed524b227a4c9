"""Models larger than memory: tokens while weights are streamed from the disk, beside llama.cpp.

Each side is a process in a cgroup of its own, which has room for what always stays, for the
process, and for a share of the weights that are read when they are needed. Each has a copy of the
file, since pages of one file are charged to the cgroup that reads them first. How far the kernel
reads ahead decides about mapped files, so it is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np

import unimem as um
from unimem._core.pieces import Pieces
from unimem.base import kernel_files
from unimem.system.disk_speed import measure_speed
from unimem_bench import decoding, files, policies, states, timed
from unimem_bench.cgroup import entering, limited_cgroup
from unimem_bench.llama_build import NoPeer
from unimem_bench.mixtures import Mixture, Routing, write_mixture
from unimem_bench.models import write_model
from unimem_bench.policies import POLICIES, Belady, Trace, miss_share
from unimem_bench.read_ahead import read_ahead
from unimem_bench.rounds import Side, stopwatch
from unimem_bench.suite import (
    Measure,
    NotMeasured,
    Suite,
    at_most,
    costs,
    faster,
    faster_than_best,
)
from unimem_bench.timed import TimedProcess, TimedProcessError
from unimem_bench.timed_side import PROMPT
from unimem_bench.trained_mixture import TRAINED, trained_mixture

SUITE = Suite("stream", "How fast is a model that is larger than memory?", in_quick=False)

STREAMED, MAPPED = "unimem, streamed", "unimem, mapped"
LLAMA, LAZY = "llama.cpp, mapped", "llama.cpp, mapped, lazy"
COPIED = "unimem, copied"
LIMIT = "computing, and the disk's best for what is missing"
ROOMS = (35, 50, 65, 80)  # percent of the weights that are streamed
# KiB that the kernel reads ahead, and what that is in words.
AHEADS = {"own": None, "128k": 128}
AHEAD_WORDS = {"own": "the disk's own read-ahead", "128k": "a read-ahead of 128 KiB"}
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
N_CTX, N_PREFILL = 1024, 512
# A measurement of decode, and how long it may take: mapped files need seconds for a token.
N_TOKENS, N_WARM, MOST_S, MOST_WARM_S = 24, 96, 4.0, 15.0
N_QUICK_TOKENS, N_QUICK_WARM, QUICK_MOST_S = 6, 24, 2.0
MOST_PREFILL_S = 120.0
SPARE_BYTES = 48 << 20  # of a cgroup, for page tables and the pages of libraries
DENSE, DENSE_ROOM = "1.1b", 70
N_COUNTED = 75  # tokens whose different experts are counted
N_TRACE = 400
PIECE_BYTES = 512  # of a piece that only counts


@dataclass(frozen=True, slots=True)
class StreamWay:
    """How a process has its weights."""

    kind: str  # the library
    options: Mapping[str, Any]  # as `unimem_bench.timed_side` takes them


_MMAP = {"repack": False, "load_mode": "mmap"}
WAYS = {
    STREAMED: StreamWay("unimem", {"load": "stream"}),
    MAPPED: StreamWay("unimem", {"load": "map"}),
    LLAMA: StreamWay("llama.cpp", {**_MMAP, "lazy": "off"}),
    LAZY: StreamWay("llama.cpp", {**_MMAP, "lazy": "on"}),
}
PEERS = (LLAMA, LAZY)


@dataclass(frozen=True, slots=True)
class StreamWork:
    """A model with too little room, and what is measured."""

    model: Callable[[Measure], Mixture]
    room: int  # percent
    ahead: int | None  # KiB
    batch: int = 1  # tokens that are computed at once


@dataclass(slots=True)
class Asked:
    """One side's process, and its next tokens."""

    process: TimedProcess
    work: StreamWork
    mixture: Mixture
    quick: bool
    at: int = 0
    counts: dict[str, float] = field(default_factory=dict)  # of the last measurement, by token

    def measure(self) -> float:
        """Compute the next tokens; ms for a token, or for a batch."""
        n = N_QUICK_TOKENS if self.quick else N_TOKENS
        seconds = QUICK_MOST_S if self.quick else MOST_S
        return self._compute(*((1, MOST_PREFILL_S) if self.work.batch > 1 else (n, seconds)))

    def warm(self) -> None:
        """Compute tokens until memory is as full as it gets."""
        n = N_QUICK_WARM if self.quick else N_WARM
        self._compute(*((1, MOST_PREFILL_S) if self.work.batch > 1 else (n, MOST_WARM_S)))

    def _compute(self, n: int, seconds: float) -> float:
        size = self.work.batch
        tokens = np.resize(np.roll(self.mixture.tokens, -self.at), n * size)
        self.at += n * size
        batches = [[int(each) for each in batch] for batch in tokens.reshape(n, size)]
        answer = self.process.batches(batches, seconds)
        n_done = len(answer["ms"])
        self.counts = {name: count / n_done for name, count in answer["counts"].items()}
        self.counts["major_faults"] = answer["major_faults"] / n_done
        return float(np.mean(answer["ms"]))


def mixture(measure: Measure, routing: Routing) -> Mixture:
    """Return the mixture of a case, and record it."""
    found = write_mixture(measure.folder, routing, quick=measure.quick)
    measure.fact("model", found.path.stem)
    measure.fact("file_bytes", found.path.stat().st_size)
    return found


def dense(measure: Measure) -> Mixture:
    """Return a model without experts, all of whose layers are streamed."""
    shape = decoding.QUICK_SHAPE if measure.quick else DENSE
    path = write_model(measure.folder, shape, "q8_0")
    with um.open_weights(path, load="map") as weights:
        layers = [tensor.nbytes for name, tensor in weights.tensors.items() if "blk." in name]
    measure.fact("model", path.stem)
    measure.fact("file_bytes", path.stat().st_size)
    tokens = np.random.default_rng(4).integers(300, 1000, 1 << 14)
    return Mixture(path, tokens, sum(layers))


def run(measure: Measure, work: StreamWork) -> None:
    """Measure all sides in their cgroups, alternately, and the limit beside them."""
    cpus = measure.pin(None)
    found = work.model(measure)
    size = found.path.stat().st_size
    states.require_room(memory=len(WAYS) * size, disk=len(WAYS) * size, folder=measure.folder)
    with ExitStack() as stack:
        ahead = stack.enter_context(read_ahead(measure.folder, work.ahead))
        measure.fact("read_ahead_kib", ahead)
        sides: dict[str, Asked] = {}
        for name, way in WAYS.items():
            try:
                process = stack.enter_context(_limited(measure, name, way, work, found, len(cpus)))
                sides[name] = Asked(process, work, found, measure.quick)
                sides[name].warm()
            except (NoPeer, TimedProcessError) as reason:
                sides.pop(name, None)
                measure.leave_out(name, str(reason))
                if name == STREAMED:
                    raise NotMeasured(f"streaming ends: {reason}") from None
        # A disk of a host is faster where it was read before, so the very file is measured.
        speed = measure_speed(_copy(found.path, STREAMED)).bytes_per_second
        measure.fact("disk_bytes_per_s", speed)
        whole = stack.enter_context(_start(COPIED, found.path, {"load": "copy"}, len(cpus)))
        all_fits = Asked(whole, work, found, measure.quick)

        def limit() -> float:
            read_bytes = sides[STREAMED].counts.get("read_bytes", 0.0)
            return all_fits.measure() + read_bytes / speed * 1e3

        measured: dict[str, Side] = {name: side.measure for name, side in sides.items()}
        measure.compare(
            {name: side for name, side in measured.items() if name not in PEERS},
            {name: side for name, side in measured.items() if name in PEERS},
            {LIMIT: limit},
            rounds=3 if work.batch > 1 else 5,
            quick_rounds=3,
            warmup=1,
            pids=[side.process.pid for side in (*sides.values(), all_fits)],
        )
        for name, side in sides.items():
            counts = {key: round(count, 2) for key, count in side.counts.items()}
            measure.fact(name, {"load": side.process.facts["load"], "a_token": counts})


@contextmanager
def _limited(
    measure: Measure, name: str, way: StreamWay, work: StreamWork, found: Mixture, n_threads: int
) -> Iterator[TimedProcess]:
    """Start a side in a cgroup with too little room, with its own copy of the model."""
    streamed = found.expert_bytes * work.room // 100
    budget = found.path.stat().st_size - found.expert_bytes + streamed
    options = dict(way.options)
    if options.get("load") == "stream":
        options["budget"] = budget
    own_bytes = _own_bytes(name, found.path, work.batch, n_threads)
    limit = budget + own_bytes + SPARE_BYTES
    measure.fact(f"{name}: cgroup_bytes", limit)
    copy = _copy(found.path, name)
    states.drop(copy)  # pages are charged to the cgroup that reads them
    with limited_cgroup(limit) as group, _start(name, copy, options, n_threads, group) as side:
        yield side


def _copy(path: Path, name: str) -> Path:
    """Return a side's copy of a model, and remove the one that it had of another model."""
    label = "".join(letter for letter in name if letter.isalnum())
    copy = path.with_name(f"copy-{label}-{path.name}")
    for other in path.parent.glob(f"copy-{label}-*"):
        if other != copy:
            other.unlink()
    return files.made_once(copy, lambda unfinished: shutil.copyfile(path, unfinished))


@cache
def _own_bytes(name: str, path: Path, batch: int, n_threads: int) -> int:
    """Return the memory of a side's process beside the weights: Python, KV cache and scratch."""
    options, size, weights = dict(WAYS[name].options), path.stat().st_size, 0
    if name == STREAMED:
        options["budget"] = weights = size
    with (
        limited_cgroup(3 * size + (1 << 30)) as group,
        _start(WAYS[name].kind, path, options, n_threads, group) as side,
    ):
        side.batches([[300] * batch], MOST_PREFILL_S)
        fields = kernel_files.read_fields(f"{group}/memory.stat", " ")
        return int(fields.get("total_rss", fields.get("anon", "0"))) - weights


def _start(
    name: str, path: Path, options: Mapping[str, Any], n_threads: int, group: Path | None = None
) -> TimedProcess:
    """Start a process that decodes, on the CPUs of this one, in a cgroup or not."""
    kind = "llama.cpp" if name.startswith("llama.cpp") else "unimem"
    words = timed.command(kind, path, {**options, "threads": n_threads, "ctx": N_CTX})
    bound = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": str(n_threads)}
    return TimedProcess(words if group is None else entering(group, words), bound)


def all_fits(measure: Measure) -> None:
    """Decode with a budget for everything, beside weights that were copied."""
    cpus = measure.pin(None)
    found = mixture(measure, "uniform")
    states.require_room(memory=3 * found.path.stat().st_size)
    work = StreamWork(partial(mixture, routing="uniform"), 100, None)
    ways: dict[str, dict[str, Any]] = {
        STREAMED: {"load": "stream", "budget": found.path.stat().st_size + SPARE_BYTES},
        COPIED: {"load": "copy"},
    }
    with ExitStack() as stack:
        sides = {}
        for name, options in ways.items():
            process = stack.enter_context(_start(name, found.path, options, len(cpus)))
            sides[name] = Asked(process, work, found, measure.quick)
            sides[name].warm()
            measure.fact(name, process.facts["load"])
        measure.compare(
            {name: side.measure for name, side in sides.items()},
            rounds=25,
            quick_rounds=5,
            pids=[side.process.pid for side in sides.values()],
        )
        measure.fact("misses_a_token", sides[STREAMED].counts["misses"])


def distinct_experts(measure: Measure, routing: Routing) -> None:
    """Count the experts that a layer uses in 75 tokens, in both libraries."""
    cpus = measure.pin(None)
    found = mixture(measure, routing)
    whole = {"load": "stream", "budget": found.path.stat().st_size + SPARE_BYTES}
    # A piece that was read stays, so that the misses are the different ones.
    n = _counted(STREAMED, found, whole, "misses", len(cpus))
    measure.count(STREAMED, [n / TRAINED.layers])
    try:
        seeing = {**WAYS[LLAMA].options, "sees_experts": True}
        n = _counted(LLAMA, found, seeing, "experts", len(cpus))
    except (NoPeer, TimedProcessError) as reason:
        measure.leave_out(LLAMA, str(reason))
    else:
        measure.count(LLAMA, [n / TRAINED.layers], "peer")


def _counted(
    name: str, found: Mixture, options: Mapping[str, Any], count: str, n_threads: int
) -> int:
    """Compute the prompt and more tokens, and return one of the counts of all of them."""
    tokens = found.tokens[: N_COUNTED - len(PROMPT)]
    with _start(name, found.path, options, n_threads) as side:
        counts = side.batches([[int(token)] for token in tokens], MOST_PREFILL_S)["counts"]
        return int(side.facts["counts"][count] + counts[count])


def hit(measure: Measure) -> None:
    """Ask for 8 pieces that are there, as one layer does."""
    n, n_used = 64, 8
    with TinyPieces(measure.folder, n, n) as pieces:
        holder = pieces.holder
        many = np.arange(n, dtype=np.int32)
        holder.ensure(many)
        names = {"ensure": holder.ensure, "few": many[:n_used], "many": many}
        few, whole = (stopwatch(f"ensure({ids})", 2000, names) for ids in ("few", "many"))
        # Of two calls the difference, so that Python's call is not counted.
        side = {"unimem": lambda: max(whole() - few(), 0.0) / (n - n_used)}
        measure.compare(side, rounds=21)


def misses(measure: Measure, trace: Callable[[Measure], Trace], room: int) -> None:
    """Count what the policies lack, ours with a file of tiny pieces."""
    calls = trace(measure)
    n_pieces = 1 + max(map(max, calls))
    n_slots = n_pieces * room // 100
    with TinyPieces(measure.folder, n_pieces, n_slots) as ours:
        measure.count("unimem", [100 * miss_share(ours, calls)])
    for name, policy in POLICIES.items():
        measure.count(name, [100 * miss_share(policy(n_slots, calls), calls)], "peer")
    measure.count("Belady", [100 * miss_share(Belady(n_slots, calls), calls)], "limit")


class TinyPieces:
    """A cache of `n` tiny pieces, experts of layers, as a `Policy`."""

    def __init__(self, folder: Path, n: int, n_slots: int) -> None:
        path = folder / "tiny-pieces.bin"
        path.write_bytes(os.urandom(PIECE_BYTES * n))
        with path.open("rb") as file:
            self.pieces = Pieces(
                [(file.fileno(), str(path))],
                [(PIECE_BYTES,)],
                [(0, [(0, PIECE_BYTES * i)]) for i in range(n)],
                slots=[n_slots],
                groups=[i // policies.N_EXPERTS for i in range(n)],
            )
        self.holder = self.pieces.holder()
        self._n_misses = 0

    def call(self, ids: Sequence[int]) -> int:
        """As `Policy.call`."""
        before = self._n_misses
        self.holder.ensure(ids)
        self._n_misses = self.pieces.stat()["misses"]
        return self._n_misses - before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.holder.close()
        self.pieces.close()


def recorded_trace(measure: Measure) -> Trace:
    """Return the routing of the small mixture on a text that it did not learn."""
    found = trained_mixture(measure.folder, quick=measure.quick)
    return policies.as_trace(found["experts"][: 2 * N_TRACE], TRAINED.experts)


TRACES: dict[str, Callable[[Measure], Trace]] = {
    "uniform": lambda measure: policies.uniform_trace(N_TRACE),
    "skewed": lambda measure: policies.skewed_trace(N_TRACE),
    "recorded": recorded_trace,
}


def declare(routing: Routing, ahead: str, room: int) -> None:
    """Declare decode with a mixture; at half of the room, prefill as well."""
    factor = 1.0 if room != 50 or routing != "uniform" else 1.6 if ahead == "128k" else 10.0
    words = f"{AHEAD_WORDS[ahead]}, {routing} routing, room for {room} % of the experts"
    model = partial(mixture, routing=routing)
    SUITE.case(
        f"decode-{routing}-{ahead}-{room}",
        f"What does a token take with {words}?",
        unit="ms",
        targets=[faster(peer, factor, issue=43, side=STREAMED) for peer in PEERS]
        + [costs(LIMIT, 1.25, issue=43, side=STREAMED)],
        in_quick=routing != "trained" and room == 50,
    )(partial(run, work=StreamWork(model, room, AHEADS[ahead])))
    if room == 50:
        SUITE.case(
            f"prefill-{routing}-{ahead}-{room}",
            f"What do 512 tokens take at once with {words}?",
            unit="ms",
            targets=[faster(peer, 2.0, issue=43, side=STREAMED) for peer in PEERS],
            in_quick=routing == "uniform",
        )(partial(run, work=StreamWork(model, room, AHEADS[ahead], batch=N_PREFILL)))


def declare_dense(ahead: str) -> None:
    """Declare decode with a model without experts."""
    SUITE.case(
        f"dense-{ahead}-{DENSE_ROOM}",
        f"What does a token of a model without experts take with {AHEAD_WORDS[ahead]}, room for "
        f"{DENSE_ROOM} % of its layers?",
        unit="ms",
        targets=[faster(peer, 2.0, issue=43, side=STREAMED) for peer in PEERS]
        + [costs(LIMIT, 1.25, issue=43, side=STREAMED)],
    )(partial(run, work=StreamWork(dense, DENSE_ROOM, AHEADS[ahead])))


def declare_misses(name: str, room: int) -> None:
    """Declare the misses of a trace."""
    best = faster_than_best(1 / 1.1, issue=43)
    SUITE.case(
        f"misses-{name}-{room}",
        f"Which share of the experts has to be read with {name} routing and room for {room} %?",
        unit="% of the uses",
        targets=[at_most(1.02 * (100 - room), issue=43) if name == "uniform" else best],
        in_quick=name != "recorded",
    )(partial(misses, trace=TRACES[name], room=room))


for _ahead in AHEADS:
    for _routing in ROUTINGS:
        for _room in ROOMS:
            declare(_routing, _ahead, _room)
    declare_dense(_ahead)
SUITE.case(
    "all-fits",
    "What does a token take if all experts have a place?",
    unit="ms",
    targets=[faster(COPIED, 0.97, issue=43, side=STREAMED)],
)(all_fits)
for _routing in ROUTINGS:
    SUITE.case(
        f"distinct-{_routing}",
        f"How many of a layer's 64 experts are used in {N_COUNTED} tokens with {_routing} routing?",
        unit="experts",
        in_quick=_routing != "trained",
    )(partial(distinct_experts, routing=_routing))
SUITE.case(
    "hit",
    "What does a piece cost that is there already?",
    unit="ns",
    targets=[at_most(100, issue=43)],
)(hit)
for _name in TRACES:
    for _room in ROOMS:
        declare_misses(_name, _room)
