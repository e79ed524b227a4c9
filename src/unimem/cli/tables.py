"""Tables, bars and facts in lines that the terminal has room for, or elsewhere of 80 columns."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.cells import cell_len, chop_cells

from unimem.cli import terminal

__all__ = ["Bar", "can_show", "fact_lines", "fit", "room", "table_lines", "wrap"]

WIDTH = 80
LABEL = 10  # columns of the names of facts

_GAP = "  "
_CUT = "..."
_NARROWEST_BAR = 6
_NARROWEST_TEXT = 8


class Bar(NamedTuple):
    """A bar at the end of a row of a table.

    Attributes
    ----------
    share : float
        What of its column is full, from 0 to 1.
    has_rest : bool
        Whether the rest of the column is shown, too.
    style : callable
        How the full part looks.
    """

    share: float
    has_rest: bool = False
    style: Callable[[str], str] = terminal.tint


def room() -> int:
    """Count the columns of a line: the terminal's, and where there is none always the same."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def can_show(text: str) -> bool:
    """Whether standard output's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def fit(text: str, columns: int) -> str:
    """Cut a text in its middle, where names and paths say the least.

    Examples
    --------
    >>> fit("/models/a-very-long-name-Q4_K_M.gguf", 20)
    '/models/..._K_M.gguf'
    """
    if cell_len(text) <= columns:
        return text
    kept = columns - len(_CUT)
    if kept < 2:
        return _head(text, columns)
    return _head(text, kept // 2) + _CUT + _head(text[::-1], kept - kept // 2)[::-1]


def _head(text: str, columns: int) -> str:
    """Give the most of its beginning that is no wider."""
    return chop_cells(text, columns)[0] if columns > 0 else ""


def wrap(text: str, columns: int) -> list[str]:
    """Break a text between words; a word that no line has room for is cut.

    Examples
    --------
    >>> wrap("One day, Maya", 8)
    ['One day,', 'Maya']
    """
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines[-1] else fit(word, columns)
        if cell_len(longer) <= columns:
            lines[-1] = longer
        else:
            lines.append(fit(word, columns))
    return lines


def fact_lines(facts: Iterable[tuple[str, str]], columns: int | None = None) -> Iterator[str]:
    """Write names, and beside each its text in as many lines as it needs.

    Parameters
    ----------
    facts : iterable of (str, str)
        Names and texts. Control characters in a text are shown, and not obeyed.
    columns : int, optional
        Of a line; by default all that there are.
    """
    columns = room() if columns is None else columns
    for name, text in facts:
        start = terminal.dim(name.ljust(LABEL))
        for line in wrap(terminal.one_line(text), max(columns - LABEL, _NARROWEST_TEXT)):
            yield start + line
            start = " " * LABEL


def table_lines(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str | None = None,
    bars: Sequence[Bar | None] = (),
    spare: Sequence[str] = (),
    styles: Sequence[Callable[[str], str]] = (),
    wraps: bool = False,
    columns: int | None = None,
) -> Iterator[str]:
    """Lay out texts in columns, and bars in what is left of the line.

    Parameters
    ----------
    head : sequence of str
        Names of the columns.
    rows : sequence of sequences of str
        Texts of each row. Control characters are shown, and not obeyed.
    align : str, optional
        ``<`` for a column to the left and ``>`` for one to the right; by default the first is to
        the left. Where the line is too short, those to the left are cut, the widest first.
    bars : sequence of Bar or None
        One a row.
    spare : sequence of str
        Names of columns that are left out where cutting is not enough, the first one first.
    styles : sequence of callable
        One a row: how its text looks.
    wraps : bool
        Whether names of columns, and texts to the left, are broken into lines before they are cut.
    columns : int, optional
        Of a line; by default all that there are.

    Yields
    ------
    str
        The head, which stands out, and the rows.

    Examples
    --------
    Where the output's encoding lacks blocks:

    >>> rows = [("kv", "512.0 MiB"), ("total", "1.0 GiB")]
    >>> bars = [Bar(0.5), None]
    >>> for line in table_lines(("memory", "size"), rows, bars=bars, columns=31):
    ...     print(line)
    memory       size
    kv      512.0 MiB  ######
    total     1.0 GiB

    >>> rows = [("a name of some words", "1.0 GiB"), ("total", "1.0 GiB")]
    >>> for line in table_lines(("memory", "the size"), rows, wraps=True, columns=20):
    ...     print(line)
    memory      the size
    a name of    1.0 GiB
    some words
    total        1.0 GiB
    """
    columns = room() if columns is None else columns
    align = "<" + ">" * (len(head) - 1) if align is None else align
    texts = [[terminal.one_line(text) for text in row] for row in (head, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    kept = _kept(head, widths, align, spare, columns)
    texts = [[row[i] for i in kept] for row in texts]
    widths, align = [widths[i] for i in kept], "".join(align[i] for i in kept)
    gaps = len(_GAP) * (len(widths) - 1)
    if wraps:  # words are cut only where breaking lines between them is not enough
        least = [
            max(map(_longest_word if side == "<" else cell_len, column), default=0)
            for column, side in zip(zip(*texts[1:], strict=True), align, strict=True)
        ]
        least = [max(each, _longest_word(name)) for each, name in zip(least, texts[0], strict=True)]
        _narrow(widths, "<" * len(widths), columns - gaps, least)
    _narrow(widths, align, columns - gaps)
    n_bar = columns - sum(widths) - gaps - len(_GAP)
    for i, row in enumerate(texts):
        first, *more = _lines(row, widths, align, wraps=wraps)
        if i == 0:
            yield from (terminal.heading(line.rstrip()) for line in (first, *more))
            continue
        style = styles[i - 1] if styles else str
        bar = bars[i - 1] if bars else None
        if bar is not None and n_bar >= _NARROWEST_BAR:
            yield (style(first) + _GAP + _drawn(bar, n_bar)).rstrip()
        else:
            yield style(first.rstrip())
        yield from (style(line.rstrip()) for line in more)


def _lines(row: Sequence[str], widths: Sequence[int], align: str, *, wraps: bool) -> Iterator[str]:
    """Lay out a row in one line, or in as many as its texts need."""
    cells = [
        wrap(text, width) if wraps else [fit(text, width)]
        for text, width in zip(row, widths, strict=True)
    ]
    for parts in zip_longest(*cells, fillvalue=""):
        yield _GAP.join(map(_pad, parts, widths, align))


def _kept(
    head: Sequence[str], widths: Sequence[int], align: str, spare: Sequence[str], columns: int
) -> list[int]:
    """Choose the columns that there is room for, the others cut as far as they may be."""
    least = [
        min(width, _NARROWEST_TEXT) if side == "<" else width
        for width, side in zip(widths, align, strict=True)
    ]
    kept = list(range(len(head)))
    for name in spare:
        if sum(least[i] for i in kept) + len(_GAP) * (len(kept) - 1) <= columns:
            break
        kept.remove(head.index(name))
    return kept


def _narrow(
    widths: list[int], align: str, columns: int, least: Sequence[int] | None = None
) -> None:
    """Take from columns to the left what lines are too long by."""
    least = [_NARROWEST_TEXT] * len(widths) if least is None else least
    while sum(widths) > columns:
        flexible = [i for i, side in enumerate(align) if side == "<" and widths[i] > least[i]]
        if not flexible:
            break
        widths[max(flexible, key=lambda i: widths[i])] -= 1


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _pad(text: str, width: int, side: str) -> str:
    spaces = " " * (width - cell_len(text))
    return text + spaces if side == "<" else spaces + text


def _drawn(bar: Bar, columns: int) -> str:
    """Draw to the half of a character, which fonts and code pages have had for long."""
    halves = round(min(max(bar.share, 0.0), 1.0) * columns * 2)
    whole, has_half = divmod(halves, 2)
    if can_show("█▌░"):
        text, rest = "█" * whole + "▌" * has_half, "░"
    else:
        text, rest = "#" * (whole + has_half), "."
    drawn = bar.style(text) if text else ""
    return drawn + terminal.dim(rest * (columns - len(text))) if bar.has_rest else drawn
