"""Long contexts: decode behind thousands of tokens, and a long prompt, beside llama.cpp.

The keys and values of the tokens are invented, and the same bytes lie in the caches of all sides.
The model has its best layout of weights on llama.cpp's side, and ``load="auto"`` on unimem's.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unimem_bench import decoding, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.decoding import Peer
from unimem_bench.llama_flags import Phase
from unimem_bench.models import Kind
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, Suite, faster_than_best

SUITE = Suite(
    "context", "How fast are prefill and decode of long contexts, beside llama.cpp?", in_quick=False
)

KIND: Kind = "q4_k_m"
KV_DTYPES = "f16", "q8_0", "q4_0"
N_COPIES = 5  # of the weights: the mapped file, and what unimem and llama.cpp copy
NO_FLASH = "llama.cpp, no flash attention"
QUICK_TOKENS = 1024  # with the smaller model
N_DECODE = 4  # tokens in one measurement
MOST_DECODED = 512  # of one side, in all rounds
# By which two attentions may differ, in deviations of the logits.
MAX_DIFFERENCE = 0.5


@dataclass(frozen=True, slots=True)
class Context:
    """The context of a case."""

    n: int  # tokens
    kv_dtype: str
    n_threads: int | None  # a thread on each core if None

    def length(self, measure: Measure) -> int:
        """Return how many tokens a run has."""
        return QUICK_TOKENS if measure.quick else self.n


def start(
    measure: Measure, stack: ExitStack, context: Context, phase: Phase
) -> dict[str, DecoderProcess]:
    """Start unimem's decoder, and those of llama.cpp with the same type of cache."""
    path, cpus = decoding.prepared(measure, KIND, N_COPIES, context.n_threads)
    peers = decoding.peers(measure, path, phase)
    n = context.length(measure)
    measure.fact("tokens", n)
    options: dict[str, Any] = {"threads": len(cpus), "ctx": n + MOST_DECODED}
    options["kv_dtype"] = context.kv_dtype
    sides = {"unimem": stack.enter_context(DecoderProcess(path, **options))}
    if decoding.BEST in peers:
        best = peers[decoding.BEST]
        peers[decoding.BEST] = Peer(best.library, replace(best.flags, flash=True))
        if context.kv_dtype == "f16":  # llama.cpp quantizes V for flash attention only
            peers[NO_FLASH] = Peer(best.library, replace(best.flags, flash=False))
    for name, peer in peers.items():
        process = decoding.start_peer(measure, name, path, peer, **options)
        if process is not None:
            sides[name] = stack.enter_context(process)
    measure.fact("share_in_huge_pages", states.in_huge_pages(path))
    for name, side in sides.items():
        measure.fact(name, side.facts)
    return sides


def compare(
    measure: Measure, sides: dict[str, DecoderProcess], measured: dict[str, Side], **rounds: int
) -> None:
    """Measure, with unimem's side first."""
    ours = {"unimem": measured.pop("unimem")}
    decoding.compare(measure, sides, ours, measured, None, **rounds)


def decode(measure: Measure, context: Context) -> None:
    """Make 4 tokens at a time; all sides have the same tokens before them."""
    with ExitStack() as stack:
        sides = start(measure, stack, context, "decode")
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=measure.folder))
        rows = Path(folder, "rows")
        logits = {name: side.fill(context.length(measure), rows) for name, side in sides.items()}
        measure.fact("logit_difference", differences(logits))
        measured: dict[str, Side] = {
            name: partial(side.decode, N_DECODE) for name, side in sides.items()
        }
        compare(measure, sides, measured, rounds=15, quick_rounds=6)


def differences(logits: dict[str, Any]) -> dict[str, float]:
    """Compare the logits of all sides with unimem's; AssertionError if they differ much."""
    ours = logits["unimem"]
    found = {}
    for name, other in logits.items():
        if name == "unimem":
            continue
        found[name] = float(np.abs(ours - other).max() / other.std())
        if not found[name] <= MAX_DIFFERENCE:
            raise AssertionError(
                f"the logits are {found[name]:.2g} of their deviation apart from those of {name}"
            )
    return found


def prefill(measure: Measure, context: Context) -> None:
    """Compute a prompt, each time anew."""
    with ExitStack() as stack:
        sides = start(measure, stack, context, "prefill")
        n = context.length(measure)
        prompt = [1, *np.random.default_rng(7).integers(3, 259, n - 1).tolist()]
        measured: dict[str, Side] = {
            name: partial(side.prefill, prompt) for name, side in sides.items()
        }
        compare(measure, sides, measured, rounds=3, quick_rounds=1, warmup=0)


def declare(n_threads: int | None, suffix: str, words: str) -> None:
    """Declare the cases of a number of threads."""
    for kv_dtype in KV_DTYPES:
        for n in (8192, 32768):
            SUITE.case(
                f"decode-{n // 1024}k-{kv_dtype}{suffix}",
                f"How fast are tokens made{words} behind {n} others, with a cache of {kv_dtype}?",
                unit="tokens/s",
                targets=[faster_than_best(1.0, issue=41)],
                in_quick=n == 8192 and n_threads is None,
            )(partial(decode, context=Context(n, kv_dtype, n_threads)))
        SUITE.case(
            f"prefill-8k-{kv_dtype}{suffix}",
            f"How fast is a prompt of 8192 tokens computed{words}, with a cache of {kv_dtype}?",
            unit="tokens/s",
            targets=[faster_than_best(1.0, issue=41)],
            in_quick=kv_dtype == "f16" and n_threads is None,
        )(partial(prefill, context=Context(8192, kv_dtype, n_threads)))


declare(None, "", "")
declare(1, "-one-thread", " by one thread")
