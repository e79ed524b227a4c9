"""Invented records of `unimem bench`: every shape that a case can have, with plausible figures."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unimem_bench.record import BEST, CaseRecord, Record, Role, SideRecord, SuiteRecord, Target

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Name of a side to its role and the figure around which its rounds lie.
Levels = Mapping[str, tuple[Role, float]]

MACHINE: dict[str, Any] = {
    "schema": "unimem.doctor/1",
    "kernel": {"release": "6.18.44", "version": [6, 18], "architecture": "x86_64"},
    "cpu": {
        "model": "AMD EPYC",
        "sockets": 1,
        "cores": 2,
        "threads": 2,
        "allowed_cores": 2,
        "allowed_threads": 2,
        "usable_cores": 2,
        "quota": None,
        "features": ["ssse3", "avx", "f16c", "fma", "avx2", "avx512f", "avx512_vnni"],
        "governors": {},
    },
    "memory": {
        "total_bytes": 25_276_510_208,
        "available_bytes": 24_692_387_840,
        "page_bytes": 4096,
        "limits": [],
        "memlock": None,
        "overcommit_mode": 0,
        "swap_total_bytes": 0,
        "swap_free_bytes": 0,
        "swappiness": 60,
        "max_map_count": 65530,
    },
    "thp": {
        "page_bytes": 2 * MIB,
        "enabled": "madvise",
        "defrag": "madvise",
        "shmem_enabled": "never",
        "khugepaged_defrag": True,
        "shm_mount": "never",
        "is_disabled_for_process": False,
        "sizes": [],
    },
    "pools": {},
    "numa": {
        "nodes": {
            "0": {
                "id": 0,
                "total_bytes": 25_276_510_208,
                "free_bytes": 24_392_663_040,
                "available_bytes": 24_692_387_840,
                "cpus": [0, 1],
                "distances": [10],
                "allowed": True,
            }
        },
        "weights": {"0": 1},
        "balancing": 0,
        "zone_reclaim_mode": 0,
        "cpuset_path": None,
    },
    "capabilities": {"has_ipc_lock": True, "has_sys_nice": True, "has_seccomp_filter": False},
    "findings": [],
}

VERSIONS = {
    "python": "3.11.7",
    "kernel": "6.18.44",
    "unimem-llm": "0.1.0",
    "numpy": "2.4.6",
    "torch": "2.13.0+cpu",
    "ggml-python": "0.0.45",
    "gguf": "0.19.0",
}


def case(
    name: str,
    question: str,
    unit: str,
    levels: Levels,
    *,
    noise: float = 0.04,
    n_passes: int = 2,
    n_rounds: int = 17,
    seed: int = 0,
    **rest: Any,
) -> CaseRecord:
    """A case ``suite/name`` with one figure a side around these levels.

    A round in which the machine was slow was slow for all sides, as it is in a real one.
    """
    suite, _, short = name.partition("/")
    rng = _generator(name, seed)
    slow = rng.lognormal(0, 0.1, (n_passes, n_rounds))
    sides = [
        SideRecord(side, role, _figures(rng, level * slow, noise))
        for side, (role, level) in levels.items()
    ]
    return CaseRecord(suite, short, question, unit, sides=sides, **rest)


def scaling_case(
    name: str,
    question: str,
    unit: str,
    x: str,
    sizes: Sequence[float],
    laws: Mapping[str, tuple[Role, Callable[[float], float]]],
    *,
    noise: float = 0.04,
    n_passes: int = 2,
    n_rounds: int = 9,
    seed: int = 0,
    **rest: Any,
) -> CaseRecord:
    """A case of scaling: each side has a law of its figure by the size."""
    suite, _, short = name.partition("/")
    rng = _generator(name, seed)
    sides = []
    for size in sizes:
        slow = rng.lognormal(0, 0.1, (n_passes, n_rounds))
        sides += [
            SideRecord(side, role, _figures(rng, law(size) * slow, noise), at=size)
            for side, (role, law) in laws.items()
        ]
    return CaseRecord(suite, short, question, unit, x, sides, **rest)


def counted_case(
    name: str, question: str, unit: str, values: Mapping[str, Sequence[float]], **rest: Any
) -> CaseRecord:
    """A case whose figures were counted: they do not vary."""
    suite, _, short = name.partition("/")
    sides: list[SideRecord] = []
    for side, figures in values.items():
        sides.append(SideRecord(side, "peer" if sides else "unimem", [list(map(float, figures))]))
    return CaseRecord(suite, short, question, unit, sides=sides, **rest)


def failed_case(
    name: str,
    question: str,
    unit: str,
    failed: str,
    targets: Sequence[Target] = (),
    *,
    is_error: bool = False,
) -> CaseRecord:
    """A case that was not measured, since it could not be asked, or by an error."""
    suite, _, short = name.partition("/")
    return CaseRecord(
        suite,
        short,
        question,
        unit,
        targets=list(targets),
        failed=failed,
        is_error=is_error,
    )


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


def _figures(rng: np.random.Generator, levels: Any, noise: float) -> list[list[float]]:
    return [
        [float(f"{x:.6g}") for x in row] for row in levels * rng.lognormal(0, noise, levels.shape)
    ]


def faster(other: str, limit: float, issue: int) -> Target:
    return Target("speed", "unimem", other, True, limit, issue)


def costs(other: str, limit: float, issue: int) -> Target:
    return Target("cost", "unimem", other, False, limit, issue)


def grows(limit: float, issue: int = 8) -> Target:
    return Target("exponent", "unimem", None, False, limit, issue)


def record(*suites: SuiteRecord, quick: bool = False) -> Record:
    """A record of these suites."""
    seconds = sum(suite.seconds for suite in suites)
    return Record("2026-11-22T05:00:00+00:00", quick, seconds, MACHINE, VERSIONS, list(suites))


def suite(name: str, question: str, *cases: CaseRecord, seconds: float = 12.5) -> SuiteRecord:
    """A suite of these cases."""
    n_passes = max((len(side.passes) for case in cases for side in case.sides), default=1)
    conditions = [{"load_avg_1min": 0.2, "cpu_freq": "1=2600 MHz"} for _ in range(n_passes)]
    return SuiteRecord(name, question, n_passes, seconds, list(cases), conditions)


def sample_record(seed: int = 0, quick: bool = False) -> Record:
    """A run with all that occurs; another seed is another run on the same machine.

    Targets that are met, missed and too close to say, those of cases that were not measured, peers
    that are not installed, scaling with size and with threads, counted figures, and a case in which
    nothing differs.
    """
    rounds = {"n_rounds": 5 if quick else 17, "n_passes": 2, "seed": seed}
    no_torch = {"torch": "torch is not installed"}
    calls = suite(
        "calls",
        "What do the hot calls cost from Python?",
        case(
            "calls/take",
            "What does an uninitialised array of 16 KiB cost?",
            "ns",
            {
                "unimem": ("unimem", 46),
                "np.empty": ("peer", 111),
                "np.zeros": ("peer", 250),
                "torch.empty": ("peer", 637),
                "an empty Cython call": ("limit", 17.5),
            },
            targets=[faster("np.empty", 2.0, 2), faster("torch.empty", 10.0, 2)],
            rounds_dropped=3,
            facts={"bytes": 16 * KIB},
            **rounds,
        ),
        case(
            "calls/append",
            "What does one token of 2 KiB of K and 2 KiB of V cost?",
            "ns",
            {
                "unimem": ("unimem", 152),
                "keys[i] = k": ("peer", 311),
                "C memcpy": ("limit", 61),
            },
            noise=0.06,
            targets=[faster("keys[i] = k", 2.0, 4), costs("C memcpy", 2.0, 4)],
            left_out=no_torch,
            **rounds,
        ),
        seconds=18.3,
    )
    accounting = suite(
        "accounting",
        "What does the ledger cost?",
        case(
            "accounting/take",
            "What does the ledger add to a take?",
            "ns",
            {"unimem": ("unimem", 46.1), "without the ledger": ("peer", 45.9)},
            targets=[costs("without the ledger", 1.0, 7)],
            rounds_disturbed=2,
            **rounds,
        ),
    )
    gguf = suite(
        "gguf",
        "How fast does a model file open?",
        case(
            "gguf/open",
            "How long until 400 tensors and 150 thousand tokens are known?",
            "ms",
            {
                "unimem": ("unimem", 2.4),
                "gguf-py": ("peer", 7082),
                "ggml": ("peer", 29.6),
                "reading the bytes": ("limit", 1.3),
            },
            targets=[faster("ggml", 5.0, 3), costs("reading the bytes", 2.0, 3)],
            **rounds,
        ),
    )
    buffers = suite(
        "buffers",
        "How far are plans of buffers above the lower bound?",
        counted_case(
            "buffers/graphs",
            "How large are the engine's own graphs?",
            "x the lower bound",
            {"unimem": [1, 1, 1, 1.01], "largest first": [1, 1, 1.13, 1.13]},
            targets=[Target("figure", "unimem", None, False, 1.02, 5)],
        ),
    )
    sizes = [float(16 * KIB * 8**i) for i in range(7)]
    scaling = suite(
        "scaling",
        "How does the cost of each operation grow with the work?",
        scaling_case(
            "scaling/take",
            "Does a take cost more in a larger tape?",
            "ns",
            "bytes of the tape",
            sizes,
            {"unimem": ("unimem", lambda _: 46), "np.empty": ("peer", lambda n: 90 + n**0.25)},
            targets=[grows(0.05)],
            seed=seed,
        ),
        scaling_case(
            "scaling/gather",
            "How does gathering grow with the sequence?",
            "us",
            "tokens",
            [64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0],
            {
                "unimem": ("unimem", lambda n: 1.1 + 0.033 * n),
                "C memcpy": ("limit", lambda n: 0.2 + 0.031 * n),
            },
            targets=[grows(1.05)],
            seed=seed,
        ),
        scaling_case(
            "scaling/verify",
            "How does looking at a block grow with its size?",
            "ms",
            "bytes of the block",
            sizes[2:],
            {"unimem": ("unimem", lambda n: 0.02 + n / 30e9)},
            targets=[grows(0.5)],
            seed=seed,
        ),
        seconds=64,
    )
    touch = suite(
        "first-touch",
        "How fast is new memory brought in?",
        case(
            "first-touch/thp",
            "How fast is a block of 2 GiB in huge pages warmed by one thread?",
            "GB/s",
            {
                "unimem": ("unimem", 24.1),
                "np.empty and fill": ("peer", 15.4),
                "C, a byte a page": ("limit", 24.6),
            },
            targets=[faster("C, a byte a page", 0.95, 2), faster("np.empty and fill", 1.3, 2)],
            **rounds,
        ),
        scaling_case(
            "first-touch/threads",
            "How does warming scale with threads?",
            "GB/s",
            "threads",
            [1.0, 2.0, 4.0, 8.0],
            {
                "unimem": ("unimem", lambda n: 24 * n**0.9),
                "C, a byte a page": ("limit", lambda n: 24.6 * n**0.91),
            },
            seed=seed,
        ),
    )
    load = suite(
        "load",
        "How does a model come into memory?",
        case(
            "load/hot",
            "How fast is a file of 4 GB in the page cache mapped and read once?",
            "GB/s",
            {
                "unimem": ("unimem", 38.1),
                "np.memmap": ("peer", 32.8),
                "safetensors load_file": ("peer", 2.4),
                "C mmap": ("limit", 38.4),
            },
            noise=0.07,
            targets=[faster("C mmap", 0.97, 6), faster(BEST, 1.0, 6)],
            **rounds,
        ),
        failed_case(
            "load/cold",
            "How fast does a file come from the disk?",
            "GB/s",
            "wants to drop files from the page cache, and /proc/sys/vm/drop_caches is read-only",
            [faster("C O_DIRECT", 0.95, 6)],
        ),
        failed_case(
            "load/staged",
            "How fast does llama.cpp start from staged memory?",
            "ms",
            "RuntimeError: llama.cpp ended with status 1: unable to load the model",
            [Target("speed", "unimem, staged", "the file", True, 2.0, 6)],
            is_error=True,
        ),
    )
    kv = suite(
        "kv",
        "What does KV memory cost?",
        case(
            "kv/float32-to-float16",
            "What does appending 1 MB of float32 to a cache of float16 cost?",
            "us",
            {
                "unimem": ("unimem", 31.2),
                "keys[i] = k": ("peer", 790),
                "torch": ("peer", 30.6),
                "C memcpy of the float32 to memory of its size": ("limit", 26.0),
            },
            noise=0.08,
            targets=[faster("keys[i] = k", 10.0, 4)],
            **rounds,
        ),
        case(
            "kv/restore",
            "How long until the first token of a session of 1 GiB is in hand?",
            "ms",
            {
                "unimem, mapped": ("unimem", 0.06),
                "unimem, copied": ("unimem", 130),
                "np.fromfile": ("peer", 240),
                "reading into warm memory": ("limit", 124),
            },
            targets=[Target("figure", "unimem, mapped", None, False, 1.0, 4)],
            **rounds,
        ),
    )
    gpu = suite(
        "gpu",
        "What does the GPU twin cost?",
        failed_case(
            "gpu/take",
            "What does an array on the GPU cost?",
            "ns",
            "unimem.cuda needs an NVIDIA GPU, and CUDA sees none",
            [faster("cupy.empty", 3.0, 5)],
        ),
        seconds=0.4,
    )
    return record(calls, accounting, gguf, buffers, scaling, touch, load, kv, gpu, quick=quick)
