"""Invented samples of a process that is watched."""

from __future__ import annotations

from collections.abc import Mapping as Names
from typing import Any

from unimem.accounting.report import Mapping, Report, Row
from unimem.accounting.samples import Sample
from unimem.system.limits import Limit
from unimem.system.placement import Placement
from unimem.system.pressure import Pressure
from unimem.system.process import Counters

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DECODER = {"n_prompt_tokens": 100, "n_generated_tokens": 500, "kv_active_bytes": 0, "kv_tokens": 0}
PIECES = {"piece_hits": 900, "piece_misses": 100, "piece_read_bytes": 5 << 20}
DECODER |= PIECES | {"piece_waited_ns": 2_500_000_000}
MACHINE = Limit("memory of the machine", 24 * GIB, 9 * GIB, "")
CGROUP = Limit("cgroup /system.slice/a-service-with-a-long-name.service", 4 * GIB, 3800 * MIB, "")


def placed(resident: int, swapped: int = 0) -> Placement:
    """In huge pages where the size is a multiple of these."""
    if resident % (2 * MIB):
        return Placement("4k", 4 * KIB, resident, 0, 0, swapped, resident, {0: resident})
    return Placement("thp", 2 * MIB, resident, resident, 0, swapped, resident, {0: resident})


# Categories to size, memory in RAM, and memory in use.
SIZES: dict[str, tuple[int, int, int | None]] = {
    "weights:q8_0": (1100 * MIB, 950 * MIB, None),
    "weights:f32": (3 * MIB, 3 * MIB, None),
    "kv": (256 * MIB, 130 * MIB, 129 * MIB + 512 * KIB),
    "scratch": (40 * MIB, 12 * MIB - 4 * KIB, 11 * MIB),
    "logits": (128 * KIB, 128 * KIB, None),
    "allocator": (80 * MIB, 30 * MIB - 12 * KIB, None),
    "libraries": (300 * MIB, 41 * MIB - 4 * KIB, None),
    "kernel": (24 * KIB, 0, None),
}


def report(
    sizes: Names[str, tuple[int, int, int | None]] = SIZES, *, swapped: int = 0, **facts: Any
) -> Report:
    """A process with these rows, a mapping for each of them but the last, and a row on a GPU."""
    rows = [
        Row(name, nbytes, placed(held, swapped), active, held, active)
        for name, (nbytes, held, active) in sizes.items()
    ]
    mappings = [
        Mapping(
            name,
            "",
            0x7F00_0000_0000 + i * GIB,
            row.nbytes,
            row.granted or placed(0),
            None,
            "/models/Llama-3-8B-Instruct-Q8_0.gguf" if name.startswith("weights") else None,
            {name: row.nbytes},
        )
        for i, (name, row) in enumerate(zip(list(sizes)[:-1], rows, strict=False))
    ]
    known = {"command": "python3 chat.py --model Llama-3-8B.gguf", "source": "published ledger"}
    gpu = Row("kv", 64 * MIB, device="cuda:0")
    return Report((*rows, gpu), known | facts, tuple(mappings))


def sample(
    seconds: float,
    memory: Report,
    *,
    started: int = 7,
    faults: tuple[int, int] = (0, 0),
    read: int | None = 0,
    cpu: float = 0.0,
    **more: Any,
) -> Sample:
    """A sample at this time, with these counts."""
    fields: dict[str, Any] = {
        "seconds": seconds,
        "clock": 1.75e9 + seconds,
        "up_seconds": 3600 + seconds,
        "counters": Counters(4711, started, *faults, read, cpu, 3),
        "report": memory,
        "report_seconds": seconds,
        "published": DECODER,
        "paged_in_bytes": 0,
        "pressure": (Pressure("machine", 0.0, 0.0),),
        "limits": (MACHINE,),
    }
    return Sample(**(fields | more))
