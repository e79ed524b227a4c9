"""A process that reports the time of each token: ``PYTHON timed_side.py KIND MODEL OPTIONS``.

`unimem_bench.timed` starts it by its path, so that no library is loaded but the one measured. The
model is an argument of its own, which ``unimem exec --stage`` replaces. The first line that it
prints says how the model was loaded, and how long the start took. Then it answers requests from
standard input, a line of JSON each: ``{"n": tokens, "seconds": at most}``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from importlib import import_module
from typing import Any, Protocol

PROMPT = [1, 300, 301]
N_TOKENS = 128  # of a conversation, which then restarts, so that all tokens are alike
N_CTX = 256
# Threads of a library poll for some milliseconds after their work. They must be asleep when the
# answer lets another process start.
SETTLE_S = 0.05


class TimedSide(Protocol):
    """One conversation of one library."""

    load: str
    start_s: float  # from the model's path to a context that is ready

    def begin(self) -> None:
        """Restart with the prompt."""

    def step(self, token: int) -> None:
        """Compute one more token."""


class TimedUnimem:
    """unimem's decoder."""

    def __init__(self, model: str, *, load: str, lock: bool = False) -> None:
        um, engine = import_module("unimem"), import_module("unimem.engine")
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        how: dict[str, Any] = {"ctx": N_CTX, "threads": 1}
        if lock:
            weights = um.open_weights(model, load=load, lock=True)
            self._decoder = engine.Decoder(weights, **how)
        else:
            self._decoder = engine.Decoder(model, load=load, **how)
        self.start_s = time.perf_counter() - start
        facts = self._decoder.report().facts
        self.load = f"{facts['load']}: {facts['load_reason']}"

    def begin(self) -> None:
        """As `TimedSide.begin`."""
        self._decoder.reset()
        self._decoder.prefill(PROMPT)

    def step(self, token: int) -> None:
        """As `TimedSide.step`."""
        self._decoder.prefill([token])


class TimedLlamaCpp:
    """llama.cpp, as `flags` say, which are those of `unimem_bench.llama_cpp.Flags`."""

    def __init__(
        self, model: str, *, library: str, threads: int = 1, ctx: int = N_CTX, **flags: Any
    ) -> None:
        api = import_module("unimem_bench.llama_cpp")
        wanted = api.Flags(**flags)
        start = time.perf_counter()
        given = api.options(wanted, n_ctx=ctx, n_threads=threads)
        self._context = api.Conversation(api.PeerModel(api.Library(library), model, given), given)
        self.start_s = time.perf_counter() - start
        self.load = str(wanted)

    def begin(self) -> None:
        """As `TimedSide.begin`."""
        self._context.clear()
        self._context.decode(PROMPT)

    def step(self, token: int) -> None:
        """As `TimedSide.step`."""
        self._context.decode([token])


def measure(side: TimedSide, n: int, seconds: float) -> dict[str, Any]:
    """Compute `n` tokens, or fewer if the time is over."""
    side.begin()
    side.step(400)
    found: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    end = time.perf_counter() + seconds
    while len(found) < n:
        place = len(found) % N_TOKENS
        if place == 0:
            side.begin()
        start = time.perf_counter()
        side.step(400 + place)
        now = time.perf_counter()
        found.append((now - start) * 1e3)
        if now > end:
            break
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    return {"ms": found, "major_faults": faults}


def main() -> None:
    """Open the side, and answer."""
    kind, model, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's own output must not mix with the answers
    side: TimedSide = {"unimem": TimedUnimem, "llama.cpp": TimedLlamaCpp}[kind](
        model, **json.loads(options)
    )
    side.begin()
    answer: dict[str, Any] = {"load": side.load, "start_s": side.start_s}
    while True:
        time.sleep(SETTLE_S)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        answer = measure(side, **json.loads(line))


if __name__ == "__main__":
    main()
