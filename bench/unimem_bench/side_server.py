"""The loop of a process that decodes: requests on standard input, answers, a line of JSON each.

It needs only the standard library and NumPy: a process that measures has one library alone.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

# OpenMP threads poll for some milliseconds after their work. They must be asleep when the answer
# lets the other side start.
SETTLE_S = 0.05
FIRST = 1  # token behind invented ones


class Side(Protocol):
    """One conversation of one library."""

    @property
    def compute_s(self) -> float | None:
        """Seconds in ggml's compute call so far; None if unknown."""

    def prefill(self, tokens: list[int]) -> Logits:
        """Start anew with `tokens`; return the logits after the last."""

    def step(self) -> int:
        """Take the likeliest token, compute the logits after it, and return it."""

    def fill(self, n: int, rows: str) -> Logits:
        """Start anew with `n` invented tokens in the cache; return the logits after one more.

        `rows` is a file with their keys and values as ggml stores them, layer by layer: all K of a
        layer, and all V. unimem's side writes it, and the other one reads it.
        """

    def facts(self) -> dict[str, Any]:
        """Return the facts needed to read the figures.

        Among them are ``start_s``, ``ggml`` (its version) and ``features`` (of the CPU, for which
        ggml is built, as it names them; tinyBLAS is "LLAMAFILE").
        """


def serve(open_side: Callable[..., Side]) -> None:
    """Open the side that the command line describes, and answer until standard input ends.

    The only argument of the command line is JSON, the options of `open_side`.
    """
    # A library's own output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: Side | None = None

    def answer(line: str) -> dict[str, Any]:
        nonlocal side
        try:
            request = json.loads(line)
            if side is None:
                side = open_side(**request)
                return side.facts() | memory_facts()
            return _ACTIONS[request.pop("do")](side, **request)
        except Exception as error:  # any: the answer names it
            return {"error": f"{type(error).__name__}: {error}"}

    waits = {"wait_s": 0.0, "wait_cpu_s": 0.0}
    line = sys.argv[1]
    while line:
        answers.write(json.dumps(answer(line) | waits) + "\n")
        answers.flush()
        waiting_since, used_before = time.perf_counter(), time.process_time()
        line = sys.stdin.readline()
        # CPU time used while waiting: threads that poll would slow down the other side.
        waits = {
            "wait_s": time.perf_counter() - waiting_since,
            "wait_cpu_s": time.process_time() - used_before,
        }


def _prefill(side: Side, tokens: list[int]) -> dict[str, Any]:
    start = time.perf_counter()
    side.prefill(tokens)
    return _settled({"seconds": time.perf_counter() - start})


def _decode(side: Side, n: int) -> dict[str, Any]:
    before = side.compute_s
    start = time.perf_counter()
    for _ in range(n):
        side.step()
    seconds = time.perf_counter() - start
    compute = None if before is None or side.compute_s is None else side.compute_s - before
    return _settled({"seconds": seconds, "compute_s": compute})


def _greedy(side: Side, tokens: list[int], n: int) -> dict[str, Any]:
    logits = base64.b64encode(side.prefill(tokens).tobytes()).decode()
    return _settled({"logits": logits, "tokens": [side.step() for _ in range(n)]})


def _fill(side: Side, n: int, rows: str) -> dict[str, Any]:
    return _settled({"logits": base64.b64encode(side.fill(n, rows).tobytes()).decode()})


_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "fill": _fill,
    "prefill": _prefill,
    "decode": _decode,
    "greedy": _greedy,
}


def _settled(answer: dict[str, Any]) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    return answer


def memory_facts() -> dict[str, int]:
    """Return the peak of this process's memory, and its anonymous part, which shows copies."""
    return {
        "peak_rss_bytes": _kib("/proc/self/status", "VmHWM:") * 1024,
        "anonymous_bytes": _kib("/proc/self/smaps_rollup", "Anonymous:") * 1024,
    }


def _kib(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"{path} has no line {field!r}")
