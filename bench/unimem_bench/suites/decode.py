"""Decode and prefill speed of unimem's decoder beside llama.cpp, alternating.

All run the same file with the same number of threads, the same context and an f16 KV cache, from
the same tokens, each in a process of its own, which sleeps while another one computes.

llama.cpp is the newest one, built for this CPU: with the flags that are its best for the model, and
with its defaults, also as wheels are built. unimem has ``load="auto"``, which is claimed, and
beside it the other ways to have the weights, where they differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from unimem.weights.loading import EngineLoad
from unimem_bench import decoding, files, states
from unimem_bench.decoders import DecoderProcess
from unimem_bench.llama_flags import Phase
from unimem_bench.models import Kind
from unimem_bench.rounds import Side
from unimem_bench.suite import Measure, Suite, at_most, faster, faster_than_best

SUITE = Suite("decode", "How fast are prefill and decode, beside llama.cpp?")

MAPPED, REPACKED, COPIED = "unimem, mapped", "unimem, repacked", "unimem, copied"
LOADS: dict[str, EngineLoad] = {MAPPED: "map", REPACKED: "repack", COPIED: "copy"}
FIRST: tuple[Kind, ...] = ("q8_0", "q4_k_m")  # for which issue 2 sets targets
N_GREEDY = 64
N_BUSY_DECODE = 32  # tokens in one measurement of a small model
N_BUSY_LARGE = 4  # of a large one
N_COPIES = 6  # of the weights: the mapped file, and what unimem and llama.cpp copy and repack
# By which two builds of the same code may differ, in deviations of the logits.
MAX_DIFFERENCE = 0.01


@dataclass(frozen=True, slots=True)
class Work:
    """What the sides of a case do."""

    kind: Kind
    n_threads: int | None = None  # a thread on each core by default
    alternatives: bool = True  # whether unimem also has the other ways to load
    # Whether each side has a copy of the file that is in the page cache as a download leaves it.
    is_written: bool = False


def prefill(measure: Measure, work: Work, prompt: list[int], rounds: int) -> None:
    """Compute a prompt, each time anew; no limit, since the best speed of a CPU is unknown."""
    with ExitStack() as stack:
        sides = start(measure, stack, work, "prefill")
        measured = {name: partial(side.prefill, prompt) for name, side in sides.items()}
        compare(measure, sides, measured, rounds=rounds, quick_rounds=4)


def decode(measure: Measure, work: Work) -> None:
    """Make 8 tokens at a time; all sides walk through the context alike."""
    with ExitStack() as stack:
        sides = start(measure, stack, work, "decode")
        measure.fact("agreement", agreement(sides))
        for side in sides.values():
            side.prefill(decoding.PROMPT)
        measured: dict[str, Side] = {
            name: partial(side.decode, decoding.N_DECODE) for name, side in sides.items()
        }
        path = decoding.model(measure, work.kind)
        weights = stack.enter_context(um.open_weights(path, load="map"))
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


def start(
    measure: Measure, stack: ExitStack, work: Work, phase: Phase
) -> dict[str, DecoderProcess]:
    """Start unimem's decoders, and those of llama.cpp."""
    path, cpus = decoding.prepared(measure, work.kind, N_COPIES, work.n_threads)
    peers = decoding.peers(measure, path, phase)
    options: dict[str, Any] = {"threads": len(cpus), "ctx": decoding.N_CTX}
    huge: dict[str, float] = {}  # the share of each side's file

    def file_of(name: str) -> Path:
        if not work.is_written:
            return path
        label = "".join(letter for letter in name if letter.isalnum())
        copy = stack.enter_context(files.downloaded(path, label))
        huge[name] = states.in_huge_pages(copy)
        return copy

    def start_ours(name: str, load: EngineLoad) -> DecoderProcess:
        states.read_through(path)  # repacking drops weights from the page cache
        return stack.enter_context(DecoderProcess(file_of(name), load=load, **options))

    sides = {"unimem": start_ours("unimem", "auto")}
    for name, load in LOADS.items() if work.alternatives else ():
        if load == sides["unimem"].facts["load"]:
            measure.leave_out(name, "as 'unimem', which chooses it")
            continue
        process = start_ours(name, load)
        if process.facts["load"] == load:
            sides[name] = process
        else:
            process.close()
            measure.leave_out(name, decoding.NOT_REPACKED)
    for name, peer in peers.items():
        other = decoding.start_peer(measure, name, file_of(name), peer, **options)
        if other is not None:
            sides[name] = stack.enter_context(other)
    # As for the sides that map the file.
    measure.fact("share_in_huge_pages", huge or states.in_huge_pages(path))
    for name, side in sides.items():
        measure.fact(name, side.facts)
    return sides


def compare(
    measure: Measure, sides: dict[str, DecoderProcess], measured: Mapping[str, Side], **rounds: int
) -> None:
    """Measure, with sides sorted into ours, peers and the limit of memory by their names."""
    ours = {name: side for name, side in measured.items() if name.startswith("unimem")}
    peers: dict[str, Side] = {n: side for n, side in measured.items() if n in decoding.PEERS}
    limits = {name: side for name, side in measured.items() if name == decoding.READ_BANDWIDTH}
    decoding.compare(measure, sides, ours, peers, limits, **rounds)


def agreement(sides: dict[str, DecoderProcess]) -> dict[str, dict[str, float]]:
    """Compare the logits after the prompt, and the tokens that follow, with unimem's.

    With the same ggml and weights in the same order, the same code computes them: they are equal.
    """
    ours = sides["unimem"]
    logits, tokens = ours.greedy(decoding.PROMPT, N_GREEDY)
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
        if is_alike(ours, side) and difference > MAX_DIFFERENCE:
            raise AssertionError(
                f"the logits are {difference:.2g} of their deviation apart from those of {name}"
            )
    return found


def is_alike(ours: DecoderProcess, other: DecoderProcess) -> bool:
    """Say whether the same code of ggml computes both with the same order of weights."""
    keys = ("ggml", "features")
    if any(ours.facts[key] != other.facts[key] for key in keys) or other.flags.flash is False:
        return False
    if other.kind == "unimem":
        return bool((ours.facts["load"] == "repack") == (other.facts["load"] == "repack"))
    return bool((ours.facts["load"] == "repack") == (other.flags.repack is not False))


def declare(kind: Kind, label: str, *, in_quick: bool) -> None:
    """Declare the cases of a kind of weights; a whole run has 1.1 billion of them."""
    is_first, best, defaults = kind in FIRST, decoding.BEST, decoding.DEFAULTS
    old = (best, defaults) if is_first else ()
    prefilled = [faster(best, 1.0, issue=41), faster(defaults, 1.0, issue=18)]
    more = 1.05 if kind in decoding.REPACKED else 1.0
    decoded = [faster(best, 1.05, issue=41), faster(defaults, more, issue=18)]
    SUITE.case(
        f"prefill-{kind}",
        f"How fast is a prompt of 128 tokens computed, with weights in {label}?",
        unit="tokens/s",
        targets=[faster(peer, 0.85, issue=2) for peer in old] + prefilled,
        in_quick=in_quick,
    )(partial(prefill, work=Work(kind), prompt=decoding.PROMPT, rounds=9))
    SUITE.case(
        f"decode-{kind}",
        f"How fast are tokens made, with weights in {label}?",
        unit="tokens/s",
        targets=[faster(peer, 0.97, issue=2) for peer in old] + decoded,
        in_quick=in_quick,
    )(partial(decode, work=Work(kind)))
    if is_first:
        SUITE.case(
            f"decode-{kind}-as-written",
            f"How fast are tokens made from a file as it was written, with weights in {label}?",
            unit="tokens/s",
            targets=[faster(best, 1.0, issue=41)],
            in_quick=False,
        )(partial(decode, work=Work(kind, alternatives=False, is_written=True)))
    for n_threads, words, suffix in ((None, "", ""), (1, " by one thread", "-one-thread")):
        alone = Work(kind, n_threads, alternatives=False)
        SUITE.case(
            f"prefill-512-{kind}{suffix}",
            f"How fast is a prompt of 512 tokens computed{words}, with weights in {label}?",
            unit="tokens/s",
            targets=prefilled,
            in_quick=False,
        )(partial(prefill, work=alone, prompt=decoding.LONG_PROMPT, rounds=5))
    SUITE.case(
        f"decode-{kind}-one-thread",
        f"How fast are tokens made by one thread, with weights in {label}?",
        unit="tokens/s",
        targets=decoded,
        in_quick=False,
    )(partial(decode, work=alone))


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
declare("q6_k", "Q6_K", in_quick=False)
declare("mxfp4", "Q8_0, and experts in MXFP4", in_quick=False)
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
