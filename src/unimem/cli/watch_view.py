"""The state of a watch as lines of a terminal, of 60x12 or more: what is wider shows more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from unimem.cli.processes import mapped_models
from unimem.cli.watch_state import Line, Rates, Sample, Sort, State
from unimem.system.limits import Limit
from unimem.system.text import escape, format_bytes, shorten

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "frame", "whole"]

LEAST_WIDTH, LEAST_HEIGHT = 60, 12

_LABEL = 10
_GAP = "  "
_SIZE, _GROWTH = 10, 11
_USUAL = 80  # below, some words are left out
_WIDE = 100  # from here on there are pictures over time
_NARROWEST_BAR = 6
_NARROWEST_NAME = 12
_LATE_SECONDS = 2.0
_SCARCE = 0.1  # of a limit: less room than this is worth a look
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")

_DIM, _BOLD, _BAR, _NOTICE = "dim", "bold", "cyan", "yellow"

# Columns by what they sort by.
_TITLES: dict[Sort, str] = {
    "category": "memory",
    "size": "size",
    "resident": "in RAM",
    "growth": "growth",
}

_HELP = (
    ("q", "leave, as Ctrl-C does; the last figures stay on the screen"),
    ("s", "sort: by category, size, what is in RAM, or growth"),
    ("m", "show single mappings, or their sums by category"),
    ("p", "pause: nothing is read until p is pressed again"),
    ("+ -", "refresh less, or more often"),
    ("arrows", "scroll, as do Page Up, Page Down, Home and End"),
    ("h ?", "this page; any key leaves it"),
)
_TERMS = (
    ("ledger", "what unimem in the process says; else the kernel's mappings"),
    ("size", "what is mapped, each byte once"),
    ("in RAM", "what of it is; a page that n processes share counts 1/n (Pss)"),
    ("change", "what came to be in RAM, or left it, since the last refresh"),
    ("growth", "the same since the watch was started"),
    ("minor", "page faults without a disk; none in the steady state of a decoder"),
    ("major", "page faults that waited for a disk: weights that do not stay in RAM"),
    ("page-ins", "bytes read from disks by the process, and by the whole machine"),
    ("pressure", "share of 10 s in which some, or all, threads waited for memory"),
)


def frame(state: State, width: int, height: int, *, blocks: bool = True) -> list[Text]:
    """Draw one picture of a terminal.

    Parameters
    ----------
    state : State
        Its `top` is brought to a line from which the rest of the table fills the screen.
    width, height : int
        The terminal's columns and lines.
    blocks : bool, default True
        Whether its characters include blocks.

    Returns
    -------
    list of Text
        At most `height` lines of at most `width` columns; the keys are the last.
    """
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        says = [
            f"{width}x{height} is too small:",
            f"{LEAST_WIDTH}x{LEAST_HEIGHT} at least.",
            "q quits.",
        ]
        return [Text(shorten(line, width)) for line in says[:height]]
    keys = _keys(state, width)
    if state.shows_help:
        return [*list(_help(width))[: height - 1], keys]
    if state.now is None:
        late = f" for {state.late_seconds:.0f} s" if state.late_seconds >= _LATE_SECONDS else ""
        return [Text(f"Reading the memory of process {state.pid}{late} ..."), Text(), keys]
    head = _head(state, width, blocks, most_models=1 + max(0, height - 24) // 4)
    lines = state.lines()
    room = height - len(head) - 3  # names of the columns, sums, keys
    if len(lines) < room:
        head.append(Text())
        room -= 1
    state.top = max(0, min(state.top, len(lines) - room))
    shown = lines[state.top : state.top + room]
    table = _table(state, lines, shown, width, blocks)
    if len(lines) > room:
        keys = _between(keys, f"{state.top + 1}-{state.top + len(shown)} of {len(lines)}", width)
    filler = [Text()] * (room - len(shown))
    return [*head, *table, *filler, keys]


def whole(state: State, width: int, *, blocks: bool = True) -> list[Text]:
    """Draw everything, in as many lines as that takes, without keys.

    Parameters
    ----------
    state, width, blocks
        As for `frame`.

    Returns
    -------
    list of Text
    """
    if state.now is None:
        return []
    width = max(width, LEAST_WIDTH)
    lines = state.lines()
    head = _head(state, width, blocks, most_models=len(lines))
    return [*head, Text(), *_table(state, lines, lines, width, blocks)]


# ---- above the table -----------------------------------------------------------------------------


class _Figure(NamedTuple):
    name: str
    value: str
    style: str = ""


class _Figures(NamedTuple):
    """A line of figures.

    Attributes
    ----------
    label : str
        What they are of.
    first, second : _Figure
        Each always in the same columns.
    rest : sequence of str
        What more there is to say, as far as there is room.
    rest_style : str
        How that looks.
    picture : callable, optional
        The rate whose picture over time is drawn where there is room.
    """

    label: str
    first: _Figure
    second: _Figure
    rest: Sequence[str] = ()
    rest_style: str = ""
    picture: Callable[[Rates], float | None] | None = None


def _head(state: State, width: int, blocks: bool, most_models: int) -> list[Text]:
    now = state.now
    assert now is not None
    lines = [_title(state, now, width)]
    if "problem" in now.report.facts:
        problem = escape(str(now.report.facts["problem"]))
        lines.append(_labelled("ledger").append(shorten(problem, width - _LABEL), _NOTICE))
    lines += _models(now, width, most_models)
    lines += [_drawn(figures, state.history, width, blocks) for figures in _figures(state, now)]
    if not now.pressure:
        text = "not available: this kernel does not count it (PSI)"
        lines.append(_labelled("pressure").append(text))
    lines.append(_room(now, width))
    for line in lines:
        line.truncate(width)
    return lines


def _figures(state: State, now: Sample) -> Iterator[_Figures]:
    counted, shown = state.rates(), now.published
    if shown:
        n = shown.get("kv_tokens", 0)
        yield _Figures(
            "tokens/s",
            _Figure("made", _number(counted.generated_tokens)),
            _Figure("prompt", _number(counted.prompt_tokens)),
            (f"KV {_plural(n, 'token')}", format_bytes(shown.get("kv_active_bytes", 0))),
            picture=lambda rates: rates.generated_tokens,
        )
    cpu = "-" if counted.cpu_seconds is None else f"{counted.cpu_seconds:.0%}"
    yield _Figures(
        "faults/s",
        _Figure("minor", _number(counted.minor_faults)),
        _Figure("major", _number(counted.major_faults), _NOTICE if counted.major_faults else ""),
        (f"CPU {cpu}", _plural(now.counters.n_threads, "thread")),
        picture=lambda rates: rates.minor_faults,
    )
    swapped = sum(row.granted.swapped_bytes for row in now.report.rows if row.granted is not None)
    yield _Figures(
        "page-ins",
        _Figure("own", _speed(counted.read_bytes)),
        _Figure("machine", _speed(counted.paged_in_bytes)),
        (f"swapped out {format_bytes(swapped)}",),
        _NOTICE if swapped else "",
        picture=lambda rates: rates.paged_in_bytes,
    )
    if now.pressure:
        machine, *own = now.pressure
        yield _Figures(
            "pressure",
            _stalled("some", machine.some_percent),
            _stalled("full", machine.full_percent),
            [f"cgroup {each.some_percent:.2f}%, {each.full_percent:.2f}%" for each in own],
            _NOTICE if any(each.some_percent for each in own) else "",
        )


def _stalled(name: str, share: float) -> _Figure:
    return _Figure(name, f"{share:.2f}%", _NOTICE if share else "")


def _drawn(figures: _Figures, history: Sequence[Rates], width: int, blocks: bool) -> Text:
    line = _labelled(figures.label)
    is_narrow = width < _USUAL
    for figure, n in ((figures.first, 6), (figures.second, 8)):
        line.append(figure.name.ljust(n), _DIM)
        line.append(figure.value.rjust(8 if is_narrow else 11), figure.style)
        line.append("  " if is_narrow else "   ")
    n_picture = min(width - _USUAL - 4, 60) if width >= _WIDE and blocks else 0
    left = width - n_picture - line.cell_len
    rest = list(figures.rest)
    while rest and cell_len(", ".join(rest)) > left:
        rest.pop()
    line.append(", ".join(rest), figures.rest_style)
    if n_picture > 0 and figures.picture is not None:
        line.append(" " * (width - n_picture - line.cell_len))
        line.append(_picture([figures.picture(rates) for rates in history], n_picture), _BAR)
    return line


def _picture(values: Sequence[float | None], width: int) -> str:
    """Draw how a rate was, the newest to the right, beside the most that is in the picture."""
    shown = [value or 0.0 for value in values[-width:]]
    most = max(shown, default=0.0) or 1.0
    return "".join(_HEIGHTS[math.ceil(value / most * 8)] for value in shown).rjust(width)


def _title(state: State, now: Sample, width: int) -> Text:
    facts = now.report.facts
    how, style = f"every {state.interval:g} s", _DIM
    if state.ended:
        how, style = state.ended, _NOTICE
    elif state.is_paused:
        how, style = "PAUSED", _NOTICE
    elif state.late_seconds >= _LATE_SECONDS:
        how, style = f"waiting for {state.late_seconds:.0f} s", _NOTICE
    elif now.report_rest > state.interval:
        # It is read with the first sample after.
        n_intervals = math.ceil(now.report_rest / state.interval)
        how += f", memory every {n_intervals * state.interval:g} s"
    right = Text(f"up {timedelta(seconds=int(now.up_seconds))}, ", _DIM)
    if width >= _USUAL:
        whose = "the kernel" if facts.get("source") == "kernel" else "its ledger"
        right.append(f"from {whose}, ", _DIM)
    right.append(how, style)
    left = Text(no_wrap=True).append(f"{state.pid} ", _BOLD)
    command = escape(str(facts.get("command") or facts.get("name") or ""))
    left.append(shorten(command, width - left.cell_len - right.cell_len - 2))
    return _between(left, right, width)


def _models(now: Sample, width: int, most: int) -> Iterator[Text]:
    models = mapped_models(now.report)
    for i, model in enumerate(models[:most]):
        share = f"{format_bytes(model.resident_bytes)} of {format_bytes(model.nbytes)} in RAM"
        share += f", {model.pages}" if model.pages != "4k" else ""
        if i == most - 1 and len(models) > most:
            share += f"; and {len(models) - most} more"
        name = shorten(escape(Path(model.path).name), width - _LABEL - len(share) - 2)
        style = "" if model.resident_bytes >= model.nbytes else _NOTICE
        yield _labelled("model").append(f"{name}  ").append(share, style)


def _room(now: Sample, width: int) -> Text:
    """Write the free memory of the machine, and of the limit with the least room."""
    line = _labelled("free")
    if not now.limits:
        return line.append("-")
    machine = now.limits[0]
    least = min(now.limits, key=lambda limit: limit.room_bytes)
    line.append(_free(machine), _scarce(machine))
    if least is not machine:
        room = f"{_free(least)} in "
        name = shorten(escape(least.name), width - cell_len(line.plain) - len(room) - 2)
        line.append("; ").append(f"{room}{name}", _scarce(least))
    return line


def _free(limit: Limit) -> str:
    return f"{format_bytes(limit.room_bytes)} of {format_bytes(limit.limit_bytes)}"


def _scarce(limit: Limit) -> str:
    return _NOTICE if limit.room_bytes < _SCARCE * limit.limit_bytes else ""


def _labelled(label: str) -> Text:
    return Text(no_wrap=True).append(label.ljust(_LABEL), _DIM)


def _number(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{format_bytes(rate)}/s"


def _plural(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# ---- the table -----------------------------------------------------------------------------------


class _Column(NamedTuple):
    """A column: what it says of a line, and of the sums, whose key is empty."""

    title: str
    width: int
    text: Callable[[Line], str]
    style: Callable[[Line], str] = lambda _: ""
    is_left: bool = False


def _table(
    state: State, lines: Sequence[Line], shown: Sequence[Line], width: int, blocks: bool
) -> list[Text]:
    """Draw names of columns, the lines that are shown, and the sums of all."""
    columns = _columns(state, lines, width, blocks)
    table = [_row(columns, [column.title for column in columns], [_BOLD] * len(columns))]
    for line in shown:
        texts = [column.text(line) for column in columns]
        table.append(_row(columns, texts, [column.style(line) for column in columns]))
    total = state.total()
    texts = [column.text(total) for column in columns]
    table.append(_row(columns, texts, [_BOLD] * len(columns)))
    return table


def _row(columns: Sequence[_Column], texts: Sequence[str], styles: Sequence[str]) -> Text:
    row = Text(no_wrap=True)
    for column, text, style in zip(columns, texts, styles, strict=True):
        spaces = " " * (column.width - cell_len(text))
        row.append(_GAP if row else "")
        row.append(text + spaces if column.is_left else spaces + text, style)
    return row


def _columns(state: State, lines: Sequence[Line], width: int, blocks: bool) -> list[_Column]:
    """Choose the columns that there is room for; what the lines are for comes last, or a bar."""
    is_wide = width >= _WIDE
    names = {line.category for line in lines}
    longest = max((cell_len(escape(name)) for name in names), default=0)
    n = max(_SIZE, min(longest, 24 if is_wide else 18))
    category = _Column(
        _TITLES["category"], n, lambda line: shorten(escape(line.category), n), is_left=True
    )
    sizes = [
        _Column("size", _SIZE, lambda line: format_bytes(line.nbytes)),
        _Column(_TITLES["resident"], _SIZE, lambda line: _size(line.resident_bytes)),
    ]
    growth = [
        _Column("change", _GROWTH, lambda line: _signed(line.change_bytes), _change_style),
        _Column("growth", _GROWTH, lambda line: _signed(line.since_start_bytes), _growth_style),
    ]
    left = width - n - sum(len(_GAP) + column.width for column in (*sizes, *growth))
    needed = len(_GAP) + (_NARROWEST_NAME if state.shows_mappings else _NARROWEST_BAR)
    if left < (needed if state.shows_mappings else 0):
        left += len(_GAP) + growth.pop(0).width
    more = []
    for column in _more(state.shows_mappings) if is_wide else ():
        if left - len(_GAP) - column.width < 2 * needed:
            break
        more.append(column)
        left -= len(_GAP) + column.width
    columns = [category, *sizes, *more, *growth]
    left -= len(_GAP)
    if state.shows_mappings:
        columns.append(_Column("what", left, lambda line: _what(line, left), is_left=True))
    elif left >= _NARROWEST_BAR:
        columns.insert(3, _bar(lines, left, blocks))
    mark = " ▼" if blocks else " v"
    return [
        column._replace(title=column.title + mark)
        if column.title == _TITLES[state.sort]
        else column
        for column in columns
    ]


def _more(shows_mappings: bool) -> Iterator[_Column]:
    """Give columns for wide terminals, the most wanted first."""
    if shows_mappings:
        yield _Column("address", 12, lambda line: f"{line.address:x}" if line.key else "")
    else:
        yield _Column("active", _SIZE, lambda line: _size(line.active_bytes) if line.key else "")
    yield _Column("pages", 6, lambda line: line.granted.pages if line.granted else "")
    for name in ("huge", "locked", "swapped"):
        yield _placed(name)


def _placed(name: str) -> _Column:
    def text(line: Line) -> str:
        if line.granted is None:
            return ""
        nbytes: int = getattr(line.granted, f"{name}_bytes")
        return format_bytes(nbytes) if nbytes else "-"

    return _Column(name, _SIZE, text)


def _bar(lines: Sequence[Line], width: int, blocks: bool) -> _Column:
    """Draw sizes beside the largest, full as far as they are in RAM."""
    largest = max((line.nbytes for line in lines), default=0) or 1

    def text(line: Line) -> str:
        if not line.key:
            return ""
        held = line.nbytes if line.resident_bytes is None else line.resident_bytes
        n = min(width, math.ceil(line.nbytes / largest * width))
        # What is there shows, however little it is.
        if blocks:
            eighths = min(8 * n, math.ceil(held / largest * width * 8))
            full = "█" * (eighths // 8) + _EIGHTHS[eighths % 8]
            return full + "░" * (n - len(full))
        n_held = min(n, math.ceil(held / largest * width))
        return "#" * n_held + "." * (n - n_held)

    return _Column("", width, text, lambda _: _BAR, is_left=True)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _signed(nbytes: int) -> str:
    if nbytes == 0:
        return "0"
    return ("+" if nbytes > 0 else "-") + format_bytes(abs(nbytes))


def _change_style(line: Line) -> str:
    return _NOTICE if line.change_bytes > 0 else "" if line.change_bytes else _DIM


def _growth_style(line: Line) -> str:
    return "" if line.since_start_bytes else _DIM


def _what(line: Line, width: int) -> str:
    """Name a mapping; of a path that is too long, its end says the most."""
    name = escape(line.name)
    if cell_len(name) > width and "/" in name:
        name = Path(name).name
    return shorten(name or (f"{line.address:x}" if line.key else ""), width)


# ---- below the table -----------------------------------------------------------------------------


def _keys(state: State, width: int) -> Text:
    keys = Text(no_wrap=True)
    other = "categories" if state.shows_mappings else "mappings"
    for key, does in (
        ("q", "quit"),
        ("s", f"sort: {'category' if state.sort == 'category' else _TITLES[state.sort]}"),
        ("m", other if width >= _USUAL else ""),
        ("p", "go on" if state.is_paused else "pause"),
        ("+ -", f"{state.interval:g} s" if width >= _USUAL else ""),
        ("h", "help"),
    ):
        keys.append(_GAP if keys else "").append(key, _BOLD).append(
            f" {does}" if does else "", _DIM
        )
    keys.truncate(width)
    return keys


def _help(width: int) -> Iterator[Text]:
    for title, entries in (("Keys", _HELP), ("Figures", _TERMS)):
        yield Text(title, _BOLD)
        for name, says in entries:
            line = Text(no_wrap=True).append(f"  {name:10}", _BOLD).append(says)
            line.truncate(width)
            yield line
        yield Text()


def _between(left: Text, right: Text | str, width: int) -> Text:
    """Put one text at each end of a line."""
    right = Text(right, _DIM) if isinstance(right, str) else right
    left.truncate(max(0, width - right.cell_len - 1))
    spaces = " " * (width - left.cell_len - right.cell_len)
    return left.append(spaces).append_text(right)
