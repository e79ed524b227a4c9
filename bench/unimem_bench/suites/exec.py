"""Programs under `unimem exec`: its cost where nothing is gained, and what llama.cpp gains."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unimem.base import kernel_files
from unimem_bench import decoding, states, timed
from unimem_bench.models import Kind
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, NotMeasured, Suite, at_most, costs, faster
from unimem_bench.timed import TimedProcess, TimedProcessError

SUITE = Suite("exec", "What does unimem exec cost programs, and what do they gain?")

WITH, WITHOUT = "unimem exec", "without"
EXEC = (*timed.UNIMEM, "exec", "--")
KIND: Kind = "q4_k_m"
N_CALLS, N_QUICK_CALLS = 300_000, 50_000  # the fastest of twelve such runs counts
# A new process each time, since the layout of memory differs between them.
CHURN = """
import sys
from unimem_bench import plain
n = int(sys.argv[1])
print(min(plain.churn(n) for _ in range(12)) / n)
"""
PREFIXES: dict[str, tuple[str, ...]] = {WITH: EXEC, WITHOUT: ()}
CTX, N_TOKENS, MOST_S = 4096, 16, 60.0
OTHER_BYTES = 512 << 20  # of llama.cpp's KV cache and compute buffers
REST_S = 8.0  # in which a host has taken all free memory of a virtual machine


@SUITE.case(
    "small",
    "What do a small malloc and its free cost under unimem exec, which leaves them to the C "
    "library?",
    unit="ns",
    targets=[costs(WITHOUT, 1.02, issue=19, side=WITH)],
)
def small(measure: Measure) -> None:
    """Time a loop in C, in CPU time of its thread."""
    n = N_QUICK_CALLS if measure.quick else N_CALLS
    words = [sys.executable, "-P", "-c", CHURN, str(n)]

    def side(name: str) -> float:
        done = subprocess.run([*PREFIXES[name], *words], capture_output=True, text=True, check=True)
        return float(done.stdout) * 1e9

    measure.compare({WITH: partial(side, WITH)}, {WITHOUT: partial(side, WITHOUT)}, rounds=21)


@SUITE.case(
    "start",
    "How much later does a program start under unimem exec?",
    unit="ms",
    targets=[at_most(30, issue=19, side=WITH)],
)
def start(measure: Measure) -> None:
    """Run a program that does nothing, with and without, and take the difference."""
    program = shutil.which("true")
    if program is None:
        raise NotMeasured("wants the program 'true'")

    def took(words: Sequence[str]) -> float:
        begin = time.perf_counter()
        subprocess.run(words, check=True)
        return (time.perf_counter() - begin) * 1e3

    measure.compare({WITH: lambda: took([*EXEC, program]) - took([program])}, rounds=21)


# ---- llama.cpp ----


def _prepared(measure: Measure) -> Path:
    """Return the model, in the page cache in a known state; the case has all cores from now on."""
    decoding.require_llama_cpp(measure, WITHOUT)
    measure.pin(None)
    path = decoding.model(measure, KIND)
    decoding.require_room(3, path)
    states.heat(path)
    return path


def _llama(
    measure: Measure, path: Path, prefix: Sequence[str], *, rest_s: float = 0.0
) -> TimedProcess:
    """Start llama.cpp with its defaults, which repack such weights."""
    states.ready(path.stat().st_size + OTHER_BYTES, measure.cpus)
    time.sleep(rest_s)
    options: dict[str, Any] = {"threads": len(measure.cpus), "ctx": CTX}
    try:
        return TimedProcess([*prefix, *timed.command("llama.cpp", path, options)])
    except TimedProcessError as error:
        raise NotMeasured(f"llama.cpp does not start here: {error}") from None


@SUITE.case(
    "llama-start",
    "How long does llama.cpp take to load a model and to make a context of 4096 tokens?",
    unit="ms",
    targets=[costs(WITHOUT, 0.8, issue=19, side=WITH)],
)
def llama_start(measure: Measure) -> None:
    """Start a new process each time, when memory was touched and freed just before."""
    _compare_starts(measure, rest_s=0.0)


@SUITE.case(
    "llama-start-rested",
    "The same, after the machine has rested for 8 seconds?",
    unit="ms",
    targets=[costs(WITHOUT, 1.0, issue=46, side=WITH)],
)
def llama_start_rested(measure: Measure) -> None:
    """Start a new process each time, after a rest in which a host takes free memory back."""
    _compare_starts(measure, rest_s=REST_S)


def _compare_starts(measure: Measure, *, rest_s: float) -> None:
    path = _prepared(measure)

    def side(prefix: Sequence[str]) -> float:
        with _llama(measure, path, prefix, rest_s=rest_s) as process:
            return float(process.facts["start_s"]) * 1e3

    prefault = (*EXEC[:-1], "--prefault", "--")
    ours: dict[str, Side] = {
        WITH: partial(side, EXEC),
        f"{WITH} --prefault": partial(side, prefault),
    }
    measure.compare(ours, {WITHOUT: partial(side, ())}, rounds=7, quick_rounds=3, warmup=1)


@SUITE.case(
    "llama-decode",
    "How fast does llama.cpp decode?",
    unit="tokens/s",
    targets=[faster(WITHOUT, 1.1, issue=19, side=WITH)],
)
def llama_decode(measure: Measure) -> None:
    """Let two processes decode in turn."""
    path = _prepared(measure)
    with _llama(measure, path, EXEC) as ours, _llama(measure, path, ()) as theirs:

        def side(process: TimedProcess) -> float:
            return 1e3 / float(np.mean(process.tokens(N_TOKENS, MOST_S)["ms"]))

        measure.compare(
            {WITH: partial(side, ours)},
            {WITHOUT: partial(side, theirs)},
            rounds=21,
            pids=[ours.pid, theirs.pid],
        )


@SUITE.case(
    "llama-pages",
    "How much of llama.cpp's anonymous memory is not in huge pages under unimem exec?",
    unit="% of it",
    targets=[at_most(5, issue=19, side=WITH)],
)
def llama_small_pages(measure: Measure) -> None:
    """Ask the kernel about processes that have decoded."""
    path = _prepared(measure)

    def share(prefix: Sequence[str]) -> float:
        with _llama(measure, path, prefix) as process:
            process.tokens(1, MOST_S)
            found = kernel_files.read_fields(f"/proc/{process.pid}/smaps_rollup")
        whole, huge = (int(found[name].split()[0]) for name in ("Anonymous", "AnonHugePages"))
        measure.fact(f"anonymous_bytes, {'with' if prefix else 'without'}", whole << 10)
        return 100 * (1 - huge / whole)

    measure.count(WITH, [share(EXEC)])
    measure.count(WITHOUT, [share(())], "peer")
