"""Tokens while memory is short: how neighbours slow a process that decodes, by its load mode.

A cgroup has just enough room for the model, the process and its neighbours, which read files, write
files, allocate and free, and compute, in the same cgroup and on the other CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem.base import kernel_files
from unimem_bench import decoding, states, timed
from unimem_bench.cgroup import entering, limited_cgroup
from unimem_bench.llama_build import NoPeer
from unimem_bench.models import Kind
from unimem_bench.suite import Measure, NotMeasured, Suite, at_most
from unimem_bench.timed import TimedProcess, TimedProcessError

SUITE = Suite("pressure", "How steady are tokens while memory is short?")

KIND: Kind = "q4_k_m"
COPIED, STAGED, REPACKED = "unimem, copied", "unimem, staged", "unimem, repacked"
EXEC = "llama.cpp, unimem exec --stage"
STEADY = (COPIED, STAGED, REPACKED, EXEC)
QUIET, PRESSED = "quiet", "pressed"
NEIGHBOUR_BYTES = 96 << 20  # of room for all of them
# Quiet and pressed in turn, so that a slowdown of the machine affects both.
N_ROUNDS, N_TOKENS, MOST_S = 4, 250, 15.0
N_QUICK_ROUNDS, N_QUICK_TOKENS, QUICK_MOST_S = 2, 50, 5.0
SETTLE_S = 1.0  # in which neighbours fill the room
FIGURES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9, "worst": 100.0}

# A neighbour is a small interpreter, without site packages; its argument is a file or a folder.
NEIGHBOURS = {
    "reads files": """
while True:
    with open(sys.argv[1], "rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
""",
    "writes files": """
path = sys.argv[2] + "/written"
while True:
    with open(path, "wb", buffering=0) as file:
        for _ in range(16):
            file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    os.remove(path)
""",
    "allocates and frees": """
while True:
    taken = bytearray(24 << 20)
    taken[::4096] = bytes(len(taken) // 4096)
    del taken
""",
    "computes": """
while True:
    pass
""",
}


@dataclass(frozen=True, slots=True)
class Way:
    """How one process loads the model."""

    kind: str  # the library
    options: Mapping[str, Any]  # as `unimem_bench.timed_side` takes them
    is_staged: bool = False
    is_exec: bool = False


WAYS: dict[str, Way] = {
    "unimem": Way("unimem", {"load": "auto"}),
    COPIED: Way("unimem", {"load": "copy"}),
    REPACKED: Way("unimem", {"load": "repack"}),
    STAGED: Way("unimem", {"load": "auto"}, is_staged=True),
    "unimem, locked": Way("unimem", {"load": "map", "lock": True}),
    "unimem, mapped": Way("unimem", {"load": "map"}),
    "llama.cpp": Way("llama.cpp", {}),
    "llama.cpp, mapped": Way("llama.cpp", {"repack": False, "load_mode": "mmap"}),
    "llama.cpp, read": Way("llama.cpp", {"repack": False, "load_mode": "none"}),
    "llama.cpp, locked": Way("llama.cpp", {"repack": False, "load_mode": "mmap+mlock"}),
    EXEC: Way("llama.cpp", {"repack": False, "load_mode": "mmap"}, is_exec=True),
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """The times of tokens in ms, and the page faults among them that read from the disk."""

    ms: list[float]
    major_faults: int

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.ms + other.ms, self.major_faults + other.major_faults)

    def figure(self, percent: float) -> float:
        """Return a percentile."""
        return float(np.percentile(self.ms, percent))


@dataclass(slots=True)
class Found:
    """The measurements by way, the reasons why others are missing, and the facts."""

    tokens: dict[str, dict[str, Tokens]]
    left_out: dict[str, str]
    facts: dict[str, Any]


# All cases share the same tokens, measured once in a process.
_found: dict[tuple[Path, bool], Found] = {}


def find(measure: Measure) -> Found:
    """Measure each way, quiet and pressed, once; record what was left out."""
    key = (measure.folder, measure.quick)
    if key not in _found:
        _found[key] = _measure_all(measure)
    found = _found[key]
    for name, why in found.left_out.items():
        measure.leave_out(name, why)
    return found


def _measure_all(measure: Measure) -> Found:
    path = decoding.model(measure, KIND)
    decoding.require_room(3, path)
    cpus = measure.pin(None)  # it decodes on the first, and the neighbours have the rest
    found = Found({}, {}, {"neighbours": list(NEIGHBOURS)})
    limits: dict[str, int] = {}  # by library, since each needs memory beside the model
    loads = {}
    for name, way in WAYS.items():
        why = _missing(measure, way)
        if why:
            found.left_out[name] = why
            continue
        try:
            if way.kind not in limits:
                limits[way.kind] = path.stat().st_size + _own_bytes(way.kind, path, cpus)
                noise = _noise_file(measure.folder, 2 * limits[way.kind])
            limit = limits[way.kind] + NEIGHBOUR_BYTES
            loads[name], found.tokens[name] = _measure(measure, way, path, noise, limit, cpus)
        except (NotMeasured, TimedProcessError) as error:
            found.left_out[name] = str(error)
    found.facts["cgroup_bytes"] = {kind: n + NEIGHBOUR_BYTES for kind, n in limits.items()}
    found.facts["load"] = loads
    found.facts["figures_ms"] = {
        name: {
            phase: {label: round(tokens.figure(p), 2) for label, p in FIGURES.items()}
            | {"tokens": len(tokens.ms), "major_faults": tokens.major_faults}
            for phase, tokens in both.items()
        }
        for name, both in found.tokens.items()
    }
    return found


def _missing(measure: Measure, way: Way) -> str:
    """Say what a way needs that is not there."""
    try:
        if way.kind == "llama.cpp":
            decoding.llama_cpp(measure)
    except NoPeer as reason:
        return str(reason)
    return ""


def _noise_file(folder: Path, nbytes: int) -> Path:
    """Make the file that neighbours read: larger than the cgroup, so that it never stays."""
    path = folder / "neighbour.bin"
    if not path.exists() or path.stat().st_size < nbytes:
        states.require_room(disk=nbytes + (1 << 30), folder=folder)
        with path.open("wb", buffering=0) as file:
            for _ in range(-(-nbytes // (1 << 20))):
                file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    return path


def _own_bytes(kind: str, path: Path, cpus: Sequence[int]) -> int:
    """Return the memory of a process that maps the model: Python, KV cache and scratch."""
    with (
        limited_cgroup(3 * path.stat().st_size + (1 << 30)) as group,
        _side(group, WAYS[f"{kind}, mapped"], str(path), cpus[:1]) as side,
    ):
        side.tokens(1, MOST_S)
        fields = kernel_files.read_fields(f"{group}/memory.stat", " ")
        return int(fields.get("total_rss", fields.get("anon", "0")))


def _measure(
    measure: Measure, way: Way, path: Path, noise: Path, limit: int, cpus: Sequence[int]
) -> tuple[str, dict[str, Tokens]]:
    rounds, n, seconds = N_ROUNDS, N_TOKENS, MOST_S
    if measure.quick:
        rounds, n, seconds = N_QUICK_ROUNDS, N_QUICK_TOKENS, QUICK_MOST_S
    for file in (path, noise):
        states.drop(file)  # pages are charged to the cgroup that loaded them
    with ExitStack() as stack:
        model = str(path)
        if way.is_staged:
            try:
                model = stack.enter_context(um.stage(path)).path
            except (um.CapacityError, um.PlacementError) as error:
                raise NotMeasured(f"wants a staged model: {error}") from None
            states.drop(path)
        group = stack.enter_context(limited_cgroup(limit))
        if way.is_exec:  # its staged model stays, with the process in the cgroup that keeps it
            drop = [*timed.UNIMEM, "stage", "--drop", str(path)]
            stack.callback(subprocess.run, drop, capture_output=True, check=False)
        side = stack.enter_context(_side(group, way, model, cpus[:1]))
        quiet, pressed = Tokens([], 0), Tokens([], 0)
        for _ in range(rounds):
            quiet += Tokens(**side.tokens(n, seconds))
            with _neighbours(group, noise, measure.folder, cpus[1:] or cpus):
                time.sleep(SETTLE_S)
                pressed += Tokens(**side.tokens(n, seconds))
        load = side.facts["load"]
    return load, {QUIET: quiet, PRESSED: pressed}


@contextmanager
def _side(group: Path, way: Way, model: str, cpus: Sequence[int]) -> Iterator[TimedProcess]:
    """Start a process that decodes, on its CPU."""
    words = timed.command(way.kind, model, way.options)
    if way.is_exec:
        words = [*timed.UNIMEM, "exec", "--stage", "--", *words]
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)  # which it inherits
    try:
        process = TimedProcess(entering(group, words), {"OMP_NUM_THREADS": "1"})
    finally:
        os.sched_setaffinity(0, own)
    with process:
        yield process


@contextmanager
def _neighbours(group: Path, noise: Path, folder: Path, cpus: Sequence[int]) -> Iterator[None]:
    own = os.sched_getaffinity(0)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="written-", dir=folder))
        os.sched_setaffinity(0, cpus)
        try:
            for script in NEIGHBOURS.values():
                python = [sys.executable, "-S", "-E", "-c", f"import os, sys\n{script}"]
                command = entering(group, [*python, str(noise), scratch])
                process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
                stack.callback(process.wait)
                stack.callback(process.kill)
        finally:
            os.sched_setaffinity(0, own)
        yield


def _role(name: str) -> Any:
    return "unimem" if WAYS[name].kind == "unimem" or WAYS[name].is_exec else "peer"


@SUITE.case(
    "token",
    "What does a token take in a cgroup that has just room for the model: alone there, and beside "
    "neighbours that read, write, allocate and compute?",
    unit="ms",
)
def token_times(measure: Measure) -> None:
    """Record the time of each token. A side that was killed is left out."""
    for name, value in find(measure).facts.items():
        measure.fact(name, value)
    for name, both in find(measure).tokens.items():
        for phase, tokens in both.items():
            kept = [float(f"{ms:.5g}") for ms in tokens.ms]
            measure.count(f"{name}, {phase}", kept, _role(name))


@SUITE.case(
    "p99.9",
    "How many times as long as alone does one token of a thousand take beside neighbours?",
    unit="times",
    targets=[at_most(1.3, issue=19, side=name) for name in STEADY],
)
def slowest_tokens(measure: Measure) -> None:
    """Divide the 99.9th percentiles."""
    for name, both in find(measure).tokens.items():
        ratio = both[PRESSED].figure(99.9) / both[QUIET].figure(99.9)
        measure.count(name, [ratio], _role(name))


@SUITE.case(
    "mean",
    "How many times as long as alone does a token take beside neighbours, on average?",
    unit="times",
    # A mean speed of 0.97 of what it is alone.
    targets=[at_most(1.031, issue=19, side=name) for name in STEADY],
)
def mean_tokens(measure: Measure) -> None:
    """Divide the means."""
    for name, both in find(measure).tokens.items():
        ratio = float(np.mean(both[PRESSED].ms) / np.mean(both[QUIET].ms))
        measure.count(name, [ratio], _role(name))


@SUITE.case(
    "major-faults",
    "How many page faults of a token read from the disk, beside neighbours?",
    unit="faults",
)
def major_faults(measure: Measure) -> None:
    """Divide the process's major faults by its tokens."""
    for name, both in find(measure).tokens.items():
        pressed = both[PRESSED]
        measure.count(name, [pressed.major_faults / len(pressed.ms)], _role(name))
