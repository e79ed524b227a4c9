"""Measure which options of ``unimem run`` suit a model on this machine.

One factor at a time: pages, load mode, NUMA policy, type of the KV cache. Each value runs beside
the defaults, in processes of its own, alternating. A value wins if the interval of its ratio lies
above 1. Since a factor may win by luck, all winners are measured once more, together, against the
defaults, and only what wins then is advised.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from unimem.base.text import format_count
from unimem.engine.model import Model
from unimem.errors import CapacityError
from unimem.models.dims import ModelDims
from unimem.planning.plan import plan
from unimem.planning.result import Plan
from unimem.system.limits import nodes
from unimem.weights.opened import open_weights
from unimem_bench import states
from unimem_bench.decoders import DecoderProcess, SideError
from unimem_bench.huge_pages import reserved
from unimem_bench.record import CaseRecord, SideRecord
from unimem_bench.rounds import alternate
from unimem_bench.stats import Ratio, ratio, spread
from unimem_bench.suite import NotMeasured

SCHEMA = "unimem.advice/1"
DEFAULT = "default"
Metric = Literal["decode", "prefill", "start"]

# Seconds of measuring in one pass, which is a set of new processes.
_QUICK_S = {"prefill": 0.4, "decode": 0.08}
_FULL_S = {"prefill": 3.0, "decode": 0.25}
_LEAST_PROMPT = 32  # tokens: attention to fewer takes no measurable time
_SETTLE_S = 0.05  # that a process waits before it answers
_PYTHON_S = 0.4  # to start one

TRADE_OFFS = {
    ("pages", "2m"): "2m pages have to be reserved before, and nothing else can use them",
    ("pages", "thp"): "with thp the weights are copied: they take RAM of their own, and the start "
    "takes longer than mapping the file",
    ("load", "copy"): "copied weights take RAM of their own, which no other process shares",
    ("load", "repack"): "repacked weights take RAM of their own, which processes share only where "
    "they are staged; later starts are faster than is shown, from an image that is kept on disk",
    ("load", "direct"): "weights that are read past the page cache take RAM of their own, and are "
    "read from the disk at every start",
    ("kv_dtype", "q8_0"): "q8_0 halves the KV cache and rounds what it holds to 8 bits",
    ("kv_dtype", "bf16"): "bf16 rounds what the KV cache holds to 8 bits of mantissa, f16 to 11",
    ("kv_dtype", "f32"): "f32 doubles the KV cache",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """Options, measured against the defaults."""

    name: str  # as on the command line; "default" without options
    options: dict[str, str]  # as keyword arguments of `unimem.plan`
    # "decode" and "prefill" in tokens a second; "start" in seconds from the path to a decoder that
    # is ready, with the file in the page cache.
    medians: dict[Metric, float]
    nbytes: int  # the memory that it takes, a mapped file included
    # How many times as fast as the defaults that ran beside it; {} for the defaults.
    ratios: dict[Metric, Ratio] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Factor:
    """An option of ``unimem run``, and what its values measured."""

    name: str  # "pages", "load", "kv_dtype" or "numa"
    # The defaults first; empty if there is nothing to compare them with.
    variants: tuple[Variant, ...]
    winner: str | None = None  # None if the default stays
    by: Metric | None = None  # what it won by


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured, depending on the speed of the model."""

    passes: int  # times that processes are started anew
    n_prompt: int  # tokens of the prompt, which fill the context
    n_decode: int  # tokens in one measurement of decoding
    rounds: int  # measurements in a pass
    seconds: float  # of one process in one pass


@dataclass(frozen=True, slots=True)
class Advised:
    """The result of `advise`."""

    model: str  # the file
    quick: bool  # whether little was measured
    threads: int
    ctx: int
    effort: Effort
    factors: tuple[Factor, ...]
    flags: tuple[str, ...]  # for ``unimem run``; empty if nothing differs
    margin: Ratio | None  # how many times as fast all flags together are as the defaults
    by: Metric | None  # the metric of the margin
    trade_offs: tuple[str, ...]  # what the flags cost
    left_out: dict[str, str]  # options that were not measured, as ``--pages 2m``, and why
    seconds: float  # that it took

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as docs/schemas/advice-1.json has them."""
        document = asdict(self) | {"margin": self.margin and self.margin._asdict()}
        for factor in document["factors"]:
            for variant in factor["variants"]:
                ratios = variant["ratios"].items()
                variant["ratios"] = {metric: each._asdict() for metric, each in ratios}
        return {"schema": SCHEMA, **document}

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())


_UNITS: dict[Metric, str] = {"decode": "tokens/s", "prefill": "tokens/s", "start": "s"}
_DECIDING: tuple[Metric, ...] = ("decode", "start")
_PLACING = {"pages", "numa"}  # with one of these, `auto` copies the weights

# By decoder and metric, the figures of each pass.
Figures = dict[str, dict[Metric, list[list[float]]]]


class Wanted(NamedTuple):
    """Options, and the plan for them."""

    options: dict[str, str]
    plan: Plan

    @property
    def pool_bytes(self) -> int:
        """The bytes of huge pages that the pool must have."""
        if self.options.get("pages") != "2m":
            return 0
        checks = self.plan.checks
        return sum(each.needed_bytes for each in checks if each.name.startswith("hugetlb pool"))


class Speeds(NamedTuple):
    """A first measurement of a process: tokens a second, and seconds to start."""

    prefill: float
    decode: float
    start_s: float


def effort(speeds: Speeds, ctx: int, *, quick: bool) -> Effort:
    """Choose how much to measure, so that fast and slow models take about as long."""
    wanted = _QUICK_S if quick else _FULL_S
    n_prompt = max(_LEAST_PROMPT, int(wanted["prefill"] * speeds.prefill))
    n_prompt = min(n_prompt, max(1, ctx // 2))
    n_decode = min(max(1, int(wanted["decode"] * speeds.decode)), max(1, (ctx - n_prompt) // 4))
    rounds = 7 if quick else 15
    seconds = _PYTHON_S + speeds.start_s + n_prompt / speeds.prefill
    seconds += (rounds + 1) * (n_decode / speeds.decode + _SETTLE_S)
    return Effort(2 if quick else 3, n_prompt, n_decode, rounds, seconds)


def advise(
    model: Path,
    *,
    quick: bool = False,
    ctx: int | None = None,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Advised:
    """Measure a model with each value of the options that place its memory.

    `ctx` and `threads` are as for ``unimem run``; `quick` takes less time, and misses small
    differences. `progress` receives lines: how long it will take, and what is measured now.

    Raises FormatError, UnsupportedModel or OSError if the file cannot be used, CapacityError if the
    model does not fit with the defaults, and SideError if the decoder cannot start with them.
    """
    started = time.monotonic()
    made = plan(model, ctx=ctx, threads=threads)
    made.require_fits(strict=False)
    with open_weights(model, load="map") as weights:
        Model.from_weights(weights)
        n_vocab = ModelDims.from_weights(weights).vocab_size
    states.read_through(model)
    bench = _Bench(model, made, n_vocab)
    speeds = bench.probe()
    bench.effort = effort(speeds, bench.ctx, quick=quick)
    values = candidates([node.id for node in nodes().values() if node.total_bytes and node.allowed])
    n_sides = sum(1 + len(each) for each in values.values()) + 2
    seconds = n_sides * bench.effort.passes * bench.effort.seconds
    progress(
        f"{format_count(made.threads, 'thread')}, "
        f"{format_count(bench.effort.n_prompt, 'token')} of prompt, "
        f"{format_count(bench.effort.passes, 'process', 'es')} for each value: "
        f"about {_minutes(seconds)}"
    )
    factors = []
    for name, found in values.items():
        progress(f"{flag(name)}: {', '.join(found)}")
        variants = bench.compare([_repacked({name: value}, made) for value in found])
        factors.append(_judged(name, variants))
    winners = {factor.name: factor.winner for factor in factors if factor.winner is not None}
    winners = _repacked(winners, made)
    together, by = None, None
    if winners:
        progress(f"together: {_label(winners)}")
        together = next(iter(bench.compare([winners])[1:]), None)
    if together is not None:
        # If nothing but the start won, the margin is that of the start.
        by = _better(together, is_loading=all(factor.by != "decode" for factor in factors))
    if together is None or by is None:
        together, by, winners = None, None, {}
    return Advised(
        model=str(model),
        quick=quick,
        threads=made.threads,
        ctx=bench.ctx,
        effort=bench.effort,
        factors=tuple(factors),
        flags=_flags(winners),
        margin=None if together is None or by is None else together.ratios[by],
        by=by,
        trade_offs=() if together is None else tuple(_trade_offs(winners, together)),
        left_out=bench.left_out,
        seconds=time.monotonic() - started,
    )


def candidates(node_ids: Sequence[int]) -> dict[str, list[str]]:
    """List the values of each option; NUMA policies only if there are several nodes.

    >>> candidates([0, 2])["numa"], "numa" in candidates([0])
    (['interleave', 'bind:0', 'bind:2'], False)
    """
    found = {
        "pages": ["4k", "thp", "2m"],
        "load": ["map", "copy", "direct", "repack"],
        "kv_dtype": ["f32", "bf16", "q8_0"],
    }
    if len(node_ids) > 1:
        found["numa"] = ["interleave", *(f"bind:{node}" for node in node_ids)]
    return found


def _repacked(options: dict[str, str], made: Plan) -> dict[str, str]:
    """Keep weights repacked on other pages and nodes, if the defaults repack them."""
    if made.load != "repack" or not options.keys() & _PLACING:
        return options
    return {"load": "repack"} | options


def flag(name: str) -> str:
    """Write an option's name as on the command line.

    >>> flag("kv_dtype")
    '--kv-dtype'
    """
    return f"--{name.replace('_', '-')}"


def _flags(options: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(text for name, value in options.items() for text in (flag(name), value))


def _label(options: Mapping[str, str]) -> str:
    return " ".join(_flags(options)) or DEFAULT


def _better(variant: Variant, *, is_loading: bool) -> Metric | None:
    """Say what a variant is better by; the start counts only where options affect nothing else."""
    if variant.ratios["decode"].low > 1:
        return "decode"
    costs_speed = min(variant.ratios["decode"].high, variant.ratios["prefill"].high) < 1
    return "start" if is_loading and variant.ratios["start"].low > 1 and not costs_speed else None


def _judged(name: str, variants: Sequence[Variant]) -> Factor:
    """Find the winning value: the one that decodes fastest, or else starts fastest."""
    won = {each.name: _better(each, is_loading=name == "load") for each in variants[1:]}
    for by in _DECIDING:
        found = [each for each in variants[1:] if won[each.name] == by]
        if found:
            best = max(found, key=lambda each: each.ratios[by].value)
            return Factor(name, tuple(variants), best.options[name], by)
    return Factor(name, tuple(variants))


def _trade_offs(winners: Mapping[str, str], together: Variant) -> Iterator[str]:
    """Say what the winners cost."""
    for each in winners.items():
        if each == ("pages", "thp") and winners.get("load") == "repack":
            continue  # nothing is copied
        if each in TRADE_OFFS:
            yield TRADE_OFFS[each]
    costs: dict[Metric, str] = {"prefill": "prefill", "start": "the start"}
    for metric, what in costs.items():
        measured = together.ratios[metric]
        if measured.high < 1:
            yield f"{what} has {measured.value:.2f} of the defaults' speed"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


class _Bench:
    """Runs decoders of one model beside each other."""

    def __init__(self, model: Path, made: Plan, n_vocab: int) -> None:
        assert made.ctx is not None  # of a model that the engine runs
        self.ctx = made.ctx
        self.left_out: dict[str, str] = {}
        self.effort = Effort(1, 1, 1, 1, 0.0)
        self._model = model
        self._common: dict[str, Any] = {"ctx": made.ctx, "threads": made.threads}
        self._cpus = sorted(os.sched_getaffinity(0))
        self._ids = np.random.default_rng(7).integers(0, n_vocab, made.ctx).tolist()

    def probe(self) -> Speeds:
        """Measure roughly how fast the model is."""
        with self._start({}) as decoder:
            prompt = self._ids[: max(1, min(16, len(self._ids) // 2))]
            decoder.prefill(prompt)
            prefill = decoder.prefill(prompt)
            decode = decoder.decode(max(1, min(4, len(self._ids) // 4)))
            return Speeds(prefill, decode, decoder.facts["start_s"])

    def compare(self, variants: Sequence[dict[str, str]]) -> list[Variant]:
        """Measure options beside the defaults, which come first; [] if none can be measured."""
        wanted = {DEFAULT: Wanted({}, plan(self._model, **self._common))}
        for options in variants:
            how: Any = {**self._common, **options}
            try:
                made = plan(self._model, **how)
                made.require_fits(strict=False)
            except (CapacityError, ValueError) as error:
                self.left_out[_label(options)] = str(error)
                continue
            if options.get("load") == "repack" and made.load != "repack":
                self.left_out[_label(options)] = made.load_reason
            else:
                wanted[_label(options)] = Wanted(options, made)
        found: list[Variant] = []
        for group in self._groups(wanted):
            measured = self._measure(group)
            found += [
                _variant(measured, name, group[name])
                for name in measured
                if name != DEFAULT or not found
            ]
        return found

    def _groups(self, wanted: dict[str, Wanted]) -> list[dict[str, Wanted]]:
        """Run all at once if there is room, else each one beside the defaults."""
        room = states.available_bytes()
        if _needed([each.plan for each in wanted.values()]) <= room:
            return [wanted]
        default = wanted.pop(DEFAULT)
        pairs = []
        for name, each in wanted.items():
            if _needed([default.plan, each.plan]) <= room:
                pairs.append({DEFAULT: default, name: each})
            else:
                self.left_out[name] = "there is no room for it beside the defaults"
        return pairs

    def _start(self, options: Mapping[str, str]) -> DecoderProcess:
        how: Any = {**self._common, **options}
        states.read_through(self._model)  # repacking drops weights from the page cache
        return DecoderProcess(self._model, **how)

    def _measure(self, group: Mapping[str, Wanted]) -> Figures:
        """Measure decoders beside each other, in several passes with new processes."""
        figures: Figures = {name: {metric: [] for metric in _UNITS} for name in group}
        # A decoder that needs pages of the pool starts before the defaults, which would take them;
        # the rest take turns.
        first = [name for name, each in group.items() if each.pool_bytes]
        order = [name for name in group if name not in first]
        with ExitStack() as pool:
            for name in first:
                try:
                    pool.enter_context(reserved(group[name].pool_bytes))
                except NotMeasured as reason:
                    self._leave_out(name, str(reason), figures)
            for number in range(self.effort.passes):
                with ExitStack() as stack:
                    decoders = self._started(first + order, group, figures, stack)
                    if number == 0:
                        self._leave_out_equals(decoders, group, figures)
                    if figures.keys() == {DEFAULT}:
                        return {}
                    self._pass({name: decoders[name] for name in figures}, figures)
                order.append(order.pop(0))
        return figures

    def _started(
        self, order: Iterable[str], group: Mapping[str, Wanted], figures: Figures, stack: ExitStack
    ) -> dict[str, DecoderProcess]:
        decoders = {}
        for name in order:
            if name in figures:
                try:
                    decoders[name] = stack.enter_context(self._start(group[name].options))
                except SideError as error:
                    if name == DEFAULT:
                        raise
                    self._leave_out(name, str(error), figures)
        return decoders

    def _leave_out(self, name: str, reason: str, figures: Figures) -> None:
        self.left_out[name] = reason
        del figures[name]

    def _leave_out_equals(
        self, decoders: Mapping[str, DecoderProcess], group: Mapping[str, Wanted], figures: Figures
    ) -> None:
        """Leave out options that equal the defaults here: their ratios would be noise."""
        default = _memory(decoders[DEFAULT])
        for name, decoder in decoders.items():
            is_placed = group[name].options.keys() <= {"pages", "load"}
            if name != DEFAULT and is_placed and _memory(decoder) == default:
                self._leave_out(name, "is what the defaults do here", figures)

    def _pass(self, decoders: Mapping[str, DecoderProcess], figures: Figures) -> None:
        how: Any = {"cpus": self._cpus, "pids": [each.pid for each in decoders.values()]}
        prompt, n = self._ids[: self.effort.n_prompt], self.effort.n_decode
        prefill = {name: partial(each.prefill, prompt) for name, each in decoders.items()}
        decode = {name: partial(each.decode, n) for name, each in decoders.items()}
        prefilled = alternate(prefill, rounds=1, warmup=0, **how)
        decoded = alternate(decode, rounds=self.effort.rounds, warmup=1, **how)
        for name, decoder in decoders.items():
            decoder.require_idle()
            figures[name]["prefill"].append(prefilled.figures[name])
            figures[name]["decode"].append(decoded.figures[name])
            figures[name]["start"].append([decoder.facts["start_s"]])


def _needed(plans: Sequence[Plan]) -> int:
    """Count the bytes of several plans that run at once; those that map the file share it."""
    shared = max(made.total_bytes - made.required_bytes for made in plans)
    return shared + sum(made.required_bytes for made in plans)


def _memory(decoder: DecoderProcess) -> tuple[Any, ...]:
    """Describe a decoder's memory, as far as options affect it."""
    granted = decoder.facts["granted"]
    return decoder.facts["load"], {part: each["pages"] for part, each in granted.items()}


def _variant(figures: Figures, name: str, wanted: Wanted) -> Variant:
    """Compare the figures of a variant with the defaults."""
    ratios, medians = {}, {}
    for metric, unit in _UNITS.items():
        case = CaseRecord("advice", metric, "", unit)
        side, default = (
            SideRecord(each, "unimem", figures[each][metric]) for each in (name, DEFAULT)
        )
        medians[metric] = spread(side).median
        if name != DEFAULT:
            ratios[metric] = ratio(case, side, default)
    return Variant(name, wanted.options, medians, wanted.plan.total_bytes, ratios)
