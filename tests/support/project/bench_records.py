"""Invented records of `unimem bench` with every kind of case and plausible figures."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from unimem_bench import stats
from unimem_bench.record import BEST, CaseRecord, Record, Role, SideRecord, SuiteRecord, Target

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# The role of each side, and the figure that its rounds vary around.
Levels = Mapping[str, tuple[Role, float]]
# The role of each side, and its figure as a function of the size.
Laws = Mapping[str, tuple[Role, Callable[[float], float]]]

MACHINE: dict[str, Any] = json.loads("""{
"schema": "unimem.doctor/1",
"kernel": {"release": "6.18.44", "version": [6, 18], "architecture": "x86_64"},
"cpu": {
    "model": "AMD EPYC", "sockets": 1, "cores": 2, "threads": 2, "allowed_cores": 2,
    "allowed_threads": 2, "usable_cores": 2, "quota": null, "governors": {},
    "features": ["ssse3", "avx", "f16c", "fma", "avx2", "avx512f", "avx512_vnni"]},
"memory": {
    "total_bytes": 25276510208, "available_bytes": 24692387840, "page_bytes": 4096, "limits": [],
    "memlock": null, "overcommit_mode": 0, "swap_total_bytes": 0, "swap_free_bytes": 0,
    "swappiness": 60, "max_map_count": 65530},
"thp": {
    "page_bytes": 2097152, "enabled": "madvise", "defrag": "madvise", "shmem_enabled": "never",
    "khugepaged_defrag": true, "shm_mount": "never", "is_disabled_for_process": false, "sizes": []},
"pools": {},
"numa": {
    "nodes": {"0": {
        "id": 0, "total_bytes": 25276510208, "free_bytes": 24392663040,
        "available_bytes": 24692387840, "cpus": [0, 1], "distances": [10], "allowed": true}},
    "weights": {"0": 1}, "balancing": 0, "zone_reclaim_mode": 0, "cpuset_path": null},
"capabilities": {"has_ipc_lock": true, "has_sys_nice": true, "has_seccomp_filter": false},
"findings": []
}""")

VERSIONS = {
    "python": "3.11.7",
    "kernel": "6.18.44",
    "unimem-llm": "0.1.0",
    "numpy": "2.4.6",
    "torch": "2.13.0+cpu",
    "ggml-python": "0.0.45",
    "gguf": "0.19.0",
}


class Rounds(NamedTuple):
    """The number of a side's figures, and their noise."""

    n_passes: int = 2
    n_rounds: int = 17
    noise: float = 0.04
    seed: int = 0


USUAL, USUAL_OF_SCALING = Rounds(), Rounds(n_rounds=9)
EXACTLY_ONE = Rounds(1, 1, 0.0)


def levels(
    ours: float | Mapping[str, float],
    peers: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
) -> Levels:
    """Return levels by role; a number for `ours` is that of ``unimem``."""
    named = ours if isinstance(ours, Mapping) else {"unimem": ours}
    found: dict[str, tuple[Role, float]] = {name: ("unimem", at) for name, at in named.items()}
    found |= {name: ("peer", at) for name, at in (peers or {}).items()}
    return found | {name: ("limit", at) for name, at in (limits or {}).items()}


def case(
    name: str, question: str, unit: str, levels: Levels, rounds: Rounds = USUAL, **rest: Any
) -> CaseRecord:
    """Make a case ``suite/name`` around these levels; a slow round is slow for all sides."""
    rng = _generator(name, rounds)
    slow = rng.lognormal(0, 0.1, rounds[:2])
    sides = [
        SideRecord(side, role, _figures(rng, level * slow, rounds))
        for side, (role, level) in levels.items()
    ]
    return CaseRecord(*_named(name), question, unit, sides=sides, **rest)


def scaling_case(
    name: str,
    question: str,
    units: tuple[str, str],
    sizes: Sequence[float],
    laws: Laws,
    rounds: Rounds = USUAL_OF_SCALING,
    **rest: Any,
) -> CaseRecord:
    """Make a case with an x axis; `units` are those of its figures and of its sizes."""
    rng = _generator(name, rounds)
    sides = []
    for size in sizes:
        slow = rng.lognormal(0, 0.1, rounds[:2])
        sides += [
            SideRecord(side, role, _figures(rng, law(size) * slow, rounds), at=size)
            for side, (role, law) in laws.items()
        ]
    return CaseRecord(*_named(name), question, *units, sides=sides, **rest)


def counted_case(
    name: str, question: str, unit: str, values: Mapping[str, Sequence[float]], **rest: Any
) -> CaseRecord:
    """Make a case of counted figures, which do not vary; the first side is unimem's."""
    sides: list[SideRecord] = []
    for side, figures in values.items():
        sides.append(SideRecord(side, "peer" if sides else "unimem", [list(map(float, figures))]))
    return CaseRecord(*_named(name), question, unit, sides=sides, **rest)


def failed_case(name: str, question: str, unit: str, failed: str, **rest: Any) -> CaseRecord:
    """Make a case that was not measured, or that failed with an error."""
    return CaseRecord(*_named(name), question, unit, failed=failed, **rest)


def _named(name: str) -> tuple[str, str]:
    suite, _, own = name.partition("/")
    return suite, own


def _generator(name: str, rounds: Rounds) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), rounds.seed])


def _figures(rng: np.random.Generator, levels: Any, rounds: Rounds) -> list[list[float]]:
    drawn = levels * rng.lognormal(0, rounds.noise, levels.shape)
    return [[float(f"{x:.6g}") for x in row] for row in drawn]


def faster(other: str, limit: float, issue: int, side: str = "unimem") -> Target:
    return Target("speed", side, other, True, limit, issue)


def costs(other: str, limit: float, issue: int) -> Target:
    return Target("cost", "unimem", other, False, limit, issue)


def at_most(limit: float, issue: int, side: str = "unimem") -> Target:
    return Target("figure", side, None, False, limit, issue)


def grows(limit: float, issue: int = 8) -> Target:
    return Target("exponent", "unimem", None, False, limit, issue)


def record(*suites: SuiteRecord, quick: bool = False) -> Record:
    seconds = sum(suite.seconds for suite in suites)
    return Record("2026-11-22T05:00:00+00:00", quick, seconds, MACHINE, VERSIONS, list(suites))


def suite(name: str, question: str, *cases: CaseRecord, seconds: float = 12.5) -> SuiteRecord:
    n_passes = max((len(side.passes) for case in cases for side in case.sides), default=1)
    conditions = [{"load_avg_1min": 0.2, "cpu_freq": "1=2600 MHz"} for _ in range(n_passes)]
    return SuiteRecord(name, question, n_passes, seconds, list(cases), conditions)


def remember_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the interval of the same figures only once."""
    monkeypatch.setattr(stats, "_interval", _interval)


@functools.cache
def _drawn(passes: tuple[bytes, ...]) -> stats.Ratio:
    return _INTERVAL([np.frombuffer(each) for each in passes])


def _interval(passes: Sequence[NDArray[np.float64]]) -> stats.Ratio:
    return _drawn(tuple(np.asarray(each, np.float64).tobytes() for each in passes))


_INTERVAL = stats._interval


def sample_record(seed: int = 0, quick: bool = False) -> Record:
    """Make a run with every kind of case and target; the seed varies the figures.

    Targets are met, missed, within noise, or not measured. A peer is missing, figures scale with
    sizes and threads, some are counted, and in one case nothing differs.
    """
    rounds = Rounds(n_rounds=5 if quick else 17, seed=seed)
    scaled = USUAL_OF_SCALING._replace(seed=seed)
    sizes = [float(16 * KIB * 8**i) for i in range(7)]
    take = case(
        "calls/take", "What does an uninitialised array of 16 KiB cost?", "ns",
        levels(46, {"np.empty": 111, "np.zeros": 250, "torch.empty": 637}, {"an empty call": 17.5}),
        rounds, targets=[faster("np.empty", 2.0, 2), faster("torch.empty", 10.0, 2)],
        rounds_dropped=3, facts={"bytes": 16 * KIB},
    )  # fmt: skip
    append = case(
        "calls/append", "What does one token of 2 KiB of K and 2 KiB of V cost?", "ns",
        levels(152, {"keys[i] = k": 311}, {"C memcpy": 61}), rounds._replace(noise=0.06),
        targets=[faster("keys[i] = k", 2.0, 4), costs("C memcpy", 2.0, 4)],
        left_out={"torch": "torch is not installed"},
    )  # fmt: skip
    ledger = case(
        "accounting/take", "What does the ledger add to a take?", "ns",
        levels(46.1, {"without the ledger": 45.9}), rounds,
        targets=[costs("without the ledger", 1.0, 7)], rounds_disturbed=2,
    )  # fmt: skip
    header = case(
        "gguf/open", "How long until 400 tensors and 150 thousand tokens are known?", "ms",
        levels(2.4, {"gguf-py": 7082, "ggml": 29.6}, {"reading the bytes": 1.3}), rounds,
        targets=[faster("ggml", 5.0, 3), costs("reading the bytes", 2.0, 3)],
    )  # fmt: skip
    graphs = counted_case(
        "buffers/graphs", "How large are the engine's own graphs?", "x the lower bound",
        {"unimem": [1, 1, 1, 1.01], "largest first": [1, 1, 1.13, 1.13]},
        targets=[at_most(1.02, 5)],
    )  # fmt: skip
    takes = scaling_case(
        "scaling/take", "Does a take cost more in a larger tape?", ("ns", "bytes of the tape"),
        sizes, {"unimem": ("unimem", lambda _: 46), "np.empty": ("peer", lambda n: 90 + n**0.25)},
        scaled, targets=[grows(0.05)],
    )  # fmt: skip
    gather = scaling_case(
        "scaling/gather", "How does gathering grow with the sequence?", ("us", "tokens"),
        [64.0 * 4**i for i in range(6)],
        {"unimem": ("unimem", lambda n: 1.1 + 0.033 * n),
         "C memcpy": ("limit", lambda n: 0.2 + 0.031 * n)},
        targets=[grows(1.05)],
    )  # fmt: skip
    verify = scaling_case(
        "scaling/verify", "How does looking at a block grow with its size?",
        ("ms", "bytes of the block"), sizes[2:], {"unimem": ("unimem", lambda n: 0.02 + n / 30e9)},
        targets=[grows(0.5)],
    )  # fmt: skip
    thp = case(
        "first-touch/thp", "How fast is a block of 2 GiB in huge pages warmed by one thread?",
        "GB/s", levels(24.1, {"np.empty and fill": 15.4}, {"C, a byte a page": 24.6}), rounds,
        targets=[faster("C, a byte a page", 0.95, 2), faster("np.empty and fill", 1.3, 2)],
    )  # fmt: skip
    threads = scaling_case(
        "first-touch/threads", "How does warming scale with threads?", ("GB/s", "threads"),
        [1.0, 2.0, 4.0, 8.0],
        {"unimem": ("unimem", lambda n: 24 * n**0.9),
         "C, a byte a page": ("limit", lambda n: 24.6 * n**0.91)},
        scaled,
    )  # fmt: skip
    hot = case(
        "load/hot", "How fast is a file of 4 GB in the page cache mapped and read once?", "GB/s",
        levels(38.1, {"np.memmap": 32.8, "safetensors load_file": 2.4}, {"C mmap": 38.4}),
        rounds._replace(noise=0.07), targets=[faster("C mmap", 0.97, 6), faster(BEST, 1.0, 6)],
    )  # fmt: skip
    cold = failed_case(
        "load/cold", "How fast does a file come from the disk?", "GB/s",
        "wants to drop files from the page cache, and /proc/sys/vm/drop_caches is read-only",
        targets=[faster("C O_DIRECT", 0.95, 6)],
    )  # fmt: skip
    staged = failed_case(
        "load/staged", "How fast does llama.cpp start from staged memory?", "ms",
        "RuntimeError: llama.cpp ended with status 1: unable to load the model",
        targets=[faster("the file", 2.0, 6, side="unimem, staged")], is_error=True,
    )  # fmt: skip
    conversion = case(
        "kv/float32-to-float16", "What does appending 1 MB of float32 to a cache of float16 cost?",
        "us", levels(31.2, {"keys[i] = k": 790, "torch": 30.6},
                     {"C memcpy of the float32 to memory of its size": 26.0}),
        rounds._replace(noise=0.08), targets=[faster("keys[i] = k", 10.0, 4)],
    )  # fmt: skip
    restore = case(
        "kv/restore", "How long until the first token of a session of 1 GiB is in hand?", "ms",
        levels({"unimem, mapped": 0.06, "unimem, copied": 130},
               {"np.fromfile": 240}, {"reading into warm memory": 124}),
        rounds, targets=[at_most(1.0, 4, side="unimem, mapped")],
    )  # fmt: skip
    on_gpu = failed_case(
        "gpu/take",
        "What does an array on the GPU cost?",
        "ns",
        "unimem.cuda needs an NVIDIA GPU, and CUDA sees none",
        targets=[faster("cupy.empty", 3.0, 5)],
    )
    return record(
        suite("calls", "What do the hot calls cost from Python?", take, append, seconds=18.3),
        suite("accounting", "What does the ledger cost?", ledger),
        suite("gguf", "How fast does a model file open?", header),
        suite("buffers", "How far are plans of buffers above the lower bound?", graphs),
        suite("scaling", "How do costs grow with the work?", takes, gather, verify, seconds=64),
        suite("first-touch", "How fast is new memory brought in?", thp, threads),
        suite("load", "How does a model come into memory?", hot, cold, staged),
        suite("kv", "What does KV memory cost?", conversion, restore),
        suite("gpu", "What does the GPU twin cost?", on_gpu, seconds=0.4),
        quick=quick,
    )
