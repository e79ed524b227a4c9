"""What the ledger costs its holders.

Tapes and caches are holders: a list of the entries asks each of them for its purpose. A take and an
append know nothing of it, so they cost the same beside few holders and beside 10,000, each with a
region of its own. Making a block enters it, and closing it removes it, in one step each. A plan
reads a file's header, as opening does, and the limits. One pinned thread, in CPU time, without the
loop.

A scrape reads the memory of other processes, by the wall clock. They sleep meanwhile.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import unimem as um
from unimem._core.ledger import entries
from unimem.accounting.prometheus import MetricsCollector, write_metrics
from unimem_bench.files import FLOAT16, TensorEntry, gguf_header, made_once, number, text
from unimem_bench.rounds import Side, milliseconds, stopwatch, warm_stopwatch
from unimem_bench.suite import Measure, Suite, at_most, costs

SUITE = Suite("accounting", "What does the ledger cost those who are entered in it?", passes=2)

N_OTHERS, N_OTHERS_QUICK = 10_000, 1000
N_REPEATED = 5
N_BLOCKS = 1000
N_SCRAPED = 20
PAGE = 4096
FEW, MANY = "beside few", "beside many"

# Tokens of 2 KiB each of K and of V: 256 KiB, which stay in a second-level cache.
N_TOKENS = 64


class Call(NamedTuple):
    """A call that is measured beside few and beside many others."""

    title: str  # of its case
    statement: str
    n: int  # runs in one measurement
    limit: float = 1.1  # of its cost beside many, in multiples of its cost beside few


CALLS = (
    Call("take", "take(16)", 256),
    Call("take_address", "take_address(64, 64)", 256),
    Call("append", "append(0, k, k)", N_TOKENS),
    Call("a block, made and closed", "Block(4096).close()", 20),
    # The table in which it is entered is larger beside many others.
    Call("a tape over a block", "Tape(block)", 256, 1.25),
)


def beside_others(measure: Measure, call: Call) -> None:
    """Compare a call with itself, beside few regions and holders and beside many.

    Each round measures both: the many are made before the one and closed before the other.
    """
    n_others = N_OTHERS_QUICK if measure.quick else N_OTHERS
    measure.fact("others", n_others)
    with um.Tape(256 * 4 * PAGE) as tape, um.KVCache(1, 8, 128, N_TOKENS) as cache:
        names = {
            "take": tape.take,
            "take_address": tape.take_address,
            "append": cache.append,
            "k": np.zeros((1, 8, 128), np.float16),
            "Block": um.Block,
            "Tape": um.Tape,
            "block": tape.block,
        }

        def clear() -> None:
            tape.clear()
            cache.clear()

        run = warm_stopwatch(call.statement, call.n, names, clear)

        def few() -> float:
            return statistics.median(run() for _ in range(N_REPEATED))

        def many() -> float:
            others = [um.Tape(PAGE, pages="4k") for _ in range(n_others)]
            try:
                return few()
            finally:
                for other in others:
                    other.close()

        measure.compare({MANY: many, FEW: few}, rounds=4, quick_rounds=5, warmup=1)


for each in CALLS:
    SUITE.case(
        each.title,
        f"Does `{each.statement}` cost more beside many other tapes, each over its own block?",
        unit="ns",
        targets=[costs(FEW, each.limit, issue=7, side=MANY)],
    )(partial(beside_others, call=each))


@SUITE.case(
    "entries", f"What do the entries of {N_BLOCKS:,} blocks cost whoever asks for them?", unit="us"
)
def compare_entries(measure: Measure) -> None:
    """List the entries of blocks, without and with a tape over each, and ask the kernel."""
    blocks = [um.Block(PAGE) for _ in range(N_BLOCKS)]
    of_entries = microseconds("entries()", {"entries": entries})
    smaps = Path("/proc/self/smaps")

    def with_tapes() -> float:
        tapes = [um.Tape(block) for block in blocks]
        try:
            return of_entries()
        finally:
            for tape in tapes:
                tape.close()

    ours = {"of blocks": of_entries, "of blocks with tapes": with_tapes}
    peers = {"smaps, read whole": microseconds("read()", {"read": smaps.read_bytes})}
    measure.compare(ours, peers, rounds=15)
    for block in blocks:
        block.close()


def microseconds(statement: str, names: Mapping[str, object]) -> Side:
    """Measure ten runs of a statement."""
    run = stopwatch(statement, 10, names)
    return lambda: run() / 1e3


@SUITE.case(
    "plan",
    "What does the plan of a model cost, beside opening its file?",
    unit="us",
    targets=[costs("open", 3.0, issue=7, side="plan")],
)
def plan(measure: Measure) -> None:
    """Plan a llama of 44 layers, and open the file; both read its header."""
    path = made_once(measure.folder / "llama-of-44-layers.gguf", write_model)
    with um.open_weights(path) as weights:
        measure.fact("tensors", len(weights.tensors))
        header_bytes = min(tensor.offset for tensor in weights.tensors.values())

    def read() -> bytes:
        with path.open("rb", buffering=0) as file:
            return file.read(header_bytes)

    names = {"path": path, "open": um.open_weights, "plan": um.plan}
    ours = {
        "plan": microseconds("plan(path)", names),
        "open": microseconds("open(path, load='map').close()", names),
    }
    limits = {"reading the header": microseconds("read()", {"read": read})}
    measure.compare(ours, limits=limits, rounds=31)


@SUITE.case(
    "scrape",
    f"What does a scrape of {N_SCRAPED} processes cost, by `unimem metrics`?",
    unit="ms",
    targets=[at_most(300, issue=20)],
)
def scrape(measure: Measure) -> None:
    """Read processes that have just loaded unimem, and write the text."""
    with ExitStack() as stack:
        pids = [stack.enter_context(waiting()) for _ in range(N_SCRAPED)]
        files = [Path(f"/proc/{pid}/smaps") for pid in pids]
        measure.fact("mappings of each", Path(f"/proc/{pids[0]}/maps").read_bytes().count(b"\n"))

        def ours() -> None:
            write_metrics(MetricsCollector(lambda: pids))

        def kernel() -> None:
            for file in files:
                file.read_bytes()

        limits = {"smaps, read whole": lambda: milliseconds(kernel)}
        measure.compare({"unimem": lambda: milliseconds(ours)}, limits=limits, rounds=15)


@contextmanager
def waiting() -> Iterator[int]:
    """Yield the number of a process that has loaded unimem and sleeps."""
    script = "import sys, unimem; print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def write_model(path: Path, n_layers: int = 44, size: int = 64, vocab: int = 320) -> None:
    """Write a model of zeros."""
    numbers = {
        "context_length": 600,
        "embedding_length": size,
        "block_count": n_layers,
        "feed_forward_length": size,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
    }
    metadata = [text("general.architecture", "llama")]
    metadata += [number(f"llama.{name}", value) for name, value in numbers.items()]
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (size, vocab),
        "output": (size, vocab),
        "output_norm": (size,),
    }
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{name}": (size, size) for name in matrices}
        shapes |= {f"blk.{i}.{name}": (size,) for name in ("attn_norm", "ffn_norm")}
    tensors = [
        TensorEntry(f"{name}.weight", ne, FLOAT16, 2 * int(np.prod(ne)))
        for name, ne in shapes.items()
    ]
    with open(path, "wb") as file:
        header = gguf_header(metadata, tensors)
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
