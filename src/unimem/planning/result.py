"""The results of planning: a plan, checks against limits, and advice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import PurePath
from shlex import quote
from typing import Any, Literal

from unimem.accounting.report_html import colors_of
from unimem.accounting.row import Row, find_row
from unimem.base.html import Html, bar, facts, fragment, heading, join, size, stack, stamp, table
from unimem.base.install_hint import install_hint
from unimem.base.text import (
    Bar,
    Surface,
    escape,
    fact_lines,
    format_bytes,
    format_count,
    format_mib,
    item_lines,
    shorten,
    table_lines,
    wrap,
)
from unimem.errors import CapacityError
from unimem.kv.layer_specs import Layer, LayerKV, LayerState
from unimem.models.dims import ARCHITECTURES
from unimem.models.families import KeptLayer, KeptState, in_words
from unimem.planning.llama_cpp import NO_COMPUTE, Engine
from unimem.planning.needs import Mode
from unimem.planning.spread import NodeSpread
from unimem.planning.streaming import Reading
from unimem.system.placement import Pages

Verdict = Literal["fits", "streams", "reads from disk", "at least", "does not fit"]
"""The verdict of a plan."""

FITS: Mapping[Verdict, bool | None] = {
    "fits": True,
    "streams": True,
    "reads from disk": True,
    "at least": None,
    "does not fit": False,
}
"""Whether what has a verdict runs; None if that is not known."""

_SCHEMA = "unimem.plan/2"


@dataclass(frozen=True, slots=True)
class Check:
    """A limit, and how much of it a plan needs. Any number of threads may use it.

    Attributes
    ----------
    name : str
        As `Limit.name`, or "node 0", "cuda:0".
    needed_bytes, available_bytes, limit_bytes : int
        The plan's whole need; what this process may have, including the parts of the plan that it
        has taken already; and the limit itself.
    remedy : str
        A command or a setting that raises it.
    is_hard : bool
        Whether the kernel refuses memory beyond it, or ends the process. At any other limit a block
        falls back, with a warning, unless it is `strict`.
    """

    name: str
    needed_bytes: int
    available_bytes: int
    limit_bytes: int
    remedy: str
    is_hard: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, and its saving. Any number of threads may use it.

    Attributes
    ----------
    text : str
        A sentence.
    saves_bytes : int
        The saving in memory that cannot be dropped: of `Plan.required_bytes`, or of the rows of a
        GPU. For a smaller file, an estimate.
    options : dict
        Keyword arguments of `plan` to change; empty if another file or limit is advised.
    fits : bool
        Whether the plan fits with this alone, as requested and without spilling.
    """

    text: str
    saves_bytes: int
    options: dict[str, Any]
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory that a model needs, by category. Any number of threads may use it.

    Attributes
    ----------
    rows : tuple of Row
        Each has its `category`, `nbytes` (in whole pages) and `device`.
    checks : tuple of Check
        One for each limit that applies.
    advice : tuple of Advice
        Changes, the cheapest first; empty if every limit has room and nothing spills.
    unknown : tuple of str
        Sentences about memory that could not be planned, and why.
    facts : dict
        As far as known: ``"model"`` (path), ``"name"``, ``"architecture"``, ``"format"`` ("GGUF",
        "safetensors", "dimensions"), ``"ggml"`` (its own memory); ``"numa"`` if some memory will
        not be on preferred nodes; ``"machine"`` of a plan for another machine or a cgroup;
        ``"image"``, the path and use of a repacked image; ``"read_bytes"`` and ``"file_bytes"`` of
        files on a server.
    ctx : int or None
        Tokens of context; None if it was not given and the memory of a token is unknown.
    batch : int
        Streams of the KV cache.
    kv_dtype : str
        Type of the KV cache.
    window : int or None
        Tokens that attention sees; None for all.
    threads, sessions : int
        Threads that compute; decoders over the same weights.
    load : {"map", "copy", "direct", "repack", "stream"}
        The load mode.
    load_reason : str
        Why.
    weights_budget : int or None
        The most memory that streamed weights take: what stays, and the slots.
    reading : Reading or None
        What a token reads from the disk, of streamed weights or of a mapped GGUF file that spills.
    pages, numa : str, str or None
        The requested pages and NUMA policy.
    max_ctx : int or None
        The longest context, up to the model's own or a longer requested one that fits, without
        spilling; if the file spills anyway, the longest that fits. 0 if none fits, None if unknown.
    required_bytes : int
        Main memory that cannot be dropped: all but the pages of a mapped file, unless it is locked
        or in shared memory.
    spilled_bytes : int
        Bytes of a mapped file that cannot stay in main memory beside the rest: each token reads
        them from the disk again.
    unread_bytes : int
        Bytes of the rows of a mapped file that no token reads, since they are repacked: they need
        no room.
    pool_bytes : dict of str to int
        Bytes of the rows that lie in pools of hugetlb pages, by page size: no other limit has them.
    available_bytes : int
        Main memory that this process may take now, including weights that it has taken already: the
        least of the checks.
    scratch_bytes, history_bytes : int
        Sizes of the two tapes of one session. With a window, or sliding layers, the KV cache is in
        memory of its own, and the history tape is one page.
    engine : {"unimem", "llama.cpp"}
        The engine that it is for.
    slots : str or None
        Conversations of a llama-server: a number, with ``":divided"`` if each has an equal part of
        the context.
    is_counted : bool
        Whether the rows have all that its layers keep, and for llama.cpp what it computes with.
    no_tokenizer : str or None
        Why `unimem run` cannot tokenize the text of the model, with the key of the file, and what
        works all the same; None if it can, or if the engine is another one.
    unhashed_bytes : int
        Bytes of weights that the first `Decoder` with a store, or with a session to save or to
        resume, reads to hash them; 0 if their hash is known, or if the engine is another one.
    model_ctx : int or None
        The model's own context, if its header has it.
    layers : tuple of KeptRows or KeptState
        The memory of each layer, in the order of its blocks; empty if unknown. See `cache_layers`.
    process_bytes : int
        What a process that is not started yet takes beside the rows: the interpreter, libraries and
        a tokenizer; 0 if this process has them, or if that is not known.
    container_bytes : int or None
        The least limit of a container for this process, in which nothing spills; None if
        `process_bytes` is 0.
    spilled_now_bytes : int or None
        As `spilled_bytes`, with the help of what the page cache has at this moment; None if it was
        not asked for.
    min_ctx : int
        The least context that is of use.
    spread : NodeSpread or None
        What each NUMA node would have with each way to place the model, and the best way; None with
        one usable node, for streamed weights, and for a GPU.
    made : float
        When it was made, in seconds since 1970; equal plans may differ in it.
    """

    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    advice: tuple[Advice, ...]
    unknown: tuple[str, ...]
    facts: dict[str, Any]
    ctx: int | None
    batch: int
    kv_dtype: str
    window: int | None
    threads: int
    sessions: int
    load: Mode
    load_reason: str
    pages: Pages
    numa: str | None
    max_ctx: int | None
    required_bytes: int
    spilled_bytes: int
    available_bytes: int
    scratch_bytes: int
    history_bytes: int
    model_ctx: int | None = None
    unread_bytes: int = 0
    pool_bytes: dict[str, int] = field(default_factory=dict)
    layers: tuple[KeptLayer, ...] = ()
    engine: Engine = "unimem"
    slots: str | None = None
    is_counted: bool = True
    weights_budget: int | None = None
    reading: Reading | None = None
    no_tokenizer: str | None = None
    unhashed_bytes: int = 0
    process_bytes: int = 0
    container_bytes: int | None = None
    spilled_now_bytes: int | None = None
    min_ctx: int = 1
    spread: NodeSpread | None = None
    made: float = field(default_factory=time.time, compare=False)

    def __getitem__(self, category: str) -> Row:
        """Return the row of a category: of main memory, else of the first device that has one.

        Raises
        ------
        CategoryError
            There is no such row; it is a `KeyError`, and names those that there are.
        """
        return find_row(self.rows, category)

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of main memory."""
        return sum(row.nbytes for row in self.rows if row.device is None)

    @property
    def fits(self) -> bool | None:
        """Whether it runs, as its verdict says; None if that is not known."""
        return FITS[self.verdict]

    @property
    def verdict(self) -> Verdict:
        """The verdict.

        ``"fits"``: everything stays in memory; at limits that are not hard, memory may be placed
        otherwise than requested. ``"streams"``: it runs, and each token reads the experts or layers
        for which its `weights_budget` has no room. ``"reads from disk"``: it runs, and each token
        reads `spilled_bytes` of the mapped file again. ``"at least"``: the rows have room, but what
        its layers keep is not known, or not all of it. ``"does not fit"``: it is refused.
        """
        if find_worst_check(self, strict=False) is not None:
            return "does not fit"
        if not self.is_counted:
            return "at least"
        if self.load == "stream" and self.reading is not None and self.reading.token_bytes:
            return "streams"
        return "reads from disk" if self.spilled_bytes else "fits"

    def require_fits(self, *, strict: bool = True, taken_bytes: int = 0) -> None:
        """Raise CapacityError, naming the tightest limit, figures and advice, if it does not fit.

        Parameters
        ----------
        strict : bool, default True
            False: only for hard limits.
        taken_bytes : int, default 0
            How much of it, beside weights, is in main memory already.
        """
        worst = find_worst_check(self, strict=strict)
        if worst is None or worst.needed_bytes <= worst.available_bytes + taken_bytes:
            return
        context = (
            "" if self.ctx is None else f" with a context of {format_count(self.ctx, 'token')}"
        )
        hints = "; ".join([item.text for item in self.advice[:2]] or [worst.remedy])
        raise CapacityError(
            f"the model needs {format_bytes(worst.needed_bytes)}{context}, but "
            f"{format_bytes(worst.available_bytes + taken_bytes)} are available: the least room is "
            f"in {worst.name} (limit {format_bytes(worst.limit_bytes)}): {hints}",
            worst.available_bytes + taken_bytes,
            0,
            worst.needed_bytes,
        )

    def cache_layers(self) -> list[Layer]:
        """Return the layers that a KV cache of the model is made of.

        Returns
        -------
        list of LayerKV and LayerState
            For ``KVCache(layers=..., max_seq_len=...)``, one for each of `layers`, in that order.

        Raises
        ------
        ValueError
            The layers are unknown.

        Examples
        --------
        >>> import unimem as um
        >>> plan = um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512))
        >>> plan.cache_layers()[0]
        LayerKV(n_kv_heads=4, head_dim=8, v_head_dim=8, window=None, dtype=None, share_of=None)
        """
        if not self.layers:
            raise ValueError("what the layers of the model keep is not known, or nothing")
        if any(layer.every > 1 for layer in self.layers if not isinstance(layer, KeptState)):
            raise ValueError("the model keeps rows of several tokens, which no cache of unimem has")
        return [
            LayerState(layer.shape)
            if isinstance(layer, KeptState)
            else LayerKV(
                layer.n_kv_heads,
                layer.k_size,
                layer.v_size,
                window=layer.window,
                share_of=layer.share_of,
            )
            for layer in self.layers
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and texts, as docs/schemas/plan-2.json has them."""
        return {
            "schema": _SCHEMA,
            "verdict": self.verdict,
            "fits": self.fits,
            "total_bytes": self.total_bytes,
            **{
                item.name: getattr(self, item.name)
                for item in fields(self)
                if item.name
                not in ("rows", "checks", "advice", "layers", "reading", "spread", "made")
            },
            "reading": None if self.reading is None else self.reading.to_dict(),
            "spread": None if self.spread is None else asdict(self.spread),
            "unknown": list(self.unknown),
            "rows": [
                {"category": row.category, "nbytes": row.nbytes, "device": row.device}
                for row in self.rows
            ],
            "checks": [asdict(check) | {"fits": check.fits} for check in self.checks],
            "advice": [asdict(item) for item in self.advice],
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        model, context = self.facts.get("model", "no file"), f"context {self.ctx}"
        return f"Plan({model}: {self.verdict}, {format_bytes(self.total_bytes)}, {context})"

    def __str__(self) -> str:
        return "\n".join(plan_lines(Surface(), self))

    def _repr_html_(self) -> str:
        return _html(self)


def find_worst_check(plan: Plan, *, strict: bool = True) -> Check | None:
    """Return the check that lacks the most room, or None; without `strict`, of hard limits."""
    found = [one for one in plan.checks if not one.fits and (strict or one.is_hard)]
    return max(found, key=lambda one: one.needed_bytes - one.available_bytes, default=None)


def is_as_asked(plan: Plan) -> bool:
    """Whether every limit has room, even those that are not hard, and no token reads the disk."""
    is_there = not plan.spilled_bytes and plan.verdict != "streams"
    return is_there and all(check.fits for check in plan.checks)


# ---- what people read ---------------------------------------------------------------------------

_INDENT = 3  # of text to be typed
_NOTICED = 64 << 20  # bytes: fewer are hashed in a tenth of a second
_EXACT = 10 * 1024  # contexts below are written exactly, others in units of 1024


def plan_lines(surface: Surface, plan: Plan, path: str | None = None) -> Iterator[str]:
    """Write a plan: the verdict first, and notes at the end.

    `path` is the name of the file, by default the plan's.
    """
    yield (surface.good if plan.verdict == "fits" else surface.bad)(_verdict(surface, plan))
    yield ""
    yield from fact_lines(surface, _facts(plan, path or plan.facts.get("model", "")).items())
    yield ""
    yield from _memory_lines(surface, plan)
    yield ""
    yield from _check_lines(surface, plan)
    if plan.spread is not None:
        yield ""
        yield from table_lines(surface, _NODE_HEAD, _node_rows(plan.spread))
    if plan.spilled_bytes:
        yield ""
        yield from wrap(
            f"{format_bytes(plan.spilled_bytes)} of the file cannot stay in RAM beside the rest: "
            "every token reads them from the disk again.",
            surface.width,
        )
    if plan.reading is not None and plan.reading.token_bytes:
        yield ""
        text = _reading(plan.reading)
        if plan.spilled_bytes and (rate := _per_second(plan.reading)):
            text += f" That is at most {rate}."
        yield from wrap(text, surface.width)
        if plan.reading.tokens_per_second is None and "model" in plan.facts:
            yield " " * _INDENT + f"unimem doctor --disk {quote(escape(plan.facts['model']))}"
    if plan.spilled_now_bytes is not None:
        yield ""
        now = plan.spilled_now_bytes
        spills = f"{format_bytes(now)} of the file do not stay" if now else "all of the file stays"
        yield from wrap(f"With what the page cache has at this moment, {spills}.", surface.width)
    missed = [check.name for check in plan.checks if not (check.fits or check.is_hard)]
    if missed:
        yield ""
        yield from wrap(
            f"Not as asked for: {escape(', '.join(missed))}. "
            "Memory falls back to what is available.",
            surface.width,
        )
    yield from _advice_lines(surface, plan)
    if plan.unknown:
        yield ""
        yield surface.heading("Not known:")
        for sentence in plan.unknown:
            yield from item_lines(surface, "-", sentence)
    if note := plan.facts.get("ggml"):
        yield ""
        yield from fact_lines(surface, [("ggml", note)])


def _reading(reading: Reading) -> str:
    """Write what a token reads, and how long that takes."""
    used, read = format_bytes(reading.used_bytes), format_bytes(reading.token_bytes)
    where = escape(reading.disk or "the disk")
    text = f"Each token uses {used} of the weights, and is expected to read {read} from {where}"
    times = reading.read_seconds, reading.compute_seconds
    if times[0] is None or times[1] is None:
        return f"{text}, whose speed is not known. This measures it:"
    rate = format_bytes(reading.bytes_per_second or 0)
    return (
        f"{text}: {times[0] * 1e3:.1f} ms at {rate}/s, as measured on {reading.measured}, beside "
        f"{times[1] * 1e3:.1f} ms for reading its weights in memory."
    )


def _per_second(reading: Reading | None) -> str:
    """Write the expected rate of tokens; "" if it is unknown."""
    rate = None if reading is None else reading.tokens_per_second
    if rate is None:
        return ""
    # From 9.95 on, two digits are a whole number.
    return f"{rate:,.0f} tokens/s" if rate >= 9.95 else f"{rate:.2g} tokens/s"


def _facts(plan: Plan, path: str) -> dict[str, str]:
    known = plan.facts
    is_gguf = known.get("format") == "GGUF"
    what = (
        known.get("architecture") or "architecture unknown",
        f"GGUF for {plan.engine}" if is_gguf else known.get("format"),
    )
    runs = is_gguf and not plan.no_tokenizer and known.get("architecture") in ARCHITECTURES
    tokens = "unknown" if plan.ctx is None else format_count(plan.ctx, "token")
    notes = []
    if plan.model_ctx:
        is_beyond = plan.ctx is not None and plan.ctx > plan.model_ctx
        notes.append(f"{'beyond the ' * is_beyond}model's own: {plan.model_ctx:,}")
    if plan.max_ctx is not None:
        notes.append(f"fits: {plan.max_ctx:,}" if plan.max_ctx else "none fits")
    tokens += f" ({', '.join(notes)})" if notes else ""
    cache = [tokens, f"KV {plan.kv_dtype}"]
    cache += [f"attention sees the last {plan.window:,}"] if plan.window else []
    cache += [format_count(plan.batch, "stream")] if plan.batch > 1 else []
    if plan.slots is not None:
        n, _, divided = plan.slots.partition(":")
        cache.append(f"{n} slots {'with a part each' if divided else 'that share it'}")
    cache += [format_count(plan.sessions, "session")] if plan.sessions > 1 else []
    name, kind = known.get("name") or PurePath(path).stem, ", ".join(filter(None, what))
    runner = ""
    if plan.engine == "unimem" and runs:
        kind = f"{kind}: unimem run runs it"
        if find_spec("unimem_ggml") is None:
            runner = f"not yet, without ggml: {install_hint('run')}"
    elif is_gguf:
        runner = f"llama-server runs it; unimem run {'does, too' if runs else 'does not'}"
    elif path:
        runner = "transformers and vLLM run it; unimem run does not"
    facts = {
        "model": f"{name}: {kind}" if name else kind,
        "file": path,
        "run": runner,
        "read": _fetched(known),
        "context": ", ".join([*cache, format_count(plan.threads, "thread")]),
        "layers": in_words(plan.layers),
        "load": f"{plan.load}: {plan.load_reason}",
        "machine": known.get("machine") or "",
        "image": known.get("image") or "",
        "text": plan.no_tokenizer or "",
        "hash": _hashing(plan.unhashed_bytes),
        "pages": plan.pages if plan.pages != "auto" else "",
        "numa": known.get("numa") or plan.numa or "",
        "nodes": "" if plan.spread is None else str(plan.spread),
    }
    return {name: text for name, text in facts.items() if text}


def _fetched(known: dict[str, Any]) -> str:
    """Say how much of a file on a server was read."""
    if "read_bytes" not in known:
        return ""
    return f"{format_bytes(known['read_bytes'])} of {format_bytes(known['file_bytes'])}"


def _hashing(nbytes: int) -> str:
    """Say what it costs to hash the weights, which sessions and stores are bound to."""
    if nbytes < _NOTICED:
        return ""
    return f"not known yet: a session or store first reads {format_bytes(nbytes)} of weights"


def _memory_lines(surface: Surface, plan: Plan) -> Iterator[str]:
    rows: list[tuple[str, str]] = []
    bars: list[Bar | None] = []
    totals: dict[str | None, int] = {None: plan.total_bytes}
    for row in plan.rows:
        if row.device is not None:
            totals[row.device] = totals.get(row.device, 0) + row.nbytes
    for row in plan.rows:
        rows.append((_on(row.category, row.device), format_bytes(row.nbytes)))
        bars.append(Bar(row.nbytes / totals[row.device] if row.nbytes else 0.0))
    for device, nbytes in totals.items():
        rows.append((_on("total", device), format_bytes(nbytes)))
        if device is None and plan.unread_bytes:
            rows.append(("not read, since repacked", format_bytes(plan.unread_bytes)))
        if device is None and plan.required_bytes < nbytes:
            rows.append(("must stay in RAM", format_bytes(plan.required_bytes)))
        if device is None and plan.container_bytes is not None:
            rows.append(("beside the model", format_bytes(plan.process_bytes)))
            rows.append(("container limit", format_mib(plan.container_bytes)))
    bars += [None] * (len(rows) - len(bars))
    yield from table_lines(surface, ("memory", "size"), rows, bars=bars)


# What is in rows of a plan whose categories do not say it.
_CONTENTS = {"diagnostics": "for unimem report", "other": "copies of headers"}


def _on(what: str, device: str | None) -> str:
    what = f"{what} ({_CONTENTS[what]})" if what in _CONTENTS else what
    return what if device is None else f"{what} on {device}"


def _check_lines(surface: Surface, plan: Plan) -> Iterator[str]:
    rows, bars = [], []
    for check in plan.checks:
        needed, available = format_bytes(check.needed_bytes), format_bytes(check.available_bytes)
        name = shorten(escape(check.name), surface.width // 2)  # leaves room for a bar
        rows.append((name, needed, available, "yes" if check.fits else "no"))
        share = check.needed_bytes / check.available_bytes if check.available_bytes else 1.0
        bars.append(Bar(share, True, surface.good if check.fits else surface.bad))
    head = ("limit", "needed", "available", "fits")
    yield from table_lines(surface, head, rows, align="<>>>", bars=bars)


_NODE_HEAD = ("node", "available", "one node", "mirror", "interleave", "distance")


def _node_rows(spread: NodeSpread) -> list[tuple[str, ...]]:
    """Write what each node would have with each way to place the model."""

    def size_of(nbytes: int | None) -> str:
        return format_bytes(nbytes) if nbytes else "-"

    return [
        (
            str(cost.node),
            format_bytes(cost.available_bytes),
            size_of(cost.alone_bytes),
            size_of(cost.mirror_bytes),
            size_of(cost.interleave_bytes),
            f"{cost.distance:g}",
        )
        for cost in spread.nodes
    ]


def _advice_lines(surface: Surface, plan: Plan) -> Iterator[str]:
    if not plan.advice:
        return
    yield ""
    yield surface.heading("What helps, the cheapest first:")
    remedies = {check.remedy for check in plan.checks}
    for number, advice in enumerate(plan.advice, 1):
        text = advice.text[:1].upper() + advice.text[1:]
        remedy = next((one for one in remedies if text.endswith(f": {one}")), "")
        text = text.removesuffix(f": {remedy}") + _worth(plan, advice)
        typed = remedy or _as_options(advice.options)
        yield from item_lines(surface, f"{number}.", f"{text}:" if typed else text)
        if typed:  # in one line of any length, to be copied
            yield " " * _INDENT + escape(typed)


def _worth(plan: Plan, advice: Advice) -> str:
    """Write its saving in figures."""
    worth = [f"saves {format_bytes(advice.saves_bytes)}"] if advice.saves_bytes > 0 else []
    if advice.fits:
        worth.append("nothing falls back then" if plan.verdict == "fits" else "then it fits")
    return f" ({', '.join(worth)})" if worth else ""


def _as_options(options: dict[str, Any]) -> str:
    """Write keyword arguments of `unimem.plan` as options of the command line."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in options.items()
        if value not in (None, False)
    )


def room_bytes(plan: Plan) -> int:
    """Return the bytes of main memory in which nothing spills, outside of hugetlb pools."""
    return plan.total_bytes - plan.unread_bytes - sum(plan.pool_bytes.values())


def _verdict(surface: Surface, plan: Plan) -> str:
    """Write the verdict in one line."""
    worst = find_worst_check(plan, strict=False)
    if worst is not None:
        is_short = 0 < (plan.max_ctx or 0) < min(plan.min_ctx, plan.ctx or 0)
        least = f" with a context of {plan.ctx:,}" if is_short else ""
        start, end = f"Does not fit{least}: {_figures(worst)} (", f"). {_largest(plan)}"
        name = shorten(escape(worst.name), surface.width - len(start) - len(end))
        return start + name + end
    if plan.verdict == "at least":
        known = _of(room_bytes(plan), plan.available_bytes)
        what = "what is computed for" if NO_COMPUTE in plan.unknown else "the cache of"
        start, end = f"At least {known}: {what} ", " is not known."
        name = escape(plan.facts.get("architecture") or "this file")
        return start + shorten(name, max(8, surface.width - len(start) - len(end))) + end
    if plan.spilled_bytes:
        again = format_bytes(plan.spilled_bytes)
        return f"Reads from disk: {again} with every token. {_largest(plan)}"
    if plan.verdict == "streams" and plan.reading is not None:
        there = sum(row.nbytes for row in plan.rows if row.category.startswith("weights"))
        streams = [f"{_of(there, plan.reading.whole_bytes)} in RAM", _per_second(plan.reading)]
        return f"Streams: {', '.join(filter(None, streams))}. {_largest(plan)}"
    needed = room_bytes(plan) + plan.process_bytes
    fits = [_of(needed, plan.available_bytes)]
    is_computed = plan.engine == "unimem" or any(row.category == "compute" for row in plan.rows)
    fits += [] if is_computed else ["compute buffers not counted"]
    devices = {row.device for row in plan.rows}
    fits += [f"{_figures(check)} on {check.name}" for check in plan.checks if check.name in devices]
    return f"Fits: {', '.join(fits)}. {_largest(plan)}"


def _figures(check: Check) -> str:
    return _of(check.needed_bytes, check.available_bytes)


def _of(nbytes: int, available: int) -> str:
    """Write two sizes, with a common unit once."""
    size, unit = format_bytes(nbytes).split()
    most = format_bytes(available)
    return f"{size} of {most}" if most.endswith(f" {unit}") else f"{size} {unit} of {most}"


def _largest(plan: Plan) -> str:
    longest = plan.max_ctx
    if longest is None:
        return "Largest context unknown."
    if not longest:
        return "No context fits."
    is_exact = longest < _EXACT and longest % 1024
    return f"Largest context {longest:,}." if is_exact else f"Largest context {longest // 1024}k."


# ---- for a notebook -----------------------------------------------------------------------------

_NOTEBOOK = Surface(width=240)  # for lines of any length
_FITS, _LACKS = "#3f9e63", "#c9544d"


def _html(plan: Plan) -> Html:
    """Write a plan as `plan_lines` does, with bars for its rows and limits."""
    host = [row for row in plan.rows if row.device is None]
    colors = colors_of(row.category for row in plan.rows)
    total = max(1, plan.total_bytes)
    rows = [
        (
            _on(row.category, row.device),
            size(row.nbytes),
            bar(row.nbytes / total, colors[row.category]) if row.device is None else "",
        )
        for row in plan.rows
    ]
    sums = [("total", size(plan.total_bytes), "")]
    if plan.required_bytes < plan.total_bytes:
        sums.append(("must stay in RAM", size(plan.required_bytes), ""))
    if plan.container_bytes is not None:
        sums.append(("beside the model", size(plan.process_bytes), ""))
        sums.append(("container limit", size(plan.container_bytes), ""))
    checks = [
        (
            check.name,
            size(check.needed_bytes),
            size(check.available_bytes),
            "yes" if check.fits else "no",
            bar(
                check.needed_bytes / check.available_bytes if check.available_bytes else 1.0,
                _FITS if check.fits else _LACKS,
            ),
        )
        for check in plan.checks
    ]
    parts = [
        heading(_verdict(_NOTEBOOK, plan)),
        stamp(plan.made),
        facts(_facts(plan, plan.facts.get("model", "")).items()),
        stack((row.category, row.nbytes, colors[row.category]) for row in host),
        table(("memory", "size", ""), rows, foot=sums, align="<><"),
        table(("limit", "needed", "available", "fits", ""), checks, align="p>>><"),
    ]
    if plan.spread is not None:
        parts.append(table(_NODE_HEAD, _node_rows(plan.spread)))
    helps = [
        f"{item.text[:1].upper()}{item.text[1:]}{_worth(plan, item)}"
        + (f": {_as_options(item.options)}" if item.options else "")
        for item in plan.advice
    ]
    for title, sentences in (
        ("What helps, the cheapest first", helps),
        ("Not known", plan.unknown),
    ):
        if sentences:
            items = join([Html(f"<li>{join([each])}</li>") for each in sentences])
            parts += [heading(title), Html(f"<ul>{items}</ul>")]
    return fragment(*parts)
