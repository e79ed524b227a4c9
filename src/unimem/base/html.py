"""HTML for people: sizes, tables, bars and charts, for notebooks and for pages without network.

All text is escaped, unless a function of this module has made it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from html import escape as quote

from unimem.base.text import escape, format_bytes, format_count, shorten

# Colours of bars are of medium brightness, and all others are the reader's own, so that the page is
# readable in light and dark, also in a notebook with another theme than the system.
_STYLE = """
.unimem{font:14px/1.45 system-ui,sans-serif;max-width:72rem;text-align:left}
.unimem *{box-sizing:border-box}
.unimem h1{font-size:1.35rem;margin:.2rem 0 .6rem;overflow-wrap:anywhere}
.unimem h2{font-size:1.05rem;margin:1.4rem 0 .4rem}
.unimem p{margin:.5rem 0}
.unimem .note{opacity:.75}
.unimem .scroll{overflow-x:auto}
.unimem table{border-collapse:collapse;border:0;margin:.4rem 0;font-size:1em;\
font-variant-numeric:tabular-nums}
.unimem :is(th,td){padding:.15rem .6rem .15rem 0;text-align:right;vertical-align:baseline;\
white-space:nowrap;border:0;border-bottom:1px solid #8884;background:none;color:inherit;\
max-width:none;font-weight:400}
.unimem :is(thead th,tfoot :is(th,td)){font-weight:600}
.unimem .l{text-align:left}
.unimem .p{white-space:normal;overflow-wrap:anywhere;min-width:12rem}
.unimem dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .9rem;margin:.6rem 0}
.unimem dt{opacity:.75;margin:0;font-weight:400}
.unimem dd{margin:0;overflow-wrap:anywhere}
.unimem .bar{display:inline-block;width:9rem;height:.65rem;background:#8883;border-radius:2px;\
overflow:hidden}
.unimem .bar i{display:block;height:100%}
.unimem .stack{display:flex;height:1.7rem;border-radius:4px;overflow:hidden;background:#8883;\
margin:.6rem 0 .4rem}
.unimem .legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;padding:0;margin:0}
.unimem .legend li{margin:0}
.unimem .legend i{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;\
margin-right:.4rem}
.unimem svg{display:block;width:100%;height:11rem;background:#8882;border-radius:4px}
.unimem .ends{display:flex;justify-content:space-between}
@media(max-width:40rem){.unimem{font-size:13px}.unimem .w{display:none}.unimem .bar{width:4rem}\
.unimem :is(th,td){padding-right:.35rem}.unimem :is(th,td):last-child{padding-right:0}\
.unimem thead th{white-space:normal;\
vertical-align:bottom}.unimem .p{min-width:7rem}}
"""
# No script, font, image or address: text that enters the page by a name can reach nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title>
<style>:root{{color-scheme:light dark}}body{{margin:0;padding:1rem;background:Canvas;\
color:CanvasText}}.unimem{{margin:auto}}</style>
</head>
<body>
{body}
</body>
</html>
"""
_CHART_WIDTH, _CHART_HEIGHT = 1000, 200
_LONGEST_TEXT = 400
_MOST_PIECES = 9


class Html(str):
    """Text that is HTML already. It never changes."""

    __slots__ = ()


def markup(text: str) -> Html:
    """Escape a text, unless it is HTML already.

    Control characters are written out as in a terminal, and very long texts are cut in the middle.

    Examples
    --------
    >>> markup("a <b> & c"), markup(Html("<b>a</b>"))
    ('a &lt;b&gt; &amp; c', '<b>a</b>')
    """
    if isinstance(text, Html):
        return text
    return Html(quote(shorten(escape(text), _LONGEST_TEXT)))


def join(parts: Iterable[str], separator: str = "") -> Html:
    """Join texts, each escaped unless it is HTML."""
    return Html(markup(separator).join(map(markup, parts)))


def heading(text: str) -> Html:
    """Write the heading of a part."""
    return Html(f"<h2>{markup(text)}</h2>")


def stamp(seconds: float | None = None) -> Html:
    """Write the name of this host, and a time in seconds since 1970, by default now."""
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
    return Html(f'<p class="note">{markup(f"{os.uname().nodename}, {when}")}</p>')


def preformatted(text: str) -> Html:
    """Write a table that is text already, as it is in a terminal."""
    return Html(f"<pre>{quote(escape(text, keeps_lines=True))}</pre>")


def size(nbytes: int | None) -> Html:
    """Write a size for people, with its bytes for programs and as a tooltip.

    Examples
    --------
    >>> size(1536)
    '<data value="1536" title="1,536 bytes">1.5 KiB</data>'
    """
    if nbytes is None:
        return Html("-")
    return Html(f'<data value="{nbytes}" title="{nbytes:,} bytes">{format_bytes(nbytes)}</data>')


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Write names with their texts; an empty name continues the text before."""
    rows = [f"<dt>{markup(name)}</dt><dd>{markup(text)}</dd>" for name, text in pairs]
    return Html(f"<dl>{''.join(rows)}</dl>" if rows else "")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    foot: Iterable[Sequence[str]] = (),
    align: str | None = None,
    spare: Sequence[str] = (),
) -> Html:
    """Write a table, which scrolls within itself on a narrow page.

    Parameters
    ----------
    head, rows, foot
        Names of the columns, and the texts of each row and of each row of sums.
    align : str, optional
        ``<`` for a column to the left, ``>`` for one to the right, ``p`` for one to the left that
        wraps; by default the first is to the left.
    spare : sequence of str
        Names of columns that narrow pages omit.

    Examples
    --------
    >>> print(table(["memory", "size"], [["kv", "1 B"]])[:43])
    <div class="scroll"><table><thead><tr><th c
    """
    align = "<" + ">" * (len(head) - 1) if align is None else align
    classes = [
        " ".join(filter(None, [{"<": "l", "p": "l p"}.get(side, ""), "w" * (name in spare)]))
        for name, side in zip(head, align, strict=True)
    ]
    attributes = [f' class="{each}"' if each else "" for each in classes]

    def line(row: Sequence[str], cell: str) -> str:
        first, *rest = zip(row, attributes, strict=True)
        text = f'<th scope="row"{first[1]}>{markup(first[0])}</th>' if cell == "td" else ""
        cells = rest if text else [first, *rest]
        return f"<tr>{text}{''.join(f'<{cell}{a}>{markup(t)}</{cell}>' for t, a in cells)}</tr>"

    above = "".join(line(row, "td") for row in rows)
    below = "".join(line(row, "td") for row in foot)
    return Html(
        f'<div class="scroll"><table><thead>{line(head, "th")}</thead><tbody>{above}'
        f"</tbody>{f'<tfoot>{below}</tfoot>' if below else ''}</table></div>"
    )


def bar(share: float, color: str) -> Html:
    """Draw a bar that is full to a share from 0 to 1."""
    width = f"{min(max(share, 0.0), 1.0):.1%}"
    return Html(f'<span class="bar"><i style="width:{width};background:{color}"></i></span>')


def stack(pieces: Iterable[tuple[str, int, str]]) -> Html:
    """Draw sizes (name, bytes, colour) side by side in one bar; the smallest are merged."""
    there = sorted((piece for piece in pieces if piece[1] > 0), key=lambda piece: -piece[1])
    there, small = there[:_MOST_PIECES], there[_MOST_PIECES:]
    if small:
        there.append((format_count(len(small), "other"), sum(piece[1] for piece in small), "#999"))
    total = sum(piece[1] for piece in there)
    drawn = "".join(
        f'<i style="width:{nbytes / total:.2%};background:{color}" '
        f'title="{markup(f"{name}: {format_bytes(nbytes)}")}"></i>'
        for name, nbytes, color in there
    )
    return Html(f'<div class="stack">{drawn}</div>{_legend(there)}')


def _legend(pieces: Iterable[tuple[str, int, str]]) -> str:
    items = (
        f'<li><i style="background:{color}"></i>{markup(name)} {size(nbytes)}</li>'
        for name, nbytes, color in pieces
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def chart(
    times: Sequence[float], series: Sequence[tuple[str, Sequence[int], str]], most: int
) -> Html:
    """Draw sizes over time, stacked, as an SVG with a legend.

    Parameters
    ----------
    times : sequence of float
        Ascending seconds, at least two.
    series : sequence of (str, sequence of int, str)
        Name, bytes at each time, and colour; the lowest first.
    most : int
        The bytes of the upper edge, above 0.
    """
    first, whole = times[0], max(times[-1] - times[0], 1e-9)
    xs = [_CHART_WIDTH * (time - first) / whole for time in times]
    below = [0] * len(times)
    areas = []
    for name, values, color in series:
        above = [low + value for low, value in zip(below, values, strict=True)]
        upper, lower = (
            [
                f"{x:.1f},{_CHART_HEIGHT * (1 - nbytes / most):.1f}"
                for x, nbytes in zip(xs, line, strict=True)
            ]
            for line in (above, below)
        )
        points = " ".join([*upper, *reversed(lower)])
        areas.append(
            f'<polygon points="{points}" fill="{color}"><title>{markup(name)}</title></polygon>'
        )
        below = above
    seconds = f"{whole:,.0f} s" if whole >= 10 else f"{whole:.1f} s"
    last = [(name, values[-1], color) for name, values, color in series]
    return Html(
        f'<div class="ends note"><span>{format_bytes(most)}</span></div>'
        f'<svg viewBox="0 0 {_CHART_WIDTH} {_CHART_HEIGHT}" preserveAspectRatio="none" role="img">'
        f"<title>Bytes in RAM over {seconds}</title>{''.join(areas)}</svg>"
        f'<div class="ends note"><span>0 s</span><span>{seconds}</span></div>{_legend(last)}'
    )


def fragment(*parts: str) -> Html:
    """Join parts and their style, for a notebook or a page."""
    return Html(f'<div class="unimem"><style>{_STYLE}</style>{join(parts)}</div>')


def page(title: str, body: Html) -> str:
    """Make a whole page of a fragment, in one file, light or dark as the reader prefers."""
    return _PAGE.format(policy=quote(_POLICY), title=markup(title), body=body)
