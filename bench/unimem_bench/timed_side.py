"""A process that reports the time of each token: ``PYTHON timed_side.py KIND MODEL OPTIONS``.

`unimem_bench.timed` starts it by its path, so that no library is loaded but the one measured. The
model is an argument of its own, which ``unimem exec --stage`` replaces. The first line that it
prints says how the model was loaded, how long the start took, and its counts. Then it answers
requests from standard input, a line of JSON each: ``{"n": tokens, "seconds": at most}``; or
``{"batches": [[token, ...], ...], "seconds": at most}``, for the time of each batch in one
conversation.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
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

    def compute(self, tokens: list[int]) -> None:
        """Compute more tokens."""

    def counts(self) -> dict[str, int]:
        """Return what it has counted so far."""


class TimedUnimem:
    """unimem's decoder."""

    def __init__(
        self,
        model: str,
        *,
        load: str,
        lock: bool = False,
        threads: int = 1,
        ctx: int = N_CTX,
        budget: int | None = None,
    ) -> None:
        um, engine = import_module("unimem"), import_module("unimem.engine")
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        how: dict[str, Any] = {"ctx": ctx, "threads": threads}
        if budget is not None:
            how["weights_budget"] = budget
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

    def compute(self, tokens: list[int]) -> None:
        """As `TimedSide.compute`."""
        self._decoder.prefill(tokens)

    def counts(self) -> dict[str, int]:
        """As `TimedSide.counts`: what streaming has read."""
        stream = getattr(self._decoder.weights, "stream", None)
        names = ("hits", "misses", "read_bytes", "waited_ns")
        return {} if stream is None else {name: getattr(stream, name) for name in names}


class TimedLlamaCpp:
    """llama.cpp, as `flags` say, which are those of `unimem_bench.llama_cpp.Flags`."""

    def __init__(
        self,
        model: str,
        *,
        library: str,
        threads: int = 1,
        ctx: int = N_CTX,
        sees_experts: bool = False,
        **flags: Any,
    ) -> None:
        api = import_module("unimem_bench.llama_cpp")
        wanted = api.Flags(**flags)
        start = time.perf_counter()
        given = api.options(wanted, n_ctx=ctx, n_threads=threads, sees_experts=sees_experts)
        loaded = api.Library(library)
        self._context = api.Conversation(api.PeerModel(loaded, model, given), given)
        self._experts = loaded.c.peer_experts if sees_experts else None
        self.start_s = time.perf_counter() - start
        self.load = str(wanted)

    def begin(self) -> None:
        """As `TimedSide.begin`."""
        self._context.clear()
        self._context.decode(PROMPT)

    def compute(self, tokens: list[int]) -> None:
        """As `TimedSide.compute`."""
        self._context.decode(tokens)

    def counts(self) -> dict[str, int]:
        """As `TimedSide.counts`: the different experts that were used."""
        return {} if self._experts is None else {"experts": self._experts()}


def measure(side: TimedSide, n: int, seconds: float) -> dict[str, Any]:
    """Compute `n` tokens, or fewer if the time is over."""
    side.begin()
    side.compute([400])
    found: list[float] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    end = time.perf_counter() + seconds
    while len(found) < n:
        place = len(found) % N_TOKENS
        if place == 0:
            side.begin()
        start = time.perf_counter()
        side.compute([400 + place])
        now = time.perf_counter()
        found.append((now - start) * 1e3)
        if now > end:
            break
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    return {"ms": found, "major_faults": faults}


def measure_batches(side: TimedSide, batches: list[list[int]], seconds: float) -> dict[str, Any]:
    """Compute batches behind the prompt, or fewer if the time is over."""
    side.begin()
    found: list[float] = []
    before, counted = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, side.counts()
    end = time.perf_counter() + seconds
    for batch in batches:
        start = time.perf_counter()
        side.compute(batch)
        now = time.perf_counter()
        found.append((now - start) * 1e3)
        if now > end:
            break
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    counts = {name: count - counted[name] for name, count in side.counts().items()}
    return {"ms": found, "major_faults": faults, "counts": counts}


def main() -> None:
    """Open the side, and answer."""
    kind, model, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's own output must not mix with the answers
    kinds: dict[str, Callable[..., TimedSide]]
    kinds = {"unimem": TimedUnimem, "llama.cpp": TimedLlamaCpp}
    side = kinds[kind](model, **json.loads(options))
    side.begin()
    answer: dict[str, Any] = {"load": side.load, "start_s": side.start_s, "counts": side.counts()}
    while True:
        time.sleep(SETTLE_S)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        asked = json.loads(line)
        answer = (measure_batches if "batches" in asked else measure)(side, **asked)


if __name__ == "__main__":
    main()
