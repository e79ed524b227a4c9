"""The state of a watch as lines of a terminal, of 60x12 or more: what is wider shows more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from unimem.cli.tables import fit
from unimem.cli.terminal import one_line
from unimem.cli.watch_state import Line, Rates, Sample, State
from unimem.limits import Limit
from unimem.placement import format_bytes

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "frame", "whole"]

LEAST_WIDTH, LEAST_HEIGHT = 60, 12

_LABEL = 10
_GAP = "  "
_SIZE, _GROWTH = 10, 11
_WIDE = 100  # from here on there are pictures over time
_NARROWEST_BAR = 6
_NARROWEST_NAME = 12
_LATE_SECONDS = 2.0
_SCARCE = 0.1  # of a limit: less room than this is worth a look
_BARS = " ▁▂▃▄▅▆▇█"

_DIM, _BOLD, _BAR, _NOTICE = "dim", "bold", "cyan", "yellow"

_HELP = (
    ("q", "leave; the last figures stay on the screen. So does Ctrl-C."),
    ("s", "sort: by category, size, resident or growth since the start"),
    ("m", "show single mappings, or their sums by category"),
    ("p", "pause: nothing is read until p is pressed again"),
    ("+ -", "refresh less, or more often"),
    ("arrows", "scroll, as do Page Up, Page Down, Home and End"),
    ("h ?", "this page; any key leaves it"),
)
_TERMS = (
    ("size", "what is mapped, each byte once"),
    ("resident", "what of it is in RAM; a page that n processes share counts 1/n"),
    ("change", "what has come to be in RAM since the last refresh"),
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
        return [Text(fit(line, width)) for line in says[:height]]
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


def _head(state: State, width: int, blocks: bool, most_models: int) -> list[Text]:
    now = state.now
    assert now is not None
    counted = state.rates()
    lines = [_title(state, now, width)]
    lines += _models(state, width, most_models)
    if now.published:
        lines.append(
            _figures(
                "tokens/s",
                ("made", _number(counted.generated_tokens), ""),
                ("prompt", _number(counted.prompt_tokens), ""),
                _kv(now),
            )
        )
        _add_picture(lines, state, lambda rate: rate.generated_tokens, width, blocks)
    n = now.counters.n_threads
    cpu = "-" if counted.cores is None else f"{counted.cores:.0%}"
    lines.append(
        _figures(
            "faults/s",
            ("minor", _number(counted.minor_faults), ""),
            ("major", _number(counted.major_faults), _NOTICE if counted.major_faults else ""),
            f"CPU {cpu}, {n} thread{'' if n == 1 else 's'}",
        )
    )
    _add_picture(lines, state, lambda rate: rate.minor_faults, width, blocks)
    swapped = sum(row.granted.swapped_bytes for row in now.report.rows if row.granted is not None)
    lines.append(
        _figures(
            "page-ins",
            ("own", _speed(counted.read_bytes), ""),
            ("machine", _speed(counted.paged_in_bytes), ""),
            f"swapped out {format_bytes(swapped)}",
            _NOTICE if swapped else "",
        )
    )
    _add_picture(lines, state, lambda rate: rate.paged_in_bytes, width, blocks)
    lines.append(_pressure(now))
    lines.append(_room(now, width))
    for line in lines:
        line.truncate(width)
    return lines


def _title(state: State, now: Sample, width: int) -> Text:
    age = now.seconds - now.report_seconds
    if state.ended:
        how, style = state.ended, _NOTICE
    elif state.is_paused:
        how, style = "PAUSED", _NOTICE
    elif state.late_seconds >= _LATE_SECONDS:
        how, style = f"waiting for {state.late_seconds:.0f} s", _NOTICE
    elif age > 0:
        how, style = f"every {state.interval:g} s, memory {age:.0f} s ago", _DIM
    else:
        how, style = f"every {state.interval:g} s", _DIM
    right = Text.assemble((f"up {timedelta(seconds=int(now.up_seconds))}, ", _DIM), (how, style))
    facts = now.report.facts
    command = one_line(str(facts.get("command") or facts.get("name") or ""))
    left = Text(f"{state.pid} ", _BOLD)
    left.append(fit(command, max(0, width - cell_len(left.plain) - cell_len(right.plain) - 3)))
    return _between(left, right, width)


def _models(state: State, width: int, most: int) -> Iterator[Text]:
    models = state.models()
    for i, model in enumerate(models[:most]):
        share = f"{format_bytes(model.resident_bytes)} of {format_bytes(model.nbytes)} in RAM"
        share += f", {model.pages}" if model.pages != "4k" else ""
        if i == most - 1 and len(models) > most:
            share += f"; and {len(models) - most} more"
        name = fit(one_line(Path(model.path).name), width - _LABEL - len(share) - 2)
        style = "" if model.resident_bytes >= model.nbytes else _NOTICE
        yield _labelled("model").append(f"{name}  ").append(share, style)


def _kv(now: Sample) -> str:
    n, nbytes = now.published.get("kv_tokens", 0), now.published.get("kv_active_bytes", 0)
    return f"KV {n:,} token{'' if n == 1 else 's'}, {format_bytes(nbytes)}"


def _pressure(now: Sample) -> Text:
    if not now.pressure:
        return _labelled("pressure").append("not available: this kernel does not count it (PSI)")
    machine, *own = now.pressure
    text = " and ".join(f"{share:.2f}%" for share in own[0][1:]) if own else ""
    return _figures(
        "pressure",
        ("some", f"{machine.some_percent:.2f}%", _NOTICE if machine.some_percent else ""),
        ("full", f"{machine.full_percent:.2f}%", _NOTICE if machine.full_percent else ""),
        f"cgroup {text}" if own else "",
        _NOTICE if own and own[0].some_percent else "",
    )


def _room(now: Sample, width: int) -> Text:
    """Write the free memory of the machine, and of the limit with the least room."""
    line = _labelled("memory")
    if not now.limits:
        return line.append("-")
    machine, *others = now.limits
    least = min(now.limits, key=lambda limit: limit.room_bytes)
    line.append(f"{_free(machine)} free", _scarce(machine))
    if least is not machine:
        room = f"{_free(least)} in "
        name = fit(one_line(least.name), width - cell_len(line.plain) - len(room) - 2)
        line.append("; ").append(f"{room}{name}", _scarce(least))
    elif others:
        line.append("; no cgroup has less", _DIM)
    return line


def _free(limit: Limit) -> str:
    return f"{format_bytes(limit.room_bytes)} of {format_bytes(limit.limit_bytes)}"


def _scarce(limit: Limit) -> str:
    return _NOTICE if limit.room_bytes < _SCARCE * limit.limit_bytes else ""


def _labelled(label: str) -> Text:
    return Text(no_wrap=True).append(label.ljust(_LABEL), _DIM)


def _figures(
    label: str,
    first: tuple[str, str, str],
    second: tuple[str, str, str],
    rest: str,
    rest_style: str = "",
) -> Text:
    """Write two figures, each where it always is, and a text."""
    line = _labelled(label)
    for (name, figure, style), name_width, width in ((first, 6, 11), (second, 8, 11)):
        line.append(name.ljust(name_width), _DIM).append(figure.rjust(width), style).append("   ")
    return line.append(rest, rest_style)


def _number(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}"


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{format_bytes(rate)}/s"


def _add_picture(
    lines: list[Text], state: State, of: Callable[[Rates], float | None], width: int, blocks: bool
) -> None:
    """Draw at the end of the last line how a rate was, the newest to the right."""
    line = lines[-1]
    n = min(width - 84, 60)
    if width < _WIDE or not blocks or cell_len(line.plain) > width - n - 2:
        return
    values = [of(rate) for rate in state.history][-n:]
    most = max((value for value in values if value is not None), default=0.0)
    picture = "".join(
        " " if not value else _BARS[max(1, math.ceil(value / most * 8))] for value in values
    )
    line.append(" " * (width - n - cell_len(line.plain)))
    line.append(picture.rjust(n), _BAR)


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
    longest = max((cell_len(line.category) for line in lines), default=0)
    n = max(len("category v"), min(longest, 24 if is_wide else 18))
    category = _Column("category", n, lambda line: fit(line.category, n), is_left=True)
    sizes = [
        _Column("size", _SIZE, lambda line: format_bytes(line.nbytes)),
        _Column("resident", _SIZE, lambda line: _size(line.resident_bytes)),
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
        column._replace(title=column.title + mark) if column.title == state.sort else column
        for column in columns
    ]


def _more(shows_mappings: bool) -> Iterator[_Column]:
    """Give columns for wide terminals, the most wanted first."""
    if shows_mappings:
        yield _Column("address", 12, lambda line: f"{line.address:x}" if line.key else "")
    else:
        yield _Column("active", _SIZE, lambda line: _size(line.active_bytes))
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
    full, rest = ("█", "░") if blocks else ("#", ".")

    def text(line: Line) -> str:
        if not line.key:
            return ""
        held = line.nbytes if line.resident_bytes is None else line.resident_bytes
        # What is there shows, however little it is.
        n_held = math.ceil(held / largest * width)
        n = max(n_held, math.ceil(line.nbytes / largest * width))
        return (full * n_held + rest * (n - n_held))[:width]

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
    name = one_line(line.name)
    if cell_len(name) > width and "/" in name:
        name = Path(name).name
    return fit(name or (f"{line.address:x}" if line.key else ""), width)


# ---- below the table -----------------------------------------------------------------------------


def _keys(state: State, width: int) -> Text:
    keys = Text(no_wrap=True)
    other = "categories" if state.shows_mappings else "mappings"
    for key, does in (
        ("q", "quit"),
        ("s", f"sort: {state.sort}"),
        ("m", other),
        ("p", "go on" if state.is_paused else "pause"),
        ("+ -", f"{state.interval:g} s"),
        ("h", "help"),
    ):
        keys.append(_GAP if keys else "").append(key, _BOLD).append(f" {does}", _DIM)
    keys.truncate(width)
    return keys


def _help(width: int) -> Iterator[Text]:
    for title, entries in (("Keys", _HELP), ("Figures", _TERMS)):
        yield Text(title, _BOLD)
        for name, says in entries:
            line = _labelled(f"  {name}").append(says)
            line.truncate(width)
            yield line
        yield Text()


def _between(left: Text, right: Text | str, width: int) -> Text:
    """Put one text at each end of a line."""
    right = Text(right, _DIM) if isinstance(right, str) else right
    left.truncate(max(0, width - right.cell_len - 1))
    spaces = " " * (width - left.cell_len - right.cell_len)
    return left.append(spaces).append_text(right)
