"""The state of a watch, for rich to lay out on 60x12 or more: what is wider shows more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from unimem.accounting.samples import Sample
from unimem.base.text import (
    draw_bar,
    escape,
    format_bytes,
    format_change,
    format_count,
    shorten,
    text_width,
)
from unimem.cli.processes import mapped_models
from unimem.cli.screen import Fitted, grid, line_of
from unimem.cli.watch_state import SORTS, Line, Sort, State
from unimem.system.limits import Limit

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "frame", "whole"]

LEAST_WIDTH, LEAST_HEIGHT = 60, 12
_USUAL = 80  # columns; below, some words are left out
_WIDE = 100  # from here on there are pictures over time
_LATE_SECONDS = 2.0
_SCARCE = 0.1  # of a limit: less room than this is worth a look
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_DIM, _BOLD, _BAR, _NOTICE = "dim", "bold", "cyan", "yellow"

# The least width of a terminal, a title, a width (None: what is left), and what is said of a line.
_Column = tuple[int, str, int | None, Callable[[Line], RenderableType]]

# Columns by what they sort by.
_TITLES: dict[Sort, str] = dict(zip(SORTS, ("memory", "size", "in RAM", "growth"), strict=True))
_HELP = """\
Keys
  q         leave, as Ctrl-C does; the last figures stay on the screen
  s         sort: by category, size, what is in RAM, or growth
  m         show single mappings, or their sums by category
  p         pause: nothing is read until p is pressed again
  + -       refresh less, or more often
  arrows    scroll, as do Page Up, Page Down, Home and End
  h ?       this page; any key leaves it

Figures
  ledger    what unimem in the process says; else the kernel's mappings
  size      what is mapped, each byte once
  in RAM    what of it is; a page that n processes share counts 1/n (Pss)
  change    what came to be in RAM, or left it, since the last refresh
  growth    the same since the watch was started
  minor     page faults without a disk; none in the steady state of a decoder
  major     page faults that waited for a disk: weights that do not stay in RAM
  page-ins  bytes read from disks by the process, and by the whole machine
  pressure  share of 10 s in which some, or all, threads waited for memory
"""


def frame(state: State, width: int, height: int, *, blocks: bool = True) -> list[RenderableType]:
    """Draw one picture of a terminal.

    The table is scrolled to `top` of the state, which is brought to a line from which the rest
    fills the screen. The last of what is returned is the keys; what fills the screen is before.
    """
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        least = f"{LEAST_WIDTH}x{LEAST_HEIGHT} at least."
        says = (f"{width}x{height} is too small:", least, "q quits.")
        return [*map(line_of, says[:height])]
    keys = _keys(state, width)
    if state.shows_help:
        helps = _HELP.split("\n")[: height - 1]
        return [*(line_of((line[:12], _BOLD), line[12:]) for line in helps), keys]
    if state.now is None:
        late = f" for {state.late_seconds:.0f} s" if state.late_seconds >= _LATE_SECONDS else ""
        return [line_of(f"Reading the memory of process {state.pid}{late} ..."), line_of(), keys]
    head = _head(state, state.now, width, blocks, most_models=1 + max(0, height - 24) // 4)
    lines = state.lines()
    room = height - len(head) - 3  # names of the columns, sums, keys
    if len(lines) < room:
        head.append(line_of())
        room -= 1
    state.top = max(0, min(state.top, len(lines) - room))
    shown = lines[state.top : state.top + room]
    place = f"{state.top + 1}-{state.top + len(shown)} of {len(lines)}"
    bottom = grid(Fitted(lambda _: keys), (place, _DIM)) if len(lines) > room else keys
    filler = [line_of()] * (room - len(shown))
    return [*head, _table(state, lines, shown, width, blocks), *filler, bottom]


def whole(state: State, width: int, *, blocks: bool = True) -> list[RenderableType]:
    """Draw everything, in as many lines as that takes, without keys."""
    if state.now is None:
        return []
    lines = state.lines()
    head = _head(state, state.now, width, blocks, most_models=len(lines))
    return [*head, line_of(), _table(state, lines, lines, width, blocks)]


def _head(
    state: State, now: Sample, width: int, blocks: bool, most_models: int
) -> list[RenderableType]:
    head: list[RenderableType] = [_title(state, now, width)]
    if "problem" in now.report.facts:
        problem = escape(str(now.report.facts["problem"]))
        head.append(_labelled("ledger", lambda n: line_of((shorten(problem, n), _NOTICE))))
    head += [*_models(now, most_models), *_figures(state, now, width, blocks)]
    if not now.pressure:
        absent = "not available: this kernel does not count it (PSI)"
        head.append(_labelled("pressure", lambda _: line_of(absent)))
    return [*head, _labelled("free", lambda n: _free(now.limits, n))]


def _title(state: State, now: Sample, width: int) -> Table:
    facts, how, style = now.report.facts, state.ended, _NOTICE
    if not how and state.is_paused:
        how = "PAUSED"
    elif not how and state.late_seconds >= _LATE_SECONDS:
        how = f"waiting for {state.late_seconds:.0f} s"
    elif not how:
        how, style = f"every {state.interval:g} s", _DIM
        if now.report_rest > state.interval:  # it is read with the first sample after
            n_intervals = math.ceil(now.report_rest / state.interval)
            how += f", memory every {n_intervals * state.interval:g} s"
    whose = "the kernel" if facts.get("source") == "kernel" else "its ledger"
    since = f"up {timedelta(seconds=int(now.up_seconds))}, "
    since += f"from {whose}, " if width >= _USUAL else ""
    pid, command = f"{state.pid} ", escape(str(facts.get("command") or facts.get("name") or ""))
    name = Fitted(lambda n: line_of((pid, _BOLD), shorten(command, n - len(pid))))
    return grid(name, line_of((since, _DIM), (how, style)))


def _labelled(label: str, draw: Callable[[int], Text], *picture: tuple[str, str]) -> Table:
    return grid((f"{label:8}", _DIM), Fitted(draw), *picture)


def _models(now: Sample, most: int) -> Iterator[Table]:
    models = mapped_models(now.report)
    for i, model in enumerate(models[:most]):
        share = f"{format_bytes(model.resident_bytes)} of {format_bytes(model.nbytes)} in RAM"
        share += f", {model.pages}" if model.pages != "4k" else ""
        share += f"; and {len(models) - most} more" if i == most - 1 and len(models) > most else ""
        told = share, "" if model.resident_bytes >= model.nbytes else _NOTICE
        yield _labelled("model", partial(_model, escape(Path(model.path).name), told))


def _model(name: str, told: tuple[str, str], width: int) -> Text:
    return line_of(shorten(name, width - len(told[0]) - 2), "  ", told)


def _figures(state: State, now: Sample, width: int, blocks: bool) -> Iterator[Table]:
    """Write two figures a line, always in the same columns, and what more there is room for."""
    rates, shown = state.rates(), now.published
    line = partial(_figures_line, state, width, blocks)
    if shown:
        tokens = f"KV {format_count(shown.get('kv_tokens', 0), 'token')}"
        kv = tokens, format_bytes(shown.get("kv_active_bytes", 0))
        made, prompt = _number(rates.generated_tokens), _number(rates.prompt_tokens)
        yield line("tokens/s", ("made", made), ("prompt", prompt), kv, "generated_tokens")
    minor, major = _number(rates.minor_faults), _number(rates.major_faults)
    cpu = f"CPU {'-' if rates.cpu_seconds is None else f'{rates.cpu_seconds:.0%}'}"
    work = cpu, format_count(now.counters.n_threads, "thread")
    odd = rates.major_faults
    yield line("faults/s", ("minor", minor), ("major", major, odd), work, "minor_faults")
    own, machine = _speed(rates.read_bytes), _speed(rates.paged_in_bytes)
    odd = sum(row.granted.swapped_bytes for row in now.report.rows if row.granted is not None)
    more = (f"swapped out {format_bytes(odd)}",)
    yield line("page-ins", ("own", own), ("machine", machine), more, "paged_in_bytes", odd)
    if now.pressure:
        (_, some, full), *groups = now.pressure
        stalled = [f"cgroup {each.some_percent:.2f}%, {each.full_percent:.2f}%" for each in groups]
        odd = any(each.some_percent for each in groups)
        stalls = ("some", f"{some:.2f}%", some), ("full", f"{full:.2f}%", full)
        yield line("pressure", *stalls, stalled, "", odd)


def _figures_line(
    state: State, width: int, blocks: bool, label: str, first: tuple[Any, ...],
    second: tuple[Any, ...], more: Sequence[str], rate: str, is_odd: object = False,
) -> Table:  # fmt: skip
    """Write figures, each a name, a text and whether that is odd, and draw a rate."""
    figures, is_usual = line_of(), width >= _USUAL
    for (name, value, *odd), n in ((first, 6), (second, 8)):
        figures.append(name.ljust(n), _DIM)
        figures.append(value.rjust(11 if is_usual else 8), _NOTICE if any(odd) else "")
        figures.append("   " if is_usual else "  ")

    def draw(n: int) -> Text:
        texts = [", ".join(more[:i]) for i in range(len(more) + 1)]
        text = max((each for each in texts if figures.cell_len + text_width(each) <= n), key=len)
        return line_of(figures, (text, _NOTICE if is_odd else ""))

    if width < _WIDE or not blocks:
        return _labelled(label, draw)
    n = min(width - _USUAL - 4, 60)
    values = [getattr(rates, rate) or 0.0 for rates in state.history][-n:] if rate else []
    most = max(values, default=0.0) or 1.0  # the newest is to the right
    picture = "".join(_HEIGHTS[math.ceil(value / most * 8)] for value in values)
    return _labelled(label, draw, (picture.rjust(n), _BAR))


def _free(limits: Sequence[Limit], width: int) -> Text:
    """Write the free memory of the machine, and of the limit with the least room."""
    text = line_of()
    least = min(limits, key=lambda limit: limit.room_bytes, default=None)
    for limit in dict.fromkeys((*limits[:1], least)):
        if limit is not None:
            style = _NOTICE if limit.room_bytes < _SCARCE * limit.limit_bytes else ""
            room = f"{format_bytes(limit.room_bytes)} of {format_bytes(limit.limit_bytes)}"
            text.append("; " if text else "").append(room, style)
            if limit is not limits[0]:
                name = shorten(escape(limit.name), width - text.cell_len - 4)
                text.append(f" in {name}", style)
    return text or line_of("-")


def _number(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{format_bytes(rate)}/s"


def _table(
    state: State, lines: Sequence[Line], shown: Sequence[Line], width: int, blocks: bool
) -> Table:
    """Draw names of columns, the lines that are shown, and the sums of all, whose key is empty."""
    table = Table(
        box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True,
        header_style=_BOLD, footer_style=_BOLD,
    )  # fmt: skip
    columns = [each for each in _columns(state, lines, blocks, width) if width >= each[0]]
    for _, title, n, draw in columns:
        mark = (" ▼" if blocks else " v") if title == _TITLES[state.sort] else ""
        table.add_column(
            line_of(title + mark), draw(state.total()), width=n, no_wrap=True, overflow="crop",
            justify="left" if n is None or title == "memory" else "right", ratio=n is None or None,
        )  # fmt: skip
    for line in shown:
        table.add_row(*(draw(line) for _, _, _, draw in columns))
    return table


def _columns(state: State, lines: Sequence[Line], blocks: bool, width: int) -> Iterator[_Column]:
    longest = max((text_width(escape(line.category)) for line in lines), default=0)
    n = max(10, min(longest, 24 if width >= _WIDE else 18))
    yield 0, "memory", n, lambda line: line_of(shorten(escape(line.category), n))
    yield 0, "size", 10, lambda line: format_bytes(line.nbytes)
    yield 0, "in RAM", 10, lambda line: _size(line.resident_bytes)
    if state.shows_mappings:
        yield 100, "address", 12, lambda line: f"{line.address:x}" if line.key else ""
    else:
        most = max((line.nbytes for line in lines), default=0) or 1
        yield 0, "", None, lambda line: Fitted(lambda n: _bar(line, most, n, blocks))
        yield 100, "active", 10, lambda line: _size(line.active_bytes) if line.key else ""
    yield 104, "pages", 6, lambda line: line.granted.pages if line.granted else ""
    yield 116, "huge", 10, lambda line: _placed(line, "huge")
    yield 128, "locked", 10, lambda line: _placed(line, "locked")
    yield 140, "swapped", 10, lambda line: _placed(line, "swapped")
    yield 72, "change", 11, lambda line: _change(line.change_bytes, _NOTICE)
    yield 0, "growth", 11, lambda line: _change(line.since_start_bytes)
    if state.shows_mappings:
        yield 0, "what", None, lambda line: Fitted(lambda n: _what(line, n))


def _bar(line: Line, most: int, columns: int, blocks: bool) -> Text:
    """Draw a size beside the largest, full as far as it is in RAM: however little, it shows."""
    if not line.key:
        return line_of()
    n = math.ceil(line.nbytes / most * columns)
    share = max(line.held_bytes / line.nbytes, 0.5 / n) if n and line.held_bytes else 0.0
    return line_of(("".join(draw_bar(share, n, has_blocks=blocks)), _BAR))


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _placed(line: Line, how: str) -> str:
    return _size(getattr(line.granted, f"{how}_bytes") or None) if line.granted else ""


def _change(nbytes: int, style: str = "") -> Text:
    return line_of((format_change(nbytes), style if nbytes > 0 else "") if nbytes else ("0", _DIM))


def _what(line: Line, width: int) -> Text:
    """Name a mapping; of a path that is too long, its end says the most."""
    name = escape(line.name) or (f"{line.address:x}" if line.key else "")
    if text_width(name) > width:
        name = name.rpartition("/")[2] or name
    return line_of(shorten(name, width))


def _keys(state: State, width: int) -> Text:
    other, is_usual = "categories" if state.shows_mappings else "mappings", width >= _USUAL
    text = line_of()
    for key, does in (
        ("q", "quit"),
        ("s", f"sort: {'category' if state.sort == 'category' else _TITLES[state.sort]}"),
        ("m", other if is_usual else ""),
        ("p", "go on" if state.is_paused else "pause"),
        ("+ -", f"{state.interval:g} s" if is_usual else ""),
        ("h", "help"),
    ):
        text.append("  " if text else "").append(key, _BOLD).append(f" {does}".rstrip(), _DIM)
    return text
