"""`unimem bench --advise MODEL`: the options of `unimem run` that suit a model on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from unimem.base.text import (
    Surface,
    escape,
    fact_lines,
    format_bytes,
    format_count,
    item_lines,
    table_lines,
)
from unimem.cli import terminal
from unimem_bench import texts
from unimem_bench.advise import Advised, Factor, Variant, advise, flag
from unimem_bench.stats import Ratio


def show_advice(model: Path, *, quick: bool, as_json: bool) -> None:
    """Measure a model with the options that place its memory, and print what won."""
    found = advise(model, quick=quick, progress=_say)
    text = found.to_json() if as_json else "\n".join(page(found))
    terminal.show(text + "\n")


def _say(line: str) -> None:
    print(escape(line), file=sys.stderr, flush=True)


def page(advice: Advised) -> Iterator[str]:
    """Write the result; the last line is a command to copy."""
    surface = terminal.surface()
    yield from fact_lines(surface, _facts(advice).items())
    yield ""
    for factor in advice.factors:
        if factor.variants:
            yield from _table(surface, factor)
            yield ""
    if advice.left_out:
        yield surface.heading("Not measured:")
        for name, reason in advice.left_out.items():
            yield from item_lines(surface, "-", f"{name}: {reason}")
        yield ""
    if advice.trade_offs:
        yield surface.heading("What it costs:")
        for sentence in advice.trade_offs:
            yield from item_lines(surface, "-", sentence)
        yield ""
    yield from _verdict(surface, advice)


def _facts(advice: Advised) -> dict[str, str]:
    effort = advice.effort
    return {
        "model": advice.model,
        "measured": f"{format_count(advice.threads, 'thread')}, a context of "
        f"{format_count(advice.ctx, 'token')}, {effort.n_prompt:,} of them filled at first; "
        f"{format_count(effort.passes, 'process', 'es')} for each value, "
        f"{format_count(effort.rounds, 'round')} of {format_count(effort.n_decode, 'token')} in "
        f"each; {texts.duration(advice.seconds)} in all",
        "shown": "tokens a second of decode and prefill, and how many times as fast decode is as "
        "with the defaults, with the interval in which a second run would lie",
    }


def _table(surface: Surface, factor: Factor) -> Iterator[str]:
    head = (flag(factor.name), "decode", "to the defaults", "prefill", "start", "memory")
    rows = [_row(each, factor.name) for each in factor.variants]
    yield from table_lines(surface, head, rows, align="<>>>>>", spare=("memory", "prefill"))


def _row(variant: Variant, name: str) -> tuple[str, ...]:
    medians = variant.medians
    return (
        variant.options.get(name, variant.name),
        f"{texts.number(medians['decode'])}/s",
        _ratio(variant.ratios.get("decode")),
        f"{texts.number(medians['prefill'])}/s",
        texts.amount(medians["start"], "s"),
        format_bytes(variant.nbytes),
    )


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    value = texts.factor(ratio.value) if ratio.is_difference else "no difference"
    return value + _interval(ratio)


def _interval(ratio: Ratio) -> str:
    return f" ({ratio.low:.2f} to {ratio.high:.2f})"


def _verdict(surface: Surface, advice: Advised) -> Iterator[str]:
    """Write the verdict; the last line is a command to copy."""
    if advice.margin is None:
        yield surface.good(
            "Nothing differs by more than noise: the defaults are as good as any here."
        )
        return
    what = "decodes" if advice.by == "decode" else "starts"
    yield surface.good(
        f"With these it {what} {texts.factor(advice.margin.value)} as fast as with the defaults"
        f"{_interval(advice.margin)}:"
    )
    yield escape(f"unimem run {shlex.quote(advice.model)} {' '.join(advice.flags)}")
