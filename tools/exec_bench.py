"""What `unimem exec` costs and gains, as ratios of alternating rounds: `make bench-exec`.

    python tools/exec_bench.py [loop] [start] [llama] [--rounds N] [--model MODEL.gguf]

``loop``: small malloc and free, in C, against the same without it; at most 1.02 is the aim.
``start``: what the start of a program takes more, in milliseconds; at most 30 is the aim.
``llama``: llama.cpp (the wheel cyllama), decode and start; 1.10 and 0.8 are the aims.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MAIN = "import sys; from unimem_command import main; sys.exit(main())"
EXEC = [sys.executable, "-c", MAIN, "exec", "--"]
LOOP = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
int main(void) {
    enum { N = 20000000, HELD = 64 };
    static void *volatile held[HELD];
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (unsigned i = 0; i < N; i++) {
        free(held[i % HELD]);
        held[i % HELD] = malloc(16 + i % 1000);
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    printf("%f\n", (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9);
}
"""
SUPPORT = Path(__file__).parents[1] / "tests" / "support"
LLAMA = """
import sys, time
sys.path.insert(0, sys.argv[2])
from cyllama.llama import llama_cpp
from llama_cpp import open_model
began = time.perf_counter()
model, context = open_model(sys.argv[1], 4096, "f16", repack=True, threads=2)
start = time.perf_counter() - began
assert context.decode(llama_cpp.llama_batch_get_one([1, *range(300, 427)], 0)) == 0
began = time.perf_counter()
for i in range(32):
    assert context.decode(llama_cpp.llama_batch_get_one([400 + i], 128 + i)) == 0
print(start, time.perf_counter() - began)
"""


def output(*words: str | Path) -> list[float]:
    """Run a program, and return the numbers of its last line."""
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.splitlines()[-1].split()]


def rounds(n: int, plain: Callable[[], list[float]], under: Callable[[], list[float]]) -> None:
    """Alternate, each first in every second round; print the median ratio of each figure."""
    pairs = []
    for i in range(n):
        order = (plain, under) if i % 2 == 0 else (under, plain)
        found = {side: side() for side in order}
        pairs.append((found[plain], found[under]))
    for column in range(len(pairs[0][0])):
        ratios = sorted(under[column] / plain[column] for plain, under in pairs)
        print(
            f"    time under it, of that without: median {statistics.median(ratios):.3f}, "
            f"{ratios[0]:.3f} to {ratios[-1]:.3f}, {n} rounds"
        )


def loop(n: int) -> None:
    """Measure small allocations."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        print("NOT MEASURED: loop wants a C compiler")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "loop.c", Path(folder) / "loop"
        source.write_text(LOOP)
        subprocess.run([compiler, "-O2", "-o", program, source], check=True)
        print("loop of small malloc and free")
        rounds(n, lambda: output(program), lambda: output(*EXEC, program))


def start(n: int) -> None:
    """Measure the start of a program that does nothing."""

    def measure(words: list[str]) -> tuple[float, float]:
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return (time.perf_counter() - began) * 1000, cpu * 1000

    true = shutil.which("true") or "true"
    pairs = [(measure([*EXEC, true]), measure([true])) for _ in range(max(n, 10))]
    for i, name in enumerate(("by the clock", "of CPU time")):
        more = sorted(under[i] - plain[i] for under, plain in pairs)
        print(f"start: {statistics.median(more):.1f} ms more {name}, {more[0]:.1f} at least")


def llama(n: int, model: Path | None) -> None:
    """Measure llama.cpp, on random weights of a 1.1B model where none is named."""
    from unimem_bench.models import write_model

    with tempfile.TemporaryDirectory() as folder:
        path = str(model or write_model(Path(folder), "1.1b", "q4_k_m"))
        words = [sys.executable, "-c", LLAMA, path, str(SUPPORT)]
        print("llama.cpp: start, then decode")
        rounds(n, lambda: output(*words), lambda: output(*EXEC, *words))


def main() -> None:
    """Measure what was named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", default=["loop", "start", "llama"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path)
    asked = parser.parse_args()
    if "loop" in asked.what:
        loop(asked.rounds)
    if "start" in asked.what:
        start(asked.rounds)
    if "llama" in asked.what:
        llama(asked.rounds, asked.model)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
