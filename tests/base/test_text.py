"""Sizes, names and lines as text."""

from __future__ import annotations

import pytest

from unimem.base import kernel_files
from unimem.base.text import (
    Surface,
    escape,
    fact_lines,
    format_change,
    format_count,
    format_ranges,
    item_lines,
    shorten,
    text_width,
    wide_lines,
    wrap,
)


def test_names_cannot_fake_lines() -> None:
    assert escape("a\nb\tc\x1b") == r"a\nb\tc\x1b"
    assert escape("a\nb\tc\x1b", keeps_lines=True) == "a\nb\tc\\x1b"
    # The marks that change the order of the text behind them, and the ends of lines.
    for (
        turn
    ) in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029":
        assert escape(turn, keeps_lines=True) == escape(turn) == f"\\u{ord(turn):04x}"
    # Arabic and combined emoji are shown unchanged.
    for text in ("\u0645\u0631\u062d\u0628\u0627", "\U0001f469\u200d\U0001f680"):
        assert escape(text) == text
    assert escape("not UTF-8: \udcff").encode() == b"not UTF-8: ?"


@pytest.mark.parametrize(
    ("ids", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((0, 2, 3, 4, 9), "0,2-4,9")]
)
def test_ranges_read_what_they_write(ids: tuple[int, ...], text: str) -> None:
    assert format_ranges(ids) == text
    assert kernel_files.parse_list(text) == ids


def test_figures() -> None:
    assert [format_change(n) for n in (-1, 0, 1 << 20)] == ["-1 B", "0 B", "+1.0 MiB"]
    counts = [format_count(n, "token") for n in (0, 1, 1000)]
    assert counts == ["0 tokens", "1 token", "1,000 tokens"]


def test_the_width_is_the_terminal_s() -> None:
    assert text_width("漢字") == 4
    assert text_width("e\u0301") == 1
    assert shorten("漢字漢字漢字", 8) == "漢...字"
    assert shorten("漢字", 3) == "漢"
    assert shorten("漢字", 0) == ""


def test_a_word_longer_than_a_line_is_cut_or_kept_whole() -> None:
    assert wrap("see /a/very/long/path now", 9) == ["see", "/a/...ath", "now"]
    assert wrap("see /a/very/long/path now", 9, cuts=False) == ["see", "/a/very/long/path", "now"]
    assert wrap("", 9) == [""]


def test_colours_appear_only_where_they_can_be_shown() -> None:
    plain, colored = Surface(20), Surface(20, is_colored=True)
    for style, code in (("heading", 1), ("dim", 2), ("good", 32), ("bad", 33), ("tint", 36)):
        assert getattr(plain, style)("x") == "x"
        assert getattr(colored, style)("x") == f"\x1b[{code}mx\x1b[0m"
    facts = [("name", "one two three"), ("", "four")]
    assert list(fact_lines(plain, facts)) == [
        "name      one two",
        "          three",
        "          four",
    ]
    assert next(fact_lines(colored, facts)) == "\x1b[2mname      \x1b[0mone two"
    lines = ["1. words that need a", "   line more"]
    assert list(item_lines(plain, "1.", "words that need a line more")) == lines


def test_fact_names_have_room() -> None:
    lines = fact_lines(Surface(), [("cpu_features", "avx2"), ("threads", "2")])
    assert list(lines) == ["cpu_features  avx2", "threads       2"]


def test_a_wide_table_stays_whole() -> None:
    name = "a/name/" * 20
    lines = wide_lines(Surface(40), ("name", "n"), [(name, "1"), ("漢", "12")])
    shown = [("name", 4, " n"), (name, len(name), " 1"), ("漢", 2, "12")]
    assert list(lines) == [f"{text}{' ' * (len(name) - n)}  {end}" for text, n, end in shown]


def test_long_texts_are_escaped_as_short_ones() -> None:
    text = "漢\x1b\n" * 3000
    assert escape(text) == r"漢\x1b\n" * 3000
    assert escape(text, keeps_lines=True) == "漢\\x1b\n" * 3000
    assert text_width(escape(text)) == (2 + 4 + 2) * 3000
