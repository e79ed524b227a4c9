"""Handmade HTML: all text is escaped and each tag is closed."""

from __future__ import annotations

import os
import time

import pytest

from support.terminal.html_pages import HtmlPage
from support.terminal.screens import CONTROL, HOSTILE
from unimem.base.html import (
    Html,
    bar,
    chart,
    facts,
    fragment,
    heading,
    join,
    markup,
    page,
    size,
    stack,
    stamp,
    table,
)

EVIL = f"</td><script>alert(1)</script>\"'&{HOSTILE}"


def whole(*parts: str) -> HtmlPage:
    return HtmlPage(page("a title", fragment(*parts)))


@pytest.mark.parametrize("made", [
    markup(EVIL), heading(EVIL), join([EVIL, EVIL], EVIL), facts([(EVIL, EVIL)]),
    table((EVIL, EVIL), [(EVIL, EVIL)], foot=[(EVIL, EVIL)], spare=(EVIL,)),
    stack([(EVIL, 3, "red"), (EVIL, 4, "red")]), chart((0, 1), [(EVIL, (1, 2), "red")], 2),
])  # fmt: skip
def test_names_are_escaped(made: Html) -> None:
    assert "<script" not in made
    assert not CONTROL.search(made)
    read = HtmlPage(page(EVIL, fragment(made)))
    assert "script" not in read.tags
    assert "alert(1)" in read.text
    assert not [name for name, _ in read.attributes if name.startswith("on")]


def test_a_page_loads_nothing() -> None:
    text = page("a title", fragment(heading("one")))
    assert "http" not in text.replace("http-equiv", "")
    assert not set(HtmlPage(text).tags) & {"script", "link", "img", "iframe", "object"}
    assert "default-src &#x27;none&#x27;" in text
    # The reader's settings choose light or dark, and the colours of text.
    assert "color-scheme:light dark" in text
    assert 'name="viewport"' in text


def test_a_stamp_names_the_host_and_the_time() -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(86400.5))
    assert whole(stamp(86400.5)).text.endswith(f"{os.uname().nodename}, {when}")
    assert time.strftime("%Y-") in whole(stamp()).text


def test_sizes_are_exact_for_programs() -> None:
    read = whole(table(("memory", "size"), [("kv", size(1536))], foot=[("total", size(2048))]))
    (found,) = read.tables
    assert (found.head, found.rows, found.foot) == (
        ["memory", "size"], [["kv", 1536]], [["total", 2048]]
    )  # fmt: skip
    assert "1.5 KiB" in read.text


def test_very_long_text_is_cut() -> None:
    assert len(markup("x" * 10_000)) == 400


@pytest.mark.parametrize(("share", "width"), [(-1.0, "0.0%"), (0.25, "25.0%"), (2.0, "100.0%")])
def test_bars_stay_in_their_column(share: float, width: str) -> None:
    assert f"width:{width}" in bar(share, "red")


def test_the_smallest_pieces_are_merged() -> None:
    made = stack([(f"n{i}", i, "red") for i in range(20)])
    assert made.count("<li>") == 10
    assert "10 others" in made  # the one of 0 bytes is not there
    assert f'value="{sum(range(11))}"' in made
    assert stack([]).count("<li>") == 0


def test_a_chart_stacks_its_rows() -> None:
    made = chart((10.0, 20.0), [("a", (0, 50), "red"), ("b", (100, 50), "blue")], 100)
    assert 'points="0.0,200.0 1000.0,100.0 1000.0,200.0 0.0,200.0"' in made
    assert 'points="0.0,0.0 1000.0,0.0 1000.0,100.0 0.0,200.0"' in made
    assert "Bytes in RAM over 10 s" in made
    assert "1.5 s" in chart((0.0, 1.5), [("a", (0, 1), "red")], 1)
