"""Decode and prefill speed of unimem's decoder beside llama.cpp, alternating.

All run the same file with the same number of threads, the same context, flash attention and an f16
KV cache, from the same tokens, each in a process of its own, which sleeps while another one
computes. The two copies of ggml must be built alike, or nothing is compared.

llama.cpp has two sides: with its defaults, which repack weights if its CPU backend has kernels for
that, and with the weights as they lie in the mapped file. For types that every x86 multiplies
faster in another order, unimem has both as well: repacked, which is claimed, and mapped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem_bench import decoding, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.models import Kind
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, Suite, at_most, faster, faster_than_best

SUITE = Suite("decode", "How fast are prefill and decode, beside llama.cpp?")

MAPPED = "unimem, mapped"
OURS = "unimem", MAPPED
FIRST: tuple[Kind, ...] = ("q8_0", "q4_k_m")  # for which issue 2 sets targets
N_GREEDY = 64
N_BUSY_DECODE = 32  # tokens in one measurement of a small model
N_BUSY_LARGE = 4  # of a large one
N_COPIES = 3  # of the weights: the mapped file, llama.cpp's copy, and unimem's repacked copy
# By which two builds of the same code may differ, in deviations of the logits.
MAX_DIFFERENCE = 0.01


def prefill(measure: Measure, kind: Kind, prompt: list[int], rounds: int) -> None:
    """Compute a prompt, each time anew; no limit, since the best speed of a CPU is unknown."""
    with ExitStack() as stack:
        sides = start(measure, stack, kind)
        measured = {name: partial(side.prefill, prompt) for name, side in sides.items()}
        compare(measure, sides, measured, rounds=rounds, quick_rounds=4)


def decode(measure: Measure, kind: Kind) -> None:
    """Make 8 tokens at a time; all sides walk through the context alike."""
    with ExitStack() as stack:
        sides = start(measure, stack, kind)
        measure.fact("agreement", agreement(sides))
        for side in sides.values():
            side.prefill(decoding.PROMPT)
        measured: dict[str, Side] = {
            name: partial(side.decode, decoding.N_DECODE) for name, side in sides.items()
        }
        weights = stack.enter_context(um.open_weights(decoding.model(measure, kind), load="map"))
        weights.warm()
        measured[decoding.READ_BANDWIDTH] = decoding.reading(weights, measure.cpus)
        compare(measure, sides, measured, rounds=25, quick_rounds=6)


def compare_python(measure: Measure, kind: Kind) -> None:
    """Measure the share of a token's time that is not in ggml's compute call."""
    path, cpus = decoding.prepared(measure, kind, N_COPIES)
    with DecoderProcess(path, threads=len(cpus), ctx=decoding.N_CTX) as ours:
        ours.prefill(decoding.PROMPT)
        side = {"unimem": lambda: 100 * ours.python_share(decoding.N_DECODE)}
        measure.compare(ours=side, rounds=15, pids=[ours.pid])


def start(measure: Measure, stack: ExitStack, kind: Kind) -> dict[str, DecoderProcess]:
    """Start unimem's decoders, and the comparable ones of llama.cpp."""
    path, cpus = decoding.prepared(measure, kind, N_COPIES)
    options: dict[str, Any] = {"threads": len(cpus), "ctx": decoding.N_CTX}
    is_repacked = kind in decoding.REPACKED
    ours = DecoderProcess(path, load="repack" if is_repacked else "auto", **options)
    sides = {"unimem": stack.enter_context(ours)}
    if is_repacked and ours.facts["load"] == "repack":
        states.read_through(path)  # repacking drops weights from the page cache
        sides[MAPPED] = stack.enter_context(DecoderProcess(path, load="map", **options))
    elif is_repacked:
        measure.leave_out(MAPPED, f"{decoding.NOT_REPACKED}: unimem maps it")
    for peer in decoding.PEERS:
        process = decoding.start_peer(measure, peer, path, ours.facts, **options)
        if process is not None:
            sides[peer] = stack.enter_context(process)
    # As for the sides that map the file.
    measure.fact("share_in_huge_pages", states.in_huge_pages(path))
    for name, side in sides.items():
        measure.fact(name, side.facts)
    return sides


def compare(
    measure: Measure, sides: dict[str, DecoderProcess], measured: Mapping[str, Side], **rounds: int
) -> None:
    """Measure, with sides sorted into ours, peers and the limit of memory by their names."""
    ours = {name: side for name, side in measured.items() if name in OURS}
    peers: dict[str, Side] = {n: side for n, side in measured.items() if n in decoding.PEERS}
    limits = {name: side for name, side in measured.items() if name == decoding.READ_BANDWIDTH}
    decoding.compare(measure, sides, ours, peers, limits, **rounds)


def agreement(sides: dict[str, DecoderProcess]) -> dict[str, dict[str, float]]:
    """Compare the logits after the prompt, and the tokens that follow, with unimem's.

    With weights in the same order, the same code computes them, and they are equal.
    """
    is_repacked = sides["unimem"].facts["load"] == "repack"
    alike = "llama.cpp" if is_repacked else "llama.cpp-mapped"
    logits, tokens = sides["unimem"].greedy(decoding.PROMPT, N_GREEDY)
    if not np.isfinite(logits).all():
        raise AssertionError("unimem's logits are not finite")
    found = {}
    for name, side in sides.items():
        if name == "unimem":
            continue
        other_logits, other_tokens = side.greedy(decoding.PROMPT, N_GREEDY)
        difference = float(np.abs(logits - other_logits).max() / other_logits.std())
        same = [a == b for a, b in zip(tokens, other_tokens, strict=True)]
        n_same = same.index(False) if False in same else len(same)
        found[name] = {"logit_difference": difference, "n_greedy_tokens_equal": n_same}
        if name == alike and difference > MAX_DIFFERENCE:
            raise AssertionError(
                f"the logits are {difference:.2g} of their deviation apart from those of {name}"
            )
    return found


def declare(kind: Kind, label: str, *, in_quick: bool) -> None:
    """Declare the cases of a kind of weights; a whole run has 1.1 billion of them."""
    is_repacked, is_first = kind in decoding.REPACKED, kind in FIRST
    prefilled = [faster("llama.cpp", 1.0, issue=18)]
    decoded = [faster("llama.cpp", 1.05 if is_repacked else 1.0, issue=18)]
    if is_repacked:
        prefilled.append(faster(MAPPED, 1.8, issue=18))
        decoded.append(faster(MAPPED, 1.1, issue=18))
    SUITE.case(
        f"prefill-{kind}",
        f"How fast is a prompt of 128 tokens computed, with weights in {label}?",
        unit="tokens/s",
        targets=[faster(peer, 0.85, issue=2) for peer in decoding.PEERS if is_first] + prefilled,
        in_quick=in_quick,
    )(partial(prefill, kind=kind, prompt=decoding.PROMPT, rounds=9))
    SUITE.case(
        f"prefill-512-{kind}",
        f"How fast is a prompt of 512 tokens computed, with weights in {label}?",
        unit="tokens/s",
        targets=prefilled,
        in_quick=False,
    )(partial(prefill, kind=kind, prompt=decoding.LONG_PROMPT, rounds=5))
    SUITE.case(
        f"decode-{kind}",
        f"How fast are tokens made, with weights in {label}?",
        unit="tokens/s",
        targets=[faster(peer, 0.97, issue=2) for peer in decoding.PEERS if is_first] + decoded,
        in_quick=in_quick,
    )(partial(decode, kind=kind))


def declare_python(kind: Kind, label: str) -> None:
    """Declare the case of Python's share of a token."""
    SUITE.case(
        f"python-{kind}",
        f"How much of a token's time is Python around the compute, with weights in {label}?",
        unit="% of a token's time",
        targets=[at_most(0.25, issue=2), at_most(0.1, issue=18)],
        in_quick=False,  # a smaller model has less to compute
    )(partial(compare_python, kind=kind))


declare("q8_0", "Q8_0", in_quick=True)
declare("q4_k_m", "Q4_K_M", in_quick=False)
declare("q4_0", "Q4_0", in_quick=True)
declare("f16", "F16", in_quick=False)
declare_python("q8_0", "Q8_0")
declare_python("q4_k_m", "Q4_K_M")


def own_threads(measure: Measure, path: Path, n_tokens: int, *, is_busy: bool, rounds: int) -> None:
    """Make tokens with the decoder's own number of threads, with one, and with two."""
    cpus = measure.pin(2)
    measure.fact("default_threads", um.plan(path, ctx=decoding.N_CTX).threads)
    counts = {"unimem": None, "one thread": 1, "2 threads": 2}
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(DecoderProcess(path, threads=n, ctx=decoding.N_CTX))
            for name, n in counts.items()
        }
        for side in sides.values():
            side.prefill(decoding.PROMPT)
        measured: dict[str, Side] = {
            name: partial(side.decode, n_tokens) for name, side in sides.items()
        }
        ours = {"unimem": measured.pop("unimem")}
        pids = [side.pid for side in sides.values()]
        if is_busy:
            pids.append(stack.enter_context(_busy(cpus[-1])))
        measure.compare(ours, measured, pids=pids, rounds=rounds, quick_rounds=6)


@SUITE.case(
    "busy-core",
    "Does the model in the package lose by its own threads, where a process has one of 2 CPUs?",
    unit="tokens/s",
    targets=[faster("one thread", 0.97, issue=11), faster_than_best(0.9, issue=18)],
)
def busy_core(measure: Measure) -> None:
    """Make 32 tokens at a time, beside an endless process."""
    from unimem.engine import embedded_model

    own_threads(measure, embedded_model(), N_BUSY_DECODE, is_busy=True, rounds=25)


@SUITE.case(
    "busy-core-q8_0",
    "Does a large model lose by its own threads, where a process has one of 2 CPUs?",
    unit="tokens/s",
    targets=[faster_than_best(0.9, issue=18)],
    in_quick=False,  # two threads need seconds for a token
)
def busy_core_large(measure: Measure) -> None:
    """Make 4 tokens at a time, beside an endless process."""
    path = decoding.model(measure, "q8_0")
    own_threads(measure, path, N_BUSY_LARGE, is_busy=True, rounds=9)


@SUITE.case(
    "own-threads-q8_0",
    "Does a large model lose by its own threads, where nobody else works?",
    unit="tokens/s",
    targets=[faster_than_best(0.98, issue=18)],
    in_quick=False,
)
def own_threads_large(measure: Measure) -> None:
    """Make 8 tokens at a time."""
    path = decoding.model(measure, "q8_0")
    own_threads(measure, path, decoding.N_DECODE, is_busy=False, rounds=25)


@contextmanager
def _busy(cpu: int) -> Iterator[int]:
    """Keep a CPU busy with a process that never sleeps, and yield its number."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.sched_setaffinity(process.pid, {cpu})
            yield process.pid
        finally:
            process.kill()
