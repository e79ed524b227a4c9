"""Text for people: sizes, tables and wrapped lines, for a terminal and for ``str()``."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from itertools import zip_longest
from typing import NamedTuple

_KIB = 1024
_SIZE = re.compile(r"([0-9]{1,20})(\.[0-9]{1,9})? ?(?:([kmgt])(?:i?b)?|b)?", re.I)
_GAP = "  "
_CUT = "..."
_LABEL = 10  # columns of the names of facts
_INDENT = 3  # of an item of a list
_NARROWEST_BAR = 6
_NARROWEST_TEXT = 8
_WIDE = 110  # columns, from which on there is room for paths

# A terminal would obey control characters, those that change the direction of text (Unicode's
# bidirectional marks, embeddings, overrides and isolates), and those that end a line. No encoding
# has surrogates, which represent bytes of file names that are not UTF-8.
_VISIBLE = {chr(code): f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_VISIBLE |= {
    chr(code): f"\\u{code:04x}"
    for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
_VISIBLE |= {"\n": "\\n", "\t": "\\t"} | dict.fromkeys(map(chr, range(0xD800, 0xE000)), "?")
_VISIBLE_IN_LINES = {char: shown for char, shown in _VISIBLE.items() if char not in "\n\t"}
_PART = 4096  # characters that are looked up at once: each may take 80 bytes


@dataclass(frozen=True, slots=True)
class Surface:
    """The medium that text is written on; by default that of ``str()``.

    Its width is in columns; it may have colours, and the block characters of Unicode.
    """

    width: int = 80
    is_colored: bool = False
    has_blocks: bool = False

    def _styled(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_colored else text

    # Each takes a text and returns it with its look: prominent, receding, green, yellow (a notice,
    # not an error), and the colour of bars.
    heading = partialmethod(_styled, 1)
    dim = partialmethod(_styled, 2)
    good = partialmethod(_styled, 32)
    bad = partialmethod(_styled, 33)
    tint = partialmethod(_styled, 36)


# ---- figures ------------------------------------------------------------------------------------


def format_bytes(nbytes: float) -> str:
    """Write a size in the largest unit that keeps it at least 1.

    Examples
    --------
    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(0)
    ('1.5 KiB', '3.0 GiB', '0 B')
    """
    if nbytes < _KIB:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= _KIB
        if nbytes < _KIB:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / _KIB:.1f} TiB"


def format_mib(nbytes: int) -> str:
    """Write a size in MiB, rounded up, as a limit that has to hold it.

    Examples
    --------
    >>> format_mib(1), format_mib(3 * 2**30)
    ('1 MiB', '3,072 MiB')
    """
    return f"{-(-nbytes // _KIB**2):,} MiB"


def parse_bytes(text: str) -> int:
    """Read a size as people write it; K, M, G and T are powers of 1024.

    Raises
    ------
    ValueError
        The text is not a size.

    Examples
    --------
    >>> parse_bytes("16G") == parse_bytes("16 GiB") == 16 << 30, parse_bytes("1.5k")
    (True, 1536)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"expected a size such as '16G' or '512M', got {text!r:.60}")
    scale = _KIB ** ("kmgt".index(found[3].lower()) + 1) if found[3] else 1
    return int(found[1]) * scale + int(float(found[2] or 0) * scale)


def format_change(nbytes: int) -> str:
    """Write the change of a size.

    Examples
    --------
    >>> format_change(1536), format_change(-2048), format_change(0)
    ('+1.5 KiB', '-2.0 KiB', '0 B')
    """
    return f"{'-' if nbytes < 0 else '+' if nbytes else ''}{format_bytes(abs(nbytes))}"


def format_age(seconds: float) -> str:
    """Write a time that has passed, in its largest unit.

    Examples
    --------
    >>> format_age(59), format_age(7200), format_age(200_000)
    ('59 s', '2 h', '2 d')
    """
    units = ("d", 86400), ("h", 3600), ("min", 60)
    unit, scale = next((each for each in units if seconds >= each[1]), ("s", 1))
    return f"{int(seconds / scale)} {unit}"


def format_count(n: int, noun: str, plural: str = "s") -> str:
    """Write a number and its noun.

    Examples
    --------
    >>> format_count(1, "page"), format_count(2048, "page"), format_count(2, "pass", "es")
    ('1 page', '2,048 pages', '2 passes')
    """
    return f"{n:,} {noun}{'' if n == 1 else plural}"


def format_ranges(ids: Iterable[int]) -> str:
    """Write numbers as the kernel lists CPUs and nodes.

    Examples
    --------
    >>> format_ranges([0, 2, 3, 4, 7])
    '0,2-4,7'
    """
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


# ---- lines --------------------------------------------------------------------------------------


def escape(text: str, *, keeps_lines: bool = False) -> str:
    r"""Write control characters as ``\x1b`` and the like; names, paths and models may hold any.

    With `keeps_lines`, line ends and tabs stay. Without, a name cannot fake another line.

    Examples
    --------
    >>> print(escape("one\ntwo\x1b[2J"))
    one\ntwo\x1b[2J
    """
    if text.isascii() and text.isprintable():  # nearly all are
        return text
    shown = (_VISIBLE_IN_LINES if keeps_lines else _VISIBLE).get  # faster than str.translate
    parts = (text[i : i + _PART] for i in range(0, len(text), _PART))
    return "".join("".join(map(shown, part, part)) for part in parts)


def text_width(text: str) -> int:
    """Count the columns of a text.

    Examples
    --------
    >>> text_width("Maya"), text_width("日本")
    (4, 4)
    """
    if text.isascii():
        return len(text)
    return sum(n * _char_width(char) for char, n in Counter(text).items())


def _char_width(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def shorten(text: str, columns: int) -> str:
    """Cut a text in its middle, the least telling part of names and paths.

    Examples
    --------
    >>> shorten("/models/a-very-long-name-Q4_K_M.gguf", 20)
    '/models/..._K_M.gguf'
    """
    if text_width(text) <= columns:
        return text
    kept = columns - len(_CUT)
    if kept < 2:
        return _beginning(text, columns)
    return _beginning(text, kept // 2) + _CUT + _beginning(text[::-1], kept - kept // 2)[::-1]


def _beginning(text: str, columns: int) -> str:
    """Return the longest beginning that fits."""
    for i, char in enumerate(text):
        columns -= _char_width(char)
        if columns < 0:
            return text[:i]
    return text


def shorten_path(surface: Surface, path: str) -> str:
    """Return a path, or the name of the file if lines are short."""
    return path if surface.width >= _WIDE else path.rpartition("/")[2]


def wrap(text: str, columns: int, *, cuts: bool = True) -> list[str]:
    """Break a text between words.

    With `cuts`, a word longer than a line is cut; otherwise it stays whole, to be copied.

    Examples
    --------
    >>> wrap("One day, Maya", 8)
    ['One day,', 'Maya']
    """
    lines = [""]
    for word in text.split():
        part = shorten(word, columns) if cuts else word
        longer = f"{lines[-1]} {part}" if lines[-1] else part
        if text_width(longer) <= columns or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def fact_lines(
    surface: Surface, facts: Iterable[tuple[str, str]], *, cuts: bool = True
) -> Iterator[str]:
    """Write names with their escaped texts, wrapped; an empty name continues the text before."""
    facts = list(facts)
    label = max([_LABEL, *(len(name) + len(_GAP) for name, _ in facts)])
    for name, text in facts:
        start = surface.dim(name.ljust(label)) if name else " " * label
        for line in wrap(escape(text), max(surface.width - label, _NARROWEST_TEXT), cuts=cuts):
            yield start + line
            start = " " * label


def item_lines(surface: Surface, mark: str, text: str) -> Iterator[str]:
    """Write an item of a list: a mark or a number, and an escaped text beside it."""
    start = mark.ljust(_INDENT)
    for line in wrap(escape(text), surface.width - _INDENT):
        yield start + line
        start = " " * _INDENT


# ---- tables -------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A bar at the end of a row of a table: its full part, from 0 to 1, whose look is `style`."""

    share: float
    has_rest: bool = False
    style: Callable[[str], str] | None = None


def draw_bar(share: float, columns: int, *, has_blocks: bool) -> tuple[str, str]:
    """Draw the full part of a bar and its rest, to half a character.

    Examples
    --------
    >>> draw_bar(0.3, 5, has_blocks=True), draw_bar(0.3, 5, has_blocks=False)
    (('█▌', '░░░'), ('##', '...'))
    """
    whole, has_half = divmod(round(min(max(share, 0.0), 1.0) * columns * 2), 2)
    rest = columns - whole - has_half
    if has_blocks:
        return "█" * whole + "▌" * has_half, "░" * rest
    return "#" * (whole + has_half), "." * rest


def table_lines(
    surface: Surface,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str | None = None,
    bars: Sequence[Bar | None] = (),
    spare: Sequence[str] = (),
    styles: Sequence[Callable[[str], str]] = (),
    wraps: bool = False,
) -> Iterator[str]:
    """Lay out texts in columns, with bars in the rest of the line: first the head, then the rows.

    Parameters
    ----------
    surface : Surface
        The medium.
    head, rows : sequences of str
        Names of the columns, and the texts of each row, which are escaped.
    align : str, optional
        ``<`` for a column to the left and ``>`` for one to the right; by default the first is to
        the left. If the line is too short, those to the left are cut, the widest first.
    bars : sequence of Bar or None
        One per row.
    spare : sequence of str
        Names of columns to leave out if cutting is not enough, the first one first.
    styles : sequence of callable
        One per row: the look of its text.
    wraps : bool
        Whether names of columns and texts to the left are wrapped before they are cut.

    Examples
    --------
    >>> rows = [("kv", "512.0 MiB"), ("total", "1.0 GiB")]
    >>> for line in table_lines(Surface(31), ("memory", "size"), rows, bars=[Bar(0.5), None]):
    ...     print(line)
    memory       size
    kv      512.0 MiB  ######
    total     1.0 GiB
    >>> rows = [("a name of some words", "1.0 GiB"), ("total", "1.0 GiB")]
    >>> for line in table_lines(Surface(20), ("memory", "the size"), rows, wraps=True):
    ...     print(line)
    memory      the size
    a name of    1.0 GiB
    some words
    total        1.0 GiB
    """
    align = "<" + ">" * (len(head) - 1) if align is None else align
    texts = [[escape(text) for text in row] for row in (head, *rows)]
    widths = [max(map(text_width, column)) for column in zip(*texts, strict=True)]
    columns = surface.width
    kept = _kept(head, widths, align, spare, columns)
    texts = [[row[i] for i in kept] for row in texts]
    widths, align = [widths[i] for i in kept], "".join(align[i] for i in kept)
    gaps = len(_GAP) * (len(widths) - 1)
    if wraps:
        _narrow_to_words(texts, widths, align, columns - gaps)
    _narrow(widths, align, columns - gaps)
    n_bar = columns - sum(widths) - gaps - len(_GAP)
    for i, row in enumerate(texts):
        first, *more = _lines(row, widths, align, wraps=wraps)
        if i == 0:
            yield from (surface.heading(line.rstrip()) for line in (first, *more))
            continue
        style = styles[i - 1] if styles else str
        bar = bars[i - 1] if bars else None
        if bar is not None and n_bar >= _NARROWEST_BAR:
            yield (style(first) + _GAP + _drawn(surface, bar, n_bar)).rstrip()
        else:
            yield style(first.rstrip())
        yield from (style(line.rstrip()) for line in more)


def wide_lines(
    surface: Surface, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    """Lay out visible texts in columns, all but the first to the right, however long the lines are.

    Examples
    --------
    >>> for line in wide_lines(Surface(), ("tensor", "size"), [("a", "1.0 GiB")]):
    ...     print(line)
    tensor     size
    a       1.0 GiB
    """
    widths = [max(map(text_width, column)) for column in zip(head, *rows, strict=True)]
    align = "<" + ">" * (len(head) - 1)
    yield surface.heading(_GAP.join(map(_pad, head, widths, align)))
    for row in rows:
        yield _GAP.join(map(_pad, row, widths, align))


def _lines(row: Sequence[str], widths: Sequence[int], align: str, *, wraps: bool) -> Iterator[str]:
    """Lay out a row in one line, or in several if its texts are wrapped."""
    cells = [
        wrap(text, width) if wraps else [shorten(text, width)]
        for text, width in zip(row, widths, strict=True)
    ]
    for parts in zip_longest(*cells, fillvalue=""):
        yield _GAP.join(map(_pad, parts, widths, align))


def _kept(
    head: Sequence[str], widths: Sequence[int], align: str, spare: Sequence[str], columns: int
) -> list[int]:
    """Choose the columns that fit when the others are cut as far as possible."""
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


def _narrow_to_words(
    texts: Sequence[Sequence[str]], widths: list[int], align: str, columns: int
) -> None:
    """Narrow columns by as much as wrapping between words makes up for."""
    heads, *rows = texts
    least = [
        max([_longest_word(name), *map(_longest_word if side == "<" else text_width, column)])
        for name, side, *column in zip(heads, align, *rows, strict=True)
    ]
    _narrow(widths, "<" * len(widths), columns, least)


def _narrow(
    widths: list[int], align: str, columns: int, least: Sequence[int] | None = None
) -> None:
    """Narrow columns to the left until the line fits."""
    least = [_NARROWEST_TEXT] * len(widths) if least is None else least
    while sum(widths) > columns:
        flexible = [i for i, side in enumerate(align) if side == "<" and widths[i] > least[i]]
        if not flexible:
            break
        widths[max(flexible, key=lambda i: widths[i])] -= 1


def _longest_word(text: str) -> int:
    return max(map(text_width, text.split()), default=0)


def _pad(text: str, width: int, side: str) -> str:
    spaces = " " * (width - text_width(text))
    return text + spaces if side == "<" else spaces + text


def _drawn(surface: Surface, bar: Bar, columns: int) -> str:
    full, rest = draw_bar(bar.share, columns, has_blocks=surface.has_blocks)
    drawn = (bar.style or surface.tint)(full) if full else ""
    return drawn + surface.dim(rest) if bar.has_rest else drawn
