"""A report in a notebook."""

from __future__ import annotations

from support.terminal.html_pages import HtmlPage
from unimem.accounting.report import Report, Row
from unimem.accounting.report_html import color_of


def test_a_notebook_shows_a_report() -> None:
    made = Report((Row("kv", 5, requested_bytes=4),), {"model": "a.gguf"})
    page = HtmlPage(made._repr_html_())
    assert page.table("memory").rows == [["kv", 4, 5, "-", "-", "-", ""]]
    assert "a.gguf" in page.text
    assert "html" not in page.tags
    assert made._repr_html_().startswith('<div class="unimem">')


def test_categories_have_colours() -> None:
    assert color_of("kv") != color_of("weights:q8_0") != color_of("weights:f32", 1)
    assert color_of("none of ours").startswith("#")
