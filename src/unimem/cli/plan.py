"""`unimem plan`: what a model will need, of which limits, and what to do where that is too much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from unimem.cli import terminal
from unimem.cli.exits import DOES_NOT_FIT
from unimem.cli.options import (
    AsJson,
    Ctx,
    KVType,
    LoadMode,
    NumaNodes,
    PageSize,
    Threads,
    Window,
    check_numa,
)
from unimem.cli.tables import Bar, fact_lines, fit, room, table_lines, wrap
from unimem.planning.plan import MOST_SESSIONS
from unimem.planning.plan import plan as make_plan
from unimem.planning.result import Advice, Check, Plan
from unimem.system.text import format_bytes

__all__ = ["plan"]

_INDENT = 3  # of a numbered item
_EXACT = 10 * 1024  # a context of fewer tokens is said to the token, others in units of 1024


def plan(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF or safetensors file, a part of a split one, or an index of several; "
            "without one, the small model that is in the package.",
            show_default=False,
        ),
    ] = None,
    ctx: Ctx = None,
    batch: Annotated[
        int, typer.Option(min=1, max=2**20, metavar="N", help="Streams of the KV cache.")
    ] = 1,
    kv_dtype: KVType = "f16",
    window: Window = None,
    threads: Threads = None,
    sessions: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_SESSIONS,
            metavar="N",
            help="Decoders over the same weights; each has a KV cache and scratch memory.",
        ),
    ] = 1,
    load: LoadMode = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cuda:N",
            help="A GPU that weights, KV cache and scratch memory shall lie on. [default: none]",
            show_default=False,
        ),
    ] = None,
    pages: PageSize = "auto",
    numa: NumaNodes = None,
    lock: Annotated[
        bool, typer.Option("--lock", help="All of it is locked in RAM, a mapped file, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a model will need, and whether it fits."""
    check_numa(numa)
    if device is not None and not re.fullmatch(r"cuda:\d+", device):
        raise typer.BadParameter(f"--device: expected cuda:N, as in cuda:0, got {device!r}")
    if model is None:
        from unimem.engine import embedded_model

        model = embedded_model()
    made = make_plan(
        model,
        ctx=ctx,
        batch=batch,
        kv_dtype=kv_dtype,
        window=window,
        threads=threads,
        sessions=sessions,
        load=load,
        device=device,
        pages=pages,
        numa=numa,
        lock=lock,
    )
    text = made.to_json() if as_json else "\n".join(_page(made, model))
    terminal.show(text + "\n")
    if not made.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _page(plan: Plan, model: Path) -> Iterator[str]:
    yield from fact_lines(_facts(plan, model).items())
    yield ""
    yield from _rows(plan)
    yield ""
    yield from _checks(plan)
    yield ""
    if plan.spilled_bytes:
        yield from wrap(
            f"{format_bytes(plan.spilled_bytes)} of the file cannot stay in RAM beside the rest: "
            "every token reads them from the disk again.",
            room(),
        )
        yield ""
    if plan.unknown:
        yield terminal.heading("Not known:")
        for sentence in plan.unknown:
            yield from _item("-", sentence)
        yield ""
    yield from _advice(plan)
    yield (terminal.good if plan.fits else terminal.bad)(_verdict(plan))


def _facts(plan: Plan, model: Path) -> dict[str, str]:
    known = plan.facts
    what = (known.get("architecture") or "architecture unknown", known.get("format"))
    tokens = "unknown" if plan.ctx is None else _count(plan.ctx, "token")
    if plan.max_ctx:
        tokens += f" (the longest that fits: {plan.max_ctx:,})"
    elif plan.max_ctx == 0:
        tokens += " (none fits)"
    cache = [tokens, f"KV {plan.kv_dtype}"]
    cache += [f"attention sees the last {plan.window:,}"] if plan.window else []
    cache += [_count(plan.batch, "stream")] if plan.batch > 1 else []
    cache += [_count(plan.sessions, "session")] if plan.sessions > 1 else []
    facts = {
        "model": f"{known.get('name') or model.stem}: {', '.join(filter(None, what))}",
        "file": str(model),
        "context": ", ".join([*cache, _count(plan.threads, "thread")]),
        "load": f"{plan.load}: {plan.load_reason}",
        "pages": plan.pages if plan.pages != "auto" else "",
        "numa": known.get("numa") or plan.numa or "",
        "ggml": known.get("ggml") or "",
    }
    return {name: text for name, text in facts.items() if text}


def _rows(plan: Plan) -> Iterator[str]:
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
        if device is None and plan.required_bytes < nbytes:
            rows.append(("must stay in RAM", format_bytes(plan.required_bytes)))
    bars += [None] * (len(rows) - len(bars))
    yield from table_lines(("memory", "size"), rows, bars=bars)


def _on(what: str, device: str | None) -> str:
    return what if device is None else f"{what} on {device}"


def _checks(plan: Plan) -> Iterator[str]:
    rows, bars = [], []
    for check in plan.checks:
        needed, available = format_bytes(check.needed_bytes), format_bytes(check.available_bytes)
        name = fit(terminal.one_line(check.name), room() // 2)  # which leaves room for a bar
        rows.append((name, needed, available, "yes" if check.fits else "no"))
        share = check.needed_bytes / check.available_bytes if check.available_bytes else 1.0
        bars.append(Bar(share, True, terminal.good if check.fits else terminal.bad))
    head = ("limit", "needed", "available", "fits")
    yield from table_lines(head, rows, align="<>>>", bars=bars)


def _advice(plan: Plan) -> Iterator[str]:
    if not plan.advice:
        return
    yield terminal.heading("What helps, that costs the least first:")
    remedies = {check.remedy for check in plan.checks}
    for number, advice in enumerate(plan.advice, 1):
        text = advice.text[:1].upper() + advice.text[1:]
        remedy = next((one for one in remedies if text.endswith(f": {one}")), "")
        text = text.removesuffix(f": {remedy}") + _worth(advice)
        typed = remedy or _as_options(advice.options)
        yield from _item(f"{number}.", f"{text}:" if typed else text)
        if typed:  # in a line of its own, however long: to be copied
            yield " " * _INDENT + terminal.one_line(typed)
    yield ""


def _worth(advice: Advice) -> str:
    """Say what it is worth in figures."""
    worth = [f"saves {format_bytes(advice.saves_bytes)}"] if advice.saves_bytes > 0 else []
    worth += ["then it fits"] if advice.fits else []
    return f" ({', '.join(worth)})" if worth else ""


def _as_options(options: dict[str, Any]) -> str:
    """Write keyword arguments of `unimem.plan` as the command line has them."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in options.items()
        if value not in (None, False)
    )


def _item(mark: str, text: str) -> Iterator[str]:
    start = mark.ljust(_INDENT)
    for line in wrap(terminal.one_line(text), room() - _INDENT):
        yield start + line
        start = " " * _INDENT


def _verdict(plan: Plan) -> str:
    """Say in one line whether it fits."""
    if not plan.fits:
        lacking = [check for check in plan.checks if not check.fits]
        worst = max(lacking, key=lambda c: (c.is_hard, c.needed_bytes - c.available_bytes))
        start, end = f"Does not fit: {_figures(worst)} (", f"). {_largest(plan)}"
        name = fit(terminal.one_line(worst.name), room() - len(start) - len(end))
        return start + name + end
    # What can be dropped is counted as long as there is room for it.
    nbytes = plan.required_bytes if plan.spilled_bytes else plan.total_bytes
    fits = [_of(nbytes, plan.available_bytes)]
    devices = {row.device for row in plan.rows}
    fits += [f"{_figures(check)} on {check.name}" for check in plan.checks if check.name in devices]
    return f"Fits: {', '.join(fits)}. {_largest(plan)}"


def _figures(check: Check) -> str:
    return _of(check.needed_bytes, check.available_bytes)


def _of(nbytes: int, available: int) -> str:
    """Write two sizes, and their unit once where it is the same."""
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


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
