"""The page of a process in a real browser: numbers are visible on a phone and a desktop."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.models import llama_cpp
from support.processes.running import running
from support.project.apt_packages import UnavailableError
from support.terminal.chromium import find_chromium, look_at
from unimem.accounting.report_page import report_page
from unimem.accounting.samples import GrowthPoint, Sampler
from unimem.base.text import format_bytes
from unimem.engine import embedded_model
from unimem.system import limits

# A browser takes seconds to start, and may have to be installed; what a page says, test_report_page
# shows without one.
pytestmark = pytest.mark.slow

MANY = """
import mmap
n, page = 10_000, mmap.PAGESIZE
areas = [mmap.mmap(-1, page, prot=1 + 2 * (i % 2)) for i in range(n)]
"""
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module", autouse=True)
def chromium() -> None:
    try:
        find_chromium()
    except UnavailableError as error:
        pytest.skip(f"no page was looked at in a browser: {error}")


@contextmanager
def process(name: str) -> Iterator[int]:
    if name == "this":
        yield os.getpid()
    elif name == "many mappings":
        with running(MANY) as pid:
            yield pid
    else:
        with llama_cpp.holding(embedded_model()) as pid:
            yield pid


def light(color: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.1, relative luminance)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("name", ["this", "llama.cpp", "many mappings"])
def test_a_page_can_be_read(name: str, tmp_path: Path) -> None:
    with process(name) as pid:
        sample = Sampler(pid).sample()
    rows = {row.category: row.resident_bytes or 0 for row in sample.report.rows}
    points = [GrowthPoint(float(i), {k: v * i // 3 for k, v in rows.items()}) for i in range(4)]
    path = tmp_path / "page.html"
    path.write_text(report_page(sample, points, "a note"))
    assert path.stat().st_size < 300_000
    for width in (PHONE, DESKTOP):
        seen = look_at(path, width)
        assert seen["overflow"] <= 0, "the page itself does not scroll sideways"
        if name != "this" and len(limits.nodes()) == 1:  # each other node has a column
            assert seen["cut"] == 0
        assert seen["smallest"] >= 12
        words = " ".join(seen["text"].split())
        for row in sample.report.rows:
            assert row.category in words
            if row.device is None:
                assert format_bytes(row.resident_bytes or 0) in words
        assert format_bytes(sample.report.resident_bytes) in words
        assert f"{len(sample.report.mappings):,} mappings" in words
        for background, text in (seen["light"], seen["dark"]):
            bright, dark = sorted([light(background), light(text)], reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 7
        assert light(seen["light"][0]) > light(seen["dark"][0])
